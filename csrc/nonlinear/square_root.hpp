// Filter steps of Gaussian laws through functions, in square-root form: a covariance is kept as a factor, P = L L'.
//
// A Gaussian x, L goes through a function g as deviations X of x and Y of g(x), so that X X' = P and, about
// the mean of g(x), Y Y' is its covariance and X Y' the cross-covariance:
//
//     extended    Y = G L, X = L, G the Jacobian at x; the mean is g(x)
//     unscented   columns √w (g(x_c) − mean) and √w (x_c − x) for the 2n + 1 points x ± s L_k and x, with
//                 w = 1/(2 s²); the model gives the weights of x, in the covariance and in the mean
//
// Each step makes a matrix [A | B] triangular by reflections, A A' + B B' = L L', and subtracts no covariances:
//
//     predict     [Y | Q^½]
//     update      S^½ from [Y | R^½],   K = X Y' S⁻¹,   [X − K Y | K R^½]
//     collapse    [√w_i L_i | √w_i δ_i],   δ_i = x_i − Σ w_i x_i
//     pull_back   J = X Y' (Y Y' + Q)⁻¹,   [X − J Y | J Q^½ | J L̂],   x̂, L̂ the law of the step after
//
// Differences of angles are taken around the circle, and their means are circular. A law is x (n), L (n·n).
// Rows of the matrices here are padded with zeros to whole vectors, and worked on a vector at a time.
#pragma once
#include "switching/gaussian.hpp"
#include "nonlinear/tape.hpp"

#define NONLINEAR_MODES_FIELDS(whole, real, place)                                                        \
  whole(modes) whole(states) whole(outputs) whole(unscented)                                              \
  place(const Tapes, tapes)                                                                               \
  place(const int64_t, function)          /* (M, 2): number of dynamics and observation in the tapes */   \
  place(const double, log_transition)     /* (M, M) */                                                    \
  place(const double, process_root)       /* (M, n, n) */                                                 \
  place(const double, observation_root)   /* (M, m, m) */                                                 \
  place(const int64_t, angle)             /* (n,), 1 for angles */                                        \
  place(const int64_t, observation_angle) /* (m,) */                                                      \
  real(spread) real(center_weight) real(center_share) /* of points: how far they lie, in units of L; */   \
                                          /* weights of x in the mean and in the covariance */
EXPTILT_FRAME(NonlinearModes, NONLINEAR_MODES_FIELDS)

// A difference; that of angles is taken around the circle, in [−π, π].
inline double around(double difference, bool angle) {
  return angle ? std::atan2(std::sin(difference), std::cos(difference)) : difference;
}

// Rows of numbers in whole vectors.
namespace rows {
using W = Wide<double>;
using V = W::V;
inline int padded(int count) { return (count + W::lanes - 1) / W::lanes * W::lanes; }

INLINE double dot(int wide, const double* a, const double* b) {
  V sum = W::load(a) * W::load(b);
  for (int c = W::lanes; c < wide; c += W::lanes) sum += W::load(a + c) * W::load(b + c);
  return W::sum(sum);
}
INLINE void copy_row(int wide, const double* a, double* out) {
  for (int c = 0; c < wide; c += W::lanes) W::store(out + c, W::load(a + c));
}
INLINE void add(int wide, double f, const double* a, double* out) {  // adds f a
  for (int c = 0; c < wide; c += W::lanes) W::store(out + c, W::load(out + c) + f * W::load(a + c));
}
INLINE void clear(int wide, double* out) { fill(out, wide / W::lanes, 0.0); }

// Copies a matrix (count, columns) to padded rows, which must hold zeros.
inline void pad(int count, int columns, const double* source, double* out) {
  const int wide = padded(columns);
  for (int i = 0; i < count; ++i) copy(columns, source + i * columns, out + i * wide);
}

// Writes the lower triangular L (n, n) with L L' = A A', diagonal not negative. A (n, wide) is overwritten.
//
// Row k is reflected to a multiple of unit vector k: with v = a_k ± |a_k| u_k, row i loses v'a_i / ½|v|² v.
// That leaves ∓ a_i'a_k / |a_k| in column k of row i. It goes to L without the sign ∓; the column is set to 0.
ONCE inline void triangular(int n, int wide, double* A, double* L) {
  bool skipped = false;  // a row of zeros leaves its column to the rows after it
  for (int k = 0; k < n; ++k) {
    double* const row = A + k * wide;
    const int column = k / W::lanes * W::lanes, begin = skipped ? 0 : column, rest = wide - begin;
    const double square = dot(rest, row + begin, row + begin), size = std::sqrt(square);
    const double head = row[k] > 0.0 ? size : -size;
    const bool some = size > 0.0;
    const double inverse = some ? 1.0 / size : 0.0, reach = some ? 1.0 / (square + row[k] * head) : 0.0;
    V keep = W::all(1.0);
    if (some) keep[k - column] = 0.0;
    skipped |= !some;
    L[k * n + k] = size;
    for (int i = k + 1; i < n; ++i) {
      double* const other = A + i * wide;
      const double cross = dot(rest, other + begin, row + begin);
      const V share = W::all((cross + head * other[k]) * reach);
      L[i * n + k] = cross * inverse;
      L[k * n + i] = 0.0;
      for (int c = begin; c < wide; c += W::lanes) {
        const V left = W::load(other + c) - share * W::load(row + c);
        W::store(other + c, c == column ? left * keep : left);
      }
    }
  }
}
}  // namespace rows

