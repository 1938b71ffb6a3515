// The sweeps of attention for float32 and, widened to it, for half precision.
#define EXPTILT_NUMBER float
#define EXPTILT_NAME(sweep) exptilt_##sweep##_float32
#include "attention/attention_exports.hpp"

EXPTILT_EXPORT const char* exptilt_fields_Attention() {
  return ATTENTION_FIELDS(EXPTILT_WHOLE_TEXT, EXPTILT_REAL_TEXT, EXPTILT_PLACE_TEXT, EXPTILT_OPERAND_TEXT,
                          EXPTILT_PLANE_TEXT);
}
