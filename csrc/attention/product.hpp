// Matrix products for tiles, in registers.
//
// Every sweep is a chain of products C += A B of small matrices. B is first packed into panels of two vectors
// (pack.hpp), so that the innermost step reads one line of B and one number from each of a few rows of A:
//
//     sum[r] += A[r, l] B[l, panel]      for l = 0 … inner − 1,
//
// where the sums never leave the registers. Each number of C is one chain of multiply-adds in the order of l,
// however the rows are cut into blocks: the same product has the same bits in every sweep. Sums over keys,
// queries and dimensions are cut into chains of `CHAIN`, which keeps them as exact as a library's.
//
// A BLAS would do the same, but packs B anew at every call and runs threads of its own; here a packed tile of
// keys serves all queries of a head, and a sweep stays on its thread.
//
// With few queries, or few keys, packing would cost more than the product: `thin_dots` and `thin_sum` read keys
// and values where they are.
#pragma once
#include "attention/pack.hpp"

constexpr int64_t CHAIN = 128;

// C[r, 0..width) = (C if add) + alpha Σ_l A(r, l) B[l, 0..width), where A(r, l) = A[r a + l], or A[l a + r] if
// Turned.
template <class T, int R, bool Turned>
INLINE void block(T* C, int64_t c, const T* A, int64_t a, const T* B, int64_t inner, T alpha, bool add) {
  using W = Wide<T>;
  constexpr int64_t L = W::lanes;
  typename W::V s0[R], s1[R];
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) s0[r] = s1[r] = typename W::V{};
  for (int64_t l = 0; l < inner; ++l, B += 2 * L) {
    const auto b0 = W::load(B), b1 = W::load(B + L);
    if constexpr (EXPTILT_BITS == 512) __builtin_prefetch(B + 16 * L);
#pragma GCC unroll 16
    for (int r = 0; r < R; ++r) {
      const auto x = W::all(Turned ? A[l * a + r] : A[r * a + l]);
      s0[r] += x * b0;
      s1[r] += x * b1;
    }
  }
#pragma GCC unroll 16
  for (int r = 0; r < R; ++r) {
    T* to = C + r * c;
    const auto x = s0[r] * alpha, y = s1[r] * alpha;
    W::store(to, add ? W::load(to) + x : x);
    W::store(to + L, add ? W::load(to + L) + y : y);
  }
}

// C (+)= alpha A B in one chain; columns are rounded up to whole panels, for which each row of C has room.
template <class T, bool Turned>
ONCE void product(T* C, int64_t c, const T* A, int64_t a, const T* B, int64_t panel, int64_t rows,
                  int64_t columns, int64_t inner, T alpha, bool add) {
  constexpr int64_t width = 2 * Wide<T>::lanes;
  const int64_t across = Turned ? 1 : a;
  for (int64_t j = 0; j < columns; j += width, B += panel) {
    int64_t r = 0;
    auto go = [&](auto count) {
      block<T, count, Turned>(C + r * c + j, c, A + r * across, a, B, inner, alpha, add);
      r += count;
    };
    while (r + EXPTILT_ROWS <= rows) go(std::integral_constant<int, EXPTILT_ROWS>{});
    if (EXPTILT_ROWS > 6 && r + 6 <= rows) go(std::integral_constant<int, 6>{});
    if (r + 4 <= rows) go(std::integral_constant<int, 4>{});
    if (r + 2 <= rows) go(std::integral_constant<int, 2>{});
    if (r < rows) go(std::integral_constant<int, 1>{});
  }
}

// C (+)= alpha A B, in chains of `CHAIN`.
template <class T>
inline void long_product(T* C, int64_t c, const T* A, int64_t a, const T* B, int64_t panel, int64_t rows,
                         int64_t columns, int64_t inner, T alpha, bool add) {
  int64_t l = 0;
  do {  // runs for inner = 0 too: the sum is then 0, and must be written
    product<T, false>(C, c, A + l, a, B + l * 2 * Wide<T>::lanes, panel, rows, columns,
                      std::min(CHAIN, inner - l), alpha, add || l > 0);
    l += CHAIN;
  } while (l < inner);
}

