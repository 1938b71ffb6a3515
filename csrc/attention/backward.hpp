// The backward sweeps: a cotangent carried back to the inputs (gradient), and the gradient of a forward derivative
// (second).
//
// Every derivative of every result by a score is p_ij times a polynomial in the centred score c = s − mean
// (derivatives/rules.py):
//
//     ds_ij = p_ij t_ij,    t_ij = <ō_i, v_j> + a0_i + a1_i c_ij + a2_i c_ij²,
//
// so each query gives the sweep only the shift, the inverse weight and the gap, from which p and c follow, and a0,
// a1, a2. With the slope σ' of the softcap,
//
//     q̄_i = scale Σ_j ds σ' k_j,    k̄_j = scale Σ_i ds σ' q_i,    v̄_j = Σ_i p_ij ō_i,
//
// and log_weight and bias get the column and row sums of ds.
//
// For **second** derivatives let Φ = Σ_i <ō_i, ȯ_i> + Ḡ_i Ġ_i + … be a cotangent applied to a tangent. Its derivative
// by a score is p_ij r_ij,
//
//     r = (t + a1 + 2 a2 c) ṡ' + <ō, v̇_j> + e0 + e1 c,      ṡ' = ṡ − Ġ,
//
// and Φ depends on q, k through ṡ too. With slope σ' and curvature σ'' of the softcap (0 without one),
//
//     M1 = p (r σ' + t σ'' ż),   M2 = p t σ',
//     q̂ = scale (M1 k + M2 k̇),   k̂ = scale (M1ᵀ q + M2ᵀ q̇),   v̂ = (p ṡ')ᵀ ō,
//
// and log_weight and bias get the column and row sums of p r. Ġ, e0 and e1 are given for each row.
//
// A unit is an owner (the blocks that add to one place of the bias's gradient, else one block), a part of its keys
// and a part of its rows. k̄ and v̄ have a copy for each part of the rows; q̄ and the row sums have one for each part
// of the keys. Keys are cut into parts if there are enough of them, and rows are swept in turns (backends/cpu.py),
// so that the copies stay small.
#pragma once
#include "attention/mass.hpp"
#include "attention/tangent.hpp"

