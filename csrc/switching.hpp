// Filters for series whose mode switches: GPB1, GPB2, IMM and Viterbi, written once over the law of a mode.
//
// With μ_i the mode probabilities, π_ij the transition, λ = log μ and N_j(·) the step of mode j (predict, update):
//
//     IMM      c_j = Σ_i μ_i π_ij,  w_{i|j} = μ_i π_ij / c_j,  law_j = N_j(collapse_i(w_{i|j}, law_i)),
//              log weight_j = log c_j + log p_j(y)
//     GPB1     as IMM with w_{i|j} = μ_i: all modes start from one law
//     GPB2     log weight_ij = λ_i + log π_ij + log p_ij(y),  law_j = collapse_i(w_{i|j}, N_j(law_i)),
//              w_{i|j} ∝_i weight_ij
//     Viterbi  as GPB2 with w_{i|j} = 1 for the largest weight_ij, which is mode j's: it follows a path
//
// The log-likelihood term of a step is the log-sum of its weights. Weights stay logarithms throughout: modes 10⁵
// nats apart still rank, and a mode of probability 0 has λ = −inf and a finite law (collapsed with weights μ_i).
//
// A law of one mode is `size` float64 numbers. A filter keeps them mode by mode: [j · size]. Modes are worked on
// in groups: mode j is lane j % lanes of group j / lanes, and the laws of a group are `size` numbers of the type
// `Number`, which is `double` (one mode a group) or `Four` (lanes.hpp). What a Law has to offer:
//
//     using Number = double;                      // or Four
//     int modes, size;
//     const Number* log_transition;               // [i · groups + g], log π_ij for the modes j of group g; lanes
//                                                 // without a mode hold 0
//     bool mapped;                                // whether modes read each other's laws through a map
//     void read(int i, int g, const double* source, Number* target);
//                                                 // the law of mode i as the modes of group g read it; if mapped
//     template <class Source>                     // Source is double (a law that all lanes share) or Number
//     void collapse(int parts, const Number* weight, int weight_step, const Source* first, int step,
//                   Number* target);              // the M-projection of a mixture of laws, `step` numbers apart
//     template <class Source>
//     void predict(int g, const Source* source, Number* target);
//     Number update(int g, const Number* source, Number* target);
//                                                 // conditions on what is seen; returns its log-density, in which
//                                                 // NaN says that it cannot be done. Lanes without a mode must not
//                                                 // give NaN
//
// and, for a pass over series (`filter_series`), with T the steps of a series and `row` its place in the results:
//
//     void start(int64_t series, int64_t t, double* state, double* log_mode);
//                                                 // the law before step t: the initial one, or (t > 0) the one that
//                                                 // steps done before have left in the results
//     void load(int64_t series, int64_t t, bool again);
//                                                 // parameters and data of a step; all of them with `again`
//     void keep(int64_t row, const double* state);
//
// or, for rows of an online filter (`step_rows`):
//
//     void load(int64_t member, bool again);      // matrices and data of a member; all of them with `again`
//
// Where Number is double, `Source` and `Number` are the same, and none of these has to be a template.
#pragma once
#include "lanes.hpp"

enum Method : int { IMM = 0, GPB1 = 1, GPB2 = 2, VITERBI = 3 };

// Writes the shares of the M scores of each lane of a group, `step` numbers apart, and returns their log-sums.
//
// Where all are −inf (the mode cannot be reached) the shares are the mode probabilities. With `choose`, the first
// largest has it all, and its score is returned.
template <class Number>
inline Number shares(int M, int step, const Number* score, const double* log_mode, bool choose, Number* weight) {
  Number top = score[0];
  for (int i = 1; i < M; ++i) top = larger(top, score[i * step]);
  if (choose) {
    for (int lane = 0; lane < LANES<Number>; ++lane) {
      double left = 1.0;
      for (int i = 0; i < M; ++i) {
        const double part = lanes(score + i * step)[lane] == lanes(&top)[lane] ? left : 0.0;
        lanes(weight + i * step)[lane] = part;
        left -= part;
      }
    }
    return top;
  }
  const bool reached = inside(top, -INFINITE, INFINITE);
  Number total = 0.0;
  for (int i = 0; i < M; ++i) {
    Number part = exponential(score[i * step] - top);
    if (!reached)
      for (int lane = 0; lane < LANES<Number>; ++lane)
        if (!(lanes(&top)[lane] > -INFINITE)) lanes(&part)[lane] = std::exp(log_mode[i]);
    weight[i * step] = part;
    total = total + part;
  }
  for (int i = 0; i < M; ++i) weight[i * step] = weight[i * step] / total;
  Number sum = top + logarithm(total);
  if (!reached)
    for (int lane = 0; lane < LANES<Number>; ++lane)
      if (!(lanes(&top)[lane] > -INFINITE)) lanes(&sum)[lane] = -INFINITE;
  return sum;
}

