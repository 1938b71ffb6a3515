// The compiled core without Python or torch: every sweep of attention on small random problems, held against
// plain loops in float64.
//
// It is linked with the library of a target, which it asks how wide its vectors are, and so shows that the
// target is right wherever a processor or an emulator runs it. One line for each check; the exit code is 0 if
// all are right. driver_switching.cpp does the same for filters.
#include <thread>

#include "attention_truth.hpp"

#define DECLARE(sweep) \
  extern "C" void exptilt_##sweep##_float32(Attention*); \
  extern "C" void exptilt_##sweep##_float64(Attention*);
DECLARE(forward) DECLARE(tangent) DECLARE(backward) DECLARE(mass) DECLARE(heaviest) DECLARE(join)
extern "C" int64_t exptilt_lanes_float32(), exptilt_lanes_float64(), exptilt_block_rows_float32();
#define PICK(sweep) (sizeof(T) == 4 ? exptilt_##sweep##_float32 : exptilt_##sweep##_float64)

namespace {

template <class N> char* bytes(std::vector<N>& x) { return reinterpret_cast<char*>(x.data()); }
template <class N> const char* bytes(const std::vector<N>& x) {
  return reinterpret_cast<const char*>(x.data());
}

// How work is cut up: the results may not depend on it.
struct Cut {
  bool thin;
  int64_t tile_rows, tile_keys, strip, slots, key_parts, row_parts, keys_outside, turns, threads;
};

template <class T> struct Case : Given<T> {
  using G = Given<T>;
  using G::p, G::q, G::k, G::v, G::out_bar, G::q_dot, G::k_dot, G::v_dot, G::bias, G::bias_dot, G::weight;
  using G::weight_dot, G::mask, G::mask_table, G::truth, G::output, G::output_dot, G::lines, G::each_key;
  const double tolerance = sizeof(T) == 4 ? 4e-6 : 4e-14;
  bool right = true;
  explicit Case(const Problem& p) : Given<T>(p) {}

  Attention frame(const Cut& cut) const {
    Attention f{};
    f.blocks = p.blocks(), f.group = p.group, f.Q = p.Q, f.K = p.K, f.D = p.D, f.Dv = p.Dv;
    f.causal = p.causal, f.window = p.window, f.scale = p.scale, f.cap = p.cap;
    f.thin = cut.thin, f.tile_rows = cut.tile_rows, f.tile_keys = cut.tile_keys, f.strip = cut.strip;
    f.shelf_slots = cut.slots, f.key_parts = f.row_parts = 1;
    f.query = q, f.key = k, f.value = v;
    if (p.bias) f.bias = {bias.bytes.data(), bias.table.data(), p.K, 1};
    if (p.weight) f.weight = {weight.bytes.data(), weight.table.data(), 0, 1};
    if (p.mask) f.mask = {mask.data(), mask_table.data(), p.K, 1};
    f.rows = bytes(lines);
    return f;
  }
  void push(Attention& f) const {
    f.query_dot = q_dot, f.key_dot = k_dot, f.value_dot = v_dot, f.attended = output;
    if (p.bias) f.bias_dot = {bias_dot.bytes.data(), bias_dot.table.data(), p.K, 1};
    if (p.weight) f.weight_dot = {weight_dot.bytes.data(), weight_dot.table.data(), 0, 1};
  }
  static void run(Attention& f, void (*sweep)(Attention*), int64_t units, int64_t threads) {
    f.next = 0, f.units = units, f.chunk = 1;
    std::vector<std::thread> others;
    for (int64_t i = 1; i < threads; ++i) others.emplace_back(sweep, &f);
    sweep(&f);
    for (auto& other : others) other.join();
  }
  void compare(const char* what, const std::vector<double>& expected, const std::vector<double>& found,
               double slack = 1) {
    const std::string name = std::string(p.name) + (sizeof(T) == 4 ? " float32" : " float64");
    right &= judge(name, what, expected, found, slack * tolerance);
  }
  template <class N> static std::vector<double> summed(const std::vector<N>& x, int64_t parts) {
    std::vector<double> sum(x.size() / parts);
    for (size_t i = 0; i < x.size(); ++i) sum[i % sum.size()] += double(x[i]);
    return sum;
  }
  // The first `dim` numbers of vectors that are rounded up to whole panels.
  static std::vector<double> cropped(const std::vector<double>& x, int64_t wide, int64_t dim) {
    std::vector<double> kept;
    for (size_t i = 0; i < x.size(); ++i)
      if (int64_t(i) % wide < dim) kept.push_back(x[i]);
    return kept;
  }
  template <class Body> std::vector<double> of_rows(Body body) const {
    std::vector<double> made;
    for (int64_t row = 0; row < p.rows(); ++row) made.push_back(body(truth[row]));
    return made;
  }
  int64_t row_tiles(const Cut& cut) const { return (p.group * p.Q + cut.tile_rows - 1) / cut.tile_rows; }
  int64_t key_tiles(const Cut& cut) const { return (p.K + cut.tile_keys - 1) / cut.tile_keys; }

  void forward(const Cut& cut) {
    const int64_t n = cut.key_parts, rows = p.rows();
    Attention frames[2] = {frame(cut), frame(cut)};
    std::vector<T> out(n * rows * p.Dv), stats(7 * n * rows), joined(rows * p.Dv), found(7 * rows);
    std::vector<int64_t> best(n * rows), first(rows);
    frames[0].key_parts = n;
    frames[0].output = bytes(out), frames[0].statistics = bytes(stats);
    frames[0].best = best.data();
    frames[1].output = bytes(joined), frames[1].statistics = bytes(found);
    frames[1].best = first.data();
    run(frames[0], PICK(forward), p.blocks() * row_tiles(cut) * n, cut.threads);
    PICK(join)(frames);
    compare("output", output.exact, summed(joined, 1));
    const char* names[] = {"log-normalizer", "entropy", "mean", "variance", "maximum", "weight", "gap"};
    for (int line = 0; line < 7; ++line) {
      const auto expected = of_rows([&](const Truth& t) {
        const double log_z = std::log(t.weight);
        const double all[] = {t.shift + log_z, log_z - t.gap, t.shift + t.gap, t.variance,
                              t.shift,         t.weight,      t.gap};
        return t.weight > 0 ? all[line] : line == 0 || line == 4 ? -INFINITY : 0;
      });
      compare(names[line], expected, {found.begin() + line * rows, found.begin() + (line + 1) * rows});
    }
    for (int64_t row = 0; row < rows; ++row)
      if (truth[row].weight > 0 && truth[row].p[first[row]] * truth[row].weight < 1 - tolerance)
        right = judge(p.name, "place of the maximum", {1}, {truth[row].p[first[row]] * truth[row].weight}, 0);
  }
  void mass(const Cut& cut) {
    Attention f = frame(cut);
    f.key_parts = cut.key_parts, f.row_parts = cut.row_parts, f.shelf_slots = 1;
    std::vector<double> columns(f.row_parts * p.heads() * p.K), expected(p.heads() * p.K);
    f.column_sum = columns.data();
    run(f, PICK(mass), p.blocks() * f.key_parts * f.row_parts, cut.threads);
    for (int64_t row = 0; row < p.rows(); ++row)
      each_key(row, [&](int64_t j, double w) { expected[row / p.Q * p.K + j] += w; });
    compare("mass", expected, summed(columns, f.row_parts));
  }
  // What leaving out each key changes, as norms or along a direction; heavy keys are left out of the sums.
  void worth(const Cut& cut, bool norms) {
    Attention f = frame(cut);
    f.key_parts = cut.key_parts, f.row_parts = cut.row_parts, f.shelf_slots = 1;
    const int64_t all = p.heads() * p.K, rows = p.rows();
    std::vector<double> columns(3 * f.row_parts * all), expected[3], found[3];
    std::vector<T> given(lines.begin(), lines.begin() + 3 * rows), squares(p.blocks() * p.K);
    std::vector<int64_t> skip(rows, -1), table;
    for (int64_t i = 0; i < p.blocks() * p.K; ++i)
      for (int64_t d = 0; d < p.Dv; ++d) squares[i] += T(v.exact[i * p.Dv + d] * v.exact[i * p.Dv + d]);
    for (int64_t head = 0; head < p.heads(); ++head) table.push_back(head / p.group * p.K);
    for (auto& x : expected) x.assign(all, 0);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t head = row / p.Q, i = row % p.Q;
      double own = 0;
      for (int64_t d = 0; d < p.Dv; ++d)
        own += output.at(head, i, d) * (norms ? output.at(head, i, d) : out_bar.at(head, i, d));
      given[2 * rows + row] = T(own);
      each_key(row, [&](int64_t j, double w) {
        if (w > 0.875) return void(skip[row] = j);
        double change = 0;
        for (int64_t d = 0; d < p.Dv; ++d) {
          const double apart = output.at(head, i, d) - v.at(head / p.group, j, d);
          change += apart * (norms ? apart : out_bar.at(head, i, d));
        }
        change = w / (1 - w) * (norms ? std::sqrt(change) : change);
        const int64_t at = head * p.K + j;
        expected[0][at] += change, expected[2][at] += std::log1p(-w);
        expected[1][at] = std::max(expected[1][at], std::fabs(change));
      });
    }
    f.attended = norms ? Operand(output) : Operand(out_bar);
    if (norms) f.weight_dot = {bytes(squares), table.data(), 0, 1};
    f.rows = bytes(given), f.column_sum = columns.data(), f.skip = skip.data();
    run(f, PICK(mass), p.blocks() * f.key_parts * f.row_parts, cut.threads);
    for (int64_t i = 0; i < 3; ++i) found[i].assign(all, 0);
    for (int64_t i = 0; i < int64_t(columns.size()); ++i) {
      double& to = found[i / (f.row_parts * all)][i % all];
      to = i / (f.row_parts * all) == 1 ? std::max(to, columns[i]) : to + columns[i];
    }
    compare(norms ? "worth" : "worth along a direction", expected[0], found[0], 30);
    compare("largest worth", expected[1], found[1], 30);
    compare("worth in G", expected[2], found[2], 10);
  }
  void heaviest(const Cut& cut) {
    Attention f = frame(cut);
    const int64_t top = f.top = std::min<int64_t>(3, p.K), rows = p.rows();
    std::vector<T> weights(rows * top), rest(rows);
    std::vector<int64_t> places(rows * top);
    f.output = bytes(weights), f.statistics = bytes(rest), f.best = places.data();
    run(f, PICK(heaviest), p.blocks() * row_tiles(cut), cut.threads);
    std::vector<double> expected, left, there;
    for (int64_t row = 0; row < rows; ++row) {
      std::vector<double> sorted = truth[row].p;
      std::sort(sorted.rbegin(), sorted.rend());
      expected.insert(expected.end(), sorted.begin(), sorted.begin() + top);
      left.push_back(0);
      for (int64_t j = top; j < p.K; ++j) left.back() += sorted[j];
      for (int64_t i = 0; i < top; ++i) {
        const int64_t place = places[row * top + i];
        there.push_back(place >= 0 && place < p.K ? truth[row].p[place] : place == -1 ? 0 : NAN);
      }
    }
    compare("heaviest weights", expected, summed(weights, 1), 2);
    compare("heaviest keys", expected, there, 2);
    compare("weight of the others", left, summed(rest, 1), 2);
  }
  void tangent(const Cut& cut) {
    Attention f = frame(cut);
    push(f);
    std::vector<T> out(p.rows() * p.Dv), sums(4 * p.rows()), given(lines.begin(), lines.begin() + 4 * p.rows());
    for (int64_t row = 0; row < p.rows(); ++row)  // a first r, or none
      given[3 * p.rows() + row] = row % 2 ? T(truth[row].pushed + 0.1) : std::numeric_limits<T>::quiet_NaN();
    f.rows = bytes(given);
    f.output = bytes(out), f.statistics = bytes(sums);
    run(f, PICK(tangent), p.blocks() * row_tiles(cut), cut.threads);
    compare("tangent", output_dot.exact, summed(out, 1), 4);
    std::vector<double> expected, r(sums.begin(), sums.begin() + p.rows());
    compare("tangent of G", of_rows([](const Truth& t) { return t.pushed; }), r, 4);
    for (int power = 1; power < 3; ++power)
      for (int64_t row = 0; row < p.rows(); ++row) {
        double sum = 0;
        const Truth& t = truth[row];
        each_key(row, [&](int64_t j, double w) {
          sum += w * std::pow(t.c[j], power) * (t.moved[j] - t.pushed);
        });
        expected.push_back(sum);
      }
    compare("tangent's sums", expected, {sums.begin() + 2 * p.rows(), sums.end()}, 10);
  }

