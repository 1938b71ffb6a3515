// The C functions of attention, for one kind of number: each takes units of a frame until there are none, on as many
// threads as call it.
#include "backward.hpp"
#include "forward.hpp"

template <class Sweep> static void run(Attention* frame) {
  try {
    Sweep(*frame).run();
  } catch (const std::bad_alloc&) {
    raise_flag(frame->failed);
  }
}

EXPTILT_EXPORT void EXPTILT_NAME(forward)(Attention* frame) { run<Forward<EXPTILT_NUMBER>>(frame); }
EXPTILT_EXPORT void EXPTILT_NAME(tangent)(Attention* frame) { run<Tangent<EXPTILT_NUMBER>>(frame); }
EXPTILT_EXPORT void EXPTILT_NAME(backward)(Attention* frame) { run<Backward<EXPTILT_NUMBER>>(frame); }
EXPTILT_EXPORT void EXPTILT_NAME(mass)(Attention* frame) { run<Mass<EXPTILT_NUMBER>>(frame); }
// Two frames, one after the other: that of the parts, and that of the results.
EXPTILT_EXPORT void EXPTILT_NAME(join)(Attention* frames) { join<EXPTILT_NUMBER>(frames[0], frames[1]); }
EXPTILT_EXPORT int64_t EXPTILT_NAME(lanes)() { return Wide<EXPTILT_NUMBER>::lanes; }
EXPTILT_EXPORT int64_t EXPTILT_NAME(block_rows)() { return EXPTILT_ROWS; }
