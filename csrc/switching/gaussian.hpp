// Gaussian laws: the arithmetic of a Kalman step.
//
// Every filter of linear modes is made of three moves on Gaussians with mean x and covariance P:
//
//     predict    x ← W x + c,       P ← W P W' + Q
//     update     x ← x + K e,       P ← (I − K H) P (I − K H)' + K R K'        (Joseph's form)
//                e = y − H x − d,   S = H P H' + R,   K = P H' S⁻¹,   log p(y) = −½ (log |2πS| + e' S⁻¹ e)
//     collapse   x ← Σ w_i x_i,     P ← Σ w_i (P_i + δ_i δ_i'),   δ_i = x_i − x      (the M-projection)
//
// Matrices are stored row by row, and these are stored one after the other:
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
// Filters, smoother, adjoint and particles are all built on this file and on series.hpp.
#pragma once
#include "switching/lanes.hpp"
#include "vectors.hpp"

constexpr double LOG_TWO_PI = 1.8378770664093453;
constexpr double ROUNDING = 4 * 2.220446049250313e-16;  // relative error of a sum, for each of its terms

// A size that is known to the compiler.
template <int size> struct Fixed {
  constexpr operator int() const { return size; }
};

INLINE int law_size(int n) { return n + n * n; }
INLINE int move_size(int n) { return 3 * n * n + n; }
INLINE int sensor_size(int n, int m) { return m * n + m + m * m; }
// Numbers of scratch that `update` needs for n states; enough for `predict` and `joseph` too.
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
  int i = 0;
  if constexpr (LANES<Number> == 1 && std::is_same_v<N, int>)
    for (; i + 4 <= n; i += 4)
      for (int j = 0; j <= i; j += 4) {
        Four block[4];
        for (int r = 0; r < 4; ++r) block[r] = Four::load(P + (i + r) * n + j);
        if (j == i)
          for (int r = 0; r < 4; ++r)
            for (int k = r + 1; k < 4; ++k) lanes(block + r)[k] = lanes(block + k)[r];
        else
          transpose(block);
        for (int r = 0; r < 4; ++r) block[r].store(P + (j + r) * n + i);
      }
  for (; i < n; ++i)
    for (int j = 0; j < i; ++j) P[j * n + i] = P[i * n + j];
}

// Writes `blocks` numbers of each of `rows` rows of C ± A B, from row i and column j on.
template <int sign, int rows, int blocks, class Number, class Inner, class Left, class Right, class Start>
INLINE void multiply_some(int i, int j, Inner inner, int columns, View<Left> A, const Right* B,
                          const Start* C, Number* out) {
  Number sum[rows][blocks];
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < blocks; ++c) sum[r][c] = C ? Number(C[(i + r) * columns + j + c]) : Number(0.0);
  for (int k = 0; k < inner; ++k)
    for (int r = 0; r < rows; ++r) {
      const Number a = Number(A.at[(i + r) * A.row + k * A.column]);
      for (int c = 0; c < blocks; ++c) {
        const Number b = Number(B[k * columns + j + c]);
        sum[r][c] = sign > 0 ? sum[r][c] + a * b : sum[r][c] - a * b;
      }
    }
  for (int r = 0; r < rows; ++r)
    for (int c = 0; c < blocks; ++c) out[(i + r) * columns + j + c] = sum[r][c];
}

