// ψ and ψ' of four shapes at a time, differences of log Γ, and the inverse of D log a − Σ_{i<D} ψ(a − i/2).
//
// Shapes from 8 on use asymptotic series. Smaller shapes are raised by 8, with the product
// P(a) = a (a + 1) ⋯ (a + 7), a polynomial in t = a (a + 7) whose coefficients are all positive:
//
//     log x − ψ(x) = 1/(2x) + Σ_k B_2k / (2k x^{2k}),          x ψ'(x) − 1 = 1/(2x) + Σ_k B_2k / x^{2k}
//     log Γ(x) = (x − ½) log x − x + ½ log 2π + Σ_k B_2k / (2k (2k − 1) x^{2k−1})
//     P = t⁴ + 28 t³ + 252 t² + 720 t,     ψ(a + 8) − ψ(a) = t' P'/P,     log Γ(a + 8) − log Γ(a) = log P
//     ψ'(a) − ψ'(a + 8) = t'² ((P'/P)² − P''/P) − 2 P'/P
//
// Differences of log Γ are sums of terms that do not cancel. Lanes are not treated one by one (except by `by_lane`,
// in a rare case), so four modes cost as much as one.
#pragma once
#include "switching/gaussian.hpp"

// B_2k, and the coefficients of three series that are made of it.
constexpr int TERMS = 10;
constexpr double BERNOULLI[TERMS] = {1. / 6,       -1. / 30, 1. / 42,       -1. / 30,    5. / 66,
                                     -691. / 2730, 7. / 6,   -3617. / 510, 43867. / 798, -174611. / 330};
struct Coefficients {
  double slope[TERMS]{}, stirling[TERMS]{}, half[TERMS]{};
  constexpr Coefficients() {
    double power = 2.0;  // 2^{2k − 1}
    for (int k = 1; k <= TERMS; ++k, power *= 4.0) {
      slope[k - 1] = BERNOULLI[k - 1] / (2 * k);
      stirling[k - 1] = slope[k - 1] / (2 * k - 1);
      half[k - 1] = stirling[k - 1] * (1.0 / power - 2.0);
    }
  }
};
constexpr Coefficients SERIES;

// Σ_k c_k q^k, in two chains.
INLINE Four series(const double* c, Four q) {
  const Four square = q * q;
  Four even = c[TERMS - 2], odd = c[TERMS - 1];
  for (int k = TERMS - 4; k >= 0; k -= 2) {
    even = even * square + c[k];
    odd = odd * square + c[k + 1];
  }
  return odd * q + even;
}

// x where a < limit, else y, lane by lane; and whether any lane is at least as large as the limit.
INLINE Four where_below(Four a, double limit, Four x, Four y) {
  return Four::each([&](int k) { return a.part[k] < limit ? x.part[k] : y.part[k]; });
}
INLINE bool any_from(Four a, double limit) {
  auto found = a.part[0] >= limit;
  for (int k = 1; k < Four::parts; ++k) found |= a.part[k] >= limit;
  bool any = false;
  for (int j = 0; j < Four::width; ++j) any |= found[j] != 0;
  return any;
}
INLINE Four size_of(Four a) { return larger(a, -a); }
template <class Function> INLINE Four by_lane(Four a, Function function) {  // slow, for rare cases
  for (int j = 0; j < 4; ++j) lanes(&a)[j] = function(lanes(&a)[j]);
  return a;
}

// Whether e is a count of at most eight, for which a product replaces log Γ.
INLINE bool is_few(double e) { return e >= 0.0 && e <= 8.0 && e == std::floor(e); }
INLINE Four rising_product(Four a, double e) {  // a (a + 1) ⋯ (a + e − 1)
  Four product = 1.0;
  for (double i = 0.0; i < e; i += 1.0) product = product * (a + i);
  return product;
}
INLINE Four product_of_eight(Four a) {
  const Four t = a * (a + 7.0);
  return t * (t * (t * (t + 28.0) + 252.0) + 720.0);
}