// The law of modes that are functions: the members that switching.hpp asks for, and `pull_back` for the backward pass.
class SquareRoot {
 public:
  using Number = double;
  const NonlinearModes& q;
  const int modes, n, m, size;
  const double* const log_transition;
  static constexpr bool mapped = false;

  SquareRoot(const NonlinearModes& q, Room& room)
      : q(q), modes(int(q.modes)), n(int(q.states)), m(int(q.outputs)), size(law_size(n)),
        log_transition(q.log_transition), points(q.unscented ? 2 * n + 1 : n), nw(rows::padded(n)),
        mw(rows::padded(m)), pw(rows::padded(points)), tape(*q.tapes, q.unscented ? points : 1, room) {
    const int most = n > m ? n : m;
    process_root = room.take(modes * n * nw);
    observation_root = room.take(modes * m * mw);
    rows::pad(modes * n, n, q.process_root, process_root);
    rows::pad(modes * m, m, q.observation_root, observation_root);
    index = reinterpret_cast<int*>(room.take(m));
    y = room.take(m);
    L = room.take(n * nw);
    later_L = room.take(n * nw);
    center = room.take(most);
    X = room.take(n * pw + rows::W::lanes);  // stores of `by_points` go beyond a row's end
    Y = room.take(most * pw);
    S = room.take(most * most);
    K = room.take(n * most);
    e = room.take(most);
    z = room.take(most);
    const int widest = pw + nw + (nw > mw ? nw : mw), mixture = modes * nw + rows::padded(modes);
    A = room.take(most * (widest > mixture ? widest : mixture));
    if (!q.unscented) return;
    spread = q.spread;
    weight = room.take(pw);
    weight_root = room.take(pw);
    for (int c = 0; c < points; ++c) {
      const double one = 0.5 / (spread * spread);
      weight[c] = c < 2 * n ? one : q.center_weight;
      weight_root[c] = std::sqrt(c < 2 * n ? one : q.center_share);
    }
  }

  // Inputs and data of a step.
  void set_inputs(const double* u) { tape.set_inputs(u); }
  void look(const double* row) {
    seen = 0;
    for (int a = 0; a < m; ++a)
      if (row[a] == row[a]) index[seen++] = a;
    copy(m, row, y);
  }

  void read(int, int, const double*, double*) {}

  ONCE void predict(int j, const double* source, double* target) {
    image(q.function[2 * j], n, q.angle, source, false);
    const int wide = pw + nw;
    for (int i = 0; i < n; ++i) {
      rows::copy_row(pw, Y + i * pw, A + i * wide);
      rows::copy_row(nw, process_root + (j * n + i) * nw, A + i * wide + pw);
    }
    copy(n, center, target);
    rows::triangular(n, wide, A, target + n);
  }

