// Gaussian laws: one Kalman step, the only copy of its arithmetic.
//
// Every filter of linear modes is made of three moves on Gaussians with mean x and covariance P:
//
//     predict    x ← W x + c,       P ← W P W' + Q
//     update     x ← x + K e,       P ← (I − K H) P (I − K H)' + K R K'        (Joseph's form)
//                e = y − H x − d,   S = H P H' + R,   K = P H' S⁻¹,   log p(y) = −½ (log |2πS| + e' S⁻¹ e)
//     collapse   x ← Σ w_i x_i,     P ← Σ w_i (P_i + δ_i δ_i'),   δ_i = x_i − x      (the M-projection)
//
// Matrices lie row by row, and what belongs together lies together:
//
//     a law      x (n), P (n·n)
//     a move     W (n·n), c (n), Q (n·n), W' (n·n)
//     a sensor   H (m·n), d (m), R (m·m)
//
// A number is a `double`, or a `Four`: the same number of four modes (lanes.hpp). The law that a move starts
// from may always be one of plain numbers, which all lanes then share. Sizes are `Fixed<4>`, for loops that
// are unrolled, or `int`, for one version of all sizes. Of a covariance the lower triangle is computed and
// mirrored to the upper one, so symmetry cannot be lost; Joseph's form multiplies by I − K H from both sides,
// so positive definiteness is not lost either.
//
// Filters, smoother, adjoint and particles are all built on this file and on series.hpp; their interface is
// stable.
#pragma once
#include "switching/lanes.hpp"

constexpr double LOG_TWO_PI = 1.8378770664093453;
constexpr double ROUNDING = 4 * 2.220446049250313e-16;  // of a sum, for each of its terms

// A size that is known to the compiler.
template <int size> struct Fixed {
  constexpr operator int() const { return size; }
};

INLINE int law_size(int n) { return n + n * n; }
INLINE int move_size(int n) { return 3 * n * n + n; }
INLINE int sensor_size(int n, int m) { return m * n + m + m * m; }
// Scratch of `update`, which also serves `predict`, and `joseph` for n states.
INLINE int update_room(int n, int m) { return m * m + 3 * n * m + 2 * m + n * n; }

// A matrix in memory: entry (i, k) is at `at[i · row + k · column]`.
template <class Source> struct View {
  const Source* at;
  int row, column;
};
template <class Source> INLINE View<Source> view(const Source* at, int row, int column = 1) {
  return {at, row, column};
}

// Copies the lower triangle to the upper one.
template <class Number, class N> INLINE void mirror(N n, Number* P) {
  for (int i = 0; i < n; ++i)
    for (int j = 0; j < i; ++j) P[j * n + i] = P[i * n + j];
}

// Writes `blocks` stretches of rows i to i + `rows` − 1 of C ± A B from column j on: each one number, or four
// plain ones at once.
template <int sign, class Stretch, int rows, int blocks, class Number, class Inner, class Left, class Right,
          class Start>
INLINE void multiply_some(int i, int j, Inner inner, int columns, View<Left> A, const Right* B,
                          const Start* C, Number* out) {
  constexpr int wide = LANES<Stretch> / LANES<Number>;
  const auto get = [](const auto* p) {
    if constexpr (wide > 1)
      return Stretch::load(p);
    else
      return Stretch(*p);
  };
  Stretch sum[rows][blocks];
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < blocks; ++c)
      sum[r][c] = C ? get(C + (i + r) * columns + j + c * wide) : Stretch(0.0);
  for (int k = 0; k < inner; ++k) {
    Stretch b[blocks];
    for (int c = 0; c < blocks; ++c) b[c] = get(B + k * columns + j + c * wide);
    for (int r = 0; r < rows; ++r) {
      const Stretch a = Stretch(A.at[(i + r) * A.row + k * A.column]);
      for (int c = 0; c < blocks; ++c) sum[r][c] = sign > 0 ? sum[r][c] + a * b[c] : sum[r][c] - a * b[c];
    }
  }
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < blocks; ++c)
      if constexpr (wide > 1)
        sum[r][c].store(out + (i + r) * columns + j + c * wide);
      else
        out[(i + r) * columns + j + c] = sum[r][c];
}