// C (+)= alpha A sourceᵀ for an unpacked source (columns, inner); C has room for whole vectors.
template <class T>
ONCE void thin_dots(T* C, int64_t c, const T* A, int64_t a, int64_t rows, const T* source, int64_t step,
                    int64_t columns, int64_t inner, T alpha, bool add) {
  using W = Wide<T>;
  using V = typename W::V;
  constexpr int64_t L = W::lanes;
  const int64_t whole = inner / L * L;
  for (int64_t r = 0; r < rows; ++r)
    for (int64_t start = 0; start < columns; start += L) {
      const T *row = A + r * a, *place[L];
      const int64_t last = std::min(L, columns - start) - 1;
#pragma GCC unroll 16
      for (int64_t k = 0; k < L; ++k) place[k] = source + (start + std::min(k, last)) * step;
      V sums[L];
#pragma GCC unroll 16
      for (int k = 0; k < L; ++k) sums[k] = V{};
      for (int64_t l = 0; l < whole; l += L) {
        const V x = W::load(row + l);
#pragma GCC unroll 16
        for (int k = 0; k < L; ++k) sums[k] += x * W::load(place[k] + l);
      }
      Turn<T>::turn(sums);
#pragma GCC unroll 4
      for (int n = L / 2; n > 0; n /= 2)  // neighbours first
#pragma GCC unroll 8
        for (int k = 0; k < n; ++k) sums[k] = sums[2 * k] + sums[2 * k + 1];
      V found = sums[0];
      for (int64_t l = whole; l < inner; ++l) {
        V others{};
#pragma GCC unroll 16
        for (int k = 0; k < L; ++k) others[k] = place[k][l];
        found += W::all(row[l]) * others;
      }
      T* to = C + r * c + start;
      W::store(to, add ? W::load(to) + found * alpha : found * alpha);
    }
}

// target[0..N·lanes) += Σ_j weight[j] source[j], U rows at a time to hide the latency of a sum. A row of weight
// exactly 0 is left out, whatever it holds.
template <class T, int N, int U>
INLINE void sum_rows(T* target, const T* weight, const T* source, int64_t step, int64_t rows) {
  using W = Wide<T>;
  typename W::V sums[U][N] = {};
  auto add = [&](int64_t j, auto u) {
    if (weight[j] == 0) return;
    const auto w = W::all(weight[j]);
#pragma GCC unroll 8
    for (int h = 0; h < N; ++h) sums[u][h] += w * W::load(source + j * step + h * W::lanes);
  };
  int64_t j = 0;
  for (; j + U <= rows; j += U) {
    add(j, std::integral_constant<int, 0>{});
    if constexpr (U > 1) add(j + 1, std::integral_constant<int, 1>{});
    if constexpr (U > 2) add(j + 2, std::integral_constant<int, 2>{}), add(j + 3, std::integral_constant<int, 3>{});
  }
  for (; j < rows; ++j) add(j, std::integral_constant<int, 0>{});
#pragma GCC unroll 8
  for (int h = 0; h < N; ++h) {
    auto total = sums[0][h];
    for (int u = 1; u < U; ++u) total += sums[u][h];
    W::store(target + h * W::lanes, W::load(target + h * W::lanes) + total);
  }
}

// C += A source for an unpacked source (inner, columns), in chains of `CHAIN`.
template <class T>
ONCE void thin_sum(T* C, int64_t c, const T* A, int64_t a, int64_t rows, const T* source, int64_t step,
                   int64_t inner, int64_t columns) {
  constexpr int64_t L = Wide<T>::lanes;
  for (int64_t start = 0; start < inner; start += CHAIN) {
    const int64_t n = std::min(CHAIN, inner - start);
    const T* from = source + start * step;
    for (int64_t r = 0; r < rows; ++r) {
      T* to = C + r * c;
      const T* weight = A + r * a + start;
      int64_t d = 0;
      for (; d + 8 * L <= columns; d += 8 * L) sum_rows<T, 8, 1>(to + d, weight, from + d, step, n);
      for (; d + 4 * L <= columns; d += 4 * L) sum_rows<T, 4, 2>(to + d, weight, from + d, step, n);
      for (; d + L <= columns; d += L) sum_rows<T, 1, 4>(to + d, weight, from + d, step, n);
      for (; d < columns; ++d) {
        T total = 0;
        for (int64_t j = 0; j < n; ++j)
          if (weight[j] != 0) total += weight[j] * from[j * step + d];
        to[d] += total;
      }
    }
  }
}