  ONCE double update(int j, const double* source, double* target) {
    if (seen == 0) return copy(size, source, target), 0.0;
    image(q.function[2 * j + 1], m, q.observation_angle, source, true);
    const double* R = observation_root + j * m * mw;
    const int wide = pw + mw;
    for (int a = 0; a < seen; ++a) {
      const int ia = index[a];
      double* const row = A + a * wide;
      rows::copy_row(pw, Y + ia * pw, row);
      rows::copy_row(mw, R + ia * mw, row + pw);
      z[a] = rows::dot(wide, row, row);
      e[a] = around(y[ia] - center[ia], q.observation_angle[ia]);
    }
    rows::triangular(seen, wide, A, S);
    double density = -0.5 * seen * LOG_TWO_PI, square = 0.0;
    for (int a = 0; a < seen; ++a) {
      const double pivot = S[a * seen + a];
      if (!(pivot * pivot > ROUNDING * (n + m) * z[a] && pivot < INFINITE)) return NOT_A_NUMBER;
      density -= std::log(pivot);
      double s = e[a];
      for (int b = 0; b < a; ++b) s -= S[a * seen + b] * z[b];
      z[a] = s / pivot;
      square += z[a] * z[a];
    }
    for (int i = 0; i < n; ++i) {  // K S^½ S^½' = X Y', row by row
      double* const gain = K + i * seen;
      for (int a = 0; a < seen; ++a) {
        double s = rows::dot(pw, X + i * pw, Y + index[a] * pw);
        for (int b = 0; b < a; ++b) s -= S[a * seen + b] * gain[b];
        gain[a] = s / S[a * seen + a];
      }
      for (int a = seen - 1; a >= 0; --a) {
        double s = gain[a];
        for (int b = a + 1; b < seen; ++b) s -= S[b * seen + a] * gain[b];
        gain[a] = s / S[a * seen + a];
      }
      double mean = source[i], *row = A + i * wide;
      rows::copy_row(pw, X + i * pw, row);
      rows::clear(mw, row + pw);
      for (int a = 0; a < seen; ++a) {
        mean += gain[a] * e[a];
        rows::add(pw, -gain[a], Y + index[a] * pw, row);
        rows::add(mw, gain[a], R + index[a] * mw, row + pw);
      }
      target[i] = around(mean, q.angle[i]);
    }
    rows::triangular(n, wide, A, target + n);
    return density - 0.5 * square;
  }

  ONCE void collapse(int parts, const double* share, int share_step, const double* first, int step,
                     double* target) {
    const int wide = parts * nw + rows::padded(parts);
    for (int i = 0; i < n; ++i) {
      const double mean = average(parts, share, share_step, first + i, step, q.angle[i]);
      double* const row = A + i * wide;
      rows::clear(wide, row);
      for (int k = 0; k < parts; ++k) {
        const double root = std::sqrt(share[k * share_step]), *part = first + k * step;
        for (int c = 0; c <= i; ++c) row[k * nw + c] = root * part[n + i * n + c];
        row[parts * nw + k] = root * around(part[i] - mean, q.angle[i]);
      }
      target[i] = mean;
    }
    rows::triangular(n, wide, A, target + n);
  }

  // Writes the law at `source` given the law at `later` of the next step, which is in mode j. If Y Y' + Q is
  // singular, directions without variance stay as they are.
  ONCE void pull_back(int j, const double* source, const double* later, double* target) {
    image(q.function[2 * j], n, q.angle, source, true);
    const double *Q = process_root + j * n * nw, *after = whole_rows(later + n, later_L);
    const int wide = pw + 2 * nw;
    for (int i = 0; i < n; ++i) {
      const double *Y_i = Y + i * pw, *Q_i = Q + i * nw;
      for (int l = 0; l <= i; ++l)
        S[i * n + l] = rows::dot(pw, Y_i, Y + l * pw) + rows::dot(nw, Q_i, Q + l * nw);
      for (int l = 0; l < n; ++l) K[i * n + l] = rows::dot(pw, Y_i, X + l * pw);  // J, transposed
      z[i] = S[i * n + i];
      e[i] = around(later[i] - center[i], q.angle[i]);
    }
    factor(n, S, z, ROUNDING * n, INFINITE);
    solve(n, n, S, K);
    for (int i = 0; i < n; ++i) {
      double mean = source[i], *row = A + i * wide;
      rows::copy_row(pw, X + i * pw, row);
      rows::clear(2 * nw, row + pw);
      for (int l = 0; l < n; ++l) {
        const double gain = K[l * n + i];
        mean += gain * e[l];
        rows::add(pw, -gain, Y + l * pw, row);
        rows::add(nw, gain, Q + l * nw, row + pw);
        rows::add(nw, gain, after + l * nw, row + pw + nw);
      }
      target[i] = mean;
    }
    rows::triangular(n, wide, A, target + n);
  }