// Writes C ± A B, or ± A B where C is null. B, C and the result lie row by row; with `lower`, only the lower
// triangle is needed. Rows of plain numbers are worked on four columns at a time; where sizes are not known
// to the compiler, several sums are made at once, as each has to wait for itself.
template <int sign, bool lower = false, class Number, class Rows, class Inner, class Columns, class Left,
          class Right, class Start>
INLINE void multiply(Rows rows, Inner inner, Columns columns, View<Left> A, const Right* B, const Start* C,
                     Number* out) {
  constexpr bool known = !std::is_same_v<Columns, int>, plain = LANES<Number> == 1;
  int i = 0;
  if constexpr (!known)
    for (; i + 4 <= rows; i += 4) {  // four rows share what is read of B
      const int end = lower ? i + 4 : int(columns);
      int j = 0;
      if constexpr (plain)
        for (; j < end && j + 8 <= columns; j += 8)
          multiply_some<sign, Four, 4, 2>(i, j, inner, columns, A, B, C, out);
      if constexpr (plain)
        for (; j < end && j + 4 <= columns; j += 4)
          multiply_some<sign, Four, 4, 1>(i, j, inner, columns, A, B, C, out);
      else
        for (; j < end && j + 2 <= columns; j += 2)
          multiply_some<sign, Number, 4, 2>(i, j, inner, columns, A, B, C, out);
      for (; j < end; ++j) multiply_some<sign, Number, 4, 1>(i, j, inner, columns, A, B, C, out);
    }
  for (; i < rows; ++i) {
    const int end = lower ? i + 1 : int(columns);
    int j = 0;
    if constexpr (plain) {
      if constexpr (!known)
        for (; j + 16 < end && j + 32 <= columns; j += 32)
          multiply_some<sign, Four, 1, 8>(i, j, inner, columns, A, B, C, out);
      if constexpr (!known)
        for (; j + 4 < end && j + 8 <= columns; j += 8)
          multiply_some<sign, Four, 1, 2>(i, j, inner, columns, A, B, C, out);
      for (; j < end && j + 4 <= columns; j += 4)
        multiply_some<sign, Four, 1, 1>(i, j, inner, columns, A, B, C, out);
    } else if constexpr (!known) {
      for (; j + 4 < end && j + 8 <= columns; j += 8)
        multiply_some<sign, Number, 1, 8>(i, j, inner, columns, A, B, C, out);
      for (; j + 2 < end && j + 4 <= columns; j += 4)
        multiply_some<sign, Number, 1, 4>(i, j, inner, columns, A, B, C, out);
    }
    for (; j < end; ++j) multiply_some<sign, Number, 1, 1>(i, j, inner, columns, A, B, C, out);
  }
}
template <class Number> constexpr const Number* NOTHING = nullptr;

// Writes the transpose of a move's W to its place.
template <class Number, class N> INLINE void turn(N n, Number* move) {
  for (int i = 0; i < n; ++i)
    for (int k = 0; k < n; ++k) move[2 * n * n + n + k * n + i] = move[i * n + k];
}

// Writes the law at `source`, moved, to `target`; `scratch` (n·n) is left with W P.
template <class Number, class Source, class N>
INLINE void predict(N n, const Number* move, const Source* source, Number* __restrict target,
                    Number* __restrict scratch) {
  const Number *W = move, *c = move + n * n, *Q = c + n, *turned = Q + n * n;
  multiply<1>(Fixed<1>{}, n, n, view(source, 0), turned, c, target);
  multiply<1>(n, n, n, view(W, n), source + n, NOTHING<Number>, scratch);
  multiply<1, true>(n, n, n, view(scratch, n), turned, Q, target + n);
  mirror(n, target + n);
}

