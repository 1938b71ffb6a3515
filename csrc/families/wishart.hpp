// Normal–inverse-Wishart beliefs of four modes at a time: A(θ + e) − A(θ), ∇A, and the θ of a given ∇A.
//
// θ = (κm, −½ pack(Ψ + κmm'), −½κ, −½(ν + D + 2)), where entry (i, j ≤ i) of a packed matrix is number
// i (i + 1)/2 + j, times √2 off the diagonal, and
//
//     A(θ) = log Γ_D(ν/2) − ½ν log |Ψ/2| − ½D log κ + const,     log Γ_D(a) = Σ_{i<D} log Γ(a − i/2) + const
//     ∇A(θ) = (νΨ⁻¹m, pack(νΨ⁻¹), D/κ + νm'Ψ⁻¹m, log |Ψ/2| − Σ_{i<D} ψ((ν − i)/2))
//
// D is a `Fixed<1>`, for loops that are not there, or an `int`.
//
// An observation adds 1 to κ and to ν, so that all but the ends of log Γ_D(a + ½) − log Γ_D(a) cancel:
//
//     log Γ(a + ½) − log Γ(a + ½ − D/2) = Σ_{k<⌊D/2⌋} log(b − k) [+ log Γ(a + ½) − log Γ(a) if D is odd],
//     b = a − ½ or, if D is odd, a − 1
#pragma once
#include "families/digamma.hpp"

constexpr double LOG_TWO = 0.6931471805599453, ROOT_TWO = 1.4142135623730951;

// How many numbers the functions below may write at `work`.
INLINE int wishart_room(int D) { return 2 * D * D + D; }

// Factors a packed matrix, `scale` times the numbers at `packed`, less r vv', at `work`; returns the log of
// its determinant, NaN where it is not positive definite. Then `wishart_inverse` writes its inverse to
// work + D·D.
template <class Size>
ONCE Four wishart_factor(Size D, const Four* packed, double scale, const Four* v, Four r, Four* work) {
  for (int i = 0; i < D; ++i)
    for (int j = 0; j <= i; ++j)
      work[i * D + j] = packed[i * (i + 1) / 2 + j] * (i == j ? scale : scale / ROOT_TWO) - v[i] * v[j] * r;
  Four* const nothing = work + 2 * D * D;
  for (int i = 0; i < D; ++i) nothing[i] = 0.0;
  return factor(D, work, nothing, 0.0, NOT_A_NUMBER);
}
template <class Size> ONCE void wishart_inverse(Size D, Four* work) {
  Four* const inverse = work + D * D;
  for (int i = 0; i < D * D; ++i) inverse[i] = i % (D + 1) ? 0.0 : 1.0;
  solve(D, D, work, inverse);
}

// Writes ∇A(θ) and returns log |Ψ|.
template <class Size> ONCE Four wishart_mean(Size D, const Four* theta, Four* mean, Four* work) {
  const int size = D * (D + 1) / 2;
  const Four half = -theta[D + size + 1] - 0.5 * (D + 2), inverse = Four(-0.5) / theta[D + size];  // ν/2, 1/κ
  const Four log_scale = wishart_factor(D, theta + D, -2.0, theta, inverse, work);
  wishart_inverse(D, work);
  Four last = Four(double(D)) * inverse;
  for (int i = 0; i < D; ++i) {
    Four along = 0.0;
    for (int j = 0; j < D; ++j) {
      const Four entry = half * work[D * D + i * D + j] * 2.0;
      along = along + entry * theta[j];
      if (j <= i) mean[D + i * (i + 1) / 2 + j] = entry * (i == j ? 1.0 : ROOT_TWO);
    }
    mean[i] = along * inverse;
    last = last + mean[i] * theta[i] * inverse;
  }
  mean[D + size] = last;
  mean[D + size + 1] = log_scale - D * LOG_TWO - digamma_sum(D, half);
  return log_scale;
}

// Writes θ + e and its ∇A; returns A(θ + e) − A(θ).
template <class Size>
Four wishart_update(Size D, const Four* theta, const double* e, Four* target, Four* mean, Four* work) {
  const int size = D * (D + 1) / 2;
  const Four half = -theta[D + size + 1] - 0.5 * (D + 2);
  const Four inverse = Four(-0.5) / theta[D + size];
  const Four before = wishart_factor(D, theta + D, -2.0, theta, inverse, work) - D * LOG_TWO;
  for (int k = 0; k < D + size + 2; ++k) target[k] = theta[k] + e[k];
  const Four after = wishart_mean(D, target, mean, work) - D * LOG_TWO;
  Four total = half * before - (half + 0.5) * after;
  total = total - logarithm(target[D + size] / theta[D + size]) * (0.5 * D);
  if (D % 2) total = total + half_rise(half);
  Four product = 1.0;
  for (int k = 0; k < D / 2; ++k) {
    product = product * (half - (D % 2 ? 1.0 : 0.5) - double(k));
    if (k % 8 == 7 || k + 1 == D / 2) total = total + logarithm(product), product = 1.0;
  }
  return total;
}

// Writes the θ whose ∇A is `mean`.
template <class Size> void wishart_from_mean(Size D, const Four* mean, Four* target, Four* work) {
  const int size = D * (D + 1) / 2;
  const Four log_scale = wishart_factor(D, mean + D, 1.0, mean, 0.0, work);
  wishart_inverse(D, work);
  const Four* inverse = work + D * D;
  Four square = mean[D + size];
  for (int i = 0; i < D; ++i) {  // m, by E[Σ⁻¹] m = E[Σ⁻¹μ]
    Four sum = 0.0;
    for (int j = 0; j < D; ++j) sum = sum + inverse[i * D + j] * mean[j];
    target[i] = sum;
    square = square - sum * mean[i];
  }
  const Four count = Four(double(D)) / square, half = invert_gap(D, mean[D + size + 1] + log_scale);
  for (int i = 0; i < D; ++i)
    for (int j = 0; j <= i; ++j) {
      const Four entry = half * inverse[i * D + j] + count * target[i] * target[j] * 0.5;
      target[D + i * (i + 1) / 2 + j] = entry * (i == j ? -1.0 : -ROOT_TWO);
    }
  for (int i = 0; i < D; ++i) target[i] = target[i] * count;
  target[D + size] = count * -0.5;
  target[D + size + 1] = -half - 0.5 * (D + 2);
}
