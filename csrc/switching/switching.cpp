// Filters of linear Gaussian modes: the law that switching.hpp runs over, for series and for online steps.
//
// The moves of gaussian.hpp are compiled for the sizes that are most in use, where loops are unrolled, and
// once for all others; each call of a kernel looks up which to use. Few modes leave lanes empty: if they have many
// states, it is faster to work on their laws one by one, as plain numbers, four columns at a time.
#include "switching/recurrent.hpp"

namespace {

// The moves for n states and m outputs; a `shared` law is one of plain numbers, the same in all lanes.
template <class Number> struct Moves {
  template <class Source>
  using Predict = void (*)(int n, const Number* move, const Source* source, Number* target, Number* scratch);
  template <class Source>
  using Collapse = void (*)(int n, int parts, const Number* weight, int weight_step, const Source* first,
                            int step, Number* target);
  using Update = void (*)(int n, int m, const double* y, const Number* sensor, const Number* source,
                          Number* target, Number* scratch, Number* density);
  Predict<Number> predict;
  Predict<double> predict_shared;
  Collapse<Number> collapse;
  Collapse<double> collapse_shared;
  Update update;
};

// A size that is known to the compiler, or (0) not.
template <int size> auto sized(int n) {
  if constexpr (size > 0)
    return (void)n, Fixed<size>{};
  else
    return n;
}
template <class Number, class Source, int N>
void predict_by(int n, const Number* move, const Source* source, Number* target, Number* scratch) {
  predict(sized<N>(n), move, source, target, scratch);
}
template <class Number, class Source, int N>
void collapse_by(int n, int parts, const Number* weight, int weight_step, const Source* first, int step,
                 Number* target) {
  collapse(sized<N>(n), parts, weight, weight_step, first, step, target);
}
template <class Number, int N, int M>
void update_by(int n, int m, const double* y, const Number* sensor, const Number* source, Number* target,
               Number* scratch, Number* density) {
  *density = update(sized<N>(n), sized<M>(m), y, sensor, source, target, scratch);
}
template <class Number, int N, int M> constexpr Moves<Number> MOVES = {
    predict_by<Number, Number, N>, predict_by<Number, double, N>, collapse_by<Number, Number, N>,
    collapse_by<Number, double, N>, update_by<Number, N, M>};

template <class Number> const Moves<Number>& moves_for(int n, int m) {
  if constexpr (LANES<Number> > 1) switch (10 * n + m) {
      case 11: return MOVES<Number, 1, 1>;
      case 21: return MOVES<Number, 2, 1>;
      case 22: return MOVES<Number, 2, 2>;
      case 31: return MOVES<Number, 3, 1>;
      case 41: return MOVES<Number, 4, 1>;
      case 42: return MOVES<Number, 4, 2>;
    }
  (void)n, (void)m;
  return MOVES<Number, 0, 0>;
}

// The law of linear Gaussian modes.
template <class Number_> struct Gaussian {
  using Number = Number_;
  const int modes, size, n, m;
  const bool mapped;
  Matrices<Number> at;
  const Number* const log_transition;
  const Moves<Number>& moves;
  Number* const scratch;

  Gaussian(int M, int n, int m, bool mapped, Room& room)
      : modes(M), size(law_size(n)), n(n), m(m), mapped(mapped), at(M, n, m, mapped, room),
        log_transition(at.log_transition), moves(moves_for<Number>(n, m)),
        scratch(room.take<Number>(update_room(n, m))) {}

  void read(int i, int g, const double* source, Number* target) {
    moves.predict_shared(n, at.maps + (i * at.groups + g) * at.move, source, target, scratch);
  }
  template <class Source> void predict(int g, const Source* source, Number* target) {
    if constexpr (std::is_same_v<Source, Number>)
      moves.predict(n, at.moves + g * at.move, source, target, scratch);
    else
      moves.predict_shared(n, at.moves + g * at.move, source, target, scratch);
  }
  template <class Source>
  void collapse(int parts, const Number* weight, int weight_step, const Source* first, int step,
                Number* target) {
    if constexpr (std::is_same_v<Source, Number>)
      moves.collapse(n, parts, weight, weight_step, first, step, target);
    else
      moves.collapse_shared(n, parts, weight, weight_step, first, step, target);
  }
  Number update(int g, const Number* source, Number* target) {
    Number density = 0.0;
    if (at.seen == m)
      moves.update(n, m, at.y, at.sensors + g * at.sensor, source, target, scratch, &density);
    else if (at.seen > 0)
      update_by<Number, 0, 0>(n, at.seen, at.y, at.sensor_of(g), source, target, scratch, &density);
    else
      copy(size, source, target);
    return density;
  }
};

// The law for a pass over series.
template <class Number> struct OfSeries : Gaussian<Number> {
  const Series& f;
  Tilting* const tilting;      // or null
  double* state = nullptr;     // the filter's laws
  OfSeries(const Series& f, Room& room, Tilting* tilting)
      : Gaussian<Number>(int(f.modes), int(f.states), int(f.outputs), f.maps || tilting, room), f(f),
        tilting(tilting) {}
  void start(int64_t series, int64_t t, double* laws, double* log_mode) {
    law_before(f, series, t, state = laws, log_mode);
  }
  void read(int i, int g, const double* source, Number* target) {
    const int M = this->modes, left = M - g * this->at.L;
    if (tilting)
      spread(left < this->at.L ? left : this->at.L, this->size,
             tilting->laws + (i * M + g * this->at.L) * this->size, this->size, target, 0);
    else
      Gaussian<Number>::read(i, g, source, target);
  }
  void load(int64_t series, int64_t t, bool again) {
    this->at.load(f, series, t, again);
    if (tilting) {
      tilting->tilt(NOW(f, transition, series, t), state);
      this->at.take_scores(tilting->log_chance);
    }
    this->at.look(f.y + (f.starts[series] + t) * this->m);
  }
  void keep(int64_t row, const double* state) {
    keep_laws(this->modes, this->n, state, f.mode_mean, f.mode_covariance, row);
  }
};

template <class Number> int64_t filter(Series& f) {
  Room room;
  Tilting tilting(f, room);
  OfSeries<Number> law(f, room, f.recurrence ? &tilting : nullptr);
  return filter_series(law, f, room);
}

}  // namespace