// Factors S = L D L' in place (L below the diagonal, 1/D on it) and returns log |S|.
//
// The m numbers at `size` say how large the terms are that rows of S are sums of; a pivot of at most `cutoff`
// times its own is rounding, and `otherwise` takes its place: NaN where S must be positive definite, infinity
// where `solve` is to leave its direction out, as a generalised inverse does.
template <class Number, class M>
INLINE Number factor(M m, Number* S, const Number* size, double cutoff, double otherwise) {
  Number log_determinant = 0.0, product = 1.0;
  constexpr bool known = !std::is_same_v<M, int>, plain = LANES<Number> == 1;
  if constexpr (!known) mirror(m, S);
  for (int a = 0; a < m; ++a) {
    Number* const row = S + a * m;
    if constexpr (known) {
      for (int b = 0; b < a; ++b) {
        Number s = row[b];
        for (int k = 0; k < b; ++k) s = s - row[k] * S[b * m + k];
        row[b] = s;
      }
      for (int k = 0; k < a; ++k) {
        const Number scaled = row[k] * S[k * m + k];
        row[a] = row[a] - row[k] * scaled;
        row[k] = scaled;
      }
    } else {  // D L' above the diagonal: its row a is a product with the rows before it
      const auto some = [&](auto blocks, auto stretch, int j) {
        multiply_some<-1, decltype(stretch), 1, blocks>(0, j, a, m, view<Number>(row, 0), S, row, row);
      };
      int j = a;
      if constexpr (plain) {
        for (; j + 16 <= m; j += 16) some(Fixed<4>{}, Four{}, j);
        for (; j + 4 <= m; j += 4) some(Fixed<1>{}, Four{}, j);
      } else {
        for (; j + 4 <= m; j += 4) some(Fixed<4>{}, Number{}, j);
      }
      for (; j < m; ++j) some(Fixed<1>{}, Number{}, j);
    }
    const Number s = between(row[a], size[a] * cutoff, otherwise);
    row[a] = Number(1.0) / s;
    if constexpr (!known)
      for (int b = a + 1; b < m; ++b) S[b * m + a] = row[b] * row[a];
    product = product * s;
    if (a + 1 < m && !inside(product, 1e-150, 1e150)) {  // one logarithm for many pivots
      log_determinant = log_determinant + logarithm(product);
      product = 1.0;
    }
  }
  return log_determinant + logarithm(product);
}

// Overwrites the matrix X (m, columns) with S⁻¹ X, S as `factor` left it. Where sizes are not known to the
// compiler, each row is a product of matrices.
template <class Number, class M, class Columns>
INLINE void solve(M m, Columns columns, const Number* S, Number* X) {
  if constexpr (std::is_same_v<Columns, int>) {
    for (int a = 1; a < m; ++a) {
      Number* const row = X + a * columns;
      multiply<-1>(Fixed<1>{}, a, columns, view(S + a * m, 0), X, static_cast<const Number*>(row), row);
    }
    for (int a = m - 1; a >= 0; --a) {
      Number* const row = X + a * columns;
      for (int i = 0; i < columns; ++i) row[i] = row[i] * S[a * m + a];
      multiply<-1>(Fixed<1>{}, m - 1 - a, columns, view(S + (a + 1) * m + a, 0, m), row + columns,
                   static_cast<const Number*>(row), row);
    }
    return;
  }
  for (int a = 1; a < m; ++a)
    for (int b = 0; b < a; ++b)
      for (int i = 0; i < columns; ++i)
        X[a * columns + i] = X[a * columns + i] - S[a * m + b] * X[b * columns + i];
  for (int a = m - 1; a >= 0; --a)
    for (int i = 0; i < columns; ++i) {
      Number s = X[a * columns + i] * S[a * m + a];
      for (int b = a + 1; b < m; ++b) s = s - S[b * m + a] * X[b * columns + i];
      X[a * columns + i] = s;
    }
}

// Writes (I − K H) P (I − K H)' + K R K' from K' and H P; `scratch` holds n·m + n·n numbers.
//
// With B = P (I − K H)' = P − (H P)' K' it is B − K (H B − R K').
template <class Number, class N, class M>
INLINE void joseph(N n, M m, const Number* H, const Number* R, const Number* K, const Number* HP,
                   const Number* P, Number* __restrict target, Number* __restrict scratch) {
  Number *G = scratch, *B = scratch + n * m;
  multiply<-1>(n, m, n, view(HP, 1, n), K, P, B);
  multiply<1>(m, n, n, view(H, n), B, NOTHING<Number>, G);
  multiply<-1>(m, m, n, view(R, m), K, G, G);
  multiply<-1, true>(n, m, n, view(K, 1, n), G, B, target);
  mirror(n, target);
}