// prior[j] = log c_j, weight[i, j] = w_{i|j} (as IMM has it) and score[i, j] = log μ_i π_ij.
template <class Number>
inline void mixing_weights(int M, int groups, const Number* log_transition, const double* log_mode, Number* score,
                           Number* weight, Number* prior) {
  for (int i = 0; i < M; ++i)
    for (int g = 0; g < groups; ++g) score[i * groups + g] = log_transition[i * groups + g] + Number(log_mode[i]);
  for (int g = 0; g < groups; ++g) prior[g] = shares(M, groups, score + g, log_mode, false, weight + g);
}

// Copies laws, moves or the like, one of `size` numbers a mode, from mode after mode to the modes' lanes.
template <class Number> inline void spread(int M, int size, const double* source, Number* target) {
  constexpr int L = LANES<Number>;
  for (int j = 0; j < M; ++j)
    for (int i = 0; i < size; ++i) lanes(target + j / L * size + i)[j % L] = source[j * size + i];
}
// Copies them back.
template <class Number> inline void gather(int M, int size, const Number* source, double* target) {
  constexpr int L = LANES<Number>;
  for (int j = 0; j < M; ++j)
    for (int i = 0; i < size; ++i) target[j * size + i] = lanes(source + j / L * size + i)[j % L];
}

// One step of a filter: `weigh`, then for each group `move` and `see`, then `finish`.
template <class Law> class Switching {
 public:
  using Number = typename Law::Number;
  static constexpr int L = LANES<Number>;

  Switching(Law& law, int method, Room& room)
      : law(law), M(law.modes), size(law.size), groups((M + L - 1) / L), method(method) {
    state = room.take(M * size);
    log_mode = room.take(groups * L);
    score = room.take<Number>(M * groups);
    weight = room.take<Number>(M * groups);
    prior = room.take<Number>(groups);
    log_weight = room.take<Number>(groups);
    ahead = room.take<Number>(M * size);
    parts = room.take<Number>(M * size);
    mixed = room.take<Number>(size);
    fresh = room.take<Number>(groups * size);
  }

  // Weights of mixing first, and the predicted log probabilities of modes. With `begun` the law at hand is itself
  // the prediction. `each` keeps a law for every pair of modes: GPB2, Viterbi.
  void weigh(bool begun_, bool each_) {
    begun = begun_, each = each_, mixed_once = false;
    if (begun) {
      for (int i = 0; i < M; ++i)
        for (int j = 0; j < groups * L; ++j) {
          lanes(score + i * groups)[j] = i == j % M ? log_mode[i] : -INFINITE;
          lanes(weight + i * groups)[j] = i == j % M ? 1.0 : 0.0;
          lanes(prior)[j] = log_mode[j % M];
        }
      return;
    }
    if (each) {
      for (int i = 0; i < M; ++i)
        for (int g = 0; g < groups; ++g)
          score[i * groups + g] = law.log_transition[i * groups + g] + Number(log_mode[i]);
      return;
    }
    mixing_weights(M, groups, law.log_transition, log_mode, score, weight, prior);
    if (method == GPB1)
      for (int i = 0; i < M; ++i) {
        const double share = std::exp(log_mode[i]);
        for (int g = 0; g < groups; ++g) weight[i * groups + g] = share;
      }
  }

  // The log-sums of the scores of pairs, which only an online filter asks for.
  void sum_scores() {
    for (int g = 0; g < groups; ++g) prior[g] = shares(M, groups, score + g, log_mode, false, weight + g);
  }

  // Predicted laws of group g, at `ahead`: one, or one for each mode i before.
  void move(int g) {
    for (int i = 0; i < (each ? M : 1); ++i) {
      Number* const target = ahead + i * size;
      if (begun) {
        for (int j = g * L; j < (g + 1) * L; ++j)
          for (int k = 0; k < size; ++k) lanes(target + k)[j - g * L] = state[(j < M ? j : 0) * size + k];
      } else if (each) {
        if (law.mapped) {
          law.read(i, g, state + i * size, mixed);
          law.predict(g, static_cast<const Number*>(mixed), target);
        } else {
          law.predict(g, static_cast<const double*>(state + i * size), target);
        }
      } else {
        if (law.mapped) {
          for (int k = 0; k < M; ++k) law.read(k, g, state + k * size, parts + k * size);
          law.collapse(M, weight + g, groups, static_cast<const Number*>(parts), size, mixed);
        } else if (!mixed_once) {
          law.collapse(M, weight + g, groups, static_cast<const double*>(state), size, mixed);
          mixed_once = method == GPB1;  // all modes begin with the same law
        }
        law.predict(g, static_cast<const Number*>(mixed), target);
      }
    }
  }

  // Conditions the laws at `ahead` on what is seen, and collapses them if there is one for each mode before.
  // Returns −1, or the mode in which it cannot be done.
  int see(int g) {
    Number* const result = fresh + g * size;
    for (int i = 0; i < (each ? M : 1); ++i) {
      const Number density = law.update(g, ahead + i * size, each ? parts + i * size : result);
      if (has_nan(density))
        for (int j = g * L; j < M && j < (g + 1) * L; ++j)
          if (has_nan(lanes(&density)[j - g * L])) return j;
      if (each)
        score[i * groups + g] = score[i * groups + g] + density;
      else
        log_weight[g] = prior[g] + density;
    }
    if (each) {
      log_weight[g] = shares(M, groups, score + g, log_mode, method == VITERBI, weight + g);
      law.collapse(M, weight + g, groups, static_cast<const Number*>(parts), size, result);
    }
    return -1;
  }

  // Takes the step: laws and log probabilities by mode, and the step's log-likelihood term. Returns −1, or M where
  // what was seen has density 0 in every mode that can be reached.
  int finish() {
    double* const w = lanes(log_weight);
    for (int j = M; j < groups * L; ++j) w[j] = -INFINITE;
    double top = -INFINITE;
    for (int j = 0; j < M; ++j) top = larger(top, w[j]);
    if (!(top > -INFINITE)) return M;
    double sum = 0.0;
    for (int g = 0; g < groups; ++g) {
      const Number part = exponential(log_weight[g] - Number(top));
      for (int j = 0; j < L; ++j) sum += lanes(&part)[j];
    }
    term = top + std::log(sum);
    for (int j = 0; j < M; ++j) log_mode[j] = w[j] - term;
    gather(M, size, fresh, state);
    return -1;
  }

  Law& law;
  const int M, size, groups, method;
  bool begun = false, each = false, mixed_once = false;
  double term = 0.0;
  double *state, *log_mode;                   // laws mode by mode, and log probabilities
  Number *score, *weight, *prior, *log_weight;  // [i · groups + g], and by group
  Number *ahead, *parts, *mixed, *fresh;      // predicted laws of a group; laws by mode before; their mixture; new laws
};

