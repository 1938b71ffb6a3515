// Filters for series whose mode switches: GPB1, GPB2, IMM and Viterbi, written once over the law of a mode.
//
// With μ_i the mode probabilities, π_ij the transition, λ = log μ and N_j(·) the step of mode j (predict,
// update):
//
//     IMM      c_j = Σ_i μ_i π_ij,  w_{i|j} = μ_i π_ij / c_j,  law_j = N_j(collapse_i(w_{i|j}, law_i)),
//              log weight_j = log c_j + log p_j(y)
//     GPB1     as IMM with w_{i|j} = μ_i: all modes start from one law
//     GPB2     log weight_ij = λ_i + log π_ij + log p_ij(y),  law_j = collapse_i(w_{i|j}, N_j(law_i)),
//              w_{i|j} ∝_i weight_ij
//     Viterbi  as GPB2 with w_{i|j} = 1 for the i of the largest weight_ij, which is mode j's weight: each mode
//              follows one path
//
// The log-likelihood term of a step is the log-sum of its weights. Weights stay logarithms throughout, so modes
// 10⁵ nats apart keep their order. A mode of probability 0 has λ = −inf and a finite law, the collapse with
// weights μ_i.
//
// A law of one mode is `size` float64 numbers, and a filter keeps them mode by mode, law j at [j · size].
// Modes are worked on in groups: mode j is lane j % L of group j / L, and the laws of a group are `size`
// numbers of the type `Number`, which is `double` (L = 1) or `Four` (L = 4, lanes.hpp). A Law must have
//
//     using Number = double;               or Four
//     int modes, size;
//     const Number* log_transition;        log π_ij for the modes j of group g at [i · groups + g]
//     bool mapped;                         whether modes read each other's laws through a map
//     void read(int i, int g, const double* source, Number* target);
//         writes the law of mode i as the modes of group g read it; called only where `mapped`
//     void collapse(int parts, const Number* weight, int weight_step, const Source* first, int step,
//                   Number* target);
//         the M-projection of a mixture of laws that are `step` numbers apart
//     void predict(int g, const Source* source, Number* target);
//     Number update(int g, const Number* source, Number* target);
//         conditions on the observation; returns its log-density, NaN where conditioning is impossible
//
// `Source` is Number or double: a law of plain numbers is shared by all lanes. A target is never its own source.
// For a pass over series (`filter_series`) a law also has
//
//     void start(int64_t series, int64_t t, double* state, double* log_mode);
//         writes the law before step t: the initial one or, for t > 0, that of the steps done before
//     void load(int64_t series, int64_t t, bool again);
//         takes parameters and data of a step; with `again`, also those that do not vary in time
//     void keep(int64_t row, const double* state);
//         writes the laws of a step to its row of the results
//
// and for rows of an online filter (`step_rows`)
//
//     void load(int64_t member, bool again);
//         takes parameters and data of a member; with `again`, also those that all members share
#pragma once
#include "switching/lanes.hpp"

enum Method : int { IMM = 0, GPB1 = 1, GPB2 = 2, VITERBI = 3 };

// Writes the softmax of the M scores of each lane of a group, `step` numbers apart, and returns their log-sums.
//
// If all scores are −inf (the mode cannot be reached), writes the mode probabilities. With `choose`, the first
// largest score gets weight 1 and is returned.
template <class Number>
ONCE Number shares(int M, int step, const Number* score, const double* log_mode, bool choose,
                     Number* weight) {
  constexpr int L = LANES<Number>;
  Number top = score[0], sum = 0.0;
  for (int i = 1; i < M; ++i) top = larger(top, score[i * step]);
  if (choose) {
    for (int j = 0; j < L; ++j) {
      double left = 1.0;
      for (int i = 0; i < M; ++i) {
        const double part = lanes(score + i * step)[j] == lanes(&top)[j] ? left : 0.0;
        lanes(weight + i * step)[j] = part;
        left -= part;
      }
    }
    return top;
  }
  const bool reached = inside(top, -INFINITE, INFINITE);
  for (int i = 0; i < M; ++i) {
    Number part = exponential(score[i * step] - top);
    if (!reached)
      for (int j = 0; j < L; ++j)
        if (lanes(&top)[j] == -INFINITE) lanes(&part)[j] = std::exp(log_mode[i]);
    weight[i * step] = part;
    sum = sum + part;
  }
  const Number inverse = Number(1.0) / sum;
  for (int i = 0; i < M; ++i) weight[i * step] = weight[i * step] * inverse;
  return top + logarithm(sum);
}