// Conditions the law at `source` on the m numbers at `y`; returns their log-density (NaN: S is singular).
//
// `scratch` (`update_room`) is left with the factor of S (m·m), K' and H P (m·n each), e and S⁻¹ e (m each).
template <class Number, class N, class M>
INLINE Number update(N n, M m, const double* y, const Number* sensor, const Number* source,
                     Number* __restrict target, Number* __restrict scratch) {
  const Number *H = sensor, *d = H + m * n, *R = d + m, *P = source + n;
  Number *S = scratch, *K = S + m * m, *HP = K + n * m, *e = HP + n * m, *v = e + m;
  multiply<1>(m, n, n, view(H, n), P, NOTHING<Number>, HP);
  for (int a = 0; a < m; ++a) {
    for (int b = 0; b <= a; ++b) {
      Number s = R[a * m + b];
      for (int k = 0; k < n; ++k) s = s + H[a * n + k] * HP[b * n + k];
      S[a * m + b] = s;
    }
    Number size = R[a * m + a], gap = Number(y[a]) - d[a];
    for (int k = 0; k < n; ++k) {
      const Number h = H[a * n + k];
      size = size + h * h * P[k * n + k];
      gap = gap - h * source[k];
    }
    e[a] = gap;
    v[a] = size;
  }
  Number total = factor(m, S, v, ROUNDING * (n + m), NOT_A_NUMBER) + Number(m * LOG_TWO_PI);
  copy(m * n, HP, K);
  solve(m, n, S, K);
  copy(m, e, v);
  solve(m, Fixed<1>{}, S, v);
  for (int a = 0; a < m; ++a) total = total + e[a] * v[a];
  multiply<1>(Fixed<1>{}, m, n, view(e, 0), K, source, target);
  joseph(n, m, H, R, K, HP, P, target + n, v + m);
  return total * Number(-0.5);
}

// Writes the law with mean and covariance of a mixture of the laws at first, first + step, …; weights are
// `weight_step` apart.
template <class Number, class Source, class N>
INLINE void collapse(N n, int parts, const Number* weight, int weight_step, const Source* first, int step,
                     Number* __restrict target) {
  for (int i = 0; i < n; ++i) {
    Number s = 0.0;
    for (int k = 0; k < parts; ++k) s = s + weight[k * weight_step] * Number(first[k * step + i]);
    target[i] = s;
  }
  Number* P = target + n;
  for (int i = 0; i < n; ++i) {
    int j = 0;
    if constexpr (LANES<Number> == 1)
      for (; j <= i && j + 4 <= n; j += 4) {
        Four sum = 0.0;
        const Four mean = Four::load(target + j);
        for (int k = 0; k < parts; ++k) {
          const double *part = first + k * step, share = weight[k * weight_step];
          const Four gap = share * (part[i] - target[i]);
          sum = sum + Four(share) * Four::load(part + n + i * n + j) + gap * (Four::load(part + j) - mean);
        }
        sum.store(P + i * n + j);
      }
    for (; j <= i; ++j) {
      Number s = 0.0;
      for (int k = 0; k < parts; ++k) {
        const Source* part = first + k * step;
        const Number share = weight[k * weight_step], gap = share * (Number(part[i]) - target[i]);
        s = s + share * Number(part[n + i * n + j]) + gap * (Number(part[j]) - target[j]);
      }
      P[i * n + j] = s;
    }
  }
  mirror(n, P);
}

// log Σ exp of `length` plain numbers `step` apart, −inf for a sum of nothing.
inline double log_sum(int length, const double* x, int step = 1) {
  double top = -INFINITE, sum = 0.0;
  for (int i = 0; i < length; ++i) top = larger(top, x[i * step]);
  if (top == -INFINITE) return top;
  for (int i = 0; i < length; ++i) sum += std::exp(x[i * step] - top);
  return top + std::log(sum);
}
