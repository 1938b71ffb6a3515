// The tangent sweep: the forward derivative of attention, a covariance with the tangent of the scores.
//
// Given ṡ_ij (from tangents of query, key, bias, log_weight) and v̇_j, it sums, under the weights p of the forward
// sweep,
//
//     Σ_j p ṡ'   Σ_j p c ṡ'   Σ_j p c² ṡ'   Σ_j p (ṡ' v_j + v̇_j),        ṡ' = ṡ − r,  c = s − mean,
//
// from which derivatives/identities.py makes the tangents of all results. r starts as the ṡ of a key that has most of
// the weight, if one is given; else as the mean of ṡ over a few keys around the heaviest of the first tile or, if
// tiles are small, over several tiles. Σ p ṡ' of a tile should be near 0; times the output o = Σ p v, it is subtracted
// from Σ p ṡ' v after each tile. In the end r is moved to Σ p ṡ,
//
//     δ = Σ p ṡ − r:    Σ p ṡ' f − δ Σ p f  for f = 1, c, c², v.
//
// So no difference of large numbers occurs, in particular none of values that are far from 0.
#pragma once
#include "attention/operands.hpp"

// A row's sums: r, then Σ p ṡ' f and Σ p f for f = 1, c, c², and the multiple of o subtracted so far from Σ p ṡ' v.
struct Sums {
  bool settled;  // whether r has been chosen
  double r, x0, x1, x2, p0, p1, p2, taken;
};
struct Settled {  // r moved to Σ p ṡ, Σ p ṡ' f for it, and the multiple of o still to be subtracted
  double r, x0, x1, x2, left;
};

