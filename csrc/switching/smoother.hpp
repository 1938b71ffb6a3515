// Kim's backward pass: Rauch's recursion for each pair of successive modes, collapsed.
//
// From the filtered law of mode j at t, carried to mode k at t + 1 by F = W_k (times the map from j to k, if
// any) with noise Q:
//
//     P(s_t = j, s_{t+1} = k | y) = P(s_{t+1} = k | y) · μ_j π_jk / Σ_j μ_j π_jk
//     S = F P_j F' + Q = L D L',   Y = L⁻¹ F P_j,   J' = L'⁻¹ D⁻¹ Y,   x_jk = x_j + J (x̂_k − F x_j − c_k),
//     P_jk = P_j − Y' D⁻¹ Y + J P̂_k J'
//
// and x̂_j, P̂_j are the collapse of x_jk, P_jk over k. With GPB2's filtered moments this is Kim's smoother
// (1994); with IMM's or GPB1's it is a fixed-interval smoother for those. The first two terms of P_jk are the Schur
// complement of S in the joint covariance of both states, by elimination as in Cholesky's method, so no gain is
// subtracted. If S is singular (exact observations, padded states), a generalised inverse leaves directions without
// variance as they are.
//
// For n states a pair of modes takes 4⅔ n³ products: 1½ for S, 1/6 for its factors, ½ for Y, ½ for Y' D⁻¹ Y, ½
// for J', 1½ for J P̂_k J'. The filter needs 1½ n³ for its prediction, and an update, for the same pair. Measured
// from 20 states on, this pass takes 1.8 to 2.4 times as long as the filter. S and F P_j are computed again rather
// than kept: for all pairs and steps they would not fit in a cache.
//
// The pass also adds up the sums that EM needs, for each mode k with z_t = (x_{t−1}, g_t), g_t the q known
// regressors (1 and the inputs), and r_t = x_t − W_k x_{t−1} − c_k the residual of the present parameters:
//
//     count_k = Σ P(s_t = k | y),    zz_k = Σ E[z z'; s_t = k],
//     rz_k = Σ E[r z'; s_t = k],     rr_k = Σ E[r r'; s_t = k]
//
// Earlier modes lie in lanes, later ones come one after the other. Sums are over the series of a chunk; how
// series are cut into chunks does not depend on the number of threads, so neither do the sums.
#pragma once
#include <utility>

#include "switching/moves.hpp"
#include "switching/recurrent.hpp"

#define SMOOTHER_FIELDS(whole, real, place)                                                                \
  place(const Series, run) whole(chunks) whole(next) whole(known) /* q */                                  \
  place(const double, regressors)    /* (rows, q) */                                                       \
  place(double, probability)         /* (rows, M) */                                                       \
  place(double, mean)                /* (rows, M·n) */                                                     \
  place(double, covariance)          /* (rows, M·n·n) */                                                   \
  place(double, pairs)               /* (rows, M·M), [i, j] = P(s_{t−1} = i, s_t = j | y), or 0 */         \
  place(double, initial_probability) /* (series, M): of the step before the data; with run.first of the */ \
  place(double, initial_mean)        /* first step; with run.lead of the last step done before */          \
  place(double, initial_covariance)                                                                        \
  place(double, sums) /* (chunks, M, 1 + (n + q)² + n (n + q) + n²): count, zz, rz, rr; or 0 */

EXPTILT_FRAME(Smoothing, SMOOTHER_FIELDS)

INLINE int rauch_room(int n) { return 4 * n * n + n + law_size(n); }