// What a pass over series is told and what it writes; to be among the fields of a frame for `filter_series`. Series
// b is rows starts[b] to starts[b + 1]; lead[b] steps of it are done already, their rows written (lead is 0: none).
// With `everything` results have a row for every step, else one for each series, its last.
#define SWITCHING_FIELDS(whole, real, place)                                                                    \
  whole(modes) whole(method) whole(first) whole(everything) whole(series) whole(next)                           \
  place(const int64_t, starts) place(const int64_t, lead)                                                       \
  place(double, log_likelihood) /* (series,) */                                                                 \
  place(double, terms)          /* (rows,) */                                                                   \
  place(double, log_mode)       /* (rows, M) */                                                                 \
  place(double, mixing)         /* (rows, M·M), [i, j] = P(mode i before | mode j now, data the collapse saw), or 0 */ \
  place(int64_t, failure)       /* (series, 2), step and mode where it stopped (M: all modes), or −1 */

// Takes the next of `count` things to do, a few at a time, for threads that share `next`; false when all are taken.
inline bool take_some(int64_t& next, int64_t count, int64_t at_once, int64_t& begin, int64_t& end) {
  begin = __atomic_fetch_add(&next, at_once, __ATOMIC_RELAXED);
  end = begin + at_once < count ? begin + at_once : count;
  return begin < count;
}

// Filters the series of a frame that no other thread has taken.
template <class Law, class Frame> void filter_series(Law& law, Frame& f) {
  Room room;
  Switching<Law> s(law, int(f.method), room);
  const int M = s.M;
  auto keep_step = [&](int64_t row, double term) {
    f.terms[row] = term;
    std::memcpy(f.log_mode + row * M, s.log_mode, M * sizeof(double));
    if (f.mixing)
      for (int i = 0; i < M; ++i)
        std::memcpy(f.mixing + (row * M + i) * M, lanes(s.weight + i * s.groups), M * sizeof(double));
    law.keep(row, s.state);
  };
  auto filter_one = [&](int64_t series) {
    const int64_t begin = f.starts[series], steps = f.starts[series + 1] - begin, done = f.lead ? f.lead[series] : 0;
    law.start(series, done, s.state, s.log_mode);
    double total = 0.0;
    int stopped = -1;
    for (int64_t t = done; t < steps; ++t) {
      law.load(series, t, t == done);
      const bool begun = t == 0 && f.first;
      s.weigh(begun, f.method >= GPB2 && !begun);
      for (int g = 0; g < s.groups && stopped < 0; ++g) {
        s.move(g);
        stopped = s.see(g);
      }
      if (stopped < 0) stopped = s.finish();
      if (stopped >= 0) {
        f.failure[2 * series] = t, f.failure[2 * series + 1] = stopped;
        return;
      }
      total += s.term;
      if (f.everything) keep_step(begin + t, s.term);
    }
    f.log_likelihood[series] = total;
    if (!f.everything) keep_step(series, total);
  };
  for (int64_t begin, end; take_some(f.next, f.series, 1, begin, end);)
    for (int64_t series = begin; series < end; ++series) filter_one(series);
}

