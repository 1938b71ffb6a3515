// Recurrent switching: the law of each mode given each next mode, whose probability depends on the state.
//
//     P(s' = j | s = i, x) = p_j(x) = softmax_j(log π_ij + <R_j, x>)
//
// For the law N(m, P) of mode i and each j this writes
//
//     c_ij = E[p_j(x)],   E[p_j(x) x] / c_ij,   and the covariance likewise.
//
// Only the scores' differences z = A x matter, A having the rows R_j − R_0. With A P A' = L D L' they are
// z = A m + L D^½ u for a standard Gaussian u, and x = m + B u + a part that is independent of u, B' = D^-½ L⁻¹ A P.
// So the results follow from the moments of u under the weights p_j. They are sums over a grid with a direction for
// each pivot of D that is more than rounding.
//
// Sums over points h apart of a function that is analytic within a of the real axis have an error of e^(−2πa/h)
// times its size there. Along a direction in which scores differ by s per unit, p_j has its first pole at
// a = π/s, and the Gaussian grows by e^(a²/2), so h = 0.48/s, at most 0.65, leaves an error of rounding. If that
// takes more than MOST points (many directions, sharp scores), the grid is coarser.
#pragma once
#include <utility>

#include "switching/series.hpp"

class Tilting {
 public:
  double *laws, *log_chance;  // of mode i given next mode j: [(i · M + j) · law], [i · M + j]

  Tilting(const Series& f, Room& room)
      : f(f), M(int(f.modes)), n(int(f.states)), k(M - 1), law(law_size(n)) {
    if (!f.recurrence) return;
    const std::pair<double**, int> places[] = {
        {&laws, M * M * law}, {&log_chance, M * M}, {&A, k * n}, {&AP, k * n}, {&G, k * k}, {&size, k},
        {&B, k * n}, {&slope, k * M}, {&shift, M}, {&base, M}, {&chance, M}, {&first, M * k},
        {&second, M * k * k}, {&spread, k}, {&node, k * LONGEST}, {&weight, k * LONGEST}, {&step, k}};
    for (const auto& [place, count] : places) *place = room.take(count);
    score = room.take<Four>(4 * M);
    index = room.take<int64_t>(k);
    count = room.take<int64_t>(k);
    for (int i = 0; i < k * n; ++i) A[i] = f.recurrence[n + i] - f.recurrence[i % n];
  }

  // Writes `laws` and `log_chance` from the laws at `state`, mode by mode, and the transition probabilities of a step.
  void tilt(const double* transition, const double* state) {
    for (int i = 0; i < M; ++i) {
      const double *x = state + i * law, *P = x + n;
      const int directions = split(transition + i * M, x, P);
      lay_grid(directions);
      add_up(directions);
      for (int j = 0; j < M; ++j) {
        double *const own = laws + (i * M + j) * law, *const P_own = own + n;
        log_chance[i * M + j] = std::log(chance[j]);
        copy(law, x, own);
        if (!(chance[j] > 0.0)) continue;
        double *const center = first + j * directions, *const product = second + j * directions * directions;
        for (int d = 0; d < directions; ++d) center[d] /= chance[j];
        for (int d = 0; d < directions; ++d) {
          for (int e = 0; e < directions; ++e)
            spread[e] = product[e <= d ? d * directions + e : e * directions + d] / chance[j] -
                        center[d] * center[e] - (d == e);
          for (int a = 0; a < n; ++a) {
            own[a] += center[d] * B[d * n + a];
            double change = 0.0;
            for (int e = 0; e < directions; ++e) change += spread[e] * B[e * n + a];
            for (int b = 0; b < n; ++b) P_own[b * n + a] += change * B[d * n + b];
          }
        }
        for (int a = 0; a < n; ++a)
          for (int b = 0; b < a; ++b)
            P_own[a * n + b] = P_own[b * n + a] = 0.5 * (P_own[a * n + b] + P_own[b * n + a]);
      }
    }
  }

 private:
  // Writes the scores at the mean, their slopes along each direction of u, and B'; returns how many there are.
  int split(const double* transition, const double* x, const double* P) {
    shift[0] = std::log(transition[0]);
    for (int a = 0; a < k; ++a) {
      shift[a + 1] = std::log(transition[a + 1]);
      for (int c = 0; c < n; ++c) shift[a + 1] += A[a * n + c] * x[c];
    }
    multiply<1>(k, n, n, view<double>(A, n), P, NOTHING<double>, AP);
    for (int a = 0; a < k; ++a) {
      for (int b = 0; b <= a; ++b) {
        G[a * k + b] = 0.0;
        for (int c = 0; c < n; ++c) G[a * k + b] += AP[a * n + c] * A[b * n + c];
      }
      size[a] = G[a * k + a];
    }
    factor(k, G, size, 64 * ROUNDING * (n + k), INFINITE);
    solve_lower(k, n, G, AP);
    int directions = 0;
    for (int d = 0; d < k; ++d) {
      const double root = std::sqrt(G[d * k + d]);
      if (!(root > 0.0)) continue;
      for (int c = 0; c < n; ++c) B[directions * n + c] = root * AP[d * n + c];
      for (int j = 0; j < M; ++j)
        slope[directions * M + j] = j <= d ? 0.0 : (j == d + 1 ? 1.0 : G[(j - 1) * k + d]) / root;
      ++directions;
    }
    return directions;
  }

