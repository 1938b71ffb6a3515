// Derivatives of a filter's results in every parameter, by one backward pass through the filter.
//
// A bar marks the derivative of the objective in a quantity; g is that in a component's log-density. x and P are the
// updated mean and covariance of the component, x⁻ and P⁻ the predicted ones. With v = S⁻¹e, N = I − KH,
// G = ½g(vv' − S⁻¹), b = K'x̄ and a = N'x̄,
//
//     x̄⁻ = a + g H'v              P̄⁻ = N'P̄N + H'GH + sym(a v'H)           d̄ = g v − b
//     R̄  = G + K'P̄K − sym(b v')    H̄  = g v x⁻' + 2 G H P⁻ + v (P x̄)' − b x' − 2 K'P̄P
//
//     predict    x̄ = W'x̄⁻,  P̄ = W'P̄⁻W,  W̄ = x̄⁻x' + 2 P̄⁻W P,  c̄ = x̄⁻,  Q̄ = P̄⁻
//     collapse   w̄_i = x̄·x_i + <P̄, P_i + δ_iδ_i'>,  x̄_i = w_i (x̄ + 2P̄δ_i),  P̄_i = w_i P̄
//
// and, with λ = log μ, p the posterior of a component and ḡ the derivative in the step's term, the derivative in
// the component's log weight is
//
//     GPB2   p̄_ij = w_{i|j} (λ̄_j + w̄_ij − Σ_i w_{i|j} w̄_ij) + p_ij (ḡ − Σ λ̄)
//     IMM    p̄_j = λ̄_j + μ_j (ḡ − Σ λ̄),  and for log μ_i π_ij:  w_{i|j} (p̄_j + w̄_ij − Σ_i w_{i|j} w̄_ij)
//
// where Σ_i w_{i|j} w̄_ij = x̄·x + <P̄, P>, x and P being the collapsed moments. The forward pass has stored the
// filtered moments; each step is computed again from them, so memory stays O(T). Transition probabilities of
// exactly 0 are structural: their derivative is 0.
//
// The later modes j lie in lanes. Derivatives are added up there as long as their parameter stays the same,
// and those in parameters that all series share are summed by chunks of series, which do not depend on the
// number of threads.
#pragma once
#include <utility>

#include "switching/moves.hpp"
#include "switching/series.hpp"

// First the derivatives in the filter's results, with their shapes. The pass adds to those in parameters and y, and
// writes those in `left`.
#define ADJOINT_FIELDS(whole, real, place)                                                            \
  place(const Series, run) whole(chunks) whole(next)                                                  \
  whole(apart) /* numbers from one chunk to the next, in parameters that all series share */          \
  place(const double, terms_bar)                                                                      \
  place(const double, log_mode_bar)   /* or 0, as the next two */                                     \
  place(const double, mean_bar)                                                                       \
  place(const double, covariance_bar)                                                                 \
  place(double, transition) place(double, dynamics) place(double, dynamics_offset)                    \
  place(double, process_noise) place(double, observation) place(double, observation_offset)           \
  place(double, observation_noise) place(double, initial_mean) place(double, initial_covariance)      \
  place(double, initial_log_probability) place(double, maps) place(double, map_covariance)            \
  place(double, y)    /* (rows, m) */                                                                 \
  place(double, left) /* (series, M (n + n²) + M): in laws and log probabilities left by steps done before */

EXPTILT_FRAME(Adjoint, ADJOINT_FIELDS)

class AdjointPass {
 public:
  using Number = Four;
  static constexpr int L = LANES<Number>;

  explicit AdjointPass(Adjoint& f)
      : f(f), run(*f.run), M(int(run.modes)), n(int(run.states)), m(int(run.outputs)), law(law_size(n)),
        nn(n * n), at(M, n, m, run.maps != nullptr, room), groups(at.groups) {
    const int one = at.m * n, pairs = M * groups;
    const std::pair<double**, int> plain[] = {{&state, M * law}, {&log_mode, M}, {&after, M * law},
                                              {&log_after, M}, {&bar, M * law}, {&log_bar, M}};
    const std::pair<Number**, int> wide[] = {
        {&lifted, M * law}, {&read, M * law}, {&mixed, law}, {&mapped, law}, {&now, law}, {&now_bar, law},
        {&ahead, law}, {&part, law}, {&part_bar, law}, {&ahead_bar, law}, {&source_bar, law}, {&map_bar, law},
        {&earlier, M * law}, {&log_earlier, M}, {&share, pairs}, {&score, M}, {&weight, M},
        {&scratch, update_room(n, m)}, {&square, nn}, {&other, nn}, {&a, n}, {&hv, n}, {&Px, n}, {&b, m},
        {&inverse, m * m}, {&G, m * m}, {&GH, one}, {&KP, one}, {&H_bar, one}, {&y_bar, m},
        {&transition_bar, pairs}, {&move_bar, groups * (2 * nn + n)}, {&sensor_bar, groups * at.sensor},
        {&maps_bar, at.mapped ? pairs * 2 * nn : 0}};
    for (const auto& [place, count] : plain) *place = room.take(count);
    for (const auto& [place, count] : wide) *place = room.take<Number>(count);
  }

