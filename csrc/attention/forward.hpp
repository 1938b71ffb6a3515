// The forward sweep: output, log-normalizer, entropy, score mean, variance and maximum, in one pass over the keys.
//
// Keys are read tile by tile. Of the scores s_j read so far, the row of a query holds
//
//     m  the largest score so far                    z  Σ e^{s_j − m}
//     c  the mean score under the weights, less m    M  Σ e^{s_j − m} (s_j − m − c)²       o  Σ e^{s_j − m} v_j
//
// A tile yields the same five numbers for its own keys, and two such summaries join by the parallel formula (Chan,
// Golub, LeVeque): weights are rebased to the larger m, then
//
//     z = z₁ + z₂,   c = c₁ + (c₂ − c₁) z₂/z,   M = M₁ + M₂ + (c₂ − c₁)² z₁ z₂/z.
//
// No difference of large numbers occurs: the variance M/z is a sum of squares about the tile's own mean, and the
// entropy is taken as log z − c, where both terms are of the entropy's own size even when the scores are of size
// 10⁴. m, z, c and M are float64 whatever the type of the scores; o is added to float64 totals every `FLUSH` tiles.
#pragma once
#include "attention/operands.hpp"

constexpr int STATISTICS = 7;  // log-normalizer, entropy, mean, variance, maximum, weight, gap