  // Chooses the points of each direction.
  void lay_grid(int directions) {
    double all = 1.0;
    for (int d = 0; d < directions; ++d) {
      const auto [low, high] = std::minmax_element(slope + d * M, slope + (d + 1) * M);
      const double h = larger(REACH / STEPS, std::min(0.65, 0.48 / (*high - *low)));
      count[d] = 2 * int64_t(std::ceil(REACH / h)) + 1;
      all *= double(count[d]);
    }
    for (int d = 0; d < directions; ++d) {
      if (all > MOST) count[d] = int64_t(double(count[d]) * std::pow(MOST / all, 1.0 / directions)) / 2 * 2 + 1;
      const int64_t half = count[d] / 2;
      // At this reach the weight cut off, e^(−reach²/2), is as small as the error of steps h, e^(−2π²/h²).
      const double reach = std::min(REACH, std::sqrt(6.283185307179586 * double(half)));
      double *const at = node + d * LONGEST, *const share = weight + d * LONGEST, sum = 0.0;
      step[d] = half > 0 ? reach / double(half) : 1.0;
      for (int64_t c = 0; c < count[d]; ++c) {
        at[c] = double(c - half) * step[d];
        sum += share[c] = std::exp(-0.5 * at[c] * at[c]);
      }
      for (int64_t c = 0; c < count[d]; ++c) share[c] /= sum;
      for (int64_t c = count[d]; c % 4; ++c) at[c] = share[c] = 0.0;
    }
  }

  // Adds up chances, and first and second moments of u under each, over the grid; the last of the directions
  // lies in lanes. Points further than REACH from the middle are left out.
  void add_up(int directions) {
    const int D = directions, last = D - 1;
    Four *sums = score + M, *lines = sums + M, *squares = lines + M;
    std::fill_n(chance, M, 0.0), std::fill_n(first, M * D, 0.0), std::fill_n(second, M * D * D, 0.0);
    std::fill_n(index, D, 0);
    if (D == 0) {  // scores do not vary with u
      const double level = log_sum(M, shift);
      for (int j = 0; j < M; ++j) chance[j] = std::exp(shift[j] - level);
      return;
    }
    for (int digit = 0; digit >= 0;) {
      double share = 1.0, room = REACH * REACH;
      for (int d = 0; d < last; ++d) {
        const double at = u(d);
        share *= weight[d * LONGEST + index[d]];
        room -= at * at;
      }
      if (room >= 0.0) {
        for (int j = 0; j < M; ++j) {
          base[j] = shift[j];
          for (int d = 0; d < last; ++d) base[j] += slope[d * M + j] * u(d);
          sums[j] = lines[j] = squares[j] = 0.0;
        }
        const int64_t half = count[last] / 2, most = int64_t(std::sqrt(room) / step[last]) + 1;
        const int64_t end = std::min(count[last], half + most + 1);
        for (int64_t c = half > most ? (half - most) / 4 * 4 : 0; c < end; c += 4) {
          const Four at = Four::load(node + last * LONGEST + c);
          Four top = -INFINITE, sum = 0.0;
          for (int j = 0; j < M; ++j) top = larger(top, score[j] = base[j] + slope[last * M + j] * at);
          for (int j = 0; j < M; ++j) sum = sum + (score[j] = exponential(score[j] - top));
          const Four scale = share * Four::load(weight + last * LONGEST + c) / sum;
          for (int j = 0; j < M; ++j) {
            const Four p = score[j] * scale, line = p * at;
            sums[j] = sums[j] + p, lines[j] = lines[j] + line, squares[j] = squares[j] + line * at;
          }
        }
        for (int j = 0; j < M; ++j) {
          const double all = total(sums[j]), line = total(lines[j]);
          double *const one = first + j * D, *const two = second + j * D * D;
          chance[j] += all;
          for (int d = 0; d < last; ++d) {
            one[d] += all * u(d);
            for (int e = 0; e <= d; ++e) two[d * D + e] += all * u(d) * u(e);
            two[last * D + d] += line * u(d);
          }
          one[last] += line;
          two[last * D + last] += total(squares[j]);
        }
      }
      for (digit = last - 1; digit >= 0 && ++index[digit] == count[digit]; --digit) index[digit] = 0;
    }
  }
  double u(int d) const { return node[d * LONGEST + index[d]]; }

  static constexpr double REACH = 8.0;     // beyond it a Gaussian has 1e-15 of its weight
  static constexpr double MOST = 8000.0;   // points of the grid
  static constexpr int STEPS = 512;        // points on each side of the middle, at most
  static constexpr int LONGEST = 2 * STEPS + 4;  // room for the points of a direction, and for whole lanes
  const Series& f;
  const int M, n, k, law;
  double *A, *AP, *G, *size, *B;                    // matrices of `split`
  double *slope, *shift, *base;                     // of scores: [direction · M + mode]
  double *chance, *first, *second, *spread;         // moments of u
  double *node, *weight, *step;                     // of each direction
  int64_t *index, *count;
  Four* score;
};
