// Numbers: one float64, or the same number of four modes side by side.
//
// A law of a mode is a run of numbers. Code that is written for `double` works on one law; the same code
// with `Four` works on the laws of four modes at once, each in its own lane. `Four` is one vector of 256 bits
// where the target has these, two of 128 bits elsewhere. It has + − · /, `exponential` and `logarithm` like a
// float64, is made from a plain number with the same value in all lanes, and its lanes can be read and written.
//
//     exp x = 2^k (1 + r + r²/2! + … + r¹³/13!),   x = k log 2 + r,   |r| ≤ (log 2)/2
//     log x = k log 2 + log(1 + f),   x = 2^k (1 + f),   √½ ≤ 1 + f < √2,   by the series of atanh(f/(2 + f))
//
// exp gives 0 below the smallest normal number; log gives −inf at 0 and NaN below it.
#pragma once
#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <memory>
#include <new>
#include <type_traits>
#include <vector>

#ifndef INLINE
#define INLINE inline __attribute__((always_inline))
#define ONCE __attribute__((noinline))  // large, and called from several places
#endif

constexpr double INFINITE = std::numeric_limits<double>::infinity();
constexpr double NOT_A_NUMBER = std::numeric_limits<double>::quiet_NaN();

struct Four {
#if EXPTILT_BITS >= 256
  static constexpr int parts = 1;
#else
  static constexpr int parts = 2;
#endif
  static constexpr int width = 4 / parts;
  typedef double Vector __attribute__((vector_size(8 * width)));
  typedef double Loose __attribute__((vector_size(8 * width), aligned(8), may_alias));
  typedef uint64_t Bits __attribute__((vector_size(8 * width)));

  Vector part[parts];

  Four() = default;
  INLINE Four(double x) {
    for (Vector& v : part) v = x - Vector{};
  }
  // Four consecutive numbers of memory.
  static INLINE Four load(const double* p) {
    Four x;
    for (int k = 0; k < parts; ++k) x.part[k] = *reinterpret_cast<const Loose*>(p + k * width);
    return x;
  }
  INLINE void store(double* p) const {
    for (int k = 0; k < parts; ++k) *reinterpret_cast<Loose*>(p + k * width) = part[k];
  }
  // Writes the first of the four, at most three.
  INLINE void store_some(double* p, int count) const {
    const double* const from = reinterpret_cast<const double*>(part);
    p[0] = from[0];
    if (count > 1) p[1] = from[1];
    if (count > 2) p[2] = from[2];
  }
  template <class Function> static INLINE Four each(Function function) {
    Four x;
    for (int k = 0; k < parts; ++k) x.part[k] = function(k);
    return x;
  }
};

INLINE Four operator+(Four a, Four b) { return Four::each([&](int k) { return a.part[k] + b.part[k]; }); }
INLINE Four operator-(Four a, Four b) { return Four::each([&](int k) { return a.part[k] - b.part[k]; }); }
INLINE Four operator*(Four a, Four b) { return Four::each([&](int k) { return a.part[k] * b.part[k]; }); }
INLINE Four operator/(Four a, Four b) { return Four::each([&](int k) { return a.part[k] / b.part[k]; }); }
INLINE Four operator-(Four a) { return Four::each([&](int k) { return -a.part[k]; }); }

// Number of modes that a Number holds.
template <class Number> constexpr int LANES = sizeof(Number) / sizeof(double);

// The lanes of numbers in memory, as plain numbers: in a row of groups, mode j is number j.
INLINE double* lanes(Four* x) { return reinterpret_cast<double*>(x); }
INLINE const double* lanes(const Four* x) { return reinterpret_cast<const double*>(x); }
INLINE double* lanes(double* x) { return x; }
INLINE const double* lanes(const double* x) { return x; }

