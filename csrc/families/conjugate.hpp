// Beliefs in conjugate families with discounted dynamics, as the law of a mode for switching.hpp.
//
// A belief is its natural parameter θ, K numbers. They form D independent groups; group g (coordinate g) has
// the numbers θ[g], θ[g + D], θ[g + 2D], …:
//
//     Gamma            A = log Γ(a) − a log b                          θ = (−b, a − 1)
//     Beta, Dirichlet  A = Σ log Γ(α_k) − log Γ(Σ α_k)                 θ = α − 1
//     NormalGamma      A = log Γ(a) − a log b − ½ log κ                θ = (κm, −b − ½κm², −½κ, a − ½)
//     NormalInverseWishart, Wishart and Gaussian, of which D is the dimension: wishart.hpp
//
//     predict    θ ← θ_rest + δ (θ − θ_rest), or, of Gammas through a map W with noise of variance q, the Gamma
//                with the mean Σ_j W_gj a_j/b_j and variance Σ_j W_gj² a_j/b_j² + q_g
//     update     θ ← θ + e(y),  log p(y) = A(θ + e) − A(θ) + log c(y)
//     collapse   the θ with ∇A(θ) = Σ w_i ∇A(θ_i), which is θ_i where w_i = 1
//
// So a law holds θ and ∇A(θ) side by side (a Gaussian has mean and covariance in place of ∇A). A predicted law has no
// ∇A. The first number in its place is 1, or 0 if no mode of the group can follow the mode before; that pair is
// skipped and gets the law of rest.
#pragma once
#include "families/dirichlet.hpp"
#include "frame.hpp"
#include "switching/switching.hpp"
#include "families/wishart.hpp"

enum Family : int { GAMMA = 0, DIRICHLET = 1, NORMAL_GAMMA = 2, NORMAL_WISHART = 3, WISHART = 4, GAUSSIAN = 5 };

#define CONJUGATE_FIELDS(whole, real, place)                     \
  SWITCHING_FIELDS(whole, real, place)                           \
  whole(family) whole(groups) whole(numbers) /* D, K */          \
  place(const double, evidence)       /* (rows, K) */            \
  place(const double, log_base)       /* (rows,), log c(y) */    \
  place(const uint8_t, seen)          /* (rows,) */              \
  place(const double, prior)          /* (M, K) */               \
  place(const double, discount)       /* (M,) */                 \
  place(const double, rest)           /* (M, K) */               \
  place(const double, map)            /* (M, D·D + D): W, q; or 0 */ \
  place(const double, log_transition) /* (M, M) */               \
  place(const double, log_initial)    /* (M,) */                 \
  place(double, belief)               /* (rows of results, M, K): θ; of a Gaussian (m, pack(P)), of a Wishart \
                                         law its mean in place of the inverse of its scale */
EXPTILT_FRAME(ConjugateSeries, CONJUGATE_FIELDS)

class Conjugate {
 public:
  using Number = Four;
  const int modes, size;
  const bool mapped = false;
  const Four* log_transition;

  Conjugate(const ConjugateSeries& f, Room& room)
      : modes(int(f.modes)), size(2 * int(f.numbers)), f(f), family(Family(f.family)), D(int(f.groups)),
        K(int(f.numbers)), groups((modes + 3) / 4) {
    Four* const transition = room.take<Four>(modes * groups);
    discount = room.take<Four>(groups);
    rest = room.take<Four>(groups * size);
    map = room.take<Four>(f.map ? groups * (D * D + D) : 0);
    prior = room.take(modes * size);
    mean = room.take<Four>(K);
    share = room.take<Four>(K);
    work = room.take<Four>(family >= NORMAL_WISHART ? wishart_room(D) : 2 * K);
    spare = room.take(5 * K);
    for (int i = 0; i < modes; ++i)
      spread(modes, 1, f.log_transition + i * modes, 1, transition + i * groups, 1);
    log_transition = transition;
    for (int i = 0; i < modes * modes; ++i) sparse |= !(f.log_transition[i] > -INFINITE);
    spread(modes, 1, f.discount, 1, discount, 1);
    if (f.map) spread(modes, D * D + D, f.map, D * D + D, map, D * D + D);
    spread(modes, K, f.prior, K, rest, size);
    for (int g = 0; g < groups; ++g) write_mean(rest + g * size, rest + g * size + K);
    gather(modes, size, rest, size, prior, size);
    spread(modes, K, f.rest, K, rest, size);
    for (int g = 0; g < groups; ++g) write_mean(rest + g * size, rest + g * size + K);
  }