  void pass() {
    for (int64_t end; take_some(f.next, f.chunks, 1, chunk, end);) {
      const int64_t stop = run.series * (chunk + 1) / f.chunks;
      for (int64_t series = run.series * chunk / f.chunks; series < stop; ++series) go_back(series);
      for (int i = 0; i < M && at.mapped; ++i) {
        const int64_t place = chunk * f.apart + i * M * nn;
        Number* const from = maps_bar + i * groups * 2 * nn;
        add_modes(nn, from, 2 * nn, f.maps + place);
        add_modes(nn, from + nn, 2 * nn, f.map_covariance + place);
      }
    }
  }

 private:
  int group_size(int g) const { return M - g * L < L ? M - g * L : L; }

  // Returns the number in a lane and sets it to 0.
  static double taken(Number* x, int lane) {
    const double value = lanes(x)[lane];
    lanes(x)[lane] = 0.0;
    return value;
  }

  void go_back(int64_t series) {
    const int64_t begin = run.starts[series], length = run.starts[series + 1] - begin;
    const int64_t done = run.lead ? run.lead[series] : 0;
    std::memset(bar, 0, M * law * sizeof(double));
    std::memset(log_bar, 0, M * sizeof(double));
    for (int64_t t = length - 1; t >= done; --t) {
      const int64_t row = begin + t;
      at.load(run, series, t, t == length - 1);
      at.look(run.y + row * m);
      law_before(run, series, t + 1, after, log_after);
      law_before(run, series, t, state, log_mode);
      if (f.mean_bar) add_bars(row);
      step(t == 0 && run.first, row);
      hand_over(series, t, t == done);
    }
    if (done > 0) {
      copy(M * law, bar, f.left + series * (M * law + M));
      copy(M, log_bar, f.left + series * (M * law + M) + M * law);
      return;
    }
    const int64_t own = run.initial_varies ? series * M : 0, shift = run.initial_varies ? 0 : chunk * f.apart;
    for (int j = 0; j < M; ++j) {
      for (int i = 0; i < n; ++i) f.initial_mean[shift + (own + j) * n + i] += bar[j * law + i];
      for (int i = 0; i < nn; ++i) f.initial_covariance[shift + (own + j) * nn + i] += bar[j * law + n + i];
      f.initial_log_probability[shift + own + j] += log_bar[j];
    }
  }

  // Adds the derivatives in the laws of a row, in covariances as symmetric matrices.
  void add_bars(int64_t row) {
    for (int j = 0; j < M; ++j) {
      const double *x = f.mean_bar + (row * M + j) * n, *P = f.covariance_bar + (row * M + j) * nn;
      log_bar[j] += f.log_mode_bar[row * M + j];
      for (int i = 0; i < n; ++i) {
        bar[j * law + i] += x[i];
        for (int k = 0; k < n; ++k) bar[j * law + n + i * n + k] += 0.5 * (P[i * n + k] + P[k * n + i]);
      }
    }
  }