// One step of a filter: `weigh`, then for each group `move` and `see`, then `finish`.
template <class Law> class Switching {
 public:
  using Number = typename Law::Number;
  static constexpr int L = LANES<Number>;

  Switching(Law& law, int method, Room& room)
      : law(law), M(law.modes), size(law.size), groups((M + L - 1) / L), method(method) {
    state = room.take(M * size);
    log_mode = room.take(M);
    score = room.take<Number>(M * groups);
    weight = room.take<Number>(M * groups);
    prior = room.take<Number>(groups);
    log_weight = room.take<Number>(groups);
    ahead = room.take<Number>(M * size);
    parts = room.take<Number>(M * size);
    mixed = room.take<Number>(size);
    fresh = room.take<Number>(groups * size);
    share = room.take<Number>(M);
    sources = room.take<int64_t>(M);
  }

  // Writes the scores and, without `pairs`, the mixing weights and the predicted log probabilities of modes. With
  // `now` the present law is itself the prediction; with `pairs` each mode gets a law for every mode before.
  void weigh(bool now, bool pairs) {
    begun = now, each = pairs, once = false;
    if (begun) {
      spread(M, 1, log_mode, 1, prior, 1);
      for (int i = 0; i < M; ++i)
        for (int j = 0; j < groups * L; ++j) {
          const bool own = i == (j < M ? j : M - 1);
          lanes(score + i * groups)[j] = own ? log_mode[i] : -INFINITE;
          lanes(weight + i * groups)[j] = own;
        }
      return;
    }
    const Number* const log_transition = law.log_transition;
    for (int i = 0; i < M; ++i)
      for (int k = i * groups; k < (i + 1) * groups; ++k) score[k] = log_transition[k] + Number(log_mode[i]);
    if (!each) sum_scores();
    for (int i = 0; i < M && method == GPB1; ++i) {
      const double share = std::exp(log_mode[i]);
      for (int g = 0; g < groups; ++g) weight[i * groups + g] = share;
    }
  }
  void sum_scores() {
    for (int g = 0; g < groups; ++g) prior[g] = shares(M, groups, score + g, log_mode, false, weight + g);
  }

  // For laws of pairs, lists the modes before that lead to group g. Lists all modes with `all`, or if no mode leads
  // to some mode of the group: that mode's law is an average over all of them.
  void find_sources(int g, bool all) {
    count = each ? 0 : 1;
    Number top = -INFINITE;
    for (int i = 0; i < M && each; ++i) top = larger(top, score[i * groups + g]);
    all = all || !inside(top, -INFINITE, INFINITE);
    for (int i = 0; i < M && each; ++i)
      if (all || largest(score[i * groups + g]) > -INFINITE) sources[count++] = i;
  }

  // Writes the predicted laws of group g to `ahead`: one, or one for each of its sources.
  void move(int g) {
    const auto plain = [](const double* p) { return p; };
    const auto wide = [](const Number* p) { return p; };
    for (int k = 0; k < count; ++k) {
      Number* const target = ahead + k * size;
      const int64_t i = each ? sources[k] : 0;
      if (begun) {
        spread(group_size(g), size, state + g * L * size, size, target, 0);
      } else if (!each) {
        if (law.mapped)
          for (int j = 0; j < M; ++j) law.read(j, g, state + j * size, parts + j * size);
        if (law.mapped)
          law.collapse(M, weight + g, groups, wide(parts), size, mixed);
        else if (!once)
          law.collapse(M, weight + g, groups, plain(state), size, mixed);
        once = method == GPB1;  // all modes start from the same mixture
        law.predict(g, wide(mixed), target);
      } else if (law.mapped) {
        law.read(i, g, state + i * size, mixed);
        law.predict(g, wide(mixed), target);
      } else {
        law.predict(g, plain(state + i * size), target);
      }
    }
  }

  // Conditions the laws at `ahead` on the observation, and collapses them if there is one for each mode before.
  // Returns −1, or a reachable mode whose density is NaN.
  int see(int g) {
    Number* const result = fresh + g * size;
    for (int k = 0; k < count; ++k) {
      Number* const target = each ? parts + k * size : result;
      const Number* const reach = each ? score + sources[k] * groups + g : prior + g;
      Number density = law.update(g, ahead + k * size, target);
      if (has_nan(density))
        for (int j = 0; j < L; ++j) {
          if (!has_nan(lanes(&density)[j])) continue;
          if (lanes(reach)[j] > -INFINITE) return g * L + j;
          lanes(&density)[j] = 0.0;  // probability 0: the law stays as predicted
          for (int i = 0; i < size; ++i) lanes(target + i)[j] = lanes(ahead + k * size + i)[j];
        }
      if (each)
        score[sources[k] * groups + g] = score[sources[k] * groups + g] + density;
      else
        log_weight[g] = prior[g] + density;
    }
    if (each) {
      log_weight[g] = shares(M, groups, score + g, log_mode, method == VITERBI, weight + g);
      for (int k = 0; k < count && count < M; ++k) share[k] = weight[sources[k] * groups + g];
      const Number* const own = count < M ? share : weight + g;
      law.collapse(count, own, count < M ? 1 : groups, static_cast<const Number*>(parts), size, result);
    }
    return -1;
  }

  // Writes the laws and log probabilities by mode, and the step's log-likelihood term. Returns −1, or M if the
  // observation has density 0 in every mode that can be reached.
  int finish() {
    for (int j = M; j < groups * L; ++j) lanes(log_weight)[j] = -INFINITE;
    Number most = log_weight[0], sum = 0.0;
    for (int g = 1; g < groups; ++g) most = larger(most, log_weight[g]);
    const double top = largest(most);
    if (!(top > -INFINITE)) return M;
    for (int g = 0; g < groups; ++g) sum = sum + exponential(log_weight[g] - Number(top));
    term = top + std::log(total(sum));
    for (int j = 0; j < M; ++j) log_mode[j] = lanes(log_weight)[j] - term;
    gather(M, size, fresh, size, state, size);
    return -1;
  }

  int group_size(int g) const { return M - g * L < L ? M - g * L : L; }

  Law& law;
  const int M, size, groups, method;
  bool begun = false, each = false, once = false;
  double term = 0.0;
  double *state, *log_mode;  // laws mode by mode, and log probabilities
  Number *score, *weight;    // [i · groups + g]
  Number *prior, *log_weight;
  Number *ahead, *parts;     // laws of a group by mode before: predicted, and given the observation
  Number *mixed, *fresh;     // a mixed or mapped law, and the new laws by group
  int count = 0;             // how many modes before lead to the present group, which, and their weights
  int64_t* sources;
  Number* share;
};