  void start(int64_t, int64_t, double* state, double* log_mode) {
    first_law = state;
    copy(modes * size, prior, state);
    copy(modes, f.log_initial, log_mode);
  }
  void load(int64_t series, int64_t t, bool) { row = f.starts[series] + t; }
  void keep(int64_t place, const double* state) {
    for (int j = 0; j < modes; ++j) {
      const double* const theta = state + j * size;
      double* const out = f.belief + (place * modes + j) * K;
      copy(K, family >= WISHART ? theta + K : theta, out);
      if (family == WISHART) out[K - 1] = theta[K - 1];
    }
  }
  void read(int, int, const double*, Four*) {}

  template <class Source> void predict(int g, const Source* source, Four* target) {
    bool possible = true;
    if constexpr (LANES<Source> == 1)  // `source` is the law of one earlier mode
      possible = !sparse || any_from(log_transition[(source - first_law) / size * groups + g], -1e300);
    target[K] = possible;
    if (!possible) return;
    if (f.map) return push(map + g * (D * D + D), source, target);
    for (int k = 0; k < K; ++k) {
      const Four base = rest[g * size + k];
      target[k] = base + discount[g] * (Four(source[k]) - base);
    }
  }

  Four update(int g, const Four* source, Four* target) {
    if (lanes(source + K)[0] == 0.0) {
      copy(size, rest + g * size, target);
      return 0.0;
    }
    if (f.seen[row]) return gain(source, f.evidence + row * K, target, target + K) + f.log_base[row];
    copy(K, source, target);
    write_mean(target, target + K);
    return 0.0;
  }

  template <class Source>
  void collapse(int parts, const Four* weight, int weight_step, const Source* first, int step, Four* target) {
    Four most = weight[0];
    for (int i = 1; i < parts; ++i) most = larger(most, weight[i * weight_step]);
    if (any_from(Four(1.0) - most, 1e-17)) {
      average(parts, weight, weight_step, first, step);
      invert(target);
      copy(K, mean, target + K);
    }
    if (any_from(most, 1.0))
      for (int i = 0; i < parts; ++i) {
        const Four w = weight[i * weight_step];
        for (int k = 0; k < size; ++k) target[k] = where_below(w, 1.0, target[k], first[i * step + k]);
      }
  }

 private:
  // Calls a function with the formulas of this family, one of matrices, and with D.
  template <class Function> INLINE Four with_matrices(Function function) {
    const auto sized = [&](auto formulas) { return D == 1 ? function(formulas, Fixed<1>{}) : function(formulas, D); };
    return family == NORMAL_WISHART ? sized(Unknown<true>{})
           : family == WISHART      ? sized(Unknown<false>{})
                                    : sized(KnownCovariance{});
  }

  // Writes the Gammas at `source` after a map with noise.
  template <class Source> void push(const Four* W, const Source* source, Four* target) {
    for (int g = 0; g < D; ++g) {
      Four first = 0.0, second = W[D * D + g];
      for (int j = 0; j < D; ++j) {
        const Four part = W[g * D + j] / -Four(source[j]), middle = part * (Four(source[D + j]) + 1.0);
        first = first + middle;
        second = second + middle * part;
      }
      const Four rate = first / second;
      target[g] = -rate;
      target[D + g] = first * rate - 1.0;
    }
  }