// Writes the law at `source` given the smoothed law of the next step, at `later`; `way` is the move between them.
// Leaves J' and P̂ J' at the beginning of `scratch` (`rauch_room` numbers).
template <class Number, class N>
INLINE void rauch(N n, const Number* way, const Number* source, const double* later,
                  Number* __restrict target, Number* __restrict scratch) {
  const int nn = n * n;
  Number *gain = scratch, *cross = gain + nn, *Y = cross + nn, *gap = Y + nn, *ahead = gap + n;
  Number* const S = ahead + n;
  predict<false>(n, way, source, ahead, Y);
  for (int i = 0; i < n; ++i) gap[i] = S[i * n + i];
  factor(n, S, gap, ROUNDING * n, INFINITE);
  solve_lower(n, n, S, Y);
  for (int a = 0; a < n; ++a)
    for (int i = 0; i < n; ++i) gain[a * n + i] = Y[a * n + i] * S[a * n + a];
  multiply<-1, true>(n, n, n, view<Number>(Y, 1, n), gain, source + n, target + n);
  solve_upper(n, n, S, gain);
  for (int i = 0; i < n; ++i) gap[i] = Number(later[i]) - ahead[i];
  multiply<1>(Fixed<1>{}, n, n, view<Number>(gap, 0), gain, source, target);
  multiply<1>(n, n, n, view(later + n, n), gain, NOTHING<Number>, cross);
  multiply<1, true>(n, n, n, view<Number>(gain, 1, n), cross, static_cast<const Number*>(target + n), target + n);
  mirror(n, target + n);
}