  // Turns `bar` and `log_bar`, the derivatives in laws and log probabilities after a step, into those before it.
  void step(bool begun, int64_t row) {
    const bool pairs = run.method == GPB2 && !begun;
    double excess = f.terms_bar[row];
    for (int j = 0; j < M; ++j) excess -= log_bar[j];
    std::memset(earlier, 0, M * law * sizeof(Number));
    std::memset(log_earlier, 0, M * sizeof(Number));
    std::memset(y_bar, 0, m * sizeof(Number));
    for (int i = 0; i < M; ++i) spread(M, 1, run.mixing + (row * M + i) * M, 1, share + i * groups, 1);
    for (int i = 0; i < M * law; ++i) lifted[i] = state[i];
    for (int g = 0; g < groups; ++g) {
      // Lanes without a mode repeat the last one, and have derivatives of 0.
      const int first = g * L, modes = group_size(g);
      Number s = 0.0;
      spread(modes, law, after + first * law, law, now, 0);
      spread(modes, law, bar + first * law, law, now_bar, 0);
      for (int j = 0; j < modes; ++j)
        lanes(&s)[j] = log_bar[first + j] + std::exp(log_after[first + j]) * excess;
      for (int j = modes; j < L; ++j)
        for (int i = 0; i < law; ++i) lanes(now_bar + i)[j] = 0.0;
      if (begun)
        see_first(g, s);
      else if (pairs)
        each_pair(g, s - dot(now_bar, now));
      else
        mix_first(g, s);
    }
    for (int i = 0; i < M * law; ++i) bar[i] = total(earlier[i]);
    for (int i = 0; i < M; ++i) log_bar[i] = total(log_earlier[i]);
    for (int a = 0; a < at.seen; ++a) f.y[row * m + at.index[a]] -= total(y_bar[a]);
  }

  // The step whose prediction is the initial law itself: mode j leads back to mode j only.
  void see_first(int g, Number s) {
    spread(group_size(g), law, state + g * L * law, law, ahead, 0);
    see(g);
    copy(law, now_bar, part_bar);
    see_back(g, s);
    for (int j = 0; j < group_size(g); ++j) {
      for (int i = 0; i < law; ++i) lanes(earlier + (g * L + j) * law + i)[0] = lanes(ahead_bar + i)[j];
      lanes(log_earlier + g * L + j)[0] = lanes(&s)[j];
    }
  }

  void each_pair(int g, Number s) {
    for (int i = 0; i < M; ++i) {
      const Number w = share[i * groups + g];
      const Number* const source = read_as(i, g);
      predict_some(n, at.moves + g * at.move, source, ahead, scratch);
      see(g);
      const Number mine = w * (s + collapse_back(w, part, now, now_bar));
      log_earlier[i] = log_earlier[i] + mine;
      transition_bar[i * groups + g] = transition_bar[i * groups + g] + mine;
      see_back(g, mine);
      move_back(g, source);
      read_back(i, g, source_bar);
    }
  }

  void mix_first(int g, Number s) {
    for (int k = 0; k < M; ++k) copy(law, read_as(k, g), read + k * law);
    collapse_some(n, M, share + g, groups, read, law, mixed);
    predict_some(n, at.moves + g * at.move, mixed, ahead, scratch);
    see(g);
    copy(law, now_bar, part_bar);
    see_back(g, s);
    move_back(g, mixed);
    const Number both = dot(source_bar, mixed);
    if (run.method == GPB1) {
      for (int k = 0; k < M; ++k) score[k] = at.log_transition[k * groups + g] + Number(log_mode[k]);
      const Number reach = shares(M, 1, score, log_mode, false, weight);
      for (int j = 0; j < L; ++j)
        if (!(lanes(&reach)[j] > -INFINITE)) lanes(&s)[j] = 0.0;  // the mode cannot be reached
    }
    for (int k = 0; k < M; ++k) {
      const Number w = share[k * groups + g], gain = collapse_back(w, read + k * law, mixed, source_bar);
      read_back(k, g, part_bar);
      Number mine = w * (s + gain - both);
      if (run.method == GPB1) {
        mine = weight[k] * s;
        log_earlier[k] = log_earlier[k] + w * gain;
      }
      log_earlier[k] = log_earlier[k] + mine;
      transition_bar[k * groups + g] = transition_bar[k * groups + g] + mine;
    }
  }

  // The law of mode i as the modes of group g read it.
  const Number* read_as(int i, int g) {
    if (!at.mapped) return lifted + i * law;
    predict_some(n, at.maps + (i * groups + g) * at.move, lifted + i * law, mapped, scratch);
    return mapped;
  }
  // Adds `from`, the derivative in the law that `read_as` returns, to those in mode i's law and in its map, if any.
  ONCE void read_back(int i, int g, const Number* from) {
    if (at.mapped) {
      Number *const map = maps_bar + (i * groups + g) * 2 * nn, *const noise = map + nn;
      for (int k = 0; k < nn; ++k) noise[k] = noise[k] + from[n + k];
      predict_back(at.maps + (i * groups + g) * at.move, lifted + i * law, from, map, map_bar);
      from = map_bar;
    }
    for (int k = 0; k < law; ++k) earlier[i * law + k] = earlier[i * law + k] + from[k];
  }