  // order 1: gradient, 2: second.
  void backward(const Cut& cut, int order) {
    const int64_t rows = p.rows(), block_rows = p.group * p.Q, tiles = row_tiles(cut);
    const int64_t width = 2 * PICK(lanes)(), wide = (p.D + width - 1) / width * width;
    const int64_t wide_v = (p.Dv + width - 1) / width * width;
    Attention f = frame(cut);
    if (order > 1) push(f);
    f.cotangent = out_bar, f.attended = output, f.second = order > 1;
    f.need_query = f.need_key = f.need_value = 1;
    f.key_parts = cut.key_parts, f.row_parts = cut.row_parts;
    f.keys_outside = cut.keys_outside;
    if (f.keys_outside) f.shelf_slots = 1;
    std::vector<T> given = lines;
    const auto line = [&](int i, int64_t row) -> T& { return given[i * rows + row]; };
    f.attended_dot = output_dot;
    std::vector<double> e0(rows), e1(rows);
    for (int64_t row = 0; row < rows; ++row) {
      e0[row] = line(7, row), e1[row] = line(8, row);
      if (order == 2) line(6, row) = T(truth[row].pushed);
    }
    f.rows = bytes(given);
    std::vector<double> q_bar(rows * p.D), k_bar(p.blocks() * p.K * p.D), v_bar(p.blocks() * p.K * p.Dv);
    std::vector<double> columns(p.heads() * p.K), sums(rows), pairs(rows * p.K);
    for (int64_t row = 0; row < rows; ++row) {
      const int64_t head = row / p.Q, i = row % p.Q, block = head / p.group;
      const Truth& t = truth[row];
      const auto meet = [&](const Vectors3<T>& x, int64_t b, int64_t r) {
        double sum = 0;
        for (int64_t d = 0; d < p.Dv; ++d) sum += out_bar.at(head, i, d) * x.at(b, r, d);
        return sum;
      };
      each_key(row, [&](int64_t j, double w) {
        const double c = t.c[j], a1 = line(4, row), a2 = line(5, row), moved = t.moved[j] - t.pushed;
        const double y = meet(v, block, j) - meet(output, head, i) + line(3, row) + a1 * c + a2 * c * c;
        const double r = (y + a1 + 2 * a2 * c) * moved + meet(v_dot, block, j) - meet(output_dot, head, i) +
                         e0[row] + e1[row] * c;
        const double ds = w * (order > 1 ? r : y), M2 = order > 1 ? w * y * t.slope[j] : 0;
        const double M1 = ds * t.slope[j] + (order > 1 ? w * y * t.bend[j] * t.z_dot[j] : 0);
        columns[head * p.K + j] += ds, sums[row] += ds, pairs[row * p.K + j] += ds;
        for (int64_t d = 0; d < p.D; ++d) {
          q_bar[row * p.D + d] += p.scale * (M1 * k.at(block, j, d) + M2 * k_dot.at(block, j, d));
          k_bar[(block * p.K + j) * p.D + d] += p.scale * (M1 * q.at(head, i, d) + M2 * q_dot.at(head, i, d));
        }
        for (int64_t d = 0; d < p.Dv; ++d)
          v_bar[(block * p.K + j) * p.Dv + d] += w * (order > 1 ? moved : 1) * out_bar.at(head, i, d);
      });
    }
    const int64_t copies = f.row_parts * p.blocks() * p.K;
    std::vector<T> k_grad(copies * wide), v_grad(copies * wide_v);
    std::vector<T> q_grad(rows * p.D), bias_grad(rows * p.K);
    std::vector<double> column_sum(f.row_parts * p.heads() * p.K), row_sum(f.key_parts * rows);
    std::vector<int64_t> order_of, bounds{0};
    for (int64_t b = 0; b < p.blocks(); ++b) order_of.push_back(p.blocks() - 1 - b), bounds.push_back(b + 1);
    f.order = order_of.data(), f.bounds = bounds.data();
    f.key_grad = bytes(k_grad), f.value_grad = bytes(v_grad);
    f.column_sum = column_sum.data(), f.row_sum = row_sum.data();
    f.bias_grad = bytes(bias_grad);
    f.bias_grad_at = bias.table.data(), f.bias_grad_row = p.K;
    const int64_t turn = (tiles + cut.turns - 1) / cut.turns;
    for (f.row_tile_from = 0; f.row_tile_from < tiles; f.row_tile_from += turn) {  // rows in turns
      f.row_tile_to = std::min(f.row_tile_from + turn, tiles);
      const int64_t start = f.row_tile_from * cut.tile_rows;
      const int64_t swept = std::min(f.row_tile_to * cut.tile_rows, block_rows) - start;
      std::vector<T> some(f.key_parts * p.blocks() * swept * p.D);
      f.query_grad = bytes(some);
      run(f, PICK(backward), p.blocks() * f.key_parts * f.row_parts, cut.threads);
      const std::vector<double> whole = summed(some, f.key_parts);
      for (int64_t b = 0; b < p.blocks(); ++b)
        for (int64_t x = 0; x < swept * p.D; ++x)
          q_grad[(b * block_rows + start) * p.D + x] = T(whole[b * swept * p.D + x]);
    }
    const std::string kind = order == 1 ? "gradient" : "second";
    using Numbers = std::vector<double>;
    const auto held = [&](const char* by, const Numbers& expected, const Numbers& found) {
      compare((kind + " by " + by).c_str(), expected, found, order == 1 ? 4 : 20);
    };
    held("query", q_bar, summed(q_grad, 1));
    held("key", k_bar, cropped(summed(k_grad, f.row_parts), wide, p.D));
    held("value", v_bar, cropped(summed(v_grad, f.row_parts), std::max<int64_t>(wide_v, 1), p.Dv));
    held("log-weight", columns, summed(column_sum, f.row_parts));
    held("bias's rows", sums, summed(row_sum, f.key_parts));
    held("bias", pairs, summed(bias_grad, 1));
  }
};

