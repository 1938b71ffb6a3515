// Wishart, normal–inverse-Wishart and Gaussian beliefs of four modes at a time: A(θ + e) − A(θ), ∇A, and the θ
// of a given ∇A.
//
// Entry (i, j ≤ i) of a packed matrix is number i (i + 1)/2 + j, times √2 off the diagonal. With
// log Γ_D(a) = Σ_{i<D} log Γ(a − i/2) + const, a normal–inverse-Wishart law has
//
//     θ = (κm, −½ pack(Ψ + κmm'), −½κ, −½(ν + D + 2))
//     A(θ) = log Γ_D(ν/2) − ½ν log |Ψ/2| − ½D log κ + const
//     ∇A(θ) = (νΨ⁻¹m, pack(νΨ⁻¹), D/κ + νm'Ψ⁻¹m, log |Ψ/2| − Σ_{i<D} ψ((ν − i)/2))
//
// and a Wishart law of scale Ψ⁻¹ has the same without the terms of m and κ, and with ν of the other sign:
//
//     θ = (−½ pack(Ψ), ½(ν − D − 1)),    ∇A(θ) = (pack(νΨ⁻¹), Σ_{i<D} ψ((ν − i)/2) − log |Ψ/2|)
//
// `Unknown<true>` is the normal–inverse-Wishart law, `Unknown<false>` the Wishart law.
//
// An observation adds 1 to ν (and to κ, if the law has one), so that all but the ends of log Γ_D(a + ½) −
// log Γ_D(a) cancel:
//
//     log Γ(a + ½) − log Γ(a + ½ − D/2) = Σ_{k<⌊D/2⌋} log(b − k) [+ log Γ(a + ½) − log Γ(a) if D is odd],
//     b = a − ½ or, if D is odd, a − 1
//
// A Gaussian law of mean m and precision Λ has θ = (Λm, −½ pack(Λ)). For e = (h, −½ pack(E)), an observation
// whose noise has precision E, and g = h − Em,
//
//     A(θ + e) − A(θ) = h'm − ½m'Em + ½g'(Λ + E)⁻¹g + ½ log |Λ| − ½ log |Λ + E|
//
// In place of ∇A it keeps (m, pack(Λ⁻¹)), so that covariances of mixtures are taken about their mean.
//
// D is an `int`, or a `Fixed<1>`, for which the compiler removes the loops.
#pragma once
#include "families/digamma.hpp"

constexpr double LOG_TWO = 0.6931471805599453, ROOT_TWO = 1.4142135623730951;

INLINE int packed_size(int D) { return D * (D + 1) / 2; }
INLINE int packed(int i, int j) { return i * (i + 1) / 2 + j; }  // j ≤ i
INLINE double packing(int i, int j) { return i == j ? 1.0 : ROOT_TWO; }

// Room, in numbers, that the functions below need at `work`.
INLINE int wishart_room(int D) { return 2 * D * D + 3 * D; }

// Factors the matrix scale · source − r vv', source packed, at `work`; returns the log of its determinant, NaN if it
// is not positive definite.
template <class Size>
ONCE Four factor_packed(Size D, const Four* source, double scale, const Four* v, Four r, Four* work) {
  for (int i = 0; i < D; ++i)
    for (int j = 0; j <= i; ++j)
      work[i * D + j] = source[packed(i, j)] * (scale / packing(i, j)) - v[i] * v[j] * r;
  Four* const nothing = work + 2 * D * D;
  for (int i = 0; i < D; ++i) nothing[i] = 0.0;
  return factor(D, work, nothing, 0.0, NOT_A_NUMBER);
}
// Writes the inverse of a matrix, whose factor is at `work`, behind the factor; returns its address.
template <class Size> ONCE Four* invert_factored(Size D, Four* work) {
  Four* const inverse = work + D * D;
  for (int i = 0; i < D * D; ++i) inverse[i] = i % (D + 1) ? 0.0 : 1.0;
  solve(D, D, work, inverse);
  return inverse;
}

