// Kernels of modes that are functions: filters over series and step by step, the backward pass, and predicted
// observations.
//
// The recursions are those of switching.hpp with the law of square_root.hpp. The backward pass is Kim's:
// with μ the filtered and μ̂ the smoothed mode probabilities, for modes j at t and k at t + 1,
//
//     P(j, k | all) = μ̂_k(t+1) μ_j(t) π_jk / Σ_i μ_i(t) π_ik,   μ̂_j(t) = Σ_k P(j, k | all),
//
// and the law of mode j is its filtered law given each k's smoothed one (`pull_back`), collapsed over k.
#include "switching/series.hpp"
#include "nonlinear/square_root.hpp"

#define TAPE_VALUES_FIELDS(whole, real, place)                                                            \
  place(const Tapes, tapes) whole(program) whole(points) place(const double, x) place(const double, u)    \
  place(double, out)
EXPTILT_FRAME(TapeValues, TAPE_VALUES_FIELDS)

// Writes the outputs of a program, (points, outputs), at states x (points, n).
EXPTILT_KERNEL(tape_values, TapeValues) {
  const Tapes& t = *f.tapes;
  Room room;
  Interpreter tape(t, f.points, room);
  tape.set_inputs(f.u);
  for (int64_t i = 0; i < t.states; ++i)
    for (int64_t c = 0; c < tape.wide; ++c) tape.state(i)[c] = f.x[(c < f.points ? c : 0) * t.states + i];
  tape.run(f.program);
  const int64_t size = t.programs[4 * f.program + 3];
  for (int64_t k = 0; k < size; ++k) {
    const auto value = tape.output(f.program, k);
    for (int64_t c = 0; c < f.points; ++c) f.out[c * size + k] = value.at[c * value.step];
  }
  return 0;
}

// Arguments and results of a filter; the backward pass overwrites log_mode, mean and factor with smoothed ones.
#define NONLINEAR_SERIES_FIELDS(whole, real, place)                                                       \
  SWITCHING_FIELDS(whole, real, place)                                                                    \
  place(const NonlinearModes, model)                                                                      \
  whole(initial_varies)                        /* 1 if each series has an initial law of its own */       \
  place(const double, initial_mean)            /* (1 or series, M·n) */                                   \
  place(const double, initial_factor)          /* (1 or series, M·n·n) */                                 \
  place(const double, initial_log_probability) /* (1 or series, M) */                                     \
  place(const double, y)                       /* (rows, m), NaN where missing */                         \
  place(const double, u)                       /* (rows, r) */                                            \
  place(double, mean)                          /* (rows, M·n) */                                          \
  place(double, factor)                        /* (rows, M·n·n) */
EXPTILT_FRAME(NonlinearSeries, NONLINEAR_SERIES_FIELDS)

// Copies laws, mode by mode, from a row of means and factors that `keep_laws` wrote.
static void take_laws(int M, int n, const double* mean, const double* factor, int64_t row, double* state) {
  for (int j = 0; j < M; ++j) {
    copy(n, mean + (row * M + j) * n, state + j * law_size(n));
    copy(n * n, factor + (row * M + j) * n * n, state + j * law_size(n) + n);
  }
}

struct SeriesLaw : SquareRoot {
  NonlinearSeries& f;
  SeriesLaw(NonlinearSeries& f, Room& room) : SquareRoot(*f.model, room), f(f) {}
  void start(int64_t series, int64_t, double* state, double* log_mode) {
    const int64_t row = f.initial_varies ? series : 0;
    take_laws(modes, n, f.initial_mean, f.initial_factor, row, state);
    copy(modes, f.initial_log_probability + row * modes, log_mode);
  }
  void load(int64_t series, int64_t t, bool) {
    const int64_t row = f.starts[series] + t;
    set_inputs(f.u + row * q.tapes->inputs);
    look(f.y + row * m);
  }
  void keep(int64_t row, const double* state) { keep_laws(modes, n, state, f.mean, f.factor, row); }
};