// The rows of one tile, with their sums.
template <class T> class Pushing {
  using W = Wide<T>;
  static constexpr int64_t lanes = W::lanes, width = 2 * W::lanes;
  static constexpr int64_t FEW = 32;    // vectors around the heaviest key, over which r is a mean
  static constexpr int64_t SOME = 256;  // keys over which r is a mean, if a tile has fewer

  const Attention& f;
  Keys<T>&k, &v, &k_dot, &v_dot;

 public:
  Rows<T> queries, moved, means, summed;  // of the rows: q, q̇, o, and Σ p (ṡ' v + v̇)
  T *slope, *bend;
  const Place* where;
  std::vector<Sums> sums;

  Pushing(const Attention& f, Keys<T>& k, Keys<T>& v, Keys<T>& k_dot, Keys<T>& v_dot)
      : f(f), k(k), v(v), k_dot(k_dot), v_dot(v_dot), sums(f.tile_rows) {}

  // Clear the sums of h rows; if tiles are small, set r to the mean of ṡ over the first `SOME` keys.
  void begin(Rows<T> S, Rows<T> X, int64_t h, int64_t block, int64_t tile_from, int64_t tile_to) {
    std::fill_n(sums.begin(), h, Sums{});
    fill(summed.at, h * summed.step / lanes, T(0));
    if (f.tile_keys >= SOME || tile_to - tile_from < 2) return;
    for (int64_t tile = tile_from; tile < std::min(tile_to, tile_from + SOME / f.tile_keys); ++tile)
      strips(h, block, tile, [&](const Strip& strip, int64_t s0) {
        products(S, X, strip, s0);
        for (int64_t r = 0; r < strip.rows; ++r) guess(strip, s0 + r, S[r], X[r]);
      });
    for (int64_t r = 0; r < h; ++r) {
      Sums& row = sums[r];
      row.settled = row.p0 > 0;
      row.r = row.settled ? T(row.r / row.p0) : 0;
      row.p0 = 0;
    }
  }
  // Calls body(strip, its first row) for each strip of h rows that sees keys of a tile.
  template <class Body> void strips(int64_t h, int64_t block, int64_t tile, Body body) {
    for (int64_t s0 = 0; s0 < h; s0 += f.strip)
      if (const Strip strip = strip_of(f, where, s0, std::min(h, s0 + f.strip), block, tile, width)) body(strip, s0);
  }
  // For a strip's rows s0 …: writes scores to S, their tangents to U, p to P and p ṡ' to X, and adds to the sums of
  // the rows. P and X may be S and U.
  void push(Rows<T> S, Rows<T> U, Rows<T> P, Rows<T> X, const Strip& strip, int64_t s0) {
    products(S, U, strip, s0);
    for (int64_t r = 0; r < strip.rows; ++r) weigh(strip, s0 + r, S[r], U[r], P[r], X[r]);
    if (f.Dv == 0) return;
    v.gather(summed.from(s0), X, strip);
    if (f.value_dot) v_dot.gather(summed.from(s0), P, strip);
    if (!f.attended) return;
    for (int64_t r = s0; r < s0 + strip.rows; ++r) {
      const T extra = T(sums[r].x0 - sums[r].taken);
      sums[r].taken += extra;
      T *to = summed[r], *mean = means[r];
      for (int64_t d = 0; d < summed.step; d += lanes) W::store(to + d, W::load(to + d) - W::load(mean + d) * extra);
    }
  }
  Settled settle(int64_t r) const {
    const Sums& row = sums[r];
    const double end = f.attended ? double(T(row.x0 + row.r * row.p0)) : row.r, by = end - row.r;
    return {end, row.x0 - by * row.p0, row.x1 - by * row.p1, row.x2 - by * row.p2, by - row.taken};
  }

 private:
  // S = scale <q,k>, U = ż.
  void products(Rows<T> S, Rows<T> U, const Strip& strip, int64_t s0) {
    k.against(S, queries.from(s0), strip, T(f.scale), false);
    if (f.query_dot) k.against(U, moved.from(s0), strip, T(f.scale), false);
    if (f.key_dot) k_dot.against(U, queries.from(s0), strip, T(f.scale), bool(f.query_dot));
    if (!f.query_dot && !f.key_dot)
      for (int64_t r = 0; r < strip.rows; ++r)
        fill(U[r] + strip.first, (strip.last - strip.first + lanes - 1) / lanes, T(0));
  }
  Vectors scores(const Strip& strip, int64_t r, Span seen, T* s, T* u) {
    const int64_t j0 = strip.tile * f.tile_keys;
    const Vectors at = to_scores<T>(f, s, slope, bend, where[r], j0, seen);
    push_scores<T>(f, u, slope, at, where[r], j0, seen);
    return at;
  }
  // Σ e^{s − shift} and Σ e^{s − shift} ṡ over some vectors.
  static void means_of(const T* s, const T* u, int64_t count, T shift, T& weight, T& mean) {
    typename W::V z[2] = {}, t[2] = {};
    by_twos(count, [&](int64_t j, auto i) {
      const auto e = W::exp(W::load(s + j * lanes) - shift);
      z[i] += e;
      t[i] += e != 0 ? e * W::load(u + j * lanes) : typename W::V{};
    });
    weight = W::sum(z[0] + z[1]);
    mean = W::sum(t[0] + t[1]);
  }
  void guess(const Strip& strip, int64_t r, T* s, T* u) {
    const Span seen = seen_of(f, where[r], strip);
    if (seen.last <= seen.first) return;
    const Vectors at = scores(strip, r, seen, s, u);
    T weight, mean;
    means_of(s + at.left, u + at.left, at.count, f.known<T>(0, where[r].head * f.Q + where[r].query), weight, mean);
    sums[r].p0 += weight;
    sums[r].r += mean;
  }
  INLINE void weigh(const Strip& strip, int64_t r, T* s, T* u, T* p_row, T* x_row) {
    const Span seen = seen_of(f, where[r], strip);
    Vectors at{strip.first, 0};
    if (seen.last > seen.first) {
      at = scores(strip, r, seen, s, u);
      Sums& row = sums[r];
      const int64_t place = where[r].head * f.Q + where[r].query;
      const T shift = f.known<T>(0, place), inverse = f.known<T>(1, place), gap = f.known<T>(2, place);
      s += at.left, u += at.left;
      if (!row.settled) {
        const int64_t top = find(s, at.count, largest_of(s, at.count)) / lanes;
        const int64_t from = std::max<int64_t>(0, std::min(top - FEW / 2, at.count - FEW)) * lanes;
        T weight, mean;
        means_of(s + from, u + from, std::min(at.count, FEW), shift, weight, mean);
        if (weight > 0) row.settled = true, row.r = mean / weight;
      }
      const T start = T(row.r);
      T *p_to = p_row + at.left, *x_to = x_row + at.left;
      typename W::V x0[2] = {}, x1[2] = {}, x2[2] = {}, p0[2] = {}, p1[2] = {}, p2[2] = {};
      by_twos(at.count, [&](int64_t j, auto i) {
        const auto d = W::load(s + j * lanes) - shift, p = W::exp(d) * inverse;
        const auto c = W::at_least(d - gap, W::all(T(FAR)));
        const auto x = p != 0 ? p * (W::load(u + j * lanes) - start) : typename W::V{};
        const auto xc = x * c, pc = p * c;
        W::store(p_to + j * lanes, p), W::store(x_to + j * lanes, x);
        x0[i] += x, x1[i] += xc, x2[i] += xc * c, p0[i] += p, p1[i] += pc, p2[i] += pc * c;
      });
      row.x0 += W::sum(x0[0] + x0[1]), row.x1 += W::sum(x1[0] + x1[1]), row.x2 += W::sum(x2[0] + x2[1]);
      row.p0 += W::sum(p0[0] + p0[1]), row.p1 += W::sum(p1[0] + p1[1]), row.p2 += W::sum(p2[0] + p2[1]);
    }
    clear_outside(p_row, strip.first, at, strip.last);
    clear_outside(x_row, strip.first, at, strip.last);
  }
};

