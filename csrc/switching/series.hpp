// Series of linear Gaussian modes: the fields that describe them, and the matrices of one step in lanes of modes.
//
// `Series` describes arrays that Python owns: the parameters, with the distance in numbers from one series
// and from one step to the next (0 where nothing varies), the data, and what a filter writes. A pass that
// reads a filter's results (smoother, adjoint, particles) has a frame of its own with a place(Series, run).
#pragma once
#include "frame.hpp"
#include "switching/gaussian.hpp"
#include "switching/switching.hpp"

#define TIMED_FIELD(whole, place, name) place(const double, name) whole(name##_series) whole(name##_step)
#define SERIES_FIELDS(whole, real, place)                                                             \
  SWITCHING_FIELDS(whole, real, place)                                                                \
  whole(states) whole(outputs)                                                                        \
  TIMED_FIELD(whole, place, transition)         /* M·M */                                             \
  TIMED_FIELD(whole, place, dynamics)           /* M·n·n */                                           \
  TIMED_FIELD(whole, place, dynamics_offset)    /* M·n, inputs included */                            \
  TIMED_FIELD(whole, place, process_noise)      /* M·n·n */                                           \
  TIMED_FIELD(whole, place, observation)        /* M·m·n */                                           \
  TIMED_FIELD(whole, place, observation_offset) /* M·m, inputs included */                            \
  TIMED_FIELD(whole, place, observation_noise)  /* M·m·m */                                           \
  whole(initial_varies)                         /* 1 if each series has an initial law of its own */  \
  place(const double, initial_mean)             /* (1 or series, M·n) */                              \
  place(const double, initial_covariance)       /* (1 or series, M·n·n) */                            \
  place(const double, initial_log_probability)  /* (1 or series, M) */                                \
  place(const double, maps)                     /* M·M·n·n or 0: state of mode i read as one of j */  \
  place(const double, map_covariance)           /* as maps */                                         \
  place(const double, y)                        /* (rows of all series, m), NaN where missing */      \
  place(double, mode_mean)                      /* (rows, M·n) */                                     \
  place(double, mode_covariance)                /* (rows, M·n·n) */                                   \
  place(const double, recurrence)               /* (M, n), or 0; see recurrent.hpp */

struct Series {
  SERIES_FIELDS(EXPTILT_WHOLE, EXPTILT_REAL, EXPTILT_PLACE)
};

// Whether four modes at once are faster than four columns of one mode's matrices: true with few states.
inline bool lanes_pay(const Series& f) {
  return f.states <= (f.modes == 1 ? 4 : f.modes == 2 ? 12 : 24);
}

// A parameter's numbers for a series at step t.
#define NOW(f, name, series, t) ((f).name + (series) * (f).name##_series + (t) * (f).name##_step)

// Copies the laws before step t of a series, mode by mode, and log probabilities: the initial ones for t = 0, else
// those that the filter wrote.
inline void law_before(const Series& f, int64_t series, int64_t t, double* state, double* log_mode) {
  const int M = int(f.modes), n = int(f.states), law = law_size(n);
  const int64_t row = t > 0 ? f.starts[series] + t - 1 : f.initial_varies ? series : 0;
  const double* mean = (t > 0 ? f.mode_mean : f.initial_mean) + row * M * n;
  const double* cov = (t > 0 ? f.mode_covariance : f.initial_covariance) + row * M * n * n;
  for (int j = 0; j < M; ++j) {
    copy(n, mean + j * n, state + j * law);
    copy(n * n, cov + j * n * n, state + j * law + n);
  }
  copy(M, (t > 0 ? f.log_mode : f.initial_log_probability) + row * M, log_mode);
}

// Writes laws, mode by mode, to a row of means and covariances.
inline void keep_laws(int M, int n, const double* state, double* mean, double* covariance, int64_t row) {
  for (int j = 0; j < M; ++j) {
    copy(n, state + j * law_size(n), mean + (row * M + j) * n);
    copy(n * n, state + j * law_size(n) + n, covariance + (row * M + j) * n * n);
  }
}