// Rows of an online filter. A row holds all that is known of a member, one stretch after the other:
//
//     laws by mode, their log probabilities       given all that was seen
//     the log-density of the last y, and the sum of these since the start
//     predicted laws, M (or, for GPB2, M·M: [j, i] is mode j's from mode i's), the scores log μ_i π_ij (M·M) and
//     their log-sums over i, the predicted log probabilities (M)
//
// Nothing is kept between calls, so rows may be copied, stored and taken up anywhere. `predict` and `update` say
// what to do; `begun`, that the initial law is itself the prediction. The first member that cannot go on is left in
// `failed` as member · (M + 1) + mode (M: all modes); it must be −1 before.
#define ONLINE_FIELDS(whole, real, place)                                                                       \
  whole(modes) whole(method) whole(predict) whole(update) whole(begun) whole(members) whole(next) whole(failed) \
  place(const double, before) place(double, after)

inline int row_length(int M, int size, bool each) { return M * size + M + 2 + (each ? M * M : M) * size + M * M + M; }

template <class Law, class Frame> void step_rows(Law& law, Frame& f) {
  Room room;
  Switching<Law> s(law, int(f.method), room);
  constexpr int L = Switching<Law>::L;
  const int M = s.M, size = s.size;
  const bool each = f.method >= GPB2;
  const int parts = each ? M : 1, length = row_length(M, size, each);
  // Copies between a row's predicted laws and those of a group: [j, i] and lane j of law i.
  auto step_one = [&](const double* from, double* to) {
    const double *term = from + M * size + M, *ahead = term + 2, *score = ahead + parts * M * size;
    double *new_term = to + M * size + M, *new_ahead = new_term + 2, *new_score = new_ahead + parts * M * size;
    std::memcpy(s.state, from, M * size * sizeof(double));
    std::memcpy(s.log_mode, from + M * size, M * sizeof(double));
    if (f.predict) {
      s.weigh(f.begun, each);
      if (each) s.sum_scores();
      for (int i = 0; i < M; ++i) std::memcpy(new_score + i * M, lanes(s.score + i * s.groups), M * sizeof(double));
      std::memcpy(new_score + M * M, lanes(s.prior), M * sizeof(double));
    } else {
      s.each = each;
      std::memcpy(new_ahead, ahead, (parts * M * size + M * M + M) * sizeof(double));
      for (int i = 0; i < M; ++i) std::memcpy(lanes(s.score + i * s.groups), score + i * M, M * sizeof(double));
      std::memcpy(lanes(s.prior), score + M * M, M * sizeof(double));
    }
    int stopped = -1;
    for (int g = 0; g < s.groups && stopped < 0; ++g) {
      if (f.predict) s.move(g);
      for (int i = 0; i < parts; ++i)
        for (int j = g * L; j < M && j < (g + 1) * L; ++j)
          for (int k = 0; k < size; ++k) {
            double& lane = lanes(s.ahead + i * size + k)[j - g * L];
            double& place = new_ahead[(j * parts + i) * size + k];
            if (f.predict)
              place = lane;
            else
              lane = place;
          }
      if (f.update) stopped = s.see(g);
    }
    if (f.update && stopped < 0) stopped = s.finish();
    std::memcpy(to, s.state, M * size * sizeof(double));
    std::memcpy(to + M * size, s.log_mode, M * sizeof(double));
    new_term[0] = f.update ? s.term : term[0];
    new_term[1] = f.update ? term[1] + s.term : term[1];
    return stopped;
  };
  for (int64_t begin, end; take_some(f.next, f.members, 64, begin, end);)
    for (int64_t member = begin; member < end; ++member) {
      law.load(member, member == begin);
      const int stopped = step_one(f.before + member * length, f.after + member * length);
      if (stopped < 0) continue;
      const int64_t found = member * (M + 1) + stopped;
      int64_t known = __atomic_load_n(&f.failed, __ATOMIC_RELAXED);
      while ((known < 0 || found < known) &&
             !__atomic_compare_exchange_n(&f.failed, &known, found, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
      }
      break;
    }
}
