// A problem of attention, and what the formulas of csrc say of it: plain loops in float64.
//
//     s_j = cap tanh(z_j / cap) + bias + log-weight,   z_j = scale <q, k_j>
//     p_j = e^{s_j} / Σ e^s,   c = s − Σ p s
//
// Inputs are rounded to the kind of number that the kernels read first, so the loops see the same numbers.
#pragma once
#include "../../csrc/attention/attention.hpp"
#include "check.hpp"

struct Problem {
  const char* name;
  int64_t items, key_heads, group, Q, K, D, Dv;
  int64_t causal, window, kind;
  double scale, cap;
  bool bias, mask, weight;
  int64_t heads() const { return items * key_heads * group; }
  int64_t blocks() const { return items * key_heads; }
  int64_t rows() const { return heads() * Q; }
};
// A number of some kind: its bytes, and the number that they mean.
template <class T> double rounded(double x, int64_t kind, char* to) {
  if (kind == NATIVE) {
    const T narrow = T(x);
    std::memcpy(to, &narrow, sizeof narrow);
    return narrow;
  }
  uint16_t half;
  double value;
  if (kind == BFLOAT16) {
    const float narrow = float(x);
    uint32_t bits;
    std::memcpy(&bits, &narrow, 4);
    half = uint16_t(bits >> 16), bits &= 0xFFFF0000u;
    float kept;
    std::memcpy(&kept, &bits, 4);
    value = kept;
  } else {  // float16: 11 bits of a fraction, or whole numbers of 2^-24
    int power;
    std::frexp(x, &power);
    const int low = std::max(power - 11, -24);
    const auto steps = uint16_t(std::nearbyint(std::ldexp(std::fabs(x), -low)));
    half = low == -24 ? steps : uint16_t((uint16_t(low + 24) << 10) + steps);
    if (x < 0) half |= 0x8000;
    value = std::copysign(std::ldexp(double(steps), low), x);
  }
  std::memcpy(to, &half, 2);
  return value;
}

// Vectors (blocks, length, dim) as a kernel reads them, with some room between them, and as float64.
template <class T> struct Vectors3 {
  int64_t length, dim, step, kind;
  std::vector<double> exact;
  std::vector<char> bytes;
  std::vector<int64_t> table;
  Vectors3(int64_t blocks, int64_t length, int64_t dim, int64_t kind, double size, int64_t gap)
      : length(length), dim(dim), step(dim + gap), kind(kind), exact(blocks * length * dim) {
    const int64_t each = bytes_of<T>(kind);
    bytes.resize(blocks * length * step * each);
    for (int64_t b = 0; b < blocks; ++b) {
      table.push_back(b * length * step);
      for (int64_t i = 0; i < length * dim; ++i)
        exact[b * length * dim + i] = rounded<T>(
            size * normal(), kind, bytes.data() + (table[b] + i / dim * step + i % dim) * each);
    }
    bytes.resize(bytes.size() - std::min<int64_t>(bytes.size(), gap * each));  // nothing after the last
  }
  double at(int64_t block, int64_t row, int64_t d) const { return exact[(block * length + row) * dim + d]; }
  // A kernel takes what is absent by an address of 0; what has no numbers is there all the same.
  operator Operand() const { return {bytes.empty() ? "" : bytes.data(), table.data(), step, kind}; }
};

// What the formulas say of one query and all keys; hidden keys have p = 0.
struct Truth {
  std::vector<double> p, c, slope, bend, moved, z_dot;  // moved: ṡ
  double shift = 0, weight = 0, gap = 0, variance = 0, pushed = 0;
};