EXPTILT_KERNEL(filter_nonlinear, NonlinearSeries) {
  Room room;
  SeriesLaw law(f, room);
  return filter_series(law, f, room);
}

EXPTILT_KERNEL(smooth_nonlinear, NonlinearSeries) {
  Room room;
  SquareRoot law(*f.model, room);
  const int M = law.modes, n = law.n, size = law.size;
  double *own = room.take(M * size), *later = room.take(M * size), *parts = room.take(M * size);
  double *pair = room.take(M * M), *score = room.take(M), *weight = room.take(M);
  for (int64_t series, end; take_some(f.next, f.series, 1, series, end);)
    for (int64_t row = f.starts[series + 1] - 2; row >= f.starts[series]; --row) {
      double *log_mode = f.log_mode + row * M, *after = log_mode + M;
      law.set_inputs(f.u + (row + 1) * f.model->tapes->inputs);
      take_laws(M, n, f.mean, f.factor, row, own);
      take_laws(M, n, f.mean, f.factor, row + 1, later);
      for (int k = 0; k < M; ++k) {
        for (int j = 0; j < M; ++j) score[j] = log_mode[j] + law.log_transition[j * M + k];
        const double total = log_sum(M, score);
        for (int j = 0; j < M; ++j)
          pair[j * M + k] = total > -INFINITE ? after[k] + score[j] - total : -INFINITE;
      }
      for (int j = 0; j < M; ++j) {
        log_mode[j] = log_sum(M, pair + j * M);
        if (log_mode[j] == -INFINITE) continue;  // the series cannot have been in mode j: its law stays
        for (int k = 0; k < M; ++k) {
          weight[k] = std::exp(pair[j * M + k] - log_mode[j]);
          if (weight[k] > 0.0)
            law.pull_back(k, own + j * size, later + k * size, parts + k * size);
          else
            copy(size, own + j * size, parts + k * size);
        }
        law.collapse(M, weight, 1, parts, size, own + j * size);
      }
      keep_laws(M, n, own, f.mean, f.factor, row);
    }
  return 0;
}

// Steps of an online filter. The field `matrices` holds the inputs, (r,) or (members, r).
#define NONLINEAR_ROWS_FIELDS(whole, real, place) \
  ONLINE_FIELDS(whole, real, place) place(const NonlinearModes, model)
EXPTILT_FRAME(NonlinearRows, NONLINEAR_ROWS_FIELDS)

struct RowsLaw : SquareRoot {
  const NonlinearRows& f;
  RowsLaw(const NonlinearRows& f, Room& room) : SquareRoot(*f.model, room), f(f) {}
  void load(int64_t member, bool) {
    set_inputs(f.matrices + member * f.matrices_step);
    if (f.update) look(f.y + member * m);
  }
};

EXPTILT_KERNEL(step_nonlinear_rows, NonlinearRows) {
  Room room;
  RowsLaw law(f, room);
  step_rows(law, f, room);
  return 0;
}

#define NONLINEAR_SIGHT_FIELDS(whole, real, place)                                                        \
  place(const NonlinearModes, model) whole(count)                                                         \
  place(const double, laws)     /* (count, M·law) */                                                      \
  place(const double, u)        /* inputs, `u_step` numbers from row to row */                            \
  whole(u_step)                                                                                           \
  place(double, mean)           /* (count, M, m) */                                                       \
  place(double, covariance)     /* (count, M, m, m) */
EXPTILT_FRAME(NonlinearSight, NONLINEAR_SIGHT_FIELDS)

// Writes mean and covariance of the observation that each mode predicts from its laws.
EXPTILT_KERNEL(see_nonlinear, NonlinearSight) {
  Room room;
  SquareRoot law(*f.model, room);
  const int64_t M = law.modes, m = law.m;
  for (int64_t k = 0; k < f.count * M; ++k) {
    law.set_inputs(f.u + k / M * f.u_step);
    law.sight(int(k % M), f.laws + k * law.size, f.mean + k * m, f.covariance + k * m * m);
  }
  return 0;
}