template <class T> class Forward {
  using W = Wide<T>;
  static constexpr int64_t lanes = W::lanes, width = 2 * W::lanes;
  struct Row {
    double top, z, gap, square;
    int64_t best;
  };

  Attention& f;
  Keys<T> k, v;
  Arena<T> arena;
  Rows<T> queries, summed, S, E;
  std::vector<Place> where;
  std::vector<Row> found;
  std::vector<double> total;
  bool plain;

 public:
  explicit Forward(Attention& f)
      : f(f), k(f, f.key, f.D, true, false), v(f, f.value, f.Dv, false, true), where(f.tile_rows),
        found(f.tile_rows), plain(f.cap <= 0 && !f.bias && !f.weight && !f.mask && !f.skip) {
    const int64_t wide_q = panels<T>(f.D), wide_v = panels<T>(f.Dv), row = f.tile_keys + width;
    const int64_t rooms[] = {f.tile_rows * wide_q, f.tile_rows * wide_v, f.strip * row, f.strip * row};
    for (int64_t room : rooms) arena.plan(room);
    k.plan(arena), v.plan(arena);
    arena.open();
    queries = {arena.piece(rooms[0]), wide_q}, summed = {arena.piece(rooms[1]), wide_v};
    S = {arena.piece(rooms[2]), row}, E = {arena.piece(rooms[3]), row};
    k.open(arena), v.open(arena);
  }

  // A unit is a tile of a block's rows against one part of its keys. Writes output (parts · rows, Dv), statistics
  // (7, parts · rows), and best (parts · rows), the key with the largest score; `join` joins the parts of a row.
  void run() {
    const int64_t tiles = (f.rows_of_block() + f.tile_rows - 1) / f.tile_rows;
    for_units(f, [&](int64_t unit) {
      const int64_t part = unit % f.key_parts, rest = unit / f.key_parts;
      sweep(rest / tiles, rest % tiles * f.tile_rows, part);
    });
  }

 private:
  void sweep(int64_t block, int64_t r0, int64_t part) {
    const int64_t h = std::min(f.tile_rows, f.rows_of_block() - r0);
    const Span seen = place_rows(f, block, r0, h, where.data());
    if (f.skip && std::none_of(where.begin(), where.begin() + h, [&](const Place& row) {
          return f.skip[row.head * f.Q + row.query] >= 0;
        }))
      return;  // none of these rows leaves out a key: the caller does not read their results
    k.enter(block), v.enter(block);
    std::fill_n(found.begin(), h, Row{-INFINITY, 0, 0, 0, 0});
    copy_rows(queries, f.query, f.D, where.data(), h);
    fill(summed.at, h * summed.step / lanes, T(0));
    int64_t done = 0;
    bool flushed = false;
    const int64_t from = seen.first / f.tile_keys, span = (seen.last + f.tile_keys - 1) / f.tile_keys - from;
    for (int64_t t = from + span * part / f.key_parts; t < from + span * (part + 1) / f.key_parts; ++t) {
      for (int64_t s0 = 0; s0 < h; s0 += f.strip) {
        const Strip strip = strip_of(f, where.data(), s0, std::min(h, s0 + f.strip), block, t, width);
        if (!strip) continue;
        k.against(S, queries.from(s0), strip, T(f.scale), false);
        for (int64_t r = 0; r < strip.rows; ++r) weigh(strip, s0 + r, S[r], E[r], done == 0, flushed);
        if (f.Dv > 0) v.gather(summed.from(s0), E, strip);
      }
      if (++done % FLUSH == 0) {
        total.resize(f.tile_rows * f.Dv);
        flush(summed, h, f.Dv, total.data(), flushed);
        flushed = true;
      }
    }
    for (int64_t r = 0; r < h; ++r) put(r, part, flushed);
  }

  // Turn the scores s of a row into weights e, and join their summary to that of the row.
  INLINE void weigh(const Strip& strip, int64_t r, T* s, T* e, bool fresh, bool flushed) {
    Row& row = found[r];
    const Span seen = seen_of(f, where[r], strip);
    if (seen.last <= seen.first) return clear_outside(e, strip.first, {strip.first, 0}, strip.last);
    Vectors v;
    if (plain && seen.first == strip.first) {
      v = vectors_of<T>(seen);
      hide_ends(s, v, seen.first, seen.last);
    } else {
      v = to_scores<T>(f, s, nullptr, nullptr, where[r], strip.tile * f.tile_keys, seen);
    }
    clear_outside(e, strip.first, v, strip.last);
    s += v.left, e += v.left;
    const double high = largest_of(s, v.count);
    if (high > row.top) {
      row.best = strip.tile * f.tile_keys + v.left + find(s, v.count, T(high));
      if (!fresh) {
        const double rebase = std::exp(row.top - high);
        row.z *= rebase;
        row.square *= rebase;
        row.gap = row.z > 0 ? row.gap + (row.top - high) : 0;
        scale_row(summed[r], summed.step / lanes, T(rebase));
        if (flushed)
          for (int64_t d = 0; d < f.Dv; ++d) total[r * f.Dv + d] *= rebase;
      }
      row.top = high;
    }
    const auto shift = W::all(T(row.top == -INFINITY ? 0 : row.top));
    typename W::V z[2] = {}, c[2] = {};
    by_twos(v.count, [&](int64_t j, auto i) {
      const auto d = W::no_lower(W::load(s + j * lanes) - shift), x = W::exp_of_limited(d);
      W::store(e + j * lanes, x);
      z[i] += x;
      c[i] += x * d;
    });
    const T weight = W::sum(z[0] + z[1]);
    if (weight == 0) return;
    const T about = W::sum(c[0] + c[1]) / weight;
    typename W::V spread[2] = {}, rest[2] = {};
    by_twos(v.count, [&](int64_t j, auto i) {
      const auto d = W::at_least(W::load(s + j * lanes) - shift - about, W::all(T(FAR)));
      const auto x = W::load(e + j * lanes) * d;
      rest[i] += x;
      spread[i] += x * d;
    });
    // `rest` corrects `about` for rounding: where all scores are near 0, that error is most of top + gap
    const double centre = about + double(W::sum(rest[0] + rest[1])) / weight;
    const double joined = row.z + weight, apart = centre - row.gap;
    row.square += W::sum(spread[0] + spread[1]) + apart * apart * (row.z * (weight / joined));
    // starts from the mean that weighs more, so that a share near 0 costs no digits
    row.gap = weight > row.z ? centre - apart * (row.z / joined) : row.gap + apart * (weight / joined);
    row.z = joined;
  }

  void put(int64_t r, int64_t part, bool flushed) {
    const Row& row = found[r];
    const int64_t at = part * f.all_rows() + where[r].head * f.Q + where[r].query, count = f.key_parts * f.all_rows();
    T *out = reinterpret_cast<T*>(f.output) + at * f.Dv, *lines = reinterpret_cast<T*>(f.statistics) + at;
    double line[STATISTICS] = {-INFINITY, 0, 0, 0, row.top, row.z, row.gap};
    if (row.z != 0) {
      const double inverse = 1 / row.z, log_z = std::log(row.z);
      if (row.z != row.z) raise_flag(f.bad);
      if (flushed)
        for (int64_t d = 0; d < f.Dv; ++d) out[d] = T((total[r * f.Dv + d] + summed[r][d]) * inverse);
      else
        for (int64_t d = 0; d < f.Dv; ++d) out[d] = summed[r][d] * T(inverse);
      line[0] = row.top + log_z, line[1] = log_z - row.gap, line[2] = row.top + row.gap;
      line[3] = row.square * inverse;
    } else {
      if (where[r].hi > where[r].lo) raise_flag(f.blind);
      std::fill_n(out, f.Dv, T(0));
    }
    for (int i = 0; i < STATISTICS; ++i) lines[i * count] = T(line[i]);
    if (f.best) f.best[at] = row.best;
  }
};

