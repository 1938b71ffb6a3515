// Vectors as wide as a register of the target, written with the compiler's vector types; their exp and tanh.
//
// exp(d) for d <= 0, by range reduction and a polynomial:
//
//     d = n log 2 + r,  |r| <= (log 2)/2,      e^d = 2^n (1 + r + r² P(r)),
//
// where log 2 is split into a part with few bits, n times which is exact, and the rest (Cody and Waite), and 2^n is
// made by writing n into the exponent bits. Below the smallest normal number the result is 0, not a denormal
// (n = −127 leaves exponent bits of 0): a score that far below the maximum has weight 0, and so has a masked
// score of −inf.
//
// tanh(x), for the softcap c tanh(z/c):
//
//     |x| < 0.625:  x + x³ P(x²) (float32), the rational form of Cephes (float64): small x keep their digits
//     otherwise:    (1 − e)/(1 + e), e = e^{−2|x|}, with the sign of x
//
// Its slope is 1 − tanh² for small x, 4e/(1 + e)² otherwise; neither subtracts numbers that are nearly equal.
//
// The compiler may fuse a product and a sum into one multiply-add and rearranges nothing else, so targets with
// equally wide vectors do the same arithmetic in the same order.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>
#include <utility>

#define INLINE inline __attribute__((always_inline))
#define ONCE __attribute__((noinline))  // large, and called from several places

template <class T> struct Wide {
  static constexpr bool single = sizeof(T) == 4;
  static constexpr int lanes = EXPTILT_BITS / 8 / sizeof(T);
  using Whole = std::conditional_t<single, int32_t, int64_t>;
  typedef T V __attribute__((vector_size(EXPTILT_BITS / 8)));
  typedef T Loose __attribute__((vector_size(EXPTILT_BITS / 8), aligned(sizeof(T)), may_alias));
  typedef Whole Bits __attribute__((vector_size(EXPTILT_BITS / 8)));

  static INLINE V load(const T* p) { return *reinterpret_cast<const Loose*>(p); }
  static INLINE void store(T* p, V x) { *reinterpret_cast<Loose*>(p) = x; }
  static INLINE V all(T x) { return x - V{}; }
  // The larger of x and low; NaN in x stays NaN.
  static INLINE V at_least(V x, V low) { return low > x ? low : x; }

  static INLINE T sum(V x) {
    return folded<lanes>(x, [](auto a, auto b) { return a + b; });
  }
  static INLINE T largest(V x) {
    return folded<lanes>(x, [](auto a, auto b) { return a > b ? a : b; });
  }
  // Joins the lower and the upper half of x, then the halves of the result, until one number is left.
  template <int n, class Some, class Join> static INLINE T folded(Some x, Join join) {
    if constexpr (n == 1) {
      return x[0];
    } else {
      typedef T Half __attribute__((vector_size(n / 2 * sizeof(T))));
      Half parts[2];
      std::memcpy(parts, &x, sizeof x);
      return folded<n / 2>(Half(join(parts[0], parts[1])), join);
    }
  }
  // x in its lanes first … last − 1, −inf in the others.
  static INLINE V between(V x, int64_t first, int64_t last) {
    V place;
    for (int i = 0; i < lanes; ++i) place[i] = T(i);
    return (place >= T(first)) & (place < T(last)) ? x : all(-std::numeric_limits<T>::infinity());
  }
  // Whether any lane of a comparison holds.
  static INLINE bool any(Bits x) {
    uint64_t part[sizeof x / 8], found = 0;
    std::memcpy(part, &x, sizeof x);
    for (uint64_t bits : part) found |= bits;
    return found != 0;
  }
  static INLINE V root(V x) {
    for (int i = 0; i < lanes; ++i) x[i] = std::sqrt(x[i]);
    return x;
  }
  // Horner's rule, highest power first.
  template <class... C> static INLINE V polynomial(V x, double first, C... rest) {
    V p = all(T(first));
    ((p = p * x + all(T(rest))), ...);
    return p;
  }

  // d, but at least the largest number whose e^d is 0 here; NaN stays NaN.
  static INLINE V no_lower(V d) { return at_least(d, all(T(-(single ? 127 : 1023) * 0.6931471805599453))); }
  static INLINE V exp(V d) { return exp_of_limited(no_lower(d)); }
  static INLINE V exp_of_limited(V y) {
    constexpr int mantissa = single ? 23 : 52, offset = single ? 127 : 1023;
    const V shift = all(single ? T(1.5 * 8388608.0) : T(1.5 * 4503599627370496.0));  // adding it rounds to whole
    const V t = y * all(T(1.4426950408889634)) + shift, n = t - shift;
    V r = n * all(T(single ? -0.693359375 : -6.93145751953125e-1)) + y;
    r = n * all(T(single ? 2.12194440e-4 : -1.42860682030941723212e-6)) + r;
    V p;
    if constexpr (single)  // minimax polynomial on |r| <= (log 2)/2 (Cephes)
      p = polynomial(r, 1.9875691500e-4, 1.3981999507e-3, 8.3334519073e-3, 4.1665795894e-2, 1.6666665459e-1,
                     5.0000001201e-1, 1.0, 1.0);
    else  // Taylor's series to r^13: the rest is below 1e-17
      p = polynomial(r, 1 / 6227020800., 1 / 479001600., 1 / 39916800., 1 / 3628800., 1 / 362880., 1 / 40320.,
                     1 / 5040., 1 / 720., 1 / 120., 1 / 24., 1 / 6., 0.5, 1.0, 1.0);
    Bits bits;
    std::memcpy(&bits, &t, sizeof t);
    bits = (bits + Whole(offset)) << mantissa;
    V power;
    std::memcpy(&power, &bits, sizeof bits);
    return p * power;
  }

  static INLINE V tanh(V x, V& slope) {
    const V size = x > 0 ? x : -x, z = x * x;
    V small;
    if constexpr (single)
      small = polynomial(z, -5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1,
                         -3.33332819422e-1) * z * x + x;
    else
      small = x * z * (polynomial(z, -9.64399179425052238628e-1, -9.92877231001918586564e1,
                                  -1.61468768441708447952e3) /
                       polynomial(z, 1.0, 1.12811678491632931402e2, 2.23548839060100448583e3,
                                  4.84406305325125486048e3)) + x;
    const V e = exp(size * T(-2)), large = (T(1) - e) / (e + T(1));
    const auto is_small = size < T(0.625);
    slope = is_small ? T(1) - small * small : e * T(4) / ((e + T(1)) * (e + T(1)));
    return is_small ? small : x > 0 ? large : -large;
  }
};