// The sweep. Rows hold shift, inverse weight, gap, and a first r or NaN. Without the outputs o (`attended`), r is not
// moved. Writes output (rows, Dv): Σ p (ṡ' v + v̇), and statistics (4, rows): r, Σ p ṡ', Σ p c ṡ', Σ p c² ṡ'.
template <class T> class Tangent {
  using W = Wide<T>;
  static constexpr int64_t lanes = W::lanes, width = 2 * W::lanes;
  Attention& f;
  Keys<T> k, v, k_dot, v_dot;
  Arena<T> arena;
  Pushing<T> rows;
  Rows<T> S, U;
  std::vector<Place> where;
  std::vector<double> total;

 public:
  explicit Tangent(Attention& f)
      : f(f), k(f, f.key, f.D, true, false), v(f, f.value, f.Dv, false, true), k_dot(f, f.key_dot, f.D, true, false),
        v_dot(f, f.value_dot, f.Dv, false, true), rows(f, k, v, k_dot, v_dot), where(f.tile_rows) {
    const int64_t wide_q = panels<T>(f.D), wide_v = panels<T>(f.Dv), row = f.tile_keys + width;
    const int64_t by_q = f.tile_rows * wide_q, by_v = f.tile_rows * wide_v;
    for (int64_t room : {by_q, by_q, by_v, by_v, f.strip * row, f.strip * row, row, row}) arena.plan(room);
    for (auto* x : {&k, &v, &k_dot, &v_dot}) x->plan(arena);
    arena.open();
    rows.queries = {arena.piece(by_q), wide_q}, rows.moved = {arena.piece(by_q), wide_q};
    rows.means = {arena.piece(by_v), wide_v}, rows.summed = {arena.piece(by_v), wide_v};
    S = {arena.piece(f.strip * row), row}, U = {arena.piece(f.strip * row), row};
    rows.slope = arena.piece(row), rows.bend = arena.piece(row);
    for (auto* x : {&k, &v, &k_dot, &v_dot}) x->open(arena);
    rows.where = where.data();
    fill(rows.means.at, by_v / lanes, T(0));  // columns beyond Dv are read, and must hold numbers
  }
  void run() {
    const int64_t tiles = (f.rows_of_block() + f.tile_rows - 1) / f.tile_rows;
    for_units(f, [&](int64_t unit) { sweep(unit / tiles, unit % tiles * f.tile_rows); });
  }

 private:
  void sweep(int64_t block, int64_t r0) {
    const int64_t h = std::min(f.tile_rows, f.rows_of_block() - r0);
    const Span seen = place_rows(f, block, r0, h, where.data());
    for (auto* x : {&k, &v, &k_dot, &v_dot}) x->enter(block);
    copy_rows(rows.queries, f.query, f.D, where.data(), h);
    if (f.query_dot) copy_rows(rows.moved, f.query_dot, f.D, where.data(), h);
    if (f.attended) copy_rows(rows.means, f.attended, f.Dv, where.data(), h);
    const int64_t from = seen.first / f.tile_keys, to = (seen.last + f.tile_keys - 1) / f.tile_keys;
    rows.begin(S, U, h, block, from, to);
    for (int64_t r = 0; r < h; ++r) {
      const double near = f.known<T>(3, where[r].head * f.Q + where[r].query);
      if (near == near) rows.sums[r].settled = true, rows.sums[r].r = near;
    }
    bool flushed = false;
    for (int64_t tile = from; tile < to; ++tile) {
      rows.strips(h, block, tile, [&](const Strip& strip, int64_t s0) { rows.push(S, U, S, U, strip, s0); });
      if ((tile - from + 1) % FLUSH == 0) {
        total.resize(f.tile_rows * f.Dv);
        flush(rows.summed, h, f.Dv, total.data(), flushed);
        flushed = true;
      }
    }
    T* lines = reinterpret_cast<T*>(f.statistics);
    for (int64_t r = 0; r < h; ++r) {
      const int64_t row = where[r].head * f.Q + where[r].query;
      const Settled end = rows.settle(r);
      T* out = reinterpret_cast<T*>(f.output) + row * f.Dv;
      for (int64_t d = 0; d < f.Dv; ++d) {
        double x = rows.summed[r][d];
        if (flushed) x += total[r * f.Dv + d];
        if (f.attended) x -= end.left * rows.means[r][d];
        out[d] = T(x);
      }
      const double line[4] = {end.r, end.x0, end.x1, end.x2};
      for (int i = 0; i < 4; ++i) lines[i * f.all_rows() + row] = T(line[i]);
    }
  }
};