  // Writes the mean of ∇A over a mixture to `mean` (for Gaussians, the mixture's mean and covariance) and, for
  // Dirichlets, the mean of α/Σα to `share`.
  template <class Source>
  void average(int parts, const Four* weight, int weight_step, const Source* first, int step) {
    for (int k = 0; k < K; ++k) mean[k] = share[k] = 0.0;
    for (int i = 0; i < parts; ++i) {
      const Four w = weight[i * weight_step];
      const Source* const part = first + i * step;
      if (!any_from(w, 1e-308)) continue;
      for (int k = 0; k < K; ++k) mean[k] = mean[k] + w * Four(part[K + k]);
      for (int g = 0; g < D && family == DIRICHLET; ++g) {
        Four sum = 0.0;
        for (int k = g; k < K; k += D) sum = sum + (Four(part[k]) + 1.0);
        sum = w / sum;
        for (int k = g; k < K; k += D) share[k] = share[k] + sum * (Four(part[k]) + 1.0);
      }
    }
    for (int i = 0; i < parts && family == GAUSSIAN; ++i) {  // the spread of the means
      const Four w = weight[i * weight_step];
      const Source* const m = first + i * step + K;
      for (int a = 0; a < D && any_from(w, 1e-308); ++a)
        for (int b = 0; b <= a; ++b)
          mean[D + packed(a, b)] =
              mean[D + packed(a, b)] + w * (Four(m[a]) - mean[a]) * (Four(m[b]) - mean[b]) * packing(a, b);
    }
  }

  // Writes ∇A(θ).
  ONCE void write_mean(const Four* theta, Four* out) {
    if (family >= NORMAL_WISHART) {
      with_matrices([&](auto formulas, auto size) { return formulas.write_mean(size, theta, out, work); });
      return;
    }
    for (int g = 0; g < D; ++g) {
      if (family == GAMMA) {
        const Four a = theta[D + g] + 1.0, b = -theta[g];
        out[g] = a / b;
        out[D + g] = digamma(a).value() - logarithm(b);
      } else if (family == DIRICHLET) {
        dirichlet_mean(g, theta, out);
      } else {
        const Normal law(theta, g, D);
        law.write_mean(g, D, logarithm(law.rate), out);
      }
    }
  }

  ONCE void dirichlet_mean(int g, const Four* theta, Four* out) {
    Four sum = 0.0;
    for (int k = g; k < K; k += D) sum = sum + (theta[k] + 1.0);
    const Digamma whole = digamma(sum);
    for (int k = g; k < K; k += D) {
      const Digamma one = digamma(theta[k] + 1.0);
      out[k] = logarithm(one.x * whole.u) + (whole.gap - one.gap);
    }
  }

  // One coordinate of a NormalGamma.
  struct Normal {
    Four a, count, m, rate;
    Normal(const Four* theta, int g, int D) : a(theta[3 * D + g] + 0.5), count(theta[2 * D + g] * -2.0) {
      m = theta[g] / count;
      rate = -theta[D + g] - theta[g] * m * 0.5;
    }
    void write_mean(int g, int D, Four log_rate, Four* out) const {
      out[D + g] = a / rate;
      out[g] = m * out[D + g];
      out[2 * D + g] = Four(1.0) / count + m * out[g];
      out[3 * D + g] = digamma(a).value() - log_rate;
    }
  };