// Writes columns `begin` to `end` − 1 of the first `rows` rows of C ± A B, all plain numbers, a few registers
// wide at a time. Up to a register of numbers beyond `end` is read and written back as it was; Room has space for
// it. With `solves`, each row a then loses corner(a, b) times row b for all rows b before it (with `upwards`, after
// it), as in elimination.
template <int sign, int rows, bool solves = false, bool upwards = false>
ONCE void panel(int begin, int end, int inner, int columns, View<double> A, const double* B, const double* C,
                double* out, View<double> corner = {}) {
  using Vectors = Wide<double>;
  using Vector = Vectors::V;
  constexpr int width = Vectors::lanes;
  const auto some = [&](auto blocks, int j) {
    Vector sum[rows][blocks];
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < blocks; ++c) sum[r][c] = C ? Vectors::load(C + r * columns + j + width * c) : Vector{};
    for (int k = 0; k < inner; ++k) {
      Vector b[blocks];
      for (int c = 0; c < blocks; ++c) b[c] = Vectors::load(B + k * columns + j + width * c);
      for (int r = 0; r < rows; ++r) {
        const Vector a = Vectors::all(A.at[r * A.row + k * A.column]);
        for (int c = 0; c < blocks; ++c) sum[r][c] = sign > 0 ? sum[r][c] + a * b[c] : sum[r][c] - a * b[c];
      }
    }
    if constexpr (solves)
      for (int i = 1; i < rows; ++i)
        for (int k = 0; k < i; ++k) {
          const int r = upwards ? rows - 1 - i : i, from = upwards ? rows - 1 - k : k;
          const Vector a = Vectors::all(corner.at[r * corner.row + from * corner.column]);
          for (int c = 0; c < blocks; ++c) sum[r][c] = sum[r][c] - a * sum[from][c];
        }
    Vectors::Bits place;
    for (int i = 0; i < width; ++i) place[i] = i + j + width * (blocks - 1);
    for (int r = 0; r < rows; ++r)
      for (int c = 0; c < blocks; ++c) {
        double* const to = out + r * columns + j + width * c;
        const bool whole = c < blocks - 1 || j + width * blocks <= end;
        Vectors::store(to, whole ? sum[r][c] : place < end - Vectors::Bits{} ? sum[r][c] : Vectors::load(to));
      }
  };
  // An addition waits for the one before it in its sum: eight or more sums at once keep the processor busy.
  constexpr int wide = rows == 4 ? 3 : 6;
  int j = begin;
  const auto left = [&] { return (end - j + width - 1) / width; };
  for (; left() >= wide && left() != 4; j += width * wide) some(Fixed<wide>{}, j);
  if constexpr (wide > 3)
    for (; left() >= 3 && left() != 4; j += 3 * width) some(Fixed<3>{}, j);
  for (; left() >= 2; j += 2 * width) some(Fixed<2>{}, j);
  if (j < end) some(Fixed<1>{}, j);
}

// Writes C ± A B, or ± A B where C is null; C may be the result. B, C and the result lie row by row; with
// `lower`, only the lower triangle is needed. Where sizes are not known to the compiler, several rows and
// columns are worked on at once.
template <int sign, bool lower = false, class Number, class Rows, class Inner, class Columns, class Left,
          class Right, class Start>
INLINE void multiply(Rows rows, Inner inner, Columns columns, View<Left> A, const Right* B, const Start* C,
                     Number* out) {
  constexpr bool known = !std::is_same_v<Columns, int>;
  int i = 0;
  if constexpr (!known && LANES<Number> == 1) {
    const auto some = [&](auto count) {
      for (; i + count <= rows; i += count) {
        const int end = lower && i + count < columns ? i + count : int(columns);
        panel<sign, count>(0, end, inner, columns, view<double>(A.at + i * A.row, A.row, A.column), B,
                           C ? C + i * columns : C, out + i * columns);
      }
    };
    some(Fixed<4>{});
    some(Fixed<1>{});
    return;
  }
  if constexpr (!known)
    for (; i + 4 <= rows; i += 4) {  // four rows share each number read from B
      const int end = lower ? i + 4 : int(columns);
      int j = 0;
      for (; j < end && j + 2 <= columns; j += 2) multiply_some<sign, 4, 2>(i, j, inner, columns, A, B, C, out);
      for (; j < end; ++j) multiply_some<sign, 4, 1>(i, j, inner, columns, A, B, C, out);
    }
  for (; i < rows; ++i) {
    const int end = lower ? i + 1 : int(columns);
    int j = 0;
    if constexpr (!known) {
      for (; j + 4 < end && j + 8 <= columns; j += 8)
        multiply_some<sign, 1, 8>(i, j, inner, columns, A, B, C, out);
      for (; j + 2 < end && j + 4 <= columns; j += 4)
        multiply_some<sign, 1, 4>(i, j, inner, columns, A, B, C, out);
    }
    for (; j < end; ++j) multiply_some<sign, 1, 1>(i, j, inner, columns, A, B, C, out);
  }
}
template <class Number> constexpr const Number* NOTHING = nullptr;