template <class Number> class Smoother {
 public:
  static constexpr int L = LANES<Number>;
  using Rauch = void (*)(int n, const Number* way, const Number* source, const double* later, Number* target,
                         Number* scratch);
  using Collapse = void (*)(int n, int parts, const Number* weight, const Number* first, Number* target);

  Smoother(Smoothing& f, Rauch rauch_by, Collapse collapse_by)
      : f(f), run(*f.run), rauch_by(rauch_by), collapse_by(collapse_by), M(int(run.modes)),
        n(int(run.states)), law(law_size(n)), nn(n * n), move(move_size(n)), q(int(f.known)),
        size(1 + (n + q) * (n + q) + n * (n + q) + nn),
        at(M, n, int(run.outputs), run.maps != nullptr, room), groups(at.groups), tilting(run, room) {
    const std::pair<double**, int> plain[] = {
        {&state, M * law}, {&log_mode, M}, {&hat, M * law}, {&hat_mode, M}};
    const std::pair<Number**, int> wide[] = {
        {&ways, L == 1 && !at.mapped ? 0 : M * (at.mapped ? groups : 1) * move},
        {&filtered, groups * law}, {&one, law}, {&fresh, groups * law}, {&parts, M * law}, {&score, M},
        {&weight, M * groups}, {&pair, M * groups}, {&mass, groups}, {&share, M},
        {&scratch, rauch_room(n)}, {&added, f.sums ? M * size : 0}};
    for (const auto& [place, count] : plain) *place = room.take(count);
    for (const auto& [place, count] : wide) *place = room.take<Number>(count);
    if (L == 1 && !at.mapped) ways = at.moves;
  }

  void pass() {
    for (int64_t c, end; take_some(f.next, f.chunks, 1, c, end);) {
      const int64_t stop = run.series * (c + 1) / f.chunks;
      for (int64_t series = run.series * c / f.chunks; series < stop; ++series) smooth(series);
      for (int i = 0; f.sums && i < M * size; ++i) {
        f.sums[c * M * size + i] = total(added[i]);
        added[i] = 0.0;
      }
    }
  }

 private:
  // If steps were done before, the pass ends at the last of them and writes its law as the initial one.
  void smooth(int64_t series) {
    const int64_t begin = run.starts[series], length = run.starts[series + 1] - begin;
    const int64_t done = run.lead ? run.lead[series] : 0;
    law_before(run, series, length, hat, hat_mode);
    for (int j = 0; j < M; ++j) hat_mode[j] = std::exp(hat_mode[j]);
    for (int64_t t = length - 1; t >= done; --t) {
      const int64_t row = begin + t;
      copy(M, hat_mode, f.probability + row * M);
      keep_laws(M, n, hat, f.mean, f.covariance, row);
      if (t == 0 && run.first) {
        for (int i = 0; i < M * M && f.pairs; ++i) f.pairs[row * M * M + i] = i % (M + 1) == 0 ? hat_mode[i / M] : 0.0;
        break;
      }
      load(series, t, t == length - 1);
      law_before(run, series, t, state, log_mode);
      if (run.recurrence) {
        tilting.tilt(NOW(run, transition, series, t), state);
        at.take_scores(tilting.log_chance);
      }
      step(row);
    }
    copy(M, hat_mode, f.initial_probability + series * M);
    keep_laws(M, n, hat, f.initial_mean, f.initial_covariance, series);
  }

  // Loads the moves of step t to `ways`: [k] is the move to later mode k, in all lanes; with maps, [g · M + k] is the
  // move to it from group g.
  void load(int64_t series, int64_t t, bool again) {
    at.load(run, series, t, again);
    const bool moved = again || run.dynamics_step || run.dynamics_offset_step || run.process_noise_step;
    for (int k = 0; k < M && moved && ways != at.moves; ++k)
      for (int g = 0; g < (at.mapped ? groups : 1); ++g) {
        const Number* const own = at.moves + k / L * move;
        Number* const way = ways + (g * M + k) * move;
        for (int i = 0; i < move; ++i) way[i] = lanes(own + i)[k % L];
        if (at.mapped) through(g, k, way);
      }
  }
  // Puts the maps of group g's modes before the move to mode k: W · map, Q + W · spread · W'.
  void through(int g, int k, Number* way) {
    Number *map = scratch, *law = map + nn, *out = parts;
    for (int i = 0; i < n; ++i) law[i] = 0.0;
    for (int lane = 0; lane < L; ++lane) {
      const int j = g * L + lane < M ? g * L + lane : M - 1;
      const Number* const from = at.maps + (j * groups + k / L) * move;
      for (int i = 0; i < nn; ++i) {
        lanes(map + i)[lane] = lanes(from + i)[k % L];
        lanes(law + n + i)[lane] = lanes(from + nn + n + i)[k % L];
      }
    }
    predict_some(n, way, law, out, law + nn + n);
    copy(nn, out + n, way + nn + n);
    times<1>(n, n, n, view(way, n), map, NOTHING<Number>, out);
    copy(nn, out, way);
    turn(n, way);
  }

  // Turns `hat`, the smoothed laws after a step, into those before it; `state` holds the filtered laws before it.
  void step(int64_t row) {
    spread(M, law, state, law, filtered, law);
    for (int g = 0; g < groups; ++g) {
      for (int j = 0; j < M; ++j) score[j] = at.log_transition[j * groups + g] + Number(log_mode[j]);
      shares(M, 1, score, log_mode, false, share);
      for (int j = 0; j < M; ++j) weight[j * groups + g] = share[j];
    }
    for (int j = 0; j < M; ++j)
      for (int k = 0; k < M; ++k) {
        const double value = lanes(weight + j * groups)[k] * hat_mode[k];
        if (f.pairs) f.pairs[(row * M + j) * M + k] = value;
        lanes(pair + k * groups)[j] = value;
      }
    for (int g = 0; g < groups; ++g) {
      Number sum = 0.0;
      for (int k = 0; k < M; ++k) sum = sum + pair[k * groups + g];
      mass[g] = sum;
      sum = between(sum, Number(0.0), 1.0);
      int count = 0;  // later modes that a mode of the group can lead to
      for (int k = 0; k < M; ++k) {
        if (!(largest(pair[k * groups + g]) > 0.0)) continue;
        const Number* const way = ways + (at.mapped ? g * M + k : k) * move;
        Number* const target = parts + count * law;
        share[count++] = pair[k * groups + g] / sum;
        const Number* source = filtered + g * law;
        if (run.recurrence) {  // a law for each pair
          const int modes = M - g * L < L ? M - g * L : L;
          spread(modes, law, tilting.laws + (g * L * M + k) * law, M * law, one, 0);
          source = one;
        }
        rauch_by(n, way, source, hat + k * law, target, scratch);
        if (f.sums) add_pair(pair[k * groups + g], way, target, hat + k * law, row, added + k * size);
      }
      if (count > 0) collapse_by(n, count, share, parts, fresh + g * law);
    }
    gather(M, law, fresh, law, hat, law);
    for (int j = 0; j < M; ++j) {
      hat_mode[j] = lanes(mass)[j];  // a mode of smoothed probability 0 keeps its filtered moments
      if (!(hat_mode[j] > 0.0)) copy(law, state + j * law, hat + j * law);
    }
  }

  // Adds a pair of modes to the sums for EM: the earlier state x at `part`, the later x', the way between.
  //
  // Cov(x', x) = P̂ J', Cov(r, x) = Cov(x', x) − W P, and Var r = P' − W Cov(x, x') − Cov(r, x) W'. P̂ J' is
  // where `rauch` left it.
  void add_pair(Number chance, const Number* way, const Number* part, const double* later, int64_t row,
                Number* sums) {
    const int q = this->q, z = n + q;
    const Number *W = way, *c = way + nn, *turned = way + 2 * nn + n, *x = part, *P = part + n;
    const double* const known = f.regressors + row * q;
    Number *cross = scratch + nn, *cross_r = cross + nn, *rest = cross_r + nn, *r = rest + nn;
    Number *zz = sums + 1, *rz = zz + z * z, *rr = rz + n * z;
    times<-1>(n, n, n, view(W, n), P, cross, cross_r);
    multiply<-1>(n, n, n, view(cross_r, n), turned, later + n, rest);
    for (int i = 0; i < n; ++i) {
      r[i] = Number(later[i]) - c[i];
      for (int k = 0; k < n; ++k) r[i] = r[i] - W[i * n + k] * x[k];
    }
    const auto add = [](Number& sum, Number value) { sum = sum + value; };
    add(sums[0], chance);
    for (int i = 0; i < n; ++i) {
      const Number xi = chance * x[i], ri = chance * r[i];
      for (int l = 0; l < n; ++l) {
        Number s = rest[i * n + l];
        for (int k = 0; k < n; ++k) s = s - W[i * n + k] * cross[l * n + k];
        add(rr[i * n + l], chance * s + ri * r[l]);
        add(rz[i * z + l], chance * cross_r[i * n + l] + ri * x[l]);
        add(zz[i * z + l], chance * P[i * n + l] + xi * x[l]);
      }
      for (int l = 0; l < q; ++l) {
        add(rz[i * z + n + l], ri * Number(known[l]));
        add(zz[i * z + n + l], xi * Number(known[l]));
        zz[(n + l) * z + i] = zz[i * z + n + l];
      }
    }
    for (int i = 0; i < q; ++i)
      for (int l = 0; l < q; ++l) add(zz[(n + i) * z + n + l], chance * Number(known[i] * known[l]));
  }

  Smoothing& f;
  const Series& run;
  const Rauch rauch_by;
  const Collapse collapse_by;
  const int M, n, law, nn, move, q, size;
  Room room;
  Matrices<Number> at;
  const int groups;
  Tilting tilting;
  double *state, *log_mode;      // filtered laws before a step, mode by mode
  double *hat, *hat_mode;        // smoothed laws and mode probabilities after it
  Number* ways;                  // moves to each later mode
  Number *filtered, *fresh;      // laws by group: filtered, and smoothed
  Number* one;                   // tilted laws of a group
  Number* parts;                 // laws of a group by later mode
  Number *score, *weight;        // of mixing; weight [j · groups + g], later modes in lanes
  Number *pair, *mass, *share;   // pair [k · groups + g], its sum over k, and its shares for one group
  Number *scratch, *added;       // of `rauch`; the sums, by later mode
};

// `rauch` and `collapse` for a number of states that is known to the compiler (Fixed) or not (int).
template <class Number, class N> void smooth_by(Smoothing& f) {
  static constexpr auto sized = [](int n) {
    if constexpr (std::is_same_v<N, int>)
      return n;
    else
      return (void)n, N{};
  };
  const auto rauch_by = [](int n, const Number* way, const Number* source, const double* later,
                           Number* target, Number* scratch) {
    rauch(sized(n), way, source, later, target, scratch);
  };
  const auto collapse_by = [](int n, int parts, const Number* weight, const Number* first, Number* target) {
    collapse(sized(n), parts, weight, 1, first, law_size(n), target);
  };
  Smoother<Number>(f, rauch_by, collapse_by).pass();
}