EXPTILT_EXPORT const char* exptilt_fields_Series() {
  return SERIES_FIELDS(EXPTILT_WHOLE_TEXT, EXPTILT_REAL_TEXT, EXPTILT_PLACE_TEXT);
}
EXPTILT_KERNEL(filter_series, Series) {
  return lanes_pay(f) ? filter<Four>(f) : filter<double>(f);
}

// Writes the matrices of a step of several models, each as a row of plain numbers (see `Matrices`).
#define PACK_FIELDS(whole, real, place) place(const Series, run) whole(step) whole(rows) place(double, out)
EXPTILT_FRAME(Pack, PACK_FIELDS)
EXPTILT_KERNEL(pack_matrices, Pack) {
  const Series& p = *f.run;
  const int M = int(p.modes), n = int(p.states), m = int(p.outputs);
  Room room;
  Matrices<double> at(M, n, m, p.maps != nullptr, room);
  for (int64_t row = 0; row < f.rows; ++row) {
    at.load(p, row, f.step, true);
    at.store(NOW(p, transition, row, f.step), f.out + row * at.row_length());
  }
  return 0;
}

// Online steps; the matrices of a member are those that `pack_matrices` writes.
#define GAUSSIAN_ROWS_FIELDS(whole, real, place) \
  ONLINE_FIELDS(whole, real, place) whole(states) whole(outputs) whole(mapped)
EXPTILT_FRAME(GaussianRows, GAUSSIAN_ROWS_FIELDS)