// Writes the transpose of a move's W to its place.
template <class Number, class N> INLINE void turn(N n, Number* move) {
  for (int i = 0; i < n; ++i)
    for (int k = 0; k < n; ++k) move[2 * n * n + n + k * n + i] = move[i * n + k];
}

// Writes the law at `source`, moved, to `target`; `scratch` (n·n) is left with W P. Unless `whole`, only the lower
// triangle of the covariance is written.
template <bool whole = true, class Number, class Source, class N>
INLINE void predict(N n, const Number* move, const Source* source, Number* __restrict target,
                    Number* __restrict scratch) {
  const Number *W = move, *c = move + n * n, *Q = c + n, *turned = Q + n * n;
  multiply<1>(Fixed<1>{}, n, n, view(source, 0), turned, c, target);
  multiply<1>(n, n, n, view(W, n), source + n, NOTHING<Number>, scratch);
  multiply<1, true>(n, n, n, view(scratch, n), turned, Q, target + n);
  if (whole) mirror(n, target + n);
}

// Factors S = L D L' in place (L below the diagonal, 1/D on it) and returns log |S|.
//
// size[a] is the size of the terms that row a of S is a sum of. A pivot of at most cutoff · size[a] is rounding and
// is replaced by `otherwise`: NaN if S must be positive definite, infinity if `solve` is to leave its direction out,
// as a generalised inverse does.
template <class Number, class M>
INLINE Number factor(M m, Number* S, const Number* size, double cutoff, double otherwise) {
  Number log_determinant = 0.0, product = 1.0;
  constexpr bool known = !std::is_same_v<M, int>, plain = LANES<Number> == 1;
  const auto pivot = [&](int a, Number& place) {
    const Number s = between(place, size[a] * cutoff, otherwise);
    place = Number(1.0) / s;
    product = product * s;
    if (a + 1 < m && !inside(product, 1e-150, 1e150)) {  // one logarithm for many pivots
      log_determinant = log_determinant + logarithm(product);
      product = 1.0;
    }
  };
  if constexpr (known) {
    for (int a = 0; a < m; ++a) {
      Number* const row = S + a * m;
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
      pivot(a, row[a]);
    }
    return log_determinant + logarithm(product);
  }
  // Writes D L' above the diagonal, one block of rows after another, each by a product with the rows before it.
  mirror(m, S);
  const auto take = [&](int first, auto rows) {
    Number* const block = S + first * m;
    const int rest = first + rows;
    if constexpr (plain) {
      const View<double> left = view<double>(block, m);
      panel<-1, rows>(first, rest, first, m, left, S, block, block);
      double corner[rows][rows];
      for (int a = 0; a < rows; ++a)
        for (int b = a; b < rows; ++b) corner[a][b] = block[a * m + first + b];
      for (int a = 0; a < rows; ++a) {
        pivot(first + a, corner[a][a]);
        for (int b = a + 1; b < rows; ++b) {
          corner[b][a] = corner[a][b] * corner[a][a];
          for (int c = b; c < rows; ++c) corner[b][c] -= corner[b][a] * corner[a][c];
        }
      }
      for (int a = 0; a < rows; ++a) copy(rows, corner[a], block + a * m + first);
      panel<-1, rows, true>(rest, m, first, m, left, S, block, block, view<double>(&corner[0][0], rows));
    } else {
      int j = first;
      for (; j + 4 <= m; j += 4)
        multiply_some<-1, 1, 4>(0, j, first, m, view<Number>(block, 0), S, block, block);
      for (; j < m; ++j) multiply_some<-1, 1, 1>(0, j, first, m, view<Number>(block, 0), S, block, block);
      pivot(first, block[first]);
    }
    int b = rest;
    if constexpr (rows == 4)
      for (; b + 4 <= m; b += 4) {
        Four part[4];
        for (int a = 0; a < 4; ++a) part[a] = Four::load(block + a * m + b) * Four(block[a * m + first + a]);
        transpose(part);
        for (int a = 0; a < 4; ++a) part[a].store(S + (b + a) * m + first);
      }
    for (; b < m; ++b)
      for (int a = 0; a < rows; ++a) S[b * m + first + a] = block[a * m + b] * block[a * m + first + a];
  };
  int first = 0;
  for (; plain && first + 4 <= m; first += 4) take(first, Fixed<plain ? 4 : 1>{});
  for (; first < m; ++first) take(first, Fixed<1>{});
  return log_determinant + logarithm(product);
}