// larger: of two numbers. between: a where least < a < ∞, else `other`. inside: whether low < a < high in all
// lanes. has_nan: whether any lane is NaN.
INLINE double larger(double a, double b) { return a > b ? a : b; }
INLINE Four larger(Four a, Four b) {
  return Four::each([&](int k) { return a.part[k] > b.part[k] ? a.part[k] : b.part[k]; });
}
INLINE double between(double a, double least, double other) { return a > least && a < INFINITE ? a : other; }
INLINE Four between(Four a, Four least, double other) {
  const Four most = INFINITE, rest = other;
  return Four::each([&](int k) {
    return (a.part[k] > least.part[k]) & (a.part[k] < most.part[k]) ? a.part[k] : rest.part[k];
  });
}
INLINE bool inside(double a, double low, double high) { return a > low && a < high; }
INLINE bool inside(Four a, double low, double high) {
  auto all = (a.part[0] > low) & (a.part[0] < high);
  for (int k = 1; k < Four::parts; ++k) all &= (a.part[k] > low) & (a.part[k] < high);
  auto every = all[0];
  for (int j = 1; j < Four::width; ++j) every &= all[j];
  return every != 0;
}
INLINE bool has_nan(double a) { return a != a; }
INLINE bool has_nan(Four a) {
  auto any = a.part[0] != a.part[0];
  for (int k = 1; k < Four::parts; ++k) any |= a.part[k] != a.part[k];
  auto some = any[0];
  for (int j = 1; j < Four::width; ++j) some |= any[j];
  return some != 0;
}

// The sum of the lanes, and the largest of them.
INLINE double total(double a) { return a; }
INLINE double total(Four a) { return (lanes(&a)[0] + lanes(&a)[1]) + (lanes(&a)[2] + lanes(&a)[3]); }
INLINE double largest(double a) { return a; }
INLINE double largest(Four a) {
  return larger(larger(lanes(&a)[0], lanes(&a)[1]), larger(lanes(&a)[2], lanes(&a)[3]));
}

template <class To, class From> INLINE To bits_of(From x) {
  To y;
  static_assert(sizeof x == sizeof y);
  std::memcpy(&y, &x, sizeof x);
  return y;
}

INLINE double exponential(double x) { return std::exp(x); }
INLINE Four exponential(Four x) {  // for x up to 700; arguments here are seldom above 0
  using V = Four::Vector;
  constexpr double least = -708.396418532264, shift = 6755399441055744.0;  // 1.5 · 2⁵²: adding it rounds
  constexpr double inverse[12] = {1 / 6227020800., 1 / 479001600., 1 / 39916800., 1 / 3628800., 1 / 362880.,
                                  1 / 40320., 1 / 5040., 1 / 720., 1 / 120., 1 / 24., 1 / 6., 0.5};
  return Four::each([&](int k) {
    const V y = x.part[k] < least ? V{} + least : x.part[k];
    const V t = y * 1.4426950408889634 + shift, whole = t - shift;
    const V r = (y - whole * 6.93147180369123816490e-01) - whole * 1.90821492927058770002e-10, s = r * r;
    V even = V{} + inverse[1], odd = V{} + inverse[0];  // two chains, of r² each
    for (int i = 3; i < 12; i += 2) even = even * s + inverse[i];
    for (int i = 2; i < 12; i += 2) odd = odd * s + inverse[i];
    const V value = (((odd * r + even) * s + r) + 1.0) * bits_of<V>((bits_of<Four::Bits>(t) + 1023) << 52);
    return x.part[k] < least ? V{} : value;
  });
}

INLINE double logarithm(double x) { return std::log(x); }
INLINE Four logarithm(Four x) {
  using V = Four::Vector;
  return Four::each([&](int k) {
    V y = x.part[k], tiny = V{};
    const auto small = y < 2.2250738585072014e-308;
    tiny = small ? V{} + 54.0 : tiny;
    y = small ? y * 18014398509481984.0 : y;  // 2⁵⁴: denormals become normal
    auto bits = bits_of<Four::Bits>(y) + (0x3ff0000000000000 - 0x3fe6a09e667f3bcd);
    const V power = bits_of<V>((bits >> 52) | 0x4330000000000000) - (4503599627370496.0 + 1023.0) - tiny;
    const V f = bits_of<V>((bits & 0x000fffffffffffff) + 0x3fe6a09e667f3bcd) - 1.0;
    const V s = f / (f + 2.0), z = s * s, w = z * z, half = f * f * 0.5;
    const V a = w * (w * (w * 1.531383769920937332e-1 + 2.222219843214978396e-1) + 3.999999999940941908e-1);
    V b = w * (w * 1.479819860511658591e-1 + 1.818357216161805012e-1) + 2.857142874366239149e-1;
    b = z * (w * b + 6.666666666666735130e-1);
    const V low = s * (half + (a + b)) + power * 1.90821492927058770002e-10;
    V value = power * 6.93147180369123816490e-01 - ((half - low) - f);
    value = x.part[k] < INFINITE ? value : x.part[k];  // inf, NaN
    value = x.part[k] == 0.0 ? V{} - INFINITE : value;
    return x.part[k] < 0.0 ? V{} + NOT_A_NUMBER : value;
  });
}