// Arguments and results of a pass over series, part of every frame for `filter_series`. Series b is rows starts[b]
// to starts[b + 1] − 1; its first lead[b] steps were done before, and their rows are written. With `first`, the
// initial law is itself the prediction of step 0. With `everything`, results have a row for every step, else one for
// each series, after its last step. mixing[i, j] is P(mode i before | mode j now, data known at the collapse).
// failure is the step at which the series stopped, or −1, and the mode, or M for all modes.
#define SWITCHING_FIELDS(whole, real, place)                                           \
  whole(modes) whole(method) whole(first) whole(everything) whole(series) whole(next)  \
  place(const int64_t, starts)  /* (series + 1,) */                                    \
  place(const int64_t, lead)    /* (series,), or 0: none */                            \
  place(double, log_likelihood) /* (series,) */                                        \
  place(double, terms)          /* (rows,) */                                          \
  place(double, log_mode)       /* (rows, M) */                                        \
  place(double, mixing)         /* (rows, M·M), or 0: not wanted */                    \
  place(int64_t, failure)       /* (series, 2) */

// Takes the next `at_once` of `count` items for one of the threads that share `next`; false if none are left.
inline bool take_some(int64_t& next, int64_t count, int64_t at_once, int64_t& begin, int64_t& end) {
  begin = __atomic_fetch_add(&next, at_once, __ATOMIC_RELAXED);
  end = begin + at_once < count ? begin + at_once : count;
  return begin < count;
}

// Filters the series of a frame that no other thread has taken; returns how many of them had to stop.
template <class Law, class Frame> int64_t filter_series(Law& law, Frame& f, Room& room) {
  Switching<Law> s(law, int(f.method), room);
  const int M = s.M;
  const auto keep = [&](int64_t row, double term) {
    f.terms[row] = term;
    copy(M, s.log_mode, f.log_mode + row * M);
    for (int i = 0; i < M && f.mixing; ++i)
      copy(M, lanes(s.weight + i * s.groups), f.mixing + (row * M + i) * M);
    law.keep(row, s.state);
  };
  const auto filter_one = [&](int64_t series) {  // returns whether it had to stop
    const int64_t begin = f.starts[series], steps = f.starts[series + 1] - begin;
    const int64_t done = f.lead ? f.lead[series] : 0;
    f.failure[2 * series] = -1;
    law.start(series, done, s.state, s.log_mode);
    double total = 0.0;
    int stopped = -1;
    for (int64_t t = done; t < steps; ++t) {
      law.load(series, t, t == done);
      const bool begun = t == 0 && f.first;
      s.weigh(begun, s.method >= GPB2 && !begun);
      for (int g = 0; g < s.groups && stopped < 0; ++g) {
        s.find_sources(g, false);
        s.move(g);
        stopped = s.see(g);
      }
      if (stopped < 0) stopped = s.finish();
      if (stopped >= 0) {
        f.failure[2 * series] = t, f.failure[2 * series + 1] = stopped;
        return true;
      }
      total += s.term;
      if (f.everything) keep(begin + t, s.term);
    }
    f.log_likelihood[series] = total;
    if (!f.everything) keep(series, total);
    return false;
  };
  int64_t stops = 0;
  for (int64_t begin, end; take_some(f.next, f.series, 1, begin, end);) stops += filter_one(begin);
  return stops;
}

