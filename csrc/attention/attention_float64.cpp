// The sweeps of attention for float64.
#define EXPTILT_NUMBER double
#define EXPTILT_NAME(sweep) exptilt_##sweep##_float64
#include "attention/attention_exports.hpp"