  Number dot(const Number* x, const Number* y) const {
    Number s = 0.0;
    for (int i = 0; i < law; ++i) s = s + x[i] * y[i];
    return s;
  }

  // Writes the derivative of `collapse` in one part to `part_bar`; returns that in the part's weight.
  ONCE Number collapse_back(Number w, const Number* part, const Number* mean, const Number* bar) {
    Number weight_bar = dot(bar, part);
    for (int i = 0; i < n; ++i) a[i] = part[i] - mean[i];
    for (int i = 0; i < n; ++i) {
      Number s = 0.0;
      for (int j = 0; j < n; ++j) {
        const Number P_bar = bar[n + i * n + j];
        s = s + P_bar * a[j];
        part_bar[n + i * n + j] = w * P_bar;
      }
      weight_bar = weight_bar + s * a[i];
      part_bar[i] = w * (bar[i] + (s + s));
    }
    return weight_bar;
  }

  // From `bar`, the derivative in a predicted law: adds the derivative in W, and writes that in the law at `source`
  // to `target`. `bar` itself is the derivative in the offset and in Q.
  ONCE void predict_back(const Number* W, const Number* source, const Number* bar, Number* W_bar,
                         Number* target) {
    times<1>(n, n, n, view(bar + n, n), W, NOTHING<Number>, square);
    times<1>(n, n, Fixed<1>{}, view(W, 1, n), bar, NOTHING<Number>, target);
    times<1, true>(n, n, n, view(W, 1, n), square, NOTHING<Number>, target + n);
    mirror(n, target + n);
    times<1>(n, n, n, view(square, n), source + n, NOTHING<Number>, other);
    for (int i = 0; i < n; ++i)
      for (int k = 0; k < n; ++k) {
        const Number twice = other[i * n + k] + other[i * n + k];
        W_bar[i * n + k] = W_bar[i * n + k] + (twice + bar[i] * source[k]);
      }
  }
  // Writes `source_bar`, the derivative in the law at `source`, from `ahead_bar`, that in its prediction by group g.
  void move_back(int g, const Number* source) {
    Number *const W = move_bar + g * (2 * nn + n), *const rest = W + nn;
    for (int i = 0; i < law; ++i) rest[i] = rest[i] + ahead_bar[i];
    predict_back(at.moves + g * at.move, source, ahead_bar, W, source_bar);
  }

  // Writes the law at `ahead`, conditioned on the observation, to `part`.
  void see(int g) { update_some(n, at.seen, at.y, at.sensor_of(g), ahead, part, scratch); }
  // Writes `ahead_bar` from `part_bar`, the derivative in the law that `see` wrote, and s, that in the log-density;
  // adds those in the sensor and in y. Scratch must be as `see` left it.
  ONCE void see_back(int g, Number s) {
    const int m = at.seen;
    if (m == 0) return copy(law, part_bar, ahead_bar);
    const Number *H = at.sensor_of(g), *S = scratch, *K = S + m * m, *v = K + 2 * n * m + m;
    const Number *x_bar = part_bar, *P_bar = part_bar + n, *x = part, *P = part + n, *P0 = ahead + n;
    Number *P0_bar = ahead_bar + n, *own = sensor_bar + g * at.sensor, *own_d = own + at.m * n;
    for (int i = 0; i < nn; ++i) square[i] = i % (n + 1) == 0 ? 1.0 : 0.0;
    times<-1>(n, m, n, view(K, 1, n), H, square, square);  // I − K H
    for (int i = 0; i < m * m; ++i) inverse[i] = i % (m + 1) == 0 ? 1.0 : 0.0;
    solve(m, m, S, inverse);
    times<1>(m, n, Fixed<1>{}, view(K, n), x_bar, NOTHING<Number>, b);
    times<1>(n, n, Fixed<1>{}, view(square, 1, n), x_bar, NOTHING<Number>, a);
    times<1>(n, n, Fixed<1>{}, view(P, n), x_bar, NOTHING<Number>, Px);
    times<1>(n, m, Fixed<1>{}, view(H, 1, n), v, NOTHING<Number>, hv);
    times<1>(m, n, n, view(K, n), P_bar, NOTHING<Number>, KP);
    times<1>(n, n, n, view(P_bar, n), square, NOTHING<Number>, other);
    const Number half = s * Number(0.5);
    for (int i = 0; i < m * m; ++i) G[i] = half * (v[i / m] * v[i % m] - inverse[i]);
    times<1>(m, m, n, view(G, m), H, NOTHING<Number>, GH);
    for (int i = 0; i < n; ++i) {
      ahead_bar[i] = a[i] + s * hv[i];
      for (int k = 0; k < n; ++k) P0_bar[i * n + k] = Number(0.5) * (a[i] * hv[k] + a[k] * hv[i]);
    }
    times<1, true>(n, n, n, view(square, 1, n), other, P0_bar, P0_bar);
    times<1, true>(n, m, n, view(H, 1, n), GH, P0_bar, P0_bar);
    mirror(n, P0_bar);
    times<1>(m, n, n, view(GH, n), P0, NOTHING<Number>, H_bar);
    times<-1>(m, n, n, view(KP, n), P, H_bar, H_bar);
    for (int r = 0; r < m; ++r) {
      const int ir = at.index[r];
      const Number d_bar = s * v[r] - b[r];
      y_bar[r] = y_bar[r] + d_bar;
      own_d[ir] = own_d[ir] + d_bar;
      for (int i = 0; i < n; ++i) {
        const Number twice = H_bar[r * n + i] + H_bar[r * n + i];
        own[ir * n + i] = own[ir * n + i] + twice + v[r] * (s * ahead[i] + Px[i]) - b[r] * x[i];
      }
      for (int c = 0; c < m; ++c) {
        Number R = G[r * m + c] - Number(0.5) * (b[r] * v[c] + b[c] * v[r]);
        for (int k = 0; k < n; ++k) R = R + KP[r * n + k] * K[c * n + k];
        Number& sum = own_d[at.m + ir * at.m + at.index[c]];
        sum = sum + R;
      }
    }
  }