// x = a, or a + 8 if a < 8;  u = 1/x;  gap = log x − ψ(a);  bend = a ψ'(a) − 1.
struct Digamma {
  Four x, u, gap, bend;
  Four value() const { return logarithm(x) - gap; }
};
INLINE Digamma digamma(Four a) {
  const Four x = where_below(a, 8.0, a + 8.0, a), t = a * (a + 7.0), along = a * 2.0 + 7.0;
  const Four P = where_below(a, 8.0, product_of_eight(a), 1.0);
  const Four both = Four(1.0) / (x * P);  // one division for two
  const Four u = both * P, q = u * u, inverse = both * x, gap = u * 0.5 + q * series(SERIES.slope, q);
  const Four bend = u * 0.5 + q * series(BERNOULLI, q);  // x ψ'(x) − 1
  const Four first = (t * (t * (t * 4.0 + 84.0) + 504.0) + 720.0) * inverse;
  const Four second = (t * (t * 12.0 + 168.0) + 504.0) * inverse;
  const Four slope = (bend + 1.0) * u + along * along * (first * first - second) - first * 2.0;  // ψ'(a)
  return {x, u, where_below(a, 8.0, gap + along * first, gap), where_below(a, 8.0, a * slope - 1.0, bend)};
}

// log Γ(a + e) − log Γ(a); for a small count e, the logarithm of a product.
ONCE inline Four log_rise(Four a, double e) {
  if (e == 0.0) return 0.0;
  if (is_few(e)) return logarithm(rising_product(a, e));
  if (!(e < 1e30)) return by_lane(a, [&](double x) { return std::lgamma(x + e) - std::lgamma(x); });
  const Four z = where_below(a, 8.0, a + 8.0, a), w = z + e, u = Four(1.0) / z, v = Four(1.0) / w;
  const Four more = u * e, ratio = more + 1.0, log_ratio = logarithm(ratio) + (more - (ratio - 1.0)) / ratio;
  const Four rest = v * series(SERIES.stirling, v * v) - u * series(SERIES.stirling, u * u);
  const Four moved = logarithm(product_of_eight(a + e)) - logarithm(product_of_eight(a));
  return (z - 0.5) * log_ratio + (logarithm(w) - 1.0) * e + rest - where_below(a, 8.0, moved, 0.0);
}

// log Γ(a + ½) − log Γ(a).
ONCE inline Four half_rise(Four a) {
  const Four z = where_below(a, 8.0, a + 8.0, a), u = Four(1.0) / z;
  const Four moved = logarithm(product_of_eight(a) / product_of_eight(a + 0.5));
  return logarithm(z) * 0.5 + u * series(SERIES.half, u * u) + where_below(a, 8.0, moved, 0.0);
}

// Σ_{i<D} ψ(a − i/2).
template <class Size> INLINE Four digamma_sum(Size D, Four a) {
  Four sum = 0.0, product = 1.0;
  for (int i = 0; i < D; ++i) {
    const Digamma one = digamma(a - 0.5 * i);
    sum = sum - one.gap;
    product = product * one.x;
    if (i % 8 == 7 || i + 1 == D) sum = sum + logarithm(product), product = 1.0;  // one logarithm for eight
  }
  return sum;
}

// The a > (D − 1)/2 with D log a − Σ_{i<D} ψ(a − i/2) = s: for D = 1, the a with log a − ψ(a) = s.
//
// Newton's method in 1/(a − (D − 1)/2), in which the left side is almost linear. Its start is within 2e-4 for
// D = 1 and s < 17 (Greenwood and Durand, Technometrics 1960), else D(D + 1)/(4s) + 1/s, which is right in the
// limits of large and of small a. NaN if s is not positive.
template <class Size> ONCE Four invert_gap(Size D, Four given) {
  const Four s = between(given, 0.0, NOT_A_NUMBER);
  Four free = Four(0.25 * D * (D + 1) + 1.0) / s;
  if (D == 1)
    free = where_below(s, 0.5772, 0.5000876 + (0.1648852 - s * 0.0544274) * s,
                       (8.898919 + (9.05995 + s * 0.9775373) * s) / (17.79728 + (s + 11.968477) * s)) / s;
  for (int round = 0; round < 60; ++round) {
    const Four a = free + 0.5 * (D - 1);
    Four gap = 0.0, slope = 0.0, product = 1.0;
    for (int i = 0; i < D; ++i) {
      const Digamma one = digamma(a - 0.5 * i);
      gap = gap + one.gap;
      slope = slope + (D == 1 ? one.bend : (one.bend + Four(0.5 * i) / a) * free / (a - 0.5 * i));
      product = product * where_below(a - 0.5 * i, 8.0, a * one.u, a / (a - 0.5 * i));
      if (i % 8 == 7 || i + 1 == D) gap = gap + logarithm(product), product = 1.0;
    }
    const Four change = (s - gap) / slope;
    free = free / larger(change + 1.0, 0.125);
    if (!any_from(size_of(change), 1e-7)) break;  // the next change would be below rounding
  }
  return free + 0.5 * (D - 1);
}