// The tensors of a problem, and the truth of each query.
template <class T> struct Given {
  const Problem p;
  Vectors3<T> q, k, v, out_bar, q_dot, k_dot, v_dot, bias, bias_dot, weight, weight_dot;
  std::vector<char> mask;
  std::vector<int64_t> mask_table;
  std::vector<Truth> truth;
  Vectors3<T> output, output_dot;
  std::vector<T> lines;  // (9, rows)

  explicit Given(const Problem& p)
      : p(p), q(p.heads(), p.Q, p.D, p.kind, 1, 1), k(p.blocks(), p.K, p.D, p.kind, 1, 3),
        v(p.blocks(), p.K, p.Dv, p.kind, 1, 0), out_bar(p.heads(), p.Q, p.Dv, p.kind, 1, 0),
        q_dot(p.heads(), p.Q, p.D, p.kind, 1, 2), k_dot(p.blocks(), p.K, p.D, p.kind, 1, 0),
        v_dot(p.blocks(), p.K, p.Dv, p.kind, 1, 1), bias(p.heads(), p.Q, p.K, NATIVE, 1, 0),
        bias_dot(p.heads(), p.Q, p.K, NATIVE, 1, 0), weight(p.heads(), 1, p.K, NATIVE, 1, 0),
        weight_dot(p.heads(), 1, p.K, NATIVE, 1, 0), output(p.heads(), p.Q, p.Dv, NATIVE, 0, 0),
        output_dot(p.heads(), p.Q, p.Dv, NATIVE, 0, 0) {
    for (int64_t i = 0; i < p.Q * p.K; ++i) mask.push_back(uniform() < 0.7);
    mask_table.assign(p.heads(), 0);
    for (int64_t row = 0; row < p.rows(); ++row) truth.push_back(truth_of(row));
    for (int64_t i = 0; i < 9 * p.rows(); ++i) lines.push_back(T(normal()));
    for (int64_t row = 0; row < p.rows(); ++row) {
      const Truth& t = truth[row];
      const double known[3] = {t.shift, t.weight > 0 ? 1 / t.weight : 0, t.gap};
      for (int i = 0; i < 3; ++i) lines[i * p.rows() + row] = T(known[i]);
      for (int64_t d = 0; d < p.Dv; ++d) {
        double o = 0, o_dot = 0;
        each_key(row, [&](int64_t j, double w) {
          const double x = v.at(row / p.Q / p.group, j, d);
          o += w * x, o_dot += w * ((t.moved[j] - t.pushed) * x + v_dot.at(row / p.Q / p.group, j, d));
        });
        const int64_t at = row * p.Dv + d;
        output.exact[at] = rounded<T>(o, NATIVE, output.bytes.data() + at * sizeof(T));
        output_dot.exact[at] = rounded<T>(o_dot, NATIVE, output_dot.bytes.data() + at * sizeof(T));
      }
    }
  }
  template <class Body> void each_key(int64_t row, Body body) const {
    for (int64_t j = 0; j < p.K; ++j)
      if (truth[row].p[j] > 0) body(j, truth[row].p[j]);
  }
  bool sees(int64_t i, int64_t j) const {
    const int64_t own = i + p.K - p.Q;
    if (p.causal && j > own) return false;
    if (p.window >= 0 && (j <= own - p.window || j >= own + p.window)) return false;
    return !p.mask || mask[i * p.K + j];
  }
  Truth truth_of(int64_t row) const {
    const int64_t head = row / p.Q, i = row % p.Q, block = head / p.group;
    Truth t;
    std::vector<double> s(p.K, -INFINITY);
    for (auto* x : {&t.p, &t.c, &t.slope, &t.bend, &t.moved, &t.z_dot}) x->assign(p.K, 0);
    double top = -INFINITY, mean = 0;
    for (int64_t j = 0; j < p.K; ++j) {
      double z = 0;
      for (int64_t d = 0; d < p.D; ++d) {
        const double x = q.at(head, i, d), y = k.at(block, j, d);
        z += p.scale * x * y;
        t.z_dot[j] += p.scale * (q_dot.at(head, i, d) * y + x * k_dot.at(block, j, d));
      }
      const double bent = p.cap > 0 ? std::tanh(z / p.cap) : 0;
      t.slope[j] = 1 - bent * bent;
      t.bend[j] = p.cap > 0 ? -2 * bent * t.slope[j] / p.cap : 0;
      t.moved[j] = t.slope[j] * t.z_dot[j];
      if (p.bias) t.moved[j] += bias_dot.at(head, i, j);
      if (p.weight) t.moved[j] += weight_dot.at(head, 0, j);
      if (!sees(i, j)) continue;
      s[j] = p.cap > 0 ? p.cap * bent : z;
      if (p.bias) s[j] += bias.at(head, i, j);
      if (p.weight) s[j] += weight.at(head, 0, j);
      top = std::max(top, s[j]);
    }
    if (top == -INFINITY) return t;
    t.shift = T(top);
    for (int64_t j = 0; j < p.K; ++j) t.weight += std::exp(s[j] - t.shift);
    for (int64_t j = 0; j < p.K; ++j) t.p[j] = std::exp(s[j] - t.shift) / t.weight;
    for (int64_t j = 0; j < p.K; ++j)
      if (t.p[j] > 0) mean += t.p[j] * s[j], t.pushed += t.p[j] * t.moved[j];
    for (int64_t j = 0; j < p.K; ++j)
      if (t.p[j] > 0) t.c[j] = s[j] - mean, t.variance += t.p[j] * t.c[j] * t.c[j];
    t.gap = mean - t.shift;
    return t;
  }
};
