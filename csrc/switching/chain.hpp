// The likelihood of a hidden Markov chain and all its derivatives: one pass forwards, one backwards.
//
//     z_tk = (y_t − a_k − u_t·B_k) / σ_k,     p_tk = exp(−½ z_tk²) / (√2π σ_k)   (1 where y_t is missing)
//     α_t = p_t ∘ P_t'α_{t−1} / s_t,   log p(y) = Σ log s_t,   β_{t−1} = P_t (p_t ∘ β_t) / s_t
//
// Each of the K modes is a regime at an age. From a mode, M modes can be reached, one for each next regime.
// P[t, i, d, r] is the probability that regime r comes after regime i of age d. The derivative in a log-density is
// the smoothed probability of its mode, α_tk β_tk; that in a transition probability is the expected number of such
// transitions divided by the probability.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <memory>

#include "frame.hpp"
#include "switching/gaussian.hpp"

#define CHAIN_FIELDS(whole, real, place)                                                  \
  whole(steps) whole(modes) whole(regimes) whole(inputs)                                  \
  whole(table)                /* numbers from one step's P to the next, or 0 */           \
  real(log_likelihood)                                                                    \
  place(const double, y)      /* (T,), NaN where missing */                               \
  place(const double, known)  /* (T, r), the inputs */                                    \
  place(const int64_t, rows)  /* (K,): the row of P of a mode's regime and age */         \
  place(const int64_t, after) /* (K, M): the mode that each regime leads to */            \
  place(const double, given)  /* (T, K), log-densities instead of those above, or null */ \
  place(double, smoothed)     /* (T, K), P(mode | y), the derivatives in log-densities; or null */ \
  place(const double, values) /* a (K), B (K, r), σ (K), the initial law (K), P (T or 1, M, D, M) */ \
  place(double, bars)         /* the derivatives in these, to be added to */

EXPTILT_FRAME(HiddenChain, CHAIN_FIELDS)

// The parameters of the likelihood, or its derivatives in them.
template <class T> struct ChainParameters {
  T *offset, *matrix, *deviation, *initial, *transition;

  ChainParameters(T* at, int64_t K, int64_t r)
      : offset(at), matrix(at + K), deviation(matrix + K * r), initial(deviation + K),
        transition(initial + K) {}
};

// Returns log p(y), and adds its derivatives.
inline double chain_pass(const HiddenChain& f) {
  const int64_t T = f.steps, K = f.modes, M = f.regimes, r = f.inputs;
  const double *y = f.y, *inputs = f.known;
  const int64_t *from = f.rows, *after = f.after;
  const ChainParameters<const double> p(f.values, K, r);
  const ChainParameters<double> bar(f.bars, K, r);
  const std::unique_ptr<double[]> room(new double[3 * T * K + T + 3 + (2 * r + 6) * K]);
  double *z = room.get(), *filtered = z + T * K, *scale = filtered + T * K, *density = scale + T;
  double *matrix = density + T * K + 3, *matrix_bar = matrix + r * K;  // by columns: modes lie side by side
  double *log_size = matrix_bar + r * K, *precision = log_size + K, *now = precision + K;
  double *logs = now + K, *later = logs + K, *before = later + K;
  for (int64_t k = 0; k < K; ++k) {
    log_size[k] = std::log(p.deviation[k]) + 0.5 * LOG_TWO_PI;
    precision[k] = 1.0 / p.deviation[k];
    now[k] = p.initial[k];
    later[k] = 1.0;
    for (int64_t i = 0; i < r; ++i) {
      matrix[i * K + k] = p.matrix[k * r + i];
      matrix_bar[i * K + k] = 0.0;
    }
  }
  double total = 0.0;
  for (int64_t t = 0; t < T; ++t) {
    double *zt = z + t * K, *dt = density + t * K, *ft = filtered + t * K, top = 0.0;
    if (!f.given && std::isnan(y[t])) {
      std::fill(dt, dt + K, 1.0);
    } else {
      if (f.given) {
        std::copy(f.given + t * K, f.given + (t + 1) * K, logs);
      } else {
        for (int64_t k = 0; k < K; ++k) zt[k] = y[t] - p.offset[k];
        for (int64_t i = 0; i < r; ++i)
          for (int64_t k = 0; k < K; ++k) zt[k] -= inputs[t * r + i] * matrix[i * K + k];
        for (int64_t k = 0; k < K; ++k) {
          zt[k] *= precision[k];
          logs[k] = -0.5 * zt[k] * zt[k] - log_size[k];
        }
      }
      top = logs[0];
      for (int64_t k = 1; k < K; ++k) top = logs[k] > top ? logs[k] : top;
      for (int64_t k = 0; k < K; k += 4)  // writes up to three numbers beyond the row, before the next row
        exponential(Four::load(logs + k) - Four(top)).store(dt + k);
    }
    double s = 0.0;
    for (int64_t k = 0; k < K; ++k) s += now[k] *= dt[k];
    scale[t] = s;
    total += std::log(s) + top;
    for (int64_t k = 0; k < K; ++k) {
      ft[k] = now[k] / s;
      now[k] = 0.0;
    }
    const double* P = p.transition + (t + 1) * f.table;
    for (int64_t k = 0; k < K && t + 1 < T; ++k)
      for (int64_t j = 0; j < M; ++j) now[after[k * M + j]] += ft[k] * P[from[k] * M + j];
  }
  for (int64_t t = T - 1; t >= 0; --t) {
    const double *zt = z + t * K, *dt = density + t * K, *ft = filtered + t * K;
    if (f.smoothed)
      for (int64_t k = 0; k < K; ++k) f.smoothed[t * K + k] = ft[k] * later[k];
    if (!f.given && !std::isnan(y[t])) {
      for (int64_t k = 0; k < K; ++k) {
        const double share = ft[k] * later[k], slope = share * zt[k] * precision[k];
        logs[k] = slope;
        bar.offset[k] += slope;
        bar.deviation[k] += share * (zt[k] * zt[k] - 1.0) * precision[k];
      }
      for (int64_t i = 0; i < r; ++i)
        for (int64_t k = 0; k < K; ++k) matrix_bar[i * K + k] += logs[k] * inputs[t * r + i];
    }
    for (int64_t k = 0; k < K; ++k) later[k] *= dt[k] / scale[t];
    if (t == 0) break;
    const double *P = p.transition + t * f.table, *past = ft - K;
    double* P_bar = bar.transition + t * f.table;
    for (int64_t k = 0; k < K; ++k) {
      double s = 0.0;
      for (int64_t j = 0; j < M; ++j) {
        const double w = later[after[k * M + j]];
        s += P[from[k] * M + j] * w;
        P_bar[from[k] * M + j] += past[k] * w;
      }
      before[k] = s;
    }
    std::swap(later, before);
  }
  for (int64_t k = 0; k < K; ++k) {
    bar.initial[k] += later[k];
    for (int64_t i = 0; i < r; ++i) bar.matrix[k * r + i] += matrix_bar[i * K + k];
  }
  return total;
}