template <bool located> struct Unknown {
  // Places in θ: the beginning of the packed matrix, κ, and ν.
  static INLINE int matrix(int D) { return located ? D : 0; }
  static INLINE int count(int D) { return matrix(D) + packed_size(D); }
  static INLINE int degrees(int D) { return count(D) + located; }

  static INLINE Four half_degrees(int D, const Four* theta) {
    return located ? -theta[degrees(D)] - 0.5 * (D + 2) : theta[degrees(D)] + 0.5 * (D + 1);
  }
  static INLINE Four inverse_count(int D, const Four* theta) {
    return located ? Four(-0.5) / theta[count(D)] : Four(0.0);
  }

  // Writes ∇A(θ) and returns log |Ψ|.
  template <class Size> static ONCE Four write_mean(Size D, const Four* theta, Four* mean, Four* work) {
    const Four half = half_degrees(D, theta), spread = inverse_count(D, theta);
    const Four log_scale = factor_packed(D, theta + matrix(D), -2.0, theta, spread, work);
    const Four* const inverse = invert_factored(D, work);
    Four last = Four(double(D)) * spread;
    for (int i = 0; i < D; ++i) {
      Four along = 0.0;
      for (int j = 0; j < D; ++j) {
        const Four entry = half * inverse[i * D + j] * 2.0;
        if (located) along = along + entry * theta[j];
        if (j <= i) mean[matrix(D) + packed(i, j)] = entry * packing(i, j);
      }
      if (!located) continue;
      mean[i] = along * spread;
      last = last + mean[i] * theta[i] * spread;
    }
    if (located) mean[count(D)] = last;
    const Four gap = log_scale - D * LOG_TWO - digamma_sum(D, half);
    mean[degrees(D)] = located ? gap : -gap;
    return log_scale;
  }

  // Writes θ + e and its ∇A; returns A(θ + e) − A(θ).
  template <class Size>
  static Four update(Size D, const Four* theta, const double* e, Four* target, Four* mean, Four* work) {
    const Four half = half_degrees(D, theta), spread = inverse_count(D, theta);
    const Four before = factor_packed(D, theta + matrix(D), -2.0, theta, spread, work) - D * LOG_TWO;
    for (int k = 0; k <= degrees(D); ++k) target[k] = theta[k] + e[k];
    const Four after = write_mean(D, target, mean, work) - D * LOG_TWO;
    Four total = half * before - (half + 0.5) * after;
    if (located) total = total - logarithm(target[count(D)] / theta[count(D)]) * (0.5 * D);
    if (D % 2) total = total + half_rise(half);
    Four product = 1.0;
    for (int k = 0; k < D / 2; ++k) {
      product = product * (half - (D % 2 ? 1.0 : 0.5) - double(k));
      if (k % 8 == 7 || k + 1 == D / 2) total = total + logarithm(product), product = 1.0;
    }
    return total;
  }

  // Writes the θ whose ∇A is `mean`.
  template <class Size> static void from_mean(Size D, const Four* mean, Four* target, Four* work) {
    const Four log_scale = factor_packed(D, mean + matrix(D), 1.0, mean, 0.0, work);
    const Four* const inverse = invert_factored(D, work);
    const Four last = mean[degrees(D)], half = invert_gap(D, (located ? last : -last) + log_scale);
    Four *const m = work + 2 * D * D, kappa = 0.0;
    for (int i = 0; i < D; ++i) m[i] = 0.0;
    if (located) {
      Four square = mean[count(D)];
      for (int i = 0; i < D; ++i) {  // m, by E[Σ⁻¹] m = E[Σ⁻¹μ]
        for (int j = 0; j < D; ++j) m[i] = m[i] + inverse[i * D + j] * mean[j];
        square = square - m[i] * mean[i];
      }
      kappa = Four(double(D)) / square;
      for (int i = 0; i < D; ++i) target[i] = m[i] * kappa;
      target[count(D)] = kappa * -0.5;
    }
    for (int i = 0; i < D; ++i)
      for (int j = 0; j <= i; ++j) {
        const Four entry = half * inverse[i * D + j] + kappa * m[i] * m[j] * 0.5;
        target[matrix(D) + packed(i, j)] = entry * -packing(i, j);
      }
    target[degrees(D)] = located ? -half - 0.5 * (D + 2) : half - 0.5 * (D + 1);
  }
};

struct KnownCovariance {
  // Writes (m, pack(Λ⁻¹)) of θ, and to `work` the factor of Λ, then Λ⁻¹; returns log |Λ|.
  template <class Size> static ONCE Four write_mean(Size D, const Four* theta, Four* mean, Four* work) {
    const Four level = factor_packed(D, theta + D, -2.0, theta, 0.0, work);
    const Four* const inverse = invert_factored(D, work);
    for (int i = 0; i < D; ++i) {
      mean[i] = 0.0;
      for (int j = 0; j < D; ++j) mean[i] = mean[i] + inverse[i * D + j] * theta[j];
      for (int j = 0; j <= i; ++j) mean[D + packed(i, j)] = inverse[i * D + j] * packing(i, j);
    }
    return level;
  }

  // Writes θ + e and its mean and covariance; returns A(θ + e) − A(θ).
  template <class Size>
  static Four update(Size D, const Four* theta, const double* e, Four* target, Four* mean, Four* work) {
    Four *const m = work + 2 * D * D + D, *const g = m + D, total = 0.0;
    const Four before = factor_packed(D, theta + D, -2.0, theta, 0.0, work);
    copy(D, theta, m);
    solve(D, Fixed<1>{}, work, m);
    for (int i = 0; i < D; ++i) {
      g[i] = e[i];
      for (int j = 0; j < D; ++j) {
        const int at = i >= j ? packed(i, j) : packed(j, i);
        g[i] = g[i] + m[j] * (2.0 / packing(i, j) * e[D + at]);
      }
      total = total + m[i] * (g[i] + e[i]) * 0.5;
    }
    for (int k = 0; k < D + packed_size(D); ++k) target[k] = theta[k] + e[k];
    const Four after = write_mean(D, target, mean, work);
    const Four* const inverse = work + D * D;
    for (int i = 0; i < D; ++i) {
      Four along = 0.0;
      for (int j = 0; j < D; ++j) along = along + inverse[i * D + j] * g[j];
      total = total + along * g[i] * 0.5;
    }
    return total + (before - after) * 0.5;
  }

  // Writes the θ of a mean and covariance.
  template <class Size> static void from_mean(Size D, const Four* mean, Four* target, Four* work) {
    factor_packed(D, mean + D, 1.0, mean, 0.0, work);
    const Four* const precision = invert_factored(D, work);
    for (int i = 0; i < D; ++i) {
      target[i] = 0.0;
      for (int j = 0; j < D; ++j) target[i] = target[i] + precision[i * D + j] * mean[j];
      for (int j = 0; j <= i; ++j) target[D + packed(i, j)] = precision[i * D + j] * (-0.5 * packing(i, j));
    }
  }
};
