// Tapes: users' functions as lists of operations, run over all points of a step at once.
//
//     instruction   operation, target, a, b, c:      register[target] = operation(a, b, c)
//     operand k     register k, if k >= 0;  number ~k, the same for all points, if k < 0
//
// A register holds one value for each point, in whole vectors; the first ones hold the state. Numbers are the
// inputs of the step, then constants. exptilt/switching/tape.py records a function as such a list, and its
// Jacobian as another one, so the user of a filter compiles nothing.
#pragma once
#include "frame.hpp"
#include "switching/lanes.hpp"
#include "vectors.hpp"

// Operations on vectors a, b, c.
#define TAPE_VECTOR_OPERATIONS(with)                                                                   \
  with(add, a + b) with(sub, a - b) with(mul, a * b) with(div, a / b) with(multiply_add, a * b + c)    \
  with(maximum, ((a > b) | (a != a)) ? a : b) with(minimum, ((a < b) | (a != a)) ? a : b)              \
  with(where, a != none ? b : c)                                                                       \
  with(gt, a > b ? one : none) with(ge, a >= b ? one : none) with(lt, a < b ? one : none)              \
  with(le, a <= b ? one : none) with(eq, a == b ? one : none) with(ne, a != b ? one : none)            \
  with(abs, a > none ? a : none - a) with(sign, a > none ? one : a < none ? -one : a)
// Operations on a and b of one point, by functions of the C library.
#define TAPE_POINT_OPERATIONS(with)                                                                    \
  with(sin, std::sin(a)) with(cos, std::cos(a)) with(tan, std::tan(a)) with(asin, std::asin(a))        \
  with(acos, std::acos(a)) with(atan, std::atan(a)) with(sinh, std::sinh(a)) with(cosh, std::cosh(a))  \
  with(tanh, std::tanh(a)) with(exp, std::exp(a)) with(expm1, std::expm1(a)) with(log, std::log(a))    \
  with(log1p, std::log1p(a)) with(sqrt, std::sqrt(a)) with(atan2, std::atan2(a, b))                    \
  with(hypot, std::hypot(a, b)) with(pow, std::pow(a, b))

#define TAPE_NAME(name, value) #name " "
EXPTILT_EXPORT const char* exptilt_tape_operations() {
  return TAPE_VECTOR_OPERATIONS(TAPE_NAME) TAPE_POINT_OPERATIONS(TAPE_NAME);
}

#define TAPE_FIELDS(whole, real, place)                                                                \
  whole(states) whole(inputs) whole(registers) whole(numbers)                                          \
  place(const int32_t, code)     /* (instructions, 5) */                                               \
  place(const int32_t, programs) /* (programs, 4): first instruction, how many, first output, how many */ \
  place(const int32_t, outputs)  /* operands */                                                        \
  place(const double, number)
EXPTILT_FRAME(Tapes, TAPE_FIELDS)

class Interpreter {
  using W = Wide<double>;
  using V = W::V;
  enum Operation {
#define TAPE_ENTRY(name, value) do_##name,
    TAPE_VECTOR_OPERATIONS(TAPE_ENTRY) TAPE_POINT_OPERATIONS(TAPE_ENTRY)
  };
  struct Operand {
    const double* at;
    int64_t step;  // 1, or 0 where all points have the same value
  };

 public:
  const Tapes& tapes;
  const int64_t points, wide;  // values of a register that belong to points, and all of them, in whole vectors
  Interpreter(const Tapes& t, int64_t points, Room& room)
      : tapes(t), points(points), wide((points + W::lanes - 1) / W::lanes * W::lanes),
        numbers(room.take((t.inputs + t.numbers) * W::lanes)),
        registers(room.take(t.registers * wide + W::lanes)) {  // a state may be written beyond its end
    for (int64_t k = 0; k < t.numbers; ++k) fill(numbers + (t.inputs + k) * W::lanes, 1, t.number[k]);
  }
  void set_inputs(const double* u) {
    for (int64_t k = 0; k < tapes.inputs; ++k) fill(numbers + k * W::lanes, 1, u[k]);
  }
  // The register of component i of the state; the caller writes all `wide` values, also those beyond `points`.
  double* state(int64_t i) { return registers + i * wide; }
  // Output k of a program that was run, at all points or (step 0) the same number for all.
  Operand output(int64_t program, int64_t k) const {
    return operand(tapes.outputs[tapes.programs[4 * program + 2] + k]);
  }

  ONCE void run(int64_t program) {
    const int32_t* line = tapes.code + 5 * tapes.programs[4 * program];
    const int32_t* end = line + 5 * tapes.programs[4 * program + 1];
    const V none = W::all(0.0), one = W::all(1.0);
    for (; line != end; line += 5) {
      double* out = registers + line[1] * wide;
      const Operand p = operand(line[2]), q = operand(line[3]), r = operand(line[4]);
      switch (line[0]) {
#define TAPE_VECTOR_CASE(name, value)                                                                  \
  case do_##name:                                                                                      \
    for (int64_t v = 0; v < wide; v += W::lanes) {                                                     \
      [[maybe_unused]] const V a = W::load(p.at + v * p.step), b = W::load(q.at + v * q.step);         \
      [[maybe_unused]] const V c = W::load(r.at + v * r.step);                                         \
      W::store(out + v, value);                                                                        \
    }                                                                                                  \
    break;
        TAPE_VECTOR_OPERATIONS(TAPE_VECTOR_CASE)
#define TAPE_POINT_CASE(name, value)                                                                   \
  case do_##name:                                                                                      \
    for (int64_t v = 0; v < points; ++v) {                                                             \
      [[maybe_unused]] const double a = p.at[v * p.step], b = q.at[v * q.step];                        \
      out[v] = value;                                                                                  \
    }                                                                                                  \
    for (int64_t v = points; v < wide; ++v) out[v] = out[0];                                           \
    break;
        TAPE_POINT_OPERATIONS(TAPE_POINT_CASE)
      }
    }
  }

 private:
  double *const numbers, *const registers;
  Operand operand(int32_t k) const {
    return k < 0 ? Operand{numbers + ~k * W::lanes, 0} : Operand{registers + k * wide, 1};
  }
};