// Rows of an online filter. A row holds the whole state of a member, in these parts:
//
//     laws by mode, their log probabilities          given all observations
//     the log-density of the last y, and the sum of these since the start
//     predicted laws, M (for GPB2 M·M, [j, i] is mode j's from mode i's), the scores log μ_i π_ij (M·M), and
//     their log-sums over i, the predicted log probabilities (M)
//
// Nothing else is kept between calls, so rows may be copied, stored and continued anywhere. A step does `predict`,
// `update` or both; with `begun`, the initial law is itself the prediction. `matrices` holds what a law needs for the
// step, in rows `matrices_step` numbers apart, one for each member, or (0) one for all. `failed`, −1 at first, gets
// the first member that cannot go on, as member · (M + 1) + mode (M: all modes).
#define ONLINE_FIELDS(whole, real, place)                                                                \
  whole(modes) whole(method) whole(members) whole(predict) whole(update) whole(begun) whole(next)        \
  whole(failed) place(const double, before) place(double, after) place(const double, matrices)           \
  whole(matrices_step) place(const double, y) /* (members, m), NaN where missing */

// Offsets of the parts of a row, and its length; `parts` is M with a law for each pair of modes, else 1.
struct Row {
  int log_mode, term, ahead, score, prior, length;
  Row(int M, int size, int parts)
      : log_mode(M * size), term(log_mode + M), ahead(term + 2), score(ahead + parts * M * size),
        prior(score + M * M), length(prior + M) {}
};

// Does a step for each member of a frame that no other thread has taken.
template <class Law, class Frame> void step_rows(Law& law, Frame& f, Room& room) {
  Switching<Law> s(law, int(f.method), room);
  constexpr int L = Switching<Law>::L;
  const int M = s.M, size = s.size, parts = s.method >= GPB2 ? M : 1;
  const Row at(M, size, parts);
  const auto step = [&](const double* from, double* to) {
    copy(M * size, from, s.state);
    copy(M, from + at.log_mode, s.log_mode);
    if (f.predict) {
      s.weigh(f.begun, parts > 1);
      if (parts > 1) s.sum_scores();
      for (int i = 0; i < M; ++i) copy(M, lanes(s.score + i * s.groups), to + at.score + i * M);
      copy(M, lanes(s.prior), to + at.prior);
    } else {
      s.each = parts > 1;
      copy(at.length - at.ahead, from + at.ahead, to + at.ahead);
      for (int i = 0; i < M; ++i) spread(M, 1, from + at.score + i * M, 1, s.score + i * s.groups, 1);
      spread(M, 1, from + at.prior, 1, s.prior, 1);
    }
    int stopped = -1;
    for (int g = 0; g < s.groups && stopped < 0; ++g) {
      s.find_sources(g, true);
      if (f.predict) s.move(g);
      for (int i = 0; i < parts; ++i) {
        double* const place = to + at.ahead + (g * L * parts + i) * size;
        if (f.predict)
          gather(s.group_size(g), size, s.ahead + i * size, 0, place, parts * size);
        else
          spread(s.group_size(g), size, place, parts * size, s.ahead + i * size, 0);
      }
      if (f.update) stopped = s.see(g);
    }
    if (f.update && stopped < 0) stopped = s.finish();
    copy(M * size, s.state, to);
    copy(M, s.log_mode, to + at.log_mode);
    to[at.term] = f.update ? s.term : from[at.term];
    to[at.term + 1] = from[at.term + 1] + (f.update ? s.term : 0.0);
    return stopped;
  };
  for (int64_t begin, end; take_some(f.next, f.members, 64, begin, end);)
    for (int64_t member = begin; member < end; ++member) {
      law.load(member, member == begin);
      const int stopped = step(f.before + member * at.length, f.after + member * at.length);
      if (stopped < 0) continue;
      const int64_t found = member * (M + 1) + stopped;
      int64_t known = __atomic_load_n(&f.failed, __ATOMIC_RELAXED);
      constexpr int order = __ATOMIC_RELAXED;
      while ((known < 0 || found < known) &&
             !__atomic_compare_exchange_n(&f.failed, &known, found, false, order, order)) {
      }
      break;
    }
}