template <class T> class Backward {
  using W = Wide<T>;
  using V = typename W::V;
  static constexpr int64_t lanes = W::lanes, width = 2 * W::lanes;
  static constexpr int64_t KEY_STRIP = 48;  // keys for which `to_keys` looks up, together, the rows that see them
  enum Line { SHIFT, INVERSE, GAP, A0, A1, A2, PUSHED, E0, E1 };

  Attention& f;
  const bool second;
  Keys<T> k, v, k_dot, v_dot;
  Arena<T> arena;
  Rows<T> S, B, U, R;  // of pairs: scores, <ō,v>, ṡ, <ō,v̇>; then p (or p ṡ'), ds (or M2), M1
  Rows<T> queries, moved, outs, summed;
  T *packed, *packed_dot, *packed_out, *slope, *bend, *columns, *line;
  std::vector<Place> where;
  struct Late {  // of a row: <ō,o>, <ō,ȯ>, Ġ, e0, e1
    T met, met_dot, pushed, e0, e1;
  };
  std::vector<Late> late;

 public:
  explicit Backward(Attention& f)
      : f(f), second(f.second), k(f, f.key, f.D, true, f.need_query), v(f, f.value, f.Dv, true, false),
        k_dot(f, f.key_dot, f.D, true, f.need_query), v_dot(f, f.value_dot, f.Dv, true, false),
        where(f.tile_rows), late(f.tile_rows) {
    const int64_t wide_q = panels<T>(f.D), wide_v = panels<T>(f.Dv), row = f.tile_keys + width;
    const int64_t by_q = f.tile_rows * wide_q, by_v = f.tile_rows * wide_v, cells = f.tile_rows * row;
    const int64_t by_moved = f.query_dot ? by_q : 0, more = second ? cells : 0;
    const int64_t rooms[] = {cells, cells, more,     more, by_q, by_moved, by_v, by_q,
                             by_q,  by_moved, by_v, row,  row,  row,      wide_v + width};
    for (int64_t room : rooms) arena.plan(room);
    for (auto* x : {&k, &v, &k_dot, &v_dot}) x->plan(arena);
    arena.open();
    int next = 0;
    auto piece = [&] { return arena.piece(rooms[next++]); };
    S = {piece(), row}, B = {piece(), row}, U = {piece(), row}, R = {piece(), row};
    queries = {piece(), wide_q}, moved = {piece(), wide_q}, outs = {piece(), wide_v}, summed = {piece(), wide_q};
    packed = piece(), packed_dot = piece(), packed_out = piece();
    slope = piece(), bend = piece(), columns = piece(), line = piece();
    for (auto* x : {&k, &v, &k_dot, &v_dot}) x->open(arena);
    fill(columns, row / lanes, T(0));
  }

  // Rows hold shift, inverse, gap, a0, a1, a2, then Ġ, e0, e1 (second). Adds to query_grad
  // (key_parts, blocks, rows from row_tile_from to row_tile_to, D), key_grad (row_parts, blocks, K, D rounded up to
  // whole panels), value_grad likewise, column_sum (row_parts, heads, K), row_sum (key_parts, rows) and bias_grad.
  // The caller fills all of them with 0, and leaves out (address 0) those it does not want.
  void run() {
    const int64_t row_tiles = f.row_tile_to - f.row_tile_from;
    for_units(f, [&](int64_t unit) {
      const int64_t key_part = unit % f.key_parts, rest = unit / f.key_parts;
      const int64_t row_part = rest % f.row_parts, owner = rest / f.row_parts;
      const int64_t row_from = f.row_tile_from + row_tiles * row_part / f.row_parts;
      const int64_t row_to = f.row_tile_from + row_tiles * (row_part + 1) / f.row_parts;
      Span seen{f.K, 0};  // the keys that these rows see are divided among the key parts
      for (int64_t t = row_from; t < row_to; ++t) {
        const Span some = place_rows(f, 0, t * f.tile_rows, rows_in(t), where.data());
        if (some.last > some.first) seen = {std::min(seen.first, some.first), std::max(seen.last, some.last)};
      }
      const int64_t begin = seen.first / f.tile_keys;
      const int64_t tiles = std::max<int64_t>(0, (seen.last + f.tile_keys - 1) / f.tile_keys - begin);
      const int64_t from = begin + tiles * key_part / f.key_parts, to = begin + tiles * (key_part + 1) / f.key_parts;
      const int64_t stride = f.keys_outside ? 1 : std::max<int64_t>(to - from, 1);
      for (int64_t turn = f.bounds[owner]; turn < f.bounds[owner + 1]; ++turn) {
        const int64_t block = f.order[turn];
        for (auto* x : {&k, &v, &k_dot, &v_dot}) x->enter(block);
        for (int64_t some = from; some < to; some += stride)
          for (int64_t t = row_from; t < row_to; ++t) sweep(block, t, some, some + stride, key_part, row_part);
      }
    });
  }

 private:
  int64_t rows_in(int64_t tile) const { return std::min(f.tile_rows, f.rows_of_block() - tile * f.tile_rows); }

  // A tile of rows against the tiles from..to of keys.
  void sweep(int64_t block, int64_t row_tile, int64_t from, int64_t to, int64_t key_part, int64_t row_part) {
    const int64_t h = rows_in(row_tile), r0 = row_tile * f.tile_rows;
    const Span seen = place_rows(f, block, r0, h, where.data());
    from = std::max(from, seen.first / f.tile_keys);
    to = std::min(to, (seen.last + f.tile_keys - 1) / f.tile_keys);
    if (from >= to) return;
    bring_rows(h);
    for (int64_t tile = from; tile < to; ++tile) sweep_tile(h, tile, block, key_part, row_part);
    if (!f.need_query) return;
    const int64_t begin = f.row_tile_from * f.tile_rows;
    const int64_t swept = std::min(f.row_tile_to * f.tile_rows, f.rows_of_block()) - begin;
    T* to_grad = reinterpret_cast<T*>(f.query_grad) + ((key_part * f.blocks + block) * swept + r0 - begin) * f.D;
    for (int64_t r = 0; r < h; ++r)
      for (int64_t d = 0; d < f.D; ++d) to_grad[r * f.D + d] += summed[r][d] * T(f.scale);
  }

  // Copies the vectors of h rows, packs those that gradients of keys and values need, and takes <ō,o> of each row.
  void bring_rows(int64_t h) {
    const int64_t panel = f.tile_rows * width;
    copy_rows(queries, f.query, f.D, where.data(), h);
    if (f.need_key) pack_rows<T>(packed, panel, queries.at, queries.step, h, f.D);
    if (f.query_dot) {
      copy_rows(moved, f.query_dot, f.D, where.data(), h);
      if (f.need_key) pack_rows<T>(packed_dot, panel, moved.at, moved.step, h, f.D);
    }
    if (f.Dv > 0) {
      copy_rows(outs, f.cotangent, f.Dv, where.data(), h);
      if (f.need_value) pack_rows<T>(packed_out, panel, outs.at, outs.step, h, f.Dv);
      for (int64_t r = 0; r < h; ++r) late[r].met = meet(f.attended, r);
    }
    if (second)
      for (int64_t r = 0; r < h; ++r) {
        const int64_t row = where[r].head * f.Q + where[r].query;
        late[r].met_dot = f.Dv > 0 ? meet(f.attended_dot, r) : T(0);
        late[r].pushed = f.known<T>(PUSHED, row), late[r].e0 = f.known<T>(E0, row), late[r].e1 = f.known<T>(E1, row);
      }
    if (f.need_query) fill(summed.at, h * summed.step / lanes, T(0));
  }
  // <ō, x> of row r, x its vector in an operand; has the same bits as <ō, v_j> if v_j is x.
  T meet(const Operand& operand, int64_t r) {
    const int64_t at = operand.table[where[r].head] + where[r].query * operand.step;
    copy_row(operand.kind, line, operand.at + at * bytes_of<T>(operand.kind), f.Dv);
    if (f.thin) {
      thin_dots<T>(line + panels<T>(f.Dv), 0, outs[r], 0, 1, line, f.Dv, 1, f.Dv, T(1), false);
      return line[panels<T>(f.Dv)];
    }
    T whole = 0;  // in the same chains of multiply-adds as `long_product`
    for (int64_t start = 0; start < f.Dv; start += CHAIN) {
      T total = 0;
      for (int64_t d = start; d < std::min(start + CHAIN, f.Dv); ++d) total += outs[r][d] * line[d];
      whole = start == 0 ? total : whole + total;
    }
    return whole;
  }

  // One tile of rows against one tile of keys.
  void sweep_tile(int64_t h, int64_t tile, int64_t block, int64_t key_part, int64_t row_part) {
    const Rows<T> first = second ? U : B;
    for (int64_t s0 = 0; s0 < h; s0 += f.strip) {
      const Strip strip = strip_of(f, where.data(), s0, std::min(h, s0 + f.strip), block, tile, width);
      if (strip) products(s0, strip);
      for (int64_t r = s0; r < s0 + strip.rows; ++r) {
        const Vectors at = derive(S[r], B[r], second ? U[r] : B[r], R[r], r, strip, key_part);
        // every sixteen rows, columns are added to float64 sums, so that a long column loses no digits
        const bool ends = r % 16 == 15 || r == h - 1 || where[r + 1].head != where[r].head;
        if (f.column_sum && ends) put_columns(f, columns, row_part, where[r].head, tile * f.tile_keys);
        const int64_t keys = std::min(f.tile_keys, f.K - tile * f.tile_keys);
        clear_outside(S[r], 0, at, keys), clear_outside(B[r], 0, at, keys);
        if (second) clear_outside(U[r], 0, at, keys);
      }
      if (!f.need_query || !strip) continue;
      k.gather(summed.from(s0), first.from(s0), strip);
      if (second && f.key_dot) k_dot.gather(summed.from(s0), B.from(s0), strip);
    }
    const int64_t key = (row_part * f.blocks + block) * f.K + tile * f.tile_keys;
    if (f.need_value) to_keys({grad(f.value_grad, key, outs.step), outs.step}, S, packed_out, f.Dv, T(1), h, tile);
    if (!f.need_key) return;
    const Rows<T> target{grad(f.key_grad, key, queries.step), queries.step};
    to_keys(target, first, packed, f.D, T(f.scale), h, tile);
    if (second && f.query_dot) to_keys(target, B, packed_dot, f.D, T(f.scale), h, tile);
  }
  static T* grad(char* at, int64_t key, int64_t step) { return reinterpret_cast<T*>(at) + key * step; }

  // Products of a strip's rows s0 … with the keys: S = scale <q,k>, B = <ō,v>, U = ż, R = <ō,v̇>.
  void products(int64_t s0, const Strip& strip) {
    const Rows<T> q = queries.from(s0), o = outs.from(s0);
    k.against(S.from(s0), q, strip, T(f.scale), false);
    if (f.Dv > 0) v.against(B.from(s0), o, strip, T(1), false);
    if (f.query_dot) k.against(U.from(s0), moved.from(s0), strip, T(f.scale), false);
    if (f.key_dot) k_dot.against(U.from(s0), q, strip, T(f.scale), bool(f.query_dot));
    if (f.value_dot) v_dot.against(R.from(s0), o, strip, T(1), false);
  }

  // From products to derivatives: s → p (or p ṡ'), b → ds (or M2), u → M1; adds to row and column sums. Returns the
  // part of the row that is not 0.
  Vectors derive(T* s, T* b, T* u, T* x, int64_t r, const Strip& strip, int64_t key_part) {
    const Place& place = where[r];
    const Span seen = seen_of(f, place, strip);
    if (seen.last <= seen.first) return {0, 0};
    const int64_t row = place.head * f.Q + place.query, j0 = strip.tile * f.tile_keys;
    const Vectors at = to_scores<T>(f, s, slope, bend, place, j0, seen);
    const int64_t l = at.left, n = at.count;
    Late& own = late[r];
    if (f.Dv == 0) fill(b + l, n, T(0)), own.met = own.met_dot = 0;
    const bool all_here = place.lo >= j0 && place.hi <= j0 + f.tile_keys;
    const bool alone = f.Dv > 0 && all_here;
    const T shift = f.known<T>(SHIFT, row), inverse = f.known<T>(INVERSE, row);
    // if this tile holds all keys of the row, <ō,o> is summed from the same terms that it is subtracted from
    const T met = alone ? mean_of(s + l, b + l, n, shift, inverse) : own.met;
    T* ds = second ? u : b;
    T found;
    if (second) {
      if (!f.value_dot) fill(x + l, n, T(0));
      if (!f.query_dot && !f.key_dot) fill(u + l, n, T(0));
      if (f.cap > 0) times_row(bend + l, u + l, n);
      push_scores<T>(f, u, slope, at, place, j0, seen);
      const T met_dot = alone ? mean_dot_of(s + l, b + l, u + l, x + l, n, shift, inverse, own.pushed) : own.met_dot;
      found = second_row(s + l, b + l, u + l, x + l, n, row, met, met_dot, own);
    } else {
      found = gradient_row(s + l, b + l, n, row, met);
    }
    if (f.row_sum) f.row_sum[key_part * f.all_rows() + row] += found;
    if (f.column_sum) add_row(columns + l, ds + l, n);
    if (f.bias_grad) {
      const int64_t to = f.bias_grad_at[place.head] + place.query * f.bias_grad_row + j0 + seen.first;
      add_numbers(reinterpret_cast<T*>(f.bias_grad) + to, ds + seen.first, 1, seen.last - seen.first);
    }
    if (f.cap > 0) {
      if (second) through_softcap(u + l, b + l, n, l);
      through_slope(b + l, n, l);
    }
    return at;
  }

  // Σ p t.
  static T mean_of(const T* s, const T* t, int64_t count, T shift, T inverse) {
    V sum[2] = {};
    by_twos(count, [&](int64_t j, auto i) {
      const V p = W::exp(W::load(s + j * lanes) - shift) * inverse;
      sum[i] += p != 0 ? p * W::load(t + j * lanes) : V{};
    });
    return W::sum(sum[0] + sum[1]);
  }
  // Σ p (ṡ' t + x).
  static T mean_dot_of(const T* s, const T* t, const T* u, const T* x, int64_t count, T shift, T inverse, T pushed) {
    V sum[2] = {};
    by_twos(count, [&](int64_t j, auto i) {
      const int64_t at = j * lanes;
      const V p = W::exp(W::load(s + at) - shift) * inverse;
      sum[i] += p != 0 ? p * ((W::load(u + at) - pushed) * W::load(t + at) + W::load(x + at)) : V{};
    });
    return W::sum(sum[0] + sum[1]);
  }
  // s → p, b → ds; returns the sum of ds.
  T gradient_row(T* s, T* b, int64_t count, int64_t row, T met) {
    const T shift = f.known<T>(SHIFT, row), inverse = f.known<T>(INVERSE, row), gap = f.known<T>(GAP, row);
    const T a0 = f.known<T>(A0, row), a1 = f.known<T>(A1, row), a2 = f.known<T>(A2, row);
    V sum[2] = {};
    by_twos(count, [&](int64_t j, auto i) {
      const V d = W::load(s + j * lanes) - shift, p = W::exp(d) * inverse;
      const V c = W::at_least(d - gap, W::all(T(FAR)));
      const V ds = p != 0 ? p * (W::load(b + j * lanes) - met + a0 + c * (c * a2 + a1)) : V{};
      W::store(s + j * lanes, p), W::store(b + j * lanes, ds);
      sum[i] += ds;
    });
    return W::sum(sum[0] + sum[1]);
  }
  // s → p ṡ', b → p t, u: ṡ → p r; x holds <ō,v̇>. Returns the sum of p r.
  T second_row(T* s, T* b, T* u, const T* x, int64_t count, int64_t row, T met, T met_dot, const Late& own) {
    const T shift = f.known<T>(SHIFT, row), inverse = f.known<T>(INVERSE, row), gap = f.known<T>(GAP, row);
    const T a0 = f.known<T>(A0, row), a1 = f.known<T>(A1, row), a2 = f.known<T>(A2, row);
    V sum[2] = {};
    by_twos(count, [&](int64_t j, auto i) {
      const int64_t at = j * lanes;
      const V d = W::load(s + at) - shift, p = W::exp(d) * inverse, c = W::at_least(d - gap, W::all(T(FAR)));
      const auto alive = p != 0;
      const V y = W::load(b + at) - met + a0 + c * (c * a2 + a1), moved = W::load(u + at) - own.pushed;
      const V r = (y + a1 + c * (a2 + a2)) * moved + (W::load(x + at) - met_dot) + own.e0 + c * own.e1;
      const V ds = alive ? p * r : V{};
      W::store(s + at, alive ? p * moved : V{}), W::store(b + at, alive ? p * y : V{}), W::store(u + at, ds);
      sum[i] += ds;
    });
    return W::sum(sum[0] + sum[1]);
  }
  // b → b σ'; 0 stays 0, because the slope at a hidden key may be NaN.
  void through_slope(T* b, int64_t count, int64_t left) {
    for (int64_t j = 0; j < count * lanes; j += lanes) {
      const V t = W::load(b + j);
      W::store(b + j, t != 0 ? t * W::load(slope + left + j) : V{});
    }
  }
  // u → u σ' + b σ'' ż; bend holds σ'' ż.
  void through_softcap(T* u, T* b, int64_t count, int64_t left) {
    through_slope(u, count, left);
    for (int64_t j = 0; j < count * lanes; j += lanes) {
      const V t = W::load(b + j);
      W::store(u + j, W::load(u + j) + (t != 0 ? t * W::load(bend + left + j) : V{}));
    }
  }

  // target[j] += alpha Σ_r M[r, j] packed[r], for the keys j of a tile, by the rows that see them.
  void to_keys(Rows<T> target, Rows<T> M, const T* packed, int64_t dim, T alpha, int64_t h, int64_t tile) {
    const int64_t j0 = tile * f.tile_keys, w = std::min(f.tile_keys, f.K - j0);
    for (int64_t c0 = 0; c0 < w; c0 += KEY_STRIP) {
      const int64_t c1 = std::min(w, c0 + KEY_STRIP);
      const Span rows = seeing(h, j0 + c0, j0 + c1);
      for (int64_t start = rows.first; start < rows.last; start += CHAIN)
        product<T, true>(target[c0], target.step, M[start] + c0, M.step, packed + start * width, f.tile_rows * width,
                         c1 - c0, dim, std::min(CHAIN, rows.last - start), alpha, true);
    }
  }
  // The rows that see some key first..last; all rows if they are of several heads.
  Span seeing(int64_t h, int64_t first, int64_t last) const {
    if (where[0].head != where[h - 1].head) return {0, h};
    Span rows{h, 0};
    for (int64_t r = 0; r < h; ++r)
      if (where[r].lo < last && where[r].hi > first) rows = {std::min(rows.first, r), r + 1};
    return rows;
  }
};