namespace {

struct OfRows : Gaussian<Four> {
  const GaussianRows& f;
  OfRows(const GaussianRows& f, Room& room)
      : Gaussian<Four>(int(f.modes), int(f.states), int(f.outputs), f.mapped, room), f(f) {}
  void load(int64_t member, bool again) {
    if (again || f.matrices_step) at.load(f.matrices + member * f.matrices_step);
    if (f.update) at.look(f.y + member * m);
  }
};

}  // namespace

EXPTILT_KERNEL(step_gaussian_rows, GaussianRows) {
  Room room;
  OfRows law(f, room);
  step_rows(law, f, room);
  return 0;
}

// Innovations of candidates under each mode's predicted law. Missing components are left out: their e is NaN.
#define CANDIDATES_FIELDS(whole, real, place)                                                             \
  whole(modes) whole(states) whole(outputs) whole(method) whole(members) whole(candidates) whole(failed)  \
  place(const double, matrices) whole(matrices_step) place(const double, rows)                            \
  place(const double, y)     /* (members, K, m) */                                                        \
  place(double, innovation)  /* (members, K, M, m) */                                                     \
  place(double, covariance)  /* (members, M, m, m) */                                                     \
  place(double, distance)    /* (members, K, M), e' S⁻¹ e */                                              \
  place(double, log_density) /* (members, K, M) */
EXPTILT_FRAME(Candidates, CANDIDATES_FIELDS)
EXPTILT_KERNEL(judge_candidates, Candidates) {
  const int M = int(f.modes), n = int(f.states), m = int(f.outputs), law = law_size(n);
  const int parts = f.method >= GPB2 ? M : 1;
  const Row place(M, law, parts);
  Room room;
  Matrices<double> at(M, n, m, false, room);
  double *laws = room.take(M * law), *after = room.take(law), *scratch = room.take(update_room(n, m));
  double* weight = room.take(M);
  for (int64_t member = 0; member < f.members; ++member) {
    const double* row = f.rows + member * place.length;
    if (member == 0 || f.matrices_step) at.load(f.matrices + member * f.matrices_step);
    for (int j = 0; j < M; ++j) {
      const double reach = row[place.prior + j], *ahead = row + place.ahead + j * parts * law;
      for (int i = 0; i < parts; ++i)  // mode j's law is a mixture over the modes before
        weight[i] = parts == 1            ? 1.0
                    : reach > -INFINITE ? std::exp(row[place.score + i * M + j] - reach)
                                        : 1.0 / M;
      collapse_by<double, double, 0>(n, parts, weight, 1, ahead, law, laws + j * law);
      double* S = f.covariance + (member * M + j) * m * m;
      const double *H = at.sensors + j * at.sensor, *R = H + m * n + m, *P = laws + j * law + n;
      multiply<1>(m, n, n, view(H, n), P, NOTHING<double>, scratch);
      for (int a = 0; a < m; ++a)
        for (int b = 0; b < m; ++b) {
          S[a * m + b] = R[a * m + b];
          for (int k = 0; k < n; ++k) S[a * m + b] += scratch[a * n + k] * H[b * n + k];
        }
    }
    for (int64_t k = member * f.candidates; k < (member + 1) * f.candidates; ++k) {
      at.look(f.y + k * m);
      for (int j = 0; j < M; ++j) {
        const int seen = at.seen;
        double density = 0.0, square = 0.0, *gap = f.innovation + (k * M + j) * m;
        const double* sensor = at.sensor_of(j);
        if (seen > 0)
          update_by<double, 0, 0>(n, seen, at.y, sensor, laws + j * law, after, scratch, &density);
        if (has_nan(density)) return f.failed = member * (M + 1) + j, 0;
        for (int a = 0; a < m; ++a) gap[a] = NOT_A_NUMBER;
        const double *e = scratch + seen * seen + 2 * n * seen, *v = e + seen;  // as `update` leaves them
        for (int a = 0; a < seen; ++a) gap[at.index[a]] = e[a], square += e[a] * v[a];
        f.distance[k * M + j] = square;
        f.log_density[k * M + j] = density;
      }
    }
  }
  return 0;
}
