// Numbers in memory: widened from half precision, copied, and packed for products.
//
// The caller's matrices may be bfloat16 or float16 in a float32 problem: `copy_row` widens them, a tile at a
// time. The right-hand side of a product is packed into panels of two vectors: `pack_rows` packs a matrix as it
// is, `pack_columns` its transpose, transposed in registers.
#pragma once
#include "vectors.hpp"

enum Kind : int64_t { NATIVE = 0, BFLOAT16 = 1, FLOAT16 = 2 };

template <class T> struct Rows {  // rows of numbers in memory, `step` numbers from one to the next
  T* at;
  int64_t step;
  INLINE T* operator[](int64_t r) const { return at + r * step; }
  INLINE Rows from(int64_t r) const { return {at + r * step, step}; }
};

INLINE float bits_to_float(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}
// One 16-bit number as float32. float16: exponent and fraction are moved into place and rescaled, which is right
// for small numbers too; an exponent of 31 is infinity or NaN.
INLINE float widened(uint16_t half, Kind kind) {
  if (kind == BFLOAT16) return bits_to_float(uint32_t(half) << 16);
  const uint32_t size = uint32_t(half & 0x7FFF) << 13, sign = uint32_t(half & 0x8000) << 16;
  if (size >= 0x0F800000) return bits_to_float(size | 0x7F800000 | sign);
  float x = bits_to_float(size) * 0x1p112f;
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits_to_float(bits | sign);
}

template <class T> INLINE int64_t bytes_of(int64_t kind) { return kind == NATIVE ? int64_t(sizeof(T)) : 2; }

// target[0..columns) = source, widened.
template <class T> inline void copy_row(int64_t kind, T* target, const void* source, int64_t columns) {
  if (kind == NATIVE) {
    std::memcpy(target, source, columns * sizeof(T));
  } else if (kind == BFLOAT16) {  // the compiler vectorises these two loops
    const uint16_t* half = static_cast<const uint16_t*>(source);
    for (int64_t c = 0; c < columns; ++c) target[c] = T(bits_to_float(uint32_t(half[c]) << 16));
  } else {
    const uint16_t* half = static_cast<const uint16_t*>(source);
    for (int64_t c = 0; c < columns; ++c) {
      const uint32_t size = uint32_t(half[c] & 0x7FFF) << 13, sign = uint32_t(half[c] & 0x8000) << 16;
      const float scaled = bits_to_float(size) * 0x1p112f;
      uint32_t bits;
      std::memcpy(&bits, &scaled, sizeof bits);
      target[c] = T(bits_to_float((size >= 0x0F800000 ? size | 0x7F800000 : bits) | sign));
    }
  }
}

// Pack B = source (inner, columns) into panels that are two vectors wide and `panel` numbers apart; columns beyond
// the last are 0. Returns whether all numbers are finite.
template <class T>
ONCE bool pack_rows(T* target, int64_t panel, const T* source, int64_t step, int64_t inner, int64_t columns) {
  using W = Wide<T>;
  constexpr int64_t width = 2 * W::lanes;
  typename W::V odd[2] = {};  // stays 0 while all x are finite; else x − x is NaN
  for (int64_t start = 0; start < columns; start += width, target += panel) {
    const int64_t n = std::min(width, columns - start);
    for (int64_t i = 0; i < inner; ++i) {
      const T* from = source + i * step + start;
      T* to = target + i * width;
      T edge[width];
      if (n < width) {
        for (int64_t c = 0; c < width; ++c) edge[c] = c < n ? from[c] : T(0);
        from = edge;
      }
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const auto x = W::load(from + h * W::lanes);
        odd[h] += x - x;
        W::store(to + h * W::lanes, x);
      }
    }
  }
  return W::sum(odd[0] + odd[1]) == 0;
}

// Transposes as many vectors as there are lanes, by interleaving pairs of rows log2(lanes) times.
template <class T> struct Turn {
  using W = Wide<T>;
  using V = typename W::V;
  static constexpr int n = W::lanes;
  template <int... I> static INLINE V low(V a, V b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (I / 2 + (I % 2) * n)...);
  }
  template <int... I> static INLINE V high(V a, V b, std::integer_sequence<int, I...>) {
    return __builtin_shufflevector(a, b, (n / 2 + I / 2 + (I % 2) * n)...);
  }
  static INLINE void turn(V* rows) {
    using Order = std::make_integer_sequence<int, n>;
#pragma GCC unroll 4
    for (int span = n; span > 1; span /= 2) {
      V made[n];
#pragma GCC unroll 8
      for (int r = 0; r < n / 2; ++r) {
        made[2 * r] = low(rows[r], rows[r + n / 2], Order{});
        made[2 * r + 1] = high(rows[r], rows[r + n / 2], Order{});
      }
#pragma GCC unroll 16
      for (int r = 0; r < n; ++r) rows[r] = made[r];
    }
  }
};

// Pack B = sourceᵀ, source (columns, inner), panel after panel. Columns of B beyond the last repeat it, or are 0.
template <class T> ONCE void pack_columns(T* target, const T* source, int64_t step, int64_t columns, int64_t inner) {
  using W = Wide<T>;
  constexpr int64_t lanes = W::lanes, width = 2 * lanes;
  const int64_t whole = inner / lanes * lanes;
  for (int64_t start = 0; start < columns; start += lanes) {
    const int64_t last = std::min(lanes, columns - start) - 1;
    T* to = target + start / width * inner * width + start % width;
    const T* from = source + start * step;
    for (int64_t l = 0; l < whole; l += lanes) {
      typename W::V rows[lanes];
#pragma GCC unroll 16
      for (int64_t c = 0; c < lanes; ++c) rows[c] = W::load(from + std::min(c, last) * step + l);
      Turn<T>::turn(rows);
#pragma GCC unroll 16
      for (int64_t c = 0; c < lanes; ++c) W::store(to + (l + c) * width, rows[c]);
    }
    for (int64_t l = whole; l < inner; ++l)
      for (int64_t c = 0; c < lanes; ++c) to[l * width + c] = from[std::min(c, last) * step + l];
  }
  if (columns % width != 0 && columns % width <= lanes) {  // products read the second vector of the last panel too
    T* to = target + columns / width * inner * width + lanes;
    for (int64_t l = 0; l < inner; ++l) fill(to + l * width, 1, T(0));
  }
}