// The matrices of one step, a move and a sensor for each group of modes, and the components of y that are seen.
template <class Number> struct Matrices {
  static constexpr int L = LANES<Number>;
  const int M, n, m, groups, law, move, sensor;
  const bool mapped;
  Number* log_transition;  // [i · groups + g]
  Number *moves, *sensors;  // one a group
  Number* maps;            // as moves, [i · groups + g]
  Number* some;            // sensors of the components that are seen, if some are missing
  double* y;               // the components that are seen
  int64_t* index;          // which these are, and how many
  int seen = 0;

  Matrices(int M, int n, int m, bool mapped, Room& room)
      : M(M), n(n), m(m), groups((M + L - 1) / L), law(law_size(n)), move(move_size(n)),
        sensor(sensor_size(n, m)), mapped(mapped), log_transition(room.take<Number>(M * groups)),
        moves(room.take<Number>(groups * move)), sensors(room.take<Number>(groups * sensor)),
        maps(room.take<Number>(mapped ? M * groups * move : 0)),
        some(room.take<Number>(groups * sensor)), y(room.take(m)), index(room.take<int64_t>(m)) {}

  // Loads the parameters of step t of a series; those that do not vary in time only with `again`.
  void load(const Series& f, int64_t series, int64_t t, bool again) {
    if (again || f.transition_step) {
      spread_rows(NOW(f, transition, series, t), 1, log_transition);
      for (int i = 0; i < M * groups; ++i) log_transition[i] = logarithm(log_transition[i]);
    }
    // Copies `size` numbers for each mode to their place in each group's move or sensor.
    const auto take = [&](int64_t varies, const double* source, int size, Number* target, int step) {
      if (again || varies) spread(M, size, source, size, target, step);
    };
    take(f.dynamics_step, NOW(f, dynamics, series, t), n * n, moves, move);
    take(f.dynamics_offset_step, NOW(f, dynamics_offset, series, t), n, moves + n * n, move);
    take(f.process_noise_step, NOW(f, process_noise, series, t), n * n, moves + n * n + n, move);
    take(f.observation_step, NOW(f, observation, series, t), m * n, sensors, sensor);
    take(f.observation_offset_step, NOW(f, observation_offset, series, t), m, sensors + m * n, sensor);
    take(f.observation_noise_step, NOW(f, observation_noise, series, t), m * m, sensors + m * n + m, sensor);
    for (int g = 0; g < groups && (again || f.dynamics_step); ++g) turn(n, moves + g * move);
    if (again && mapped && f.maps)  // moves without an offset
      for (int i = 0; i < M; ++i) {
        Number* const at = maps + i * groups * move;
        spread(M, n * n, f.maps + i * M * n * n, n * n, at, move);
        spread(M, n * n, f.map_covariance + i * M * n * n, n * n, at + n * n + n, move);
        for (int g = 0; g < groups; ++g) turn(n, at + g * move);
      }
  }

  // Takes logarithms of transition probabilities, (M, M).
  void take_scores(const double* scores) { spread_rows(scores, 1, log_transition); }

  // Loads from and stores to a row of plain numbers, mode by mode: logarithms of transition probabilities, these
  // probabilities, moves, sensors, maps.
  int64_t row_length() const { return 2 * M * M + M * (move + sensor) + (mapped ? M * M * move : 0); }
  void load(const double* row) {
    spread_rows(row, 1, log_transition);
    row += 2 * M * M;
    spread(M, move, row, move, moves, move);
    row += M * move;
    spread(M, sensor, row, sensor, sensors, sensor);
    if (mapped) spread_rows(row + M * sensor, move, maps);
  }
  void store(const double* transition, double* row) const {
    static_assert(L == 1);
    copy(M * M, log_transition, row);
    copy(M * M, transition, row + M * M);
    row += 2 * M * M;
    copy(M * move, moves, row);
    row += M * move;
    copy(M * sensor, sensors, row);
    if (mapped) copy(M * M * move, maps, row + M * sensor);
  }

  // Takes the components of a row that are seen, and, if some are missing, their sensors.
  void look(const double* row) {
    seen = 0;
    for (int a = 0; a < m; ++a)
      if (row[a] == row[a]) {
        index[seen] = a;
        y[seen++] = row[a];
      }
    if (seen == m) return;
    for (int g = 0; g < groups; ++g) {
      const Number *H = sensors + g * sensor, *d = H + m * n, *R = d + m;
      Number *own_H = some + g * sensor_size(n, seen), *own_d = own_H + seen * n, *own_R = own_d + seen;
      for (int a = 0; a < seen; ++a) {
        copy(n, H + index[a] * n, own_H + a * n);
        own_d[a] = d[index[a]];
        for (int b = 0; b < seen; ++b) own_R[a * seen + b] = R[index[a] * m + index[b]];
      }
    }
  }
  // The sensors of group g for the components that are seen.
  const Number* sensor_of(int g) const {
    return seen == m ? sensors + g * sensor : some + g * sensor_size(n, seen);
  }

 private:
  // `spread` for each mode i before.
  void spread_rows(const double* source, int size, Number* target) {
    for (int i = 0; i < M; ++i)
      spread(M, size, source + i * M * size, size, target + i * groups * size, size);
  }
};