  // Writes mean (m) and covariance (m, m) of the observation that mode j predicts from a law.
  void sight(int j, const double* source, double* mean, double* covariance) {
    image(q.function[2 * j + 1], m, q.observation_angle, source, false);
    const double* R = observation_root + j * m * mw;
    copy(m, center, mean);
    for (int a = 0; a < m; ++a)
      for (int b = 0; b < m; ++b)
        covariance[a * m + b] =
            rows::dot(pw, Y + a * pw, Y + b * pw) + rows::dot(mw, R + a * mw, R + b * mw);
  }

 private:
  const int points, nw, mw, pw;  // columns of X and Y; n, m and these padded
  Interpreter tape;
  double *process_root, *observation_root;     // padded
  double *y, *L, *later_L, *center, *X, *Y;    // the data; factors, padded; results of `image`
  double *S, *K, *e, *z, *A;                   // for the matrices of a step
  double *weight, *weight_root, spread = 0.0;  // of points
  int *index, seen = 0;                        // which components of y are seen, and how many

  const double* whole_rows(const double* matrix, double* room) {
    if (n == nw) return matrix;
    rows::pad(n, n, matrix, room);
    return room;
  }

  // Σ share · value of numbers `step` apart, on the circle for an angle.
  static double average(int parts, const double* share, int share_step, const double* value, int64_t step,
                        bool angle) {
    double sum = 0.0, sine = 0.0, cosine = 0.0;
    for (int k = 0; k < parts; ++k) {
      const double part = share[k * share_step], x = value[k * step];
      if (angle)
        sine += part * std::sin(x), cosine += part * std::cos(x);
      else
        sum += part * x;
    }
    return angle ? std::atan2(sine, cosine) : sum;
  }

  // Writes mean and deviations Y of a function of a law, and X of the law if `both` are wanted.
  void image(int64_t function, int count, const int64_t* angle, const double* law, bool both) {
    const double* factor = whole_rows(law + n, L);
    if (q.unscented)
      by_points(2 * function, count, angle, law, factor, both);
    else
      by_tangent(2 * function + 1, count, law, factor, both);
  }

  ONCE void by_tangent(int64_t program, int count, const double* law, const double* factor, bool both) {
    for (int i = 0; i < n; ++i) fill(tape.state(i), 1, law[i]);
    tape.run(program);
    for (int a = 0; a < count; ++a) {
      center[a] = *tape.output(program, a).at;
      rows::clear(nw, Y + a * nw);
      for (int i = 0; i < n; ++i)
        rows::add(nw, *tape.output(program, count + a * n + i).at, factor + i * nw, Y + a * nw);
    }
    for (int i = 0; i < n && both; ++i) rows::copy_row(nw, factor + i * nw, X + i * nw);
  }

  ONCE void by_points(int64_t program, int count, const int64_t* angle, const double* law,
                      const double* factor, bool both) {
    using namespace rows;
    // Writes middle + f L_i, middle − f L_i and middle; numbers written beyond an end are overwritten later.
    const auto write = [&](int i, V middle, double f, double* out) {
      for (int c = 0; c < nw; c += W::lanes) W::store(out + c, middle + f * W::load(factor + i * nw + c));
      for (int c = 0; c < nw; c += W::lanes) W::store(out + n + c, middle - f * W::load(factor + i * nw + c));
      for (int c = 2 * n; c < pw; c += W::lanes) W::store(out + c, middle);
    };
    for (int i = 0; i < n; ++i) write(i, W::all(law[i]), spread, tape.state(i));
    for (int i = 0; i < n && both; ++i) write(i, W::all(0.0), 0.70710678118654752440, X + i * pw);  // √½
    tape.run(program);
    for (int a = 0; a < count; ++a) {
      const auto [at, step] = tape.output(program, a);
      const double mean = center[a] = average(points, weight, 1, at, step, angle[a]);
      double* const row = Y + a * pw;
      for (int c = 0; c < pw; c += W::lanes)
        W::store(row + c, W::load(weight_root + c) * (W::load(at + c * step) - mean));
      for (int c = 0; c < points && angle[a]; ++c)
        row[c] = weight_root[c] * around(at[c * step] - mean, true);
    }
  }
};
