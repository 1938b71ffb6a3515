// Functions of gaussian.hpp for sizes that are not known to the compiler, compiled once and not inlined.
#pragma once
#include "switching/gaussian.hpp"

template <int sign, bool lower = false, class Columns, class Number>
ONCE void times(int rows, int inner, Columns columns, View<Number> A, const Number* B, const Number* C,
                Number* out) {
  multiply<sign, lower>(rows, inner, columns, A, B, C, out);
}

template <class Number, class Source>
ONCE void predict_some(int n, const Number* move, const Source* source, Number* target, Number* scratch) {
  predict(n, move, source, target, scratch);
}

template <class Number>
ONCE void collapse_some(int n, int parts, const Number* weight, int weight_step, const Number* first,
                        int step, Number* target) {
  collapse(n, parts, weight, weight_step, first, step, target);
}

// Without observed components (m = 0) the law stays as it is.
template <class Number>
ONCE Number update_some(int n, int m, const double* y, const Number* sensor, const Number* source,
                        Number* target, Number* scratch) {
  if (m > 0) return update(n, m, y, sensor, source, target, scratch);
  copy(law_size(n), source, target);
  return 0.0;
}
