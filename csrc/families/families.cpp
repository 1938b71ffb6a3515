// Kernels of switching models whose beliefs are conjugate families: the filter, and the backward pass.
#include "families/conjugate.hpp"

EXPTILT_KERNEL(filter_families, ConjugateSeries) {
  Room room;
  Conjugate law(f, room);
  filter_series(law, f, room);
  return 0;
}

// ---- the backward pass: probabilities of modes and of pairs given all of y, and r, the sum of what later
// observations add to θ.
//
//     r_{t−1, i} = Σ_j P(j | i, y) δ_j (e(y_t) + r_{t, j})
//
// The recursion is the same for every family: given the modes, the evidence of later observations is discounted
// going back as that of earlier ones is going forward.

#define BACKWARD_FIELDS(whole, real, place)                                                        \
  whole(modes) whole(numbers) whole(series)                                                        \
  place(const int64_t, starts)       /* (series + 1,) */                                           \
  place(const double, evidence)      /* (rows, K) */                                               \
  place(const double, discount)      /* (M,) */                                                    \
  place(const double, level)         /* (rows, M), mode probabilities of the filter */             \
  place(const double, mixing)        /* (rows, M, M) */                                            \
  place(double, probability)         /* (rows, M) */                                               \
  place(double, pairs)               /* (rows, M, M) */                                            \
  place(double, later)               /* (rows, M, K) */
EXPTILT_FRAME(ConjugateBackward, BACKWARD_FIELDS)

EXPTILT_KERNEL(smooth_families, ConjugateBackward) {
  const int64_t M = f.modes, K = f.numbers;
  for (int64_t series = 0; series < f.series; ++series) {
    const int64_t first = f.starts[series], last = f.starts[series + 1] - 1;
    for (int64_t j = 0; j < M; ++j) f.probability[last * M + j] = f.level[last * M + j];
    for (int64_t k = 0; k < M * K; ++k) f.later[last * M * K + k] = 0.0;
    for (int64_t row = last; row >= first; --row) {
      double* const pairs = f.pairs + row * M * M;
      for (int64_t i = 0; i < M; ++i)
        for (int64_t j = 0; j < M; ++j)
          pairs[i * M + j] = f.probability[row * M + j] * f.mixing[(row * M + i) * M + j];
      if (row == first) break;
      for (int64_t i = 0; i < M; ++i) {
        double total = 0.0;
        for (int64_t j = 0; j < M; ++j) total += pairs[i * M + j];
        f.probability[(row - 1) * M + i] = total;
        double* const before = f.later + ((row - 1) * M + i) * K;
        for (int64_t k = 0; k < K; ++k) before[k] = 0.0;
        for (int64_t j = 0; j < M; ++j) {
          const double share = total > 0.0 ? pairs[i * M + j] / total * f.discount[j] : 0.0;
          for (int64_t k = 0; k < K; ++k)
            before[k] += share * (f.evidence[row * K + k] + f.later[(row * M + j) * K + k]);
        }
      }
    }
  }
  return 0;
}
