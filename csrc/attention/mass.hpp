// The key mass: the attention that each key receives from all queries, Σ_i p_ij.
//
// Rows come to one tile of keys after another. The weights of a tile's rows are added up as vectors, four rows of a
// head at a time, and every strip of rows is then added to sums in float64: a mass over a million queries is as exact
// as one over a few hundred.
#pragma once
#include "attention/operands.hpp"

// Add a tile's column sums to those of a head, and clear them.
template <class T> INLINE void put_columns(Attention& f, T* columns, int64_t part, int64_t head, int64_t j0) {
  const int64_t count = std::min(f.tile_keys, f.K - j0);
  double* to = f.column_sum + (part * f.blocks * f.group + head) * f.K + j0;
  for (int64_t j = 0; j < count; ++j) to[j] += columns[j];
  std::fill_n(columns, count, T(0));
}

template <class T> class Mass {
  using W = Wide<T>;
  static constexpr int64_t lanes = W::lanes, width = 2 * W::lanes;
  Attention& f;
  Keys<T> k;
  Arena<T> arena;
  Rows<T> queries, S;
  T* columns;
  std::vector<Place> where;

 public:
  explicit Mass(Attention& f) : f(f), k(f, f.key, f.D, true, false), where(f.tile_rows) {
    const int64_t wide_q = panels<T>(f.D), row = f.tile_keys + width;
    for (int64_t room : {f.tile_rows * wide_q, f.strip * row, row}) arena.plan(room);
    k.plan(arena);
    arena.open();
    queries = {arena.piece(f.tile_rows * wide_q), wide_q}, S = {arena.piece(f.strip * row), row};
    columns = arena.piece(row);
    k.open(arena);
    fill(columns, row / lanes, T(0));
  }
  // A unit is a block, a part of its rows and a part of its keys.
  void run() {
    const int64_t row_tiles = (f.rows_of_block() + f.tile_rows - 1) / f.tile_rows;
    const int64_t key_tiles = (f.K + f.tile_keys - 1) / f.tile_keys;
    for_units(f, [&](int64_t unit) {
      const int64_t key_part = unit % f.key_parts, rest = unit / f.key_parts;
      const int64_t row_part = rest % f.row_parts, block = rest / f.row_parts;
      k.enter(block);
      for (int64_t tile = key_tiles * key_part / f.key_parts; tile < key_tiles * (key_part + 1) / f.key_parts; ++tile)
        for (int64_t t = row_tiles * row_part / f.row_parts; t < row_tiles * (row_part + 1) / f.row_parts; ++t)
          sweep(block, t * f.tile_rows, tile, row_part);
    });
  }

 private:
  void sweep(int64_t block, int64_t r0, int64_t tile, int64_t part) {
    const int64_t h = std::min(f.tile_rows, f.rows_of_block() - r0), j0 = tile * f.tile_keys;
    const Span seen = place_rows(f, block, r0, h, where.data());
    if (seen.last <= j0 || seen.first >= j0 + f.tile_keys) return;
    copy_rows(queries, f.query, f.D, where.data(), h);
    for (int64_t s0 = 0; s0 < h; s0 += f.strip) {
      const Strip strip = strip_of(f, where.data(), s0, std::min(h, s0 + f.strip), block, tile, width);
      if (!strip) continue;
      k.against(S, queries.from(s0), strip, T(f.scale), false);
      add(strip, s0, part);
    }
  }

  // Add the weights of a strip's rows s0 … to the columns, four rows of one head at a time.
  void add(const Strip& strip, int64_t s0, int64_t part) {
    const int64_t j0 = strip.tile * f.tile_keys;
    for (int64_t r = 0; r < strip.rows;) {
      const Place* row = &where[s0 + r];
      const int64_t n = r + 4 <= strip.rows && row[0].head == row[3].head ? 4 : 1;
      Vectors at[4];
      int64_t first = strip.last, last = strip.first;
      for (int64_t i = 0; i < n; ++i) {
        const Span seen = seen_of(f, row[i], strip);
        at[i] = {first, 0};
        if (seen.last <= seen.first) continue;
        at[i] = to_scores<T>(f, S[r + i], nullptr, nullptr, row[i], j0, seen);
        first = std::min(first, at[i].left), last = std::max(last, at[i].left + at[i].count * lanes);
      }
      if (last > first) {
        for (int64_t i = 0; i < n; ++i) {  // what only others of the four see weighs nothing here
          T* s = S[r + i];
          const T minus = -std::numeric_limits<T>::infinity();
          const int64_t left = at[i].count ? at[i].left : last, right = at[i].count ? left + at[i].count * lanes : last;
          fill(s + first, (left - first) / lanes, minus);
          fill(s + right, (last - right) / lanes, minus);
        }
        const int64_t place = row->head * f.Q + row->query;
        if (n == 4)
          weigh<4>(S.from(r), first, last, place);
        else
          weigh<1>(S.from(r), first, last, place);
      }
      r += n;
      if (r == strip.rows || where[s0 + r].head != row->head) put_columns(f, columns, part, row->head, j0);
    }
  }
  template <int N> INLINE void weigh(Rows<T> s, int64_t first, int64_t last, int64_t place) {
    typename W::V shift[N], inverse[N];
    for (int i = 0; i < N; ++i)
      shift[i] = W::all(f.known<T>(0, place + i)), inverse[i] = W::all(f.known<T>(1, place + i));
    for (int64_t j = first; j < last; j += lanes) {
      typename W::V p[N];
#pragma GCC unroll 4
      for (int i = 0; i < N; ++i) p[i] = W::exp(W::load(s[i] + j) - shift[i]) * inverse[i];
      if constexpr (N == 4)
        W::store(columns + j, W::load(columns + j) + ((p[0] + p[1]) + (p[2] + p[3])));
      else
        W::store(columns + j, W::load(columns + j) + p[0]);
    }
  }
};
