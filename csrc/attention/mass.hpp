// Sums over all queries for each key, its mass and its worth; and the heaviest keys of each query.
//
// The key mass is Σ_i p_ij. All rows are swept for one tile of keys after another. The weights of a tile's rows are
// added up as vectors, four rows of a head at a time, and every strip of rows is then added to sums in float64: a mass
// over a million queries is as exact as one over a few hundred.
//
// The worth of a key is how much leaving it out changes: Σ_i and max_i of p/(1 − p) d, and Σ_i log(1 − p). Here d is
// |o_i − v_j|, from one more product by |o|² − 2 <o, v> + |v|², or <g_i, o_i − v_j> along a direction g.
#pragma once
#include "attention/operands.hpp"

// Add a tile's column sums to those of a head, and clear them.
template <class T>
INLINE void put_columns(Attention& f, T* columns, int64_t part, int64_t head, int64_t j0, int64_t table = 0) {
  const int64_t count = std::min(f.tile_keys, f.K - j0);
  double* to = f.column_sum + table + (part * f.blocks * f.group + head) * f.K + j0;
  for (int64_t j = 0; j < count; ++j) to[j] += columns[j];
  std::fill_n(columns, count, T(0));
}

// The key mass or, with `attended` (outputs o, or the direction g), the worth of keys. column_sum then holds three
// tables: Σ change, largest change, Σ log(1 − p). Rows hold shift, inverse weight, and |o|² or <g, o>. weight_dot is
// |v|², absent with a direction.
template <class T> class Mass {
  using W = Wide<T>;
  using V = typename W::V;
  static constexpr int64_t lanes = W::lanes, width = 2 * W::lanes;
  static constexpr double LIGHT = 1. / 16;  // up to this weight log(1 − p) is a short series
  Attention& f;
  Keys<T> k, v;
  Arena<T> arena;
  Rows<T> queries, outputs, S, E;
  T *columns, *largest, *lost;
  std::vector<Place> where;
  bool worth, norms;

 public:
  explicit Mass(Attention& f)
      : f(f), k(f, f.key, f.D, true, false), v(f, f.attended ? f.value : f.attended, f.Dv, true, false),
        where(f.tile_rows), worth(bool(f.attended)), norms(bool(f.weight_dot)) {
    const int64_t wide_q = panels<T>(f.D), wide_v = worth ? panels<T>(f.Dv) : 0, row = f.tile_keys + width;
    const int64_t rooms[] = {f.tile_rows * wide_q, f.tile_rows * wide_v, f.strip * row,
                             worth ? f.strip * row : 0, 3 * row};
    for (int64_t room : rooms) arena.plan(room);
    k.plan(arena), v.plan(arena);
    arena.open();
    queries = {arena.piece(rooms[0]), wide_q}, outputs = {arena.piece(rooms[1]), wide_v};
    S = {arena.piece(rooms[2]), row}, E = {arena.piece(rooms[3]), row};
    columns = arena.piece(rooms[4]), largest = columns + row, lost = largest + row;
    k.open(arena), v.open(arena);
    fill(columns, 3 * row / lanes, T(0));
  }
  // A unit is a block, a part of its rows and a part of its keys.
  void run() {
    const int64_t row_tiles = (f.rows_of_block() + f.tile_rows - 1) / f.tile_rows;
    const int64_t key_tiles = (f.K + f.tile_keys - 1) / f.tile_keys;
    for_units(f, [&](int64_t unit) {
      const int64_t key_part = unit % f.key_parts, rest = unit / f.key_parts;
      const int64_t row_part = rest % f.row_parts, block = rest / f.row_parts;
      k.enter(block), v.enter(block);
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
    if (worth) copy_rows(outputs, f.attended, f.Dv, where.data(), h);
    for (int64_t s0 = 0; s0 < h; s0 += f.strip) {
      const Strip strip = strip_of(f, where.data(), s0, std::min(h, s0 + f.strip), block, tile, width);
      if (!strip) continue;
      k.against(S, queries.from(s0), strip, T(f.scale), false);
      if (worth) {
        v.against(E, outputs.from(s0), strip, T(norms ? -2 : -1), false);
        value(strip, s0, part);
      } else {
        add(strip, s0, part);
      }
    }
  }

  // Add the worth of a strip's keys for its rows s0 … to the columns.
  void value(const Strip& strip, int64_t s0, int64_t part) {
    const int64_t j0 = strip.tile * f.tile_keys, tables = f.row_parts * f.blocks * f.group * f.K;
    for (int64_t r = 0; r < strip.rows; ++r) {
      const Place& row = where[s0 + r];
      const Span seen = seen_of(f, row, strip);
      if (seen.last > seen.first) {
        const Vectors at = to_scores<T>(f, S[r], nullptr, nullptr, row, j0, seen);
        add_plane(E[r] + seen.first, f.weight_dot, row, j0 + seen.first, seen.last - seen.first);
        change(strip, s0 + r, S[r], E[r], at);
      }
      if (r + 1 < strip.rows && where[s0 + r + 1].head == row.head) continue;
      const int64_t count = std::min(f.tile_keys, f.K - j0);
      double* high = f.column_sum + tables + (part * f.blocks * f.group + row.head) * f.K + j0;
      for (int64_t j = 0; j < count; ++j) high[j] = std::max(high[j], double(largest[j])), largest[j] = 0;
      put_columns(f, columns, part, row.head, j0);
      put_columns(f, lost, part, row.head, j0, 2 * tables);
    }
  }
  // Add the change of row r without each key to the columns. s are its scores; `apart` plus the row's |o|² or <g, o>
  // is d² or d.
  INLINE void change(const Strip& strip, int64_t r, const T* s, const T* apart, Vectors at) {
    const int64_t place = where[r].head * f.Q + where[r].query;
    const T own = f.known<T>(2, place);
    const V shift = W::all(f.known<T>(0, place)), inverse = W::all(f.known<T>(1, place)), zero{};
    const V least = W::all(norms ? own / 32 : -std::numeric_limits<T>::infinity());
    for (int64_t j = at.left; j < at.left + at.count * lanes; j += lanes) {
      const V p = W::exp(W::load(s + j) - shift) * inverse, d = W::load(apart + j) + own;
      const auto apart_enough = !(d < least);  // otherwise most of |o|² + |v|² cancels
      const auto plain = (p <= T(LIGHT)) & apart_enough, there = p != T(0);
      const V size = norms ? W::root(W::at_least(d, zero)) : d;
      V moved = (plain & there) ? p / (T(1) - p) * size : zero, less = plain ? -p * series(p) : zero;
      if (W::any(there & ~plain))
        for (int i = 0; i < lanes; ++i)
          if (p[i] != 0 && !(p[i] <= T(LIGHT) && !(d[i] < least[i]))) {
            const double q = p[i];
            moved[i] = T(q / (1 - q) * (norms ? distance(strip, r, j + i) : double(d[i]))), less[i] = T(std::log1p(-q));
          }
      W::store(columns + j, W::load(columns + j) + moved);
      W::store(largest + j, W::at_least(W::load(largest + j), moved < zero ? -moved : moved));
      W::store(lost + j, W::load(lost + j) + less);
    }
  }
  // −log(1 − p) / p for p up to LIGHT.
  static INLINE V series(V p) {
    if constexpr (W::single)
      return W::polynomial(p, 1 / 7., 1 / 6., 1 / 5., 1 / 4., 1 / 3., 1 / 2., 1.0);
    else
      return W::polynomial(p, 1 / 13., 1 / 12., 1 / 11., 1 / 10., 1 / 9., 1 / 8., 1 / 7., 1 / 6., 1 / 5., 1 / 4.,
                           1 / 3., 1 / 2., 1.0);
  }
  // |o − v| of row r and key j of a tile.
  double distance(const Strip& strip, int64_t r, int64_t j) {
    const T *o = outputs[r], *x = v.tile(strip.tile)[j];
    double sum = 0;
    for (int64_t d = 0; d < f.Dv; ++d) sum += (double(o[d]) - x[d]) * (double(o[d]) - x[d]);
    return std::sqrt(sum);
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
        for (int64_t i = 0; i < n; ++i) {  // keys that only others of the four see have weight 0
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

// Writes the f.top heaviest keys of each row, heaviest first: the keys to `best` (−1 where there are fewer), their
// weights to `output`, and the sum of all other weights to `statistics`. Rows hold shift and inverse weight.
template <class T> class Heaviest {
  using W = Wide<T>;
  static constexpr int64_t lanes = W::lanes, width = 2 * W::lanes;
  Attention& f;
  Keys<T> k;
  Arena<T> arena;
  Rows<T> queries, S, scores;
  std::vector<Place> where;
  std::vector<double> rest;

 public:
  explicit Heaviest(Attention& f) : f(f), k(f, f.key, f.D, true, false), where(f.tile_rows), rest(f.tile_rows) {
    const int64_t wide_q = panels<T>(f.D), row = f.tile_keys + width;
    const int64_t rooms[] = {f.tile_rows * wide_q, f.strip * row, f.tile_rows * f.top};
    for (int64_t room : rooms) arena.plan(room);
    k.plan(arena);
    arena.open();
    queries = {arena.piece(rooms[0]), wide_q}, S = {arena.piece(rooms[1]), row};
    scores = {arena.piece(rooms[2]), f.top};
    k.open(arena);
  }
  // A unit is a tile of a block's rows.
  void run() {
    const int64_t tiles = (f.rows_of_block() + f.tile_rows - 1) / f.tile_rows;
    for_units(f, [&](int64_t unit) { sweep(unit / tiles, unit % tiles * f.tile_rows); });
  }

 private:
  void sweep(int64_t block, int64_t r0) {
    const int64_t h = std::min(f.tile_rows, f.rows_of_block() - r0);
    const Span seen = place_rows(f, block, r0, h, where.data());
    k.enter(block);
    copy_rows(queries, f.query, f.D, where.data(), h);
    std::fill_n(scores.at, h * f.top, -std::numeric_limits<T>::infinity());
    std::fill_n(rest.begin(), h, 0.0);
    for (int64_t r = 0; r < h; ++r) std::fill_n(f.best + row_of(r) * f.top, f.top, int64_t(-1));
    for (int64_t t = seen.first / f.tile_keys; t * f.tile_keys < seen.last; ++t)
      for (int64_t s0 = 0; s0 < h; s0 += f.strip) {
        const Strip strip = strip_of(f, where.data(), s0, std::min(h, s0 + f.strip), block, t, width);
        if (!strip) continue;
        k.against(S, queries.from(s0), strip, T(f.scale), false);
        for (int64_t r = 0; r < strip.rows; ++r) look(strip, s0 + r, S[r]);
      }
    for (int64_t r = 0; r < h; ++r) {
      T* out = reinterpret_cast<T*>(f.output) + row_of(r) * f.top;
      for (int64_t i = 0; i < f.top; ++i) out[i] = weight(r, scores[r][i]);
      reinterpret_cast<T*>(f.statistics)[row_of(r)] = T(rest[r]);
    }
  }
  int64_t row_of(int64_t r) const { return where[r].head * f.Q + where[r].query; }
  T weight(int64_t r, T score) const {
    const int64_t place = row_of(r);
    return W::exp(W::all(score - f.known<T>(0, place)))[0] * f.known<T>(1, place);
  }

  // Insert keys heavier than the lightest one held for a row; weights of all other keys, and of displaced ones, go to
  // `rest`.
  INLINE void look(const Strip& strip, int64_t r, T* s) {
    const Span seen = seen_of(f, where[r], strip);
    if (seen.last <= seen.first) return;
    const int64_t j0 = strip.tile * f.tile_keys;
    const Vectors at = to_scores<T>(f, s, nullptr, nullptr, where[r], j0, seen);
    T* held = scores[r];
    const auto shift = W::all(f.known<T>(0, row_of(r))), inverse = W::all(f.known<T>(1, row_of(r)));
    typename W::V light{};
    for (int64_t j = at.left; j < at.left + at.count * lanes; j += lanes) {
      const auto x = W::load(s + j);
      auto p = W::exp(x - shift) * inverse;
      if (W::any(x > held[f.top - 1]))
        for (int i = 0; i < lanes; ++i)
          if (s[j + i] > held[f.top - 1]) p[i] = weight(r, held[f.top - 1]), insert(r, s[j + i], j0 + j + i);
      light += p;
    }
    rest[r] += W::sum(light);
  }
  void insert(int64_t r, T score, int64_t key) {
    T* held = scores[r];
    int64_t *keys = f.best + row_of(r) * f.top, i = f.top - 1;
    for (; i > 0 && held[i - 1] < score; --i) held[i] = held[i - 1], keys[i] = keys[i - 1];
    held[i] = score, keys[i] = key;
  }
};