// Calls body(j, k) for the vectors j = 0 … count − 1 of a row, with k = 0 and 1 in turn. A body that adds to sum k
// of two sums has two chains of additions, which hide each other's latency.
template <class Body> INLINE void by_twos(int64_t count, Body body) {
  int64_t j = 0;
  for (; j + 2 <= count; j += 2) {
    body(j, std::integral_constant<int, 0>{});
    body(j + 1, std::integral_constant<int, 1>{});
  }
  if (j < count) body(j, std::integral_constant<int, 0>{});
}

template <class T> INLINE void fill(T* row, int64_t vectors, T value) {
  for (int64_t j = 0; j < vectors; ++j) Wide<T>::store(row + j * Wide<T>::lanes, Wide<T>::all(value));
}
template <class T> INLINE void scale_row(T* row, int64_t vectors, T factor) {
  using W = Wide<T>;
  for (int64_t j = 0; j < vectors; ++j) W::store(row + j * W::lanes, W::load(row + j * W::lanes) * factor);
}
template <class T> INLINE void times_row(T* row, const T* by, int64_t vectors) {
  using W = Wide<T>;
  for (int64_t j = 0; j < vectors * W::lanes; j += W::lanes) W::store(row + j, W::load(row + j) * W::load(by + j));
}
template <class T> INLINE void add_row(T* row, const T* more, int64_t vectors) {
  using W = Wide<T>;
  for (int64_t j = 0; j < vectors * W::lanes; j += W::lanes) W::store(row + j, W::load(row + j) + W::load(more + j));
}
// The largest number of a row of whole vectors; NaN counts as smaller than all others.
template <class T> INLINE T largest_of(const T* row, int64_t vectors) {
  using W = Wide<T>;
  typename W::V top[2] = {W::all(-std::numeric_limits<T>::infinity()), W::all(-std::numeric_limits<T>::infinity())};
  by_twos(vectors, [&](int64_t j, auto k) {
    const auto x = W::load(row + j * W::lanes);
    top[k] = x > top[k] ? x : top[k];
  });
  return W::largest(top[0] > top[1] ? top[0] : top[1]);
}
// Place of the first number of a row that equals x; 0 if there is none.
template <class T> INLINE int64_t find(const T* row, int64_t vectors, T x) {
  using W = Wide<T>;
  constexpr int64_t few = 4 * W::lanes;
  const auto wanted = W::all(x);
  const int64_t count = vectors * W::lanes;
  int64_t j = 0;
  for (; j + few <= count; j += few) {  // skips four vectors at a time until one of them holds x
    const auto same = (W::load(row + j) == wanted) | (W::load(row + j + W::lanes) == wanted) |
                      (W::load(row + j + 2 * W::lanes) == wanted) | (W::load(row + j + 3 * W::lanes) == wanted);
    int64_t words[EXPTILT_BITS / 64], any = 0;
    std::memcpy(words, &same, sizeof same);
    for (int64_t word : words) any |= word;
    if (any) break;
  }
  for (; j < count; ++j)
    if (row[j] == x) return j;
  return 0;
}