// Overwrites the matrix X (m, columns) with L⁻¹ X, S as `factor` left it.
template <class Number, class M, class Columns>
INLINE void solve_lower(M m, Columns columns, const Number* S, Number* X) {
  constexpr int most = !std::is_same_v<Columns, int> ? 1 : 4;
  for (int first = 0, rows; first < m; first += rows) {
    rows = first + most <= m ? most : 1;
    Number* const block = X + first * columns;
    if constexpr (most > 1 && LANES<Number> == 1)
      if (rows == most) {
        panel<-1, most, true>(0, columns, first, columns, view<double>(S + first * m, m), X, block, block,
                              view<double>(S + first * m + first, m));
        continue;
      }
    const auto take = [&](auto count) {
      multiply<-1>(count, first, columns, view(S + first * m, m), X, static_cast<const Number*>(block), block);
    };
    rows == most ? take(Fixed<most>{}) : take(Fixed<1>{});
    for (int a = 1; a < rows; ++a) {
      Number* const row = block + a * columns;
      multiply<-1>(Fixed<1>{}, a, columns, view(S + (first + a) * m + first, 0), block,
                   static_cast<const Number*>(row), row);
    }
  }
}
// The same with L'⁻¹ X.
template <class Number, class M, class Columns>
INLINE void solve_upper(M m, Columns columns, const Number* S, Number* X) {
  constexpr int most = !std::is_same_v<Columns, int> ? 1 : 4;
  for (int end = m, rows; end > 0; end -= rows) {
    rows = end >= most ? most : 1;
    const int first = end - rows;
    Number* const block = X + first * columns;
    if constexpr (most > 1 && LANES<Number> == 1)
      if (rows == most) {
        panel<-1, most, true, true>(0, columns, m - end, columns, view<double>(S + end * m + first, 1, m),
                                    X + end * columns, block, block, view<double>(S + first * m + first, 1, m));
        continue;
      }
    const auto take = [&](auto count) {
      multiply<-1>(count, m - end, columns, view(S + end * m + first, 1, m), X + end * columns,
                   static_cast<const Number*>(block), block);
    };
    rows == most ? take(Fixed<most>{}) : take(Fixed<1>{});
    for (int a = rows - 2; a >= 0; --a) {
      Number* const row = block + a * columns;
      multiply<-1>(Fixed<1>{}, rows - 1 - a, columns, view(S + (first + a + 1) * m + first + a, 0, m),
                   row + columns, static_cast<const Number*>(row), row);
    }
  }
}
// The same with D⁻¹ X.
template <class Number, class M, class Columns>
INLINE void scale_rows(M m, Columns columns, const Number* S, Number* X) {
  for (int a = 0; a < m; ++a)
    for (int i = 0; i < columns; ++i) X[a * columns + i] = X[a * columns + i] * S[a * m + a];
}
// The same with S⁻¹ X.
template <class Number, class M, class Columns>
INLINE void solve(M m, Columns columns, const Number* S, Number* X) {
  solve_lower(m, columns, S, X);
  scale_rows(m, columns, S, X);
  solve_upper(m, columns, S, X);
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