  // Writes θ + e and its ∇A; returns A(θ + e) − A(θ).
  ONCE Four gain(const Four* theta, const double* e, Four* target, Four* out) {
    if (family >= NORMAL_WISHART)
      return with_matrices(
          [&](auto formulas, auto size) { return formulas.update(size, theta, e, target, out, work); });
    for (int k = 0; k < K; ++k) target[k] = theta[k] + e[k];
    Four sum = 0.0;
    for (int g = 0; g < D; ++g) {
      if (family == GAMMA) {
        const double shape = e[D + g];
        const Four a = theta[D + g] + 1.0, more = Four(e[g]) / theta[g], ratio = more + 1.0;
        const Four log_ratio = logarithm(ratio) + (more - (ratio - 1.0)) / ratio;  // of the rates
        const Four log_rate = logarithm(-target[g]);
        sum = sum + log_rise(a, shape) - (log_rate * shape + a * log_ratio);
        out[g] = -(a + shape) / target[g];
        out[D + g] = digamma(a + shape).value() - log_rate;
      } else if (family == DIRICHLET) {
        sum = sum + dirichlet_gain(g, theta, e);
        dirichlet_mean(g, target, out);
      } else {
        const Normal before(theta, g, D), after(target, g, D);
        const Four log_rate = logarithm(after.rate);
        sum = sum + half_rise(before.a) - before.a * logarithm(after.rate / before.rate) -
              (log_rate + logarithm(after.count / before.count)) * 0.5;
        after.write_mean(g, D, log_rate, out);
      }
    }
    return sum;
  }

  // A(θ + e) − A(θ) of group g; for counts that sum to at most eight, one logarithm of a quotient of products.
  Four dirichlet_gain(int g, const Four* theta, const double* e) {
    Four whole = 0.0, product = 1.0, sum = 0.0;
    double count = 0.0;
    bool few = true;
    for (int k = g; k < K; k += D) {
      whole = whole + (theta[k] + 1.0);
      count += e[k];
      few = few && is_few(e[k]) && count <= 8.0;
    }
    for (int k = g; k < K; k += D) {
      if (few)
        product = product * rising_product(theta[k] + 1.0, e[k]);
      else
        sum = sum + log_rise(theta[k] + 1.0, e[k]);
    }
    return few ? logarithm(product / rising_product(whole, count)) : sum - log_rise(whole, count);
  }

  // Writes the θ whose ∇A is at `mean`.
  ONCE void invert(Four* target) {
    if (family >= NORMAL_WISHART) {
      with_matrices([&](auto formulas, auto size) {
        formulas.from_mean(size, mean, target, work);
        return Four(0.0);
      });
      return;
    }
    for (int g = 0; g < D; ++g) {
      if (family == GAMMA) {
        const Four a = invert_gap(Fixed<1>{}, logarithm(mean[g]) - mean[D + g]);
        target[g] = -a / mean[g];
        target[D + g] = a - 1.0;
      } else if (family == DIRICHLET) {
        invert_dirichlet(g, target);
      } else {
        const Four precision = mean[D + g], m = mean[g] / precision;
        const Four a = invert_gap(Fixed<1>{}, logarithm(precision) - mean[3 * D + g]);
        const Four count = Four(1.0) / (mean[2 * D + g] - mean[g] * m);
        target[g] = count * m;
        target[D + g] = -a / precision - count * m * m * 0.5;
        target[2 * D + g] = count * -0.5;
        target[3 * D + g] = a - 0.5;
      }
    }
  }

  void invert_dirichlet(int g, Four* target) {
    const int entries = K / D;
    const Four moved = newton_dirichlet(entries, D, mean + g, share + g, target + g, work);
    for (int lane = 0; lane < 4; ++lane)
      if (!(lanes(&moved)[lane] < SETTLED)) {
        double *wanted = spare + 3 * entries, *alpha = wanted + entries;
        for (int k = 0; k < entries; ++k) wanted[k] = lanes(mean + g + k * D)[lane];
        find_dirichlet(entries, wanted, alpha, spare);
        for (int k = 0; k < entries; ++k) lanes(target + g + k * D)[lane] = alpha[k];
      }
    for (int k = g; k < K; k += D) target[k] = target[k] - 1.0;
  }

  const ConjugateSeries& f;
  const Family family;
  const int D, K, groups;             // groups of coordinates, numbers of θ, groups of modes
  bool sparse = false;                // whether some modes cannot follow some others
  int64_t row = 0;                    // of the observation
  const double* first_law = nullptr;  // the filter's laws, mode by mode
  Four *discount, *rest, *map;        // by group of modes; laws of rest with their ∇A
  Four *mean, *share, *work;
  double *prior, *spare;
};
