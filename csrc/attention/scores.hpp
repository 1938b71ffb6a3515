// Scores: turns products <q, k> into scores, and says which keys each query sees. All sweeps use these functions.
//
// A sweep takes the rows of a block (the queries of all heads that share a key head, one after another) tile by
// tile, fills a strip of rows with z = scale <q_i, k_j> (product.hpp), and calls
//
//     place_rows   the head and query of each row, and the keys lo..hi that causal rule and window let it see
//     to_scores    z → s = softcap(z) + bias + log_weight, −inf where masked, left out or outside of lo..hi, in place;
//                  slope ds/dz = 1 − tanh² and bend d²s/dz² = −2 tanh (1 − tanh²)/cap are kept for derivatives
//
// So a score has the same bits in all sweeps, and e^{s − max} <= 1 holds in the derivatives as it does in the
// forward sweep. Rows are worked on in whole vectors: numbers beyond a row's keys are −inf, of weight 0.
#pragma once
#include "attention/attention.hpp"

struct Place {  // of a row: its head and query, and the keys lo..hi that it sees
  int64_t head, query, lo, hi;
};
struct Span {
  int64_t first, last;
};
struct Vectors {  // the part of a row that holds scores: `count` vectors from number `left` on
  int64_t left, count;
};
// Some rows of a block against the vectors first … last of a tile of its keys; first is at a whole panel.
struct Strip {
  int64_t rows, block, tile, first, last;
  explicit operator bool() const { return last > first; }
};

// Fill where[0..count) for rows r0 … of a block; returns the first and last key that any row sees. The last query
// stands at the last key (bottom-right).
inline Span place_rows(const Attention& f, int64_t block, int64_t r0, int64_t count, Place* where) {
  Span seen{f.K, 0};
  for (int64_t r = 0; r < count; ++r) {
    const int64_t head = (r0 + r) / f.Q, query = (r0 + r) % f.Q, own = query + f.K - f.Q;
    int64_t lo = 0, hi = f.K;
    if (f.causal) hi = std::min(hi, own + 1);
    if (f.window >= 0) {
      lo = std::max(lo, own - f.window + 1);
      if (!f.causal) hi = std::min(hi, own + f.window);
    }
    lo = std::min(lo, f.K);
    hi = std::max(hi, lo);
    where[r] = {block * f.group + head, query, lo, hi};
    if (hi > lo) seen = {std::min(seen.first, lo), std::max(seen.last, hi)};
  }
  return {std::min(seen.first, seen.last), seen.last};
}

// The strip of rows s0..s1 and the keys of a tile that any of them sees, from a whole panel of `width` keys on.
inline Strip strip_of(const Attention& f, const Place* where, int64_t s0, int64_t s1, int64_t block,
                      int64_t tile, int64_t width) {
  const int64_t j0 = tile * f.tile_keys, whole = std::min(f.tile_keys, f.K - j0);
  int64_t first = whole, last = 0;
  for (int64_t r = s0; r < s1; ++r) {
    const int64_t lo = std::max<int64_t>(where[r].lo - j0, 0), hi = std::min(where[r].hi - j0, whole);
    if (hi > lo) first = std::min(first, lo), last = std::max(last, hi);
  }
  return {s1 - s0, block, tile, std::min(first, last) / width * width, last};
}
// The keys of a strip that a row sees, counted from the first key of the tile.
INLINE Span seen_of(const Attention& f, const Place& row, const Strip& strip) {
  const int64_t j0 = strip.tile * f.tile_keys;
  return {std::max(row.lo - j0, strip.first), std::min(row.hi - j0, strip.last)};
}
template <class T> INLINE Vectors vectors_of(Span seen) {
  constexpr int64_t lanes = Wide<T>::lanes;
  return {seen.first / lanes * lanes, (seen.last + lanes - 1) / lanes - seen.first / lanes};
}
// Zero a row from first to last, except for the vectors v, which hold scores. Only last may lie within a vector.
template <class T> INLINE void clear_outside(T* row, int64_t first, Vectors v, int64_t last) {
  constexpr int64_t lanes = Wide<T>::lanes;
  if (v.left > first) fill(row + first, (v.left - first) / lanes, T(0));
  const int64_t right = v.left + v.count * lanes;
  if (right < last) fill(row + right, (last - right + lanes - 1) / lanes, T(0));
}