#if defined(__has_builtin)
#if EXPTILT_BITS >= 256 && __has_builtin(__builtin_shufflevector)
#define SHUFFLED 1
#endif
#endif
// Transposes four numbers of four modes: lane k of x[i] and lane i of x[k] change places.
INLINE void transpose(Four* x) {
#ifdef SHUFFLED
  const auto a = x[0].part[0], b = x[1].part[0], c = x[2].part[0], d = x[3].part[0];
  const auto p = __builtin_shufflevector(a, b, 0, 4, 2, 6), q = __builtin_shufflevector(a, b, 1, 5, 3, 7);
  const auto r = __builtin_shufflevector(c, d, 0, 4, 2, 6), s = __builtin_shufflevector(c, d, 1, 5, 3, 7);
  x[0].part[0] = __builtin_shufflevector(p, r, 0, 1, 4, 5);
  x[1].part[0] = __builtin_shufflevector(q, s, 0, 1, 4, 5);
  x[2].part[0] = __builtin_shufflevector(p, r, 2, 3, 6, 7);
  x[3].part[0] = __builtin_shufflevector(q, s, 2, 3, 6, 7);
#else
  const Four y[4] = {x[0], x[1], x[2], x[3]};
  for (int i = 0; i < 4; ++i)
    for (int k = 0; k < 4; ++k) lanes(x + i)[k] = lanes(y + k)[i];
#endif
}

// Copies numbers; plain ones four at a time.
template <class Number, class Source> INLINE void copy(int length, const Source* source, Number* target) {
  int i = 0;
  if constexpr (sizeof(Number) == sizeof(double))
    for (; i + 4 <= length; i += 4) Four::load(source + i).store(target + i);
  for (; i < length; ++i) target[i] = source[i];
}

// Copies laws, moves or the like to lanes. Each mode has `size` numbers, `apart` numbers from those of the next
// mode; groups of lanes are `step` numbers apart. Lanes without a mode repeat the last mode, so that whatever is
// possible in all modes is possible in all lanes.
template <class Number>
ONCE void spread(int M, int size, const double* source, int apart, Number* target, int step) {
  constexpr int L = LANES<Number>;
  for (int first = 0; first < M; first += L, target += step) {
    const double* mode[L];
    for (int j = 0; j < L; ++j) mode[j] = source + (first + j < M ? first + j : M - 1) * apart;
    int i = 0;
    if constexpr (L == 4)
      for (; i + 4 <= size; i += 4) {
        Four block[4] = {Four::load(mode[0] + i), Four::load(mode[1] + i), Four::load(mode[2] + i),
                         Four::load(mode[3] + i)};
        transpose(block);
        for (int k = 0; k < 4; ++k) target[i + k] = block[k];
      }
    for (; i < size; ++i)
      for (int j = 0; j < L; ++j) lanes(target + i)[j] = mode[j][i];
  }
}
// Copies from lanes back to modes: the reverse of `spread`.
template <class Number>
ONCE void gather(int M, int size, const Number* source, int step, double* target, int apart) {
  constexpr int L = LANES<Number>;
  for (int first = 0; first < M; first += L, source += step, target += L * apart) {
    const int modes = M - first < L ? M - first : L;
    int i = 0;
    if constexpr (L == 4)
      for (; i + 4 <= size; i += 4) {
        Four block[4] = {source[i], source[i + 1], source[i + 2], source[i + 3]};
        transpose(block);
        for (int j = 0; j < modes; ++j) block[j].store(target + j * apart + i);
      }
    for (; i < size; ++i)
      for (int j = 0; j < modes; ++j) target[j * apart + i] = lanes(source + i)[j];
  }
}

// Working memory of a kernel, filled with 0 and freed when the kernel ends.
class Room {
 public:
  template <class Number = double> Number* take(int64_t count) {
    const int64_t size = (count * LANES<Number> + 7) / 8 * 8;  // whole lines of the cache
    if (size > left_) {
      left_ = size > least ? size : least;
      blocks_.emplace_back(new double[left_ + 16]);
      next_ = blocks_.back().get();
      next_ += (64 - reinterpret_cast<uintptr_t>(next_) % 64) % 64 / 8;
    }
    double* const found = next_;
    next_ += size, left_ -= size;
    std::fill_n(found, size, 0.0);
    return reinterpret_cast<Number*>(found);
  }

 private:
  static constexpr int64_t least = 8192;
  std::vector<std::unique_ptr<double[]>> blocks_;
  double* next_ = nullptr;
  int64_t left_ = 0;
};
