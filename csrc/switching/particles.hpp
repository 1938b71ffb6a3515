// The Rao–Blackwellised particle filter: sample the modes, keep the state Gaussian.
//
//     log weight_i ← log weight_i + log Σ_j π_{s_i j} p_j(y),     s_i ← j with probability ∝ π_{s_i j} p_j(y)
//
// Particle i holds a mode path, of which only the last mode s_i counts, and the Kalman moments along it. At
// each step it weighs all M modes it could go to, which lie in lanes. Its weight is multiplied by the sum of
// theirs, and it moves to one drawn in proportion (the optimal proposal). The log-sum of the weights is the log of
// an unbiased estimate of the marginal likelihood. If the effective sample size 1 / Σ W_i² falls below half the
// number of particles, they are resampled systematically. The caller draws all random numbers.
#pragma once
#include <algorithm>
#include <utility>

#include "switching/moves.hpp"
#include "resampling.hpp"
#include "switching/series.hpp"

#define SWARM_FIELDS(whole, real, place)                                                                  \
  place(const Series, run) whole(next) whole(particles)                                                   \
  place(const double, uniform)  /* (rows, N + 1): one for each particle, and one to resample with */      \
  place(const int64_t, chosen)  /* (series, N): the first modes */                                        \
  place(double, effective_size) /* (rows,) */                                                             \
  place(int64_t, mode)          /* (rows, N), or 0; particles after each step, before they are resampled */ \
  place(double, log_weight)     /* (rows, N) */                                                           \
  place(double, mean)           /* (rows, N·n) */                                                         \
  place(double, covariance)     /* (rows, N·n·n) */

EXPTILT_FRAME(Swarm, SWARM_FIELDS)

class Swarming {
 public:
  using Number = Four;
  static constexpr int L = 4;

  explicit Swarming(Swarm& f)
      : f(f), run(*f.run), M(int(run.modes)), n(int(run.states)), m(int(run.outputs)), law(law_size(n)),
        N(int(f.particles)), at(M, n, m, run.maps != nullptr, room), groups(at.groups) {
    const std::pair<double**, int> plain[] = {
        {&initial, M * law}, {&log_initial, M}, {&state, N * law}, {&spare, N * law}, {&log_weight, N + L},
        {&weight, N + L}, {&result, M * law}, {&pair, M * M}, {&share, M}};
    const std::pair<Number**, int> wide[] = {
        {&read, law}, {&ahead, law}, {&option, groups * law}, {&score, groups}, {&part, groups},
        {&scratch, update_room(n, m)}};
    for (const auto& [place, count] : plain) *place = room.take(count);
    for (const auto& [place, count] : wide) *place = room.take<Number>(count);
    for (int64_t** place : {&mode, &before, &kept}) *place = room.take<int64_t>(N);
  }

  void pass() {
    for (int64_t series, end; take_some(f.next, run.series, 1, series, end);) filter(series);
  }

 private:
  void filter(int64_t series) {
    const int64_t begin = run.starts[series], length = run.starts[series + 1] - begin;
    run.failure[2 * series] = -1;
    law_before(run, series, 0, initial, log_initial);
    for (int i = 0; i < N; ++i) {
      mode[i] = f.chosen[series * N + i];
      copy(law, initial + mode[i] * law, state + i * law);
      log_weight[i] = -std::log(N);
    }
    double total = 0.0;
    for (int64_t t = 0; t < length; ++t) {
      const int64_t row = begin + t;
      const double* const uniform = f.uniform + row * (N + 1);
      at.load(run, series, t, t == 0);
      at.look(run.y + row * m);
      const bool begun = t == 0 && run.first;
      int stopped = -1;
      for (int i = 0; i < N && stopped < 0; ++i) stopped = advance(i, begun, uniform[i]);
      const double term = stopped < 0 ? weigh() : 0.0;
      if (stopped < 0 && !(term > -INFINITE)) stopped = M;
      if (stopped >= 0) {
        run.failure[2 * series] = t, run.failure[2 * series + 1] = stopped;
        return;
      }
      total += term;
      run.terms[row] = term;
      f.effective_size[row] = effective;
      summarise(row, begun);
      if (f.mode) keep(row);
      if (effective < 0.5 * N) resample(uniform[N]);
    }
    run.log_likelihood[series] = total;
  }