// Puts −inf in the first and last vector of a row outside of the keys lo..hi. Stores whole vectors, because whole
// vectors are loaded right after.
template <class T> INLINE void hide_ends(T* s, Vectors v, int64_t lo, int64_t hi) {
  using W = Wide<T>;
  T *first = s + v.left, *last = first + (v.count - 1) * W::lanes;
  if (lo > v.left) W::store(first, W::between(W::load(first), lo - v.left, W::lanes));
  if (s + hi < last + W::lanes) W::store(last, W::between(W::load(last), 0, s + hi - last));
}

// target[0..count) += plane[0, column, 2 column, …].
template <class T> inline void add_numbers(T* target, const T* plane, int64_t column, int64_t count) {
  if (column == 0) {
    const T x = plane[0];
    for (int64_t j = 0; j < count; ++j) target[j] += x;
  } else if (column == 1) {
    for (int64_t j = 0; j < count; ++j) target[j] += plane[j];
  } else {
    for (int64_t j = 0; j < count; ++j) target[j] += plane[j * column];
  }
}
// target[0..count) += a plane's numbers for a row and the keys j …; does nothing if the plane is absent.
template <class T> INLINE void add_plane(T* target, const Plane& plane, const Place& row, int64_t j, int64_t count) {
  if (!plane) return;
  const int64_t at = plane.table[row.head] + row.query * plane.row + j * plane.column;
  add_numbers(target, reinterpret_cast<const T*>(plane.at) + at, plane.column, count);
}

// Turn a row from scale <q,k> into scores, in place; keys j0 + seen.first … j0 + seen.last are visible, at least
// one. With a softcap, slope and bend are filled unless slope is null. The rest of the row's first and last vector
// is −inf.
template <class T>
ONCE Vectors to_scores(const Attention& f, T* s, T* slope, T* bend, const Place& row, int64_t j0, Span seen) {
  using W = Wide<T>;
  constexpr int64_t lanes = W::lanes;
  const T minus = -std::numeric_limits<T>::infinity();
  const Vectors v = vectors_of<T>(seen);
  const int64_t lo = seen.first, hi = seen.last, end = v.left + v.count * lanes;
  if (f.cap > 0) {
    const auto cap = W::all(T(f.cap));
    const T inverse = T(1 / f.cap);
    for (int64_t j = v.left; j < end; j += lanes) {
      typename W::V steep;
      const auto t = W::tanh(W::load(s + j) / cap, steep);
      W::store(s + j, t * cap);
      if (slope) W::store(slope + j, steep), W::store(bend + j, -(t + t) * steep * inverse);
    }
  }
  add_plane(s + lo, f.bias, row, j0 + lo, hi - lo);
  add_plane(s + lo, f.weight, row, j0 + lo, hi - lo);
  if (f.mask) {
    const int64_t step = f.mask.column;
    const char* mask = f.mask.at + f.mask.table[row.head] + row.query * f.mask.row + (j0 + lo) * step;
    if (step == 1)
      for (int64_t j = 0; j < hi - lo; ++j) s[lo + j] = mask[j] ? s[lo + j] : minus;
    else
      for (int64_t j = 0; j < hi - lo; ++j) s[lo + j] = mask[j * step] ? s[lo + j] : minus;
  }
  if (f.skip) {
    const int64_t j = f.skip[row.head * f.Q + row.query] - j0;
    if (j >= lo && j < hi) s[j] = minus;
  }
  hide_ends(s, v, lo, hi);
  return v;
}

// Turn a row from ż, the tangent of scale <q,k>, into ṡ, in place.
template <class T>
INLINE void push_scores(const Attention& f, T* t, const T* slope, Vectors v, const Place& row, int64_t j0, Span seen) {
  if (f.cap > 0) times_row(t + v.left, slope + v.left, v.count);
  add_plane(t + seen.first, f.bias_dot, row, j0 + seen.first, seen.last - seen.first);
  add_plane(t + seen.first, f.weight_dot, row, j0 + seen.first, seen.last - seen.first);
}