template <class T> bool check(const Problem& p) {
  const int64_t pair = 4 * PICK(lanes)(), rows = p.group * p.Q, all = (p.K + pair - 1) / pair * pair;
  const int64_t some = exptilt_block_rows_float32(), most = (rows + some - 1) / some * some;
  const Cut cuts[] = {
      // thin, tile_rows, tile_keys, strip, slots, key_parts, row_parts, keys_outside, turns, threads
      {true, rows, all, rows, 1, 1, 1, 0, 1, 1},
      {true, rows, pair, rows, 1, 2, 1, 0, 1, 2},
      {false, some, pair, some, 2, 3, 1, 0, 2, 2},
      {false, some, pair, some, 1, 2, 2, 1, 1, 1},
      {false, most, all, some, 1, 1, 1, 0, 1, 1},
  };
  Case<T> made(p);
  for (const Cut& cut : cuts) {
    made.forward(cut), made.mass(cut), made.worth(cut, true), made.worth(cut, false), made.heaviest(cut);
    made.tangent(cut), made.backward(cut, 1), made.backward(cut, 2);
  }
  return made.right;
}

}  // namespace

bool switching_is_right();

int main() {
  bool right = true;
  const Problem problems[] = {
      // items, key heads, group, Q, K, D, Dv, causal, window, kind, scale, cap, bias, mask, weight
      {"plain", 1, 2, 2, 11, 37, 20, 9, 0, -1, NATIVE, 0.3, 0, false, false, false},
      {"causal with bias", 2, 1, 3, 14, 29, 7, 17, 1, -1, NATIVE, 0.4, 0, true, false, false},
      {"window and weight", 1, 2, 1, 25, 61, 16, 8, 0, 9, NATIVE, 0.3, 0, false, false, true},
      {"softcap and mask", 1, 1, 2, 13, 44, 9, 5, 1, 20, NATIVE, 0.8, 2.5, true, true, true},
      {"more queries than keys", 1, 1, 1, 40, 11, 3, 1, 1, -1, NATIVE, 0.5, 0, false, true, false},
      {"one query", 2, 1, 1, 1, 130, 65, 33, 1, -1, NATIVE, 0.1, 0, false, false, true},
      {"no values", 1, 1, 2, 9, 20, 1, 0, 0, -1, NATIVE, 1.0, 3.0, true, false, false},
      {"many keys", 1, 1, 1, 2, 1100, 4, 3, 0, -1, NATIVE, 1.0, 0, false, false, false},
      {"bfloat16", 1, 2, 2, 10, 35, 19, 6, 1, -1, BFLOAT16, 0.3, 0, true, false, false},
      {"float16", 1, 1, 4, 7, 40, 24, 21, 0, 12, FLOAT16, 0.3, 1.5, false, true, true},
  };
  for (const Problem& p : problems) {
    right &= check<float>(p);
    if (p.kind == NATIVE) right &= check<double>(p);
  }
  right &= switching_is_right();
  std::printf(right ? "all right\n" : "something is WRONG\n");
  return right ? 0 : 1;
}