  // Adds the sums in lanes to the derivatives in parameters that vary in time, at step t; at the `last` step of a
  // series, in all parameters.
  void hand_over(int64_t series, int64_t t, bool last) {
#define PLACE(name) \
  (f.name + series * run.name##_series + t * run.name##_step + (run.name##_series ? 0 : chunk * f.apart))
#define DUE(name) (last || run.name##_step)
    const double* const P = NOW(run, transition, series, t);
    for (int i = 0; DUE(transition) && i < M; ++i)
      for (int j = 0; j < M; ++j) {
        const double value = taken(transition_bar + i * groups + j / L, j % L);
        if (P[i * M + j] > 0.0) PLACE(transition)[i * M + j] += value / P[i * M + j];
      }
    const int move = 2 * nn + n, sensor = at.sensor;
    Number* from = move_bar;
    if (DUE(dynamics)) add_modes(nn, from, move, PLACE(dynamics));
    from += nn;
    if (DUE(dynamics_offset)) add_modes(n, from, move, PLACE(dynamics_offset));
    from += n;
    if (DUE(process_noise)) add_modes(nn, from, move, PLACE(process_noise));
    from = sensor_bar;
    if (DUE(observation)) add_modes(m * n, from, sensor, PLACE(observation));
    from += m * n;
    if (DUE(observation_offset)) add_modes(m, from, sensor, PLACE(observation_offset));
    from += m;
    if (DUE(observation_noise)) add_modes(m * m, from, sensor, PLACE(observation_noise));
#undef PLACE
#undef DUE
  }
  // Adds `size` numbers for each mode from its lane, and sets them to 0 there.
  ONCE void add_modes(int size, Number* from, int step, double* to) {
    for (int j = 0; j < M; ++j)
      for (int i = 0; i < size; ++i) to[j * size + i] += taken(from + j / L * step + i, j % L);
  }

  Adjoint& f;
  const Series& run;
  const int M, n, m, law, nn;
  Room room;
  Matrices<Number> at;
  const int groups;
  int64_t chunk = 0;
  double *state, *log_mode, *after, *log_after;  // laws before and after a step, mode by mode
  double *bar, *log_bar;                         // derivatives in laws after a step, then before it
  Number *lifted, *read, *mapped, *mixed;        // laws before it: in all lanes, as a group reads them, mixed
  Number *now, *now_bar;                         // the law of a group after it, and the derivative in that
  Number *ahead, *part, *part_bar, *ahead_bar, *source_bar, *map_bar;
  Number *earlier, *log_earlier;                 // derivatives before the step, still to be summed over lanes
  Number *share, *score, *weight;
  Number *scratch, *square, *other, *a, *hv, *Px, *b, *inverse, *G, *GH, *KP, *H_bar;
  Number *transition_bar, *move_bar, *sensor_bar, *maps_bar, *y_bar;  // in parameters and in y
};