  // Moves particle i and multiplies its weight; returns −1, or the mode whose density is NaN. If `begun`, modes
  // have their initial probabilities.
  int advance(int i, bool begun, double uniform) {
    double* const own = state + i * law;
    before[i] = mode[i];
    for (int g = 0; g < groups; ++g) {
      if (begun) {
        spread(M - g * L < L ? M - g * L : L, law, initial + g * L * law, law, ahead, 0);
      } else if (at.mapped) {
        predict_some(n, at.maps + (mode[i] * groups + g) * at.move, own, read, scratch);
        predict_some(n, at.moves + g * at.move, read, ahead, scratch);
      } else {
        predict_some(n, at.moves + g * at.move, own, ahead, scratch);
      }
      score[g] = update_some(n, at.seen, at.y, at.sensor_of(g), ahead, option + g * law, scratch);
    }
    double *const value = lanes(score), top = -INFINITE, sum = 0.0;
    for (int j = 0; j < M; ++j) {
      if (has_nan(value[j])) return j;
      value[j] += begun ? log_initial[j] : lanes(at.log_transition + mode[i] * groups)[j];
      top = larger(top, value[j]);
    }
    if (!(top > -INFINITE)) {
      log_weight[i] = top;
      return -1;
    }
    for (int g = 0; g < groups; ++g) part[g] = exponential(score[g] - Number(top));
    for (int j = 0; j < M; ++j) sum += lanes(part)[j];
    double rest = uniform * sum;
    int pick = 0;
    for (int j = 0; j < M && rest >= 0.0; ++j)
      if (lanes(part)[j] > 0.0) {
        pick = j;
        rest -= lanes(part)[j];
      }
    mode[i] = pick;
    for (int k = 0; k < law; ++k) own[k] = lanes(option + pick / L * law + k)[pick % L];
    log_weight[i] += top + std::log(sum);
    return -1;
  }

  // Divides the weights by their sum; returns the logarithm of that sum.
  double weigh() {
    double top = -INFINITE, sum = 0.0, square = 0.0;
    for (int i = 0; i < N; ++i) top = larger(top, log_weight[i]);
    if (!(top > -INFINITE)) return top;
    for (int i = 0; i < N; i += L)
      reinterpret_cast<Number*>(weight)[i / L] =
          exponential(reinterpret_cast<const Number*>(log_weight)[i / L] - Number(top));
    for (int i = 0; i < N; ++i) sum += weight[i];
    const double term = top + std::log(sum);
    std::fill(pair, pair + M * M, 0.0);
    std::fill(share, share + M, 0.0);
    for (int i = 0; i < N; ++i) {
      log_weight[i] -= term;
      weight[i] /= sum;
      square += weight[i] * weight[i];
      pair[before[i] * M + mode[i]] += weight[i];
      share[mode[i]] += weight[i];
    }
    effective = 1.0 / square;
    return term;
  }

  // Writes the law of each mode (that of all particles, if none is in it), its log probability, and the
  // probabilities of the modes before it.
  void summarise(int64_t row, bool begun) {
    std::fill(result, result + M * law, 0.0);
    for (int i = 0; i < N; ++i) {
      const double w = weight[i] / share[mode[i]];
      for (int k = 0; w > 0.0 && k < n; ++k) result[mode[i] * law + k] += w * state[i * law + k];
    }
    for (int i = 0; i < N; ++i) {
      const double w = weight[i] / share[mode[i]], *const x = state + i * law, *const P = x + n;
      double *const mean = result + mode[i] * law, *const covariance = mean + n;
      for (int a = 0; w > 0.0 && a < n; ++a) {
        const double gap = x[a] - mean[a];
        for (int b = 0; b <= a; ++b) covariance[a * n + b] += w * (P[a * n + b] + gap * (x[b] - mean[b]));
      }
    }
    for (int j = 0; j < M; ++j) {
      if (share[j] > 0.0)
        mirror(n, result + j * law + n);
      else
        collapse_some(n, N, weight, 1, state, law, result + j * law);
      run.log_mode[row * M + j] = std::log(share[j]);
      for (int i = 0; i < M; ++i) {
        double& value = run.mixing[(row * M + i) * M + j];
        value = begun ? i == j : share[j] > 0.0 ? pair[i * M + j] / share[j] : 1.0 / M;
      }
    }
    keep_laws(M, n, result, run.mode_mean, run.mode_covariance, row);
  }

  void keep(int64_t row) {
    std::copy(mode, mode + N, f.mode + row * N);
    copy(N, log_weight, f.log_weight + row * N);
    keep_laws(N, n, state, f.mean, f.covariance, row);
  }

  void resample(double start) {
    systematic(weight, N, start, before, N);
    std::copy(mode, mode + N, kept);
    for (int i = 0; i < N; ++i) {
      copy(law, state + before[i] * law, spare + i * law);
      mode[i] = kept[before[i]];
      log_weight[i] = -std::log(N);
    }
    std::swap(state, spare);
  }

  Swarm& f;
  const Series& run;
  const int M, n, m, law, N;
  Room room;
  Matrices<Number> at;
  const int groups;
  double effective = 0.0;
  double *initial, *log_initial;              // the initial laws, mode by mode
  double *state, *spare;                      // laws of particles
  double *log_weight, *weight, *result;       // of particles; laws by mode
  double *pair, *share;                       // probabilities of the modes before and now, and now
  int64_t *mode, *before, *kept;              // modes of particles, those before; ancestors
  Number *read, *ahead, *option, *score, *part, *scratch;  // laws in the modes that a particle could go to
};