// Join the parts of each row, which lie one after another in `parts`, into the results of `whole`.
template <class T> void join(const Attention& parts, Attention& whole) {
  const int64_t rows = parts.all_rows(), n = parts.key_parts, Dv = parts.Dv;
  std::vector<double> share(n), mean(Dv);
  const T *outputs = reinterpret_cast<const T*>(parts.output), *lines = reinterpret_cast<const T*>(parts.statistics);
  T *output = reinterpret_cast<T*>(whole.output), *joined = reinterpret_cast<T*>(whole.statistics);
  auto known = [&](int line, int64_t part, int64_t row) { return double(lines[(line * n + part) * rows + row]); };
  for (int64_t row = 0; row < rows; ++row) {
    double top = -INFINITY, z = 0, gap = 0, square = 0, centre = 0;
    int64_t at = 0;
    for (int64_t p = 0; p < n; ++p)
      if (known(4, p, row) > top) top = known(4, p, row), at = p;
    for (int64_t p = 0; p < n; ++p) {
      const double weight = known(5, p, row), shift = weight != 0 ? known(4, p, row) - top : 0;
      share[p] = weight != 0 ? weight * std::exp(shift) : 0;
      z += share[p];
      gap += share[p] * (known(6, p, row) + shift);
    }
    std::fill(mean.begin(), mean.end(), 0.0);
    if (z != 0) {
      gap /= z;
      for (int64_t p = 0; p < n; ++p) {
        if (share[p] == 0) continue;
        const double part = share[p] / z, apart = known(6, p, row) + (known(4, p, row) - top) - gap;
        square += part * (known(3, p, row) + apart * apart);
        centre += part * known(2, p, row);
        for (int64_t d = 0; d < Dv; ++d) mean[d] += part * outputs[(p * rows + row) * Dv + d];
      }
    }
    for (int64_t d = 0; d < Dv; ++d) output[row * Dv + d] = T(mean[d]);
    const double log_z = z != 0 ? std::log(z) : -INFINITY;
    const double line[STATISTICS] = {z != 0 ? top + log_z : -INFINITY, z != 0 ? log_z - gap : 0,
                                     centre, square, top, z, gap};
    for (int i = 0; i < STATISTICS; ++i) joined[i * rows + row] = T(line[i]);
    if (whole.best) whole.best[row] = parts.best[at * rows + row];
  }
}
