// Systematic resampling: N equally spaced pointers into the cumulative weights, moved by one uniform number.
//
//     pointer_i = (i + start) / N,     ancestor_i = the least k with W_1 + … + W_k > pointer_i
//
// The weights may have any sum. A particle of weight 0 has no descendants. Ancestors are in rising order.
#pragma once
#include <cstdint>

inline void systematic(const double* weight, int64_t count, double start, int64_t* ancestor, int64_t drawn) {
  double total = 0.0;
  int64_t last = 0;
  for (int64_t k = 0; k < count; ++k) {
    total += weight[k];
    if (weight[k] > 0.0) last = k;
  }
  int64_t source = 0;
  double cumulative = weight[0];
  for (int64_t i = 0; i < drawn; ++i) {
    const double pointer = (double(i) + start) / double(drawn) * total;
    while (cumulative <= pointer && source < last)  // rounding may put a pointer beyond the total
      cumulative += weight[++source];
    ancestor[i] = source;
  }
}
