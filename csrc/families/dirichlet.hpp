// The Dirichlet law with given expected logarithms: the α with ψ(α_k) − ψ(Σα) = m_k.
//
// `newton_dirichlet` is Newton's method in 1/α, four modes at a time; its Hessian is a diagonal less a matrix
// of rank one. It converges in a few rounds unless the α differ by many orders of magnitude. `find_dirichlet`
// always converges, one mode at a time. Let * be the entry with the largest m, and R the sum of all others, which
// may be a tiny part of τ = Σα. At a given τ the others are ψ⁻¹(ψ(τ) + m_k), and m_* asks for them to sum to the R*
// with ψ(τ) − ψ(τ − R*) = −m_*. As τ grows, R/R* falls from ∞ to Q = (S − e^{m_*}) / (1 − e^{m_*}) < 1,
// S = Σ e^{m_k}, and log(R/R* − Q) is nearly −log τ + const at both ends. Newton's method on that logarithm finds
// the τ with R = R*, kept between totals known to be too small and too large. Newton's method on all entries
// follows; none of its steps subtracts nearly equal numbers.
#pragma once
#include "families/digamma.hpp"

// Writes α, entries of which are `step` numbers apart; `work` has room for 2 `size`. Returns for each lane the
// largest relative change of α in the last round: below SETTLED the next round would change it by less than 1e-13.
//
// It starts from α = p τ, with the shares p at `share` and the τ that solves Σ_k p_k (log p_k − m_k) =
// Σ_k p_k g(p_k τ) − g(τ), where g(a) = (1 + 1/(1 + 6a))/(2a) approximates log a − ψ(a) within 2 %.
constexpr double SETTLED = 5e-7;
INLINE Four newton_dirichlet(int size, int step, const Four* mean, const Four* share, Four* alpha,
                             Four* work) {
  Four excess = 0.0, moved = 0.0;
  for (int k = 0; k < size; ++k)
    excess = excess + share[k * step] * (logarithm(share[k * step]) - mean[k * step]);
  excess = Four(0.5) / excess;
  Four start = excess * double(size - 1);
  for (int round = 0; round < 2; ++round) {
    Four sum = Four(double(size - 1)) - Four(1.0) / (start * 6.0 + 1.0);
    for (int k = 0; k < size; ++k) sum = sum + Four(1.0) / (start * share[k * step] * 6.0 + 1.0);
    start = sum * excess;
  }
  for (int k = 0; k < size; ++k) alpha[k * step] = start * share[k * step];
  for (int round = 0; round < 12; ++round) {
    Four total = 0.0;
    for (int k = 0; k < size; ++k) total = total + alpha[k * step];
    const Digamma whole = digamma(total);
    Four shared = 0.0, spare = total / (whole.bend + 1.0);  // 1/ψ'(τ)
    for (int k = 0; k < size; ++k) {
      const Digamma one = digamma(alpha[k * step]);
      const Four slope = Four(1.0) / (one.bend + 1.0), weight = alpha[k * step] * slope;
      const Four error = logarithm(one.x * whole.u) + (whole.gap - one.gap) - mean[k * step];
      spare = spare - weight;
      shared = shared + error * weight;
      work[2 * k] = slope;
      work[2 * k + 1] = error;
    }
    shared = shared / spare;
    moved = 0.0;
    for (int k = 0; k < size; ++k) {
      const Four change = (work[2 * k + 1] + shared) * work[2 * k];
      alpha[k * step] = alpha[k * step] / larger(change + 1.0, 0.125);
      moved = larger(moved, size_of(change));
    }
    if (!any_from(moved, SETTLED)) break;
  }
  return moved;
}

// ---- functions of one number, for `find_dirichlet`

inline double psi(double a) {
  const Four value = digamma(a).value();
  return lanes(&value)[0];
}
inline double psi_slope(double a) {
  const Four bend = digamma(a).bend;
  return (lanes(&bend)[0] + 1.0) / a;
}

// ψ(a + b) − ψ(a) and ψ'(a) − ψ'(a + b); small b cost no digits, because every term has the factor b.
inline double psi_rise(double a, double b) {
  const double c = a + b, u = 1.0 / (a + 8.0), v = 1.0 / (c + 8.0), q = u * u, p = v * v;
  double total = 0.0, shared = 0.0, power = 1.0, tail = 0.0;
  for (int i = 0; i < 8; ++i) total += 1.0 / ((a + i) * (c + i));
  for (double coefficient : SERIES.slope) {  // q^k − p^k = (q − p) (q^{k−1} + q^{k−2} p + ⋯)
    shared = shared * q + power;
    power *= p;
    tail += coefficient * shared;
  }
  return b * (total + u * v * (0.5 + (u + v) * tail)) + std::log1p(b * u);
}
inline double psi_slope_fall(double a, double b) {
  const double c = a + b, u = 1.0 / (a + 8.0), v = 1.0 / (c + 8.0), q = u * u, p = v * v;
  double total = 0.0, shared = 0.0, power = 1.0, tail = 1.0 + 0.5 * (u + v);
  for (int i = 0; i < 8; ++i) total += (a + c + 2.0 * i) / ((a + i) * (c + i)) / ((a + i) * (c + i));
  for (double coefficient : BERNOULLI) {
    shared = shared * q + power;
    power *= p;
    tail += coefficient * ((u + v) * u * shared + power);
  }
  return b * (total + u * v * tail);
}

// The a with ψ(a) = y (Minka 2000, appendix C).
inline double inverse_psi(double y) {
  double a = y >= -2.22 ? std::exp(y) + 0.5 : 1.0 / (-0.5772156649015329 - y);
  for (int round = 0; round < 4; ++round) a -= (psi(a) - y) / psi_slope(a);
  return a;
}

// The r with ψ(τ) − ψ(τ − r) = s, and x = τ − r: Newton's method for a convex function, from beyond the root.
struct Rest {
  double r, x;
};
inline Rest rest_for(double total, double s) {
  const double st = s * total;
  Rest found{std::fmin(-total * std::expm1(-s), total * (st / (1.0 + st))),
             std::fmax(total * std::exp(-s), total / (1.0 + st))};
  for (int round = 0; round < 3; ++round) {
    const double change = (psi_rise(found.x, found.r) - s) / psi_slope(found.x);
    found.x += change;
    found.r -= change;
  }
  return found;
}

// Writes α; `work` holds 3 `size` numbers.
inline void find_dirichlet(int size, const double* mean, double* alpha, double* work) {
  int top = 0;
  for (int k = 1; k < size; ++k)
    if (mean[k] > mean[top]) top = k;
  const double s = -mean[top], share = -std::expm1(-s);
  double others = 0.0;
  for (int k = 0; k < size; ++k)
    if (k != top) others += std::exp(mean[k]);
  const double left = share - others, limit = others / share, target = std::log(left / share);
  double total = size / (2.0 * left), low = 1e-300, high = 1e300;
  bool settled = false;
  for (int round = 0; round < 60 && !settled; ++round) {
    const double shift = psi(total);
    double rest = 0.0, slopes = 0.0;
    for (int k = 0; k < size; ++k)
      if (k != top) {
        const double a = inverse_psi(mean[k] + shift);
        rest += a;
        slopes += 1.0 / psi_slope(a);
      }
    const Rest wanted = rest_for(total, s);
    const double ratio = rest / wanted.r;
    (ratio > 1.0 ? low : high) = ratio > 1.0 ? total / 2.0 : 2.0 * total;
    const double fall = psi_slope_fall(wanted.x, wanted.r) / psi_slope(wanted.x);
    const double steep = psi_slope(total) * slopes / rest - fall / wanted.r;
    const double change = (target - std::log(ratio - limit)) * (ratio - limit) / (total * ratio * steep);
    double now = total * std::exp(std::fmin(std::fmax(change, -16.0), 16.0));
    if (!(low <= now && now <= high && change == change)) now = std::sqrt(low) * std::sqrt(high);
    settled = std::fabs(now - total) < 1e-3 * total;
    total = now;
  }
  const double shift = psi(total);
  for (int k = 0; k < size; ++k) alpha[k] = k == top ? rest_for(total, s).x : inverse_psi(mean[k] + shift);
  double *rest = work, *error = work + size, *slope = error + size;
  for (int round = 0; round < 3; ++round) {
    double sum = 0.0, after = 0.0, spare = 0.0, shared = 0.0;
    for (int k = 0; k < size; ++k) rest[k] = sum, sum += alpha[k];  // the sum of all others
    for (int k = size - 1; k >= 0; --k) rest[k] += after, after += alpha[k];
    for (int k = 0; k < size; ++k) {
      error[k] = -psi_rise(alpha[k], rest[k]) - mean[k];
      slope[k] = psi_slope(alpha[k]);
      const double fall = psi_slope_fall(alpha[k], rest[k]);
      spare += k == top ? -fall / (slope[k] * psi_slope(sum)) : 1.0 / slope[k];
      shared += error[k] / slope[k];
    }
    for (int k = 0; k < size; ++k) {
      const double now = std::fmax(alpha[k] - (error[k] - shared / spare) / slope[k], alpha[k] / 4.0);
      if (std::isfinite(now)) alpha[k] = now;
    }
  }
}
