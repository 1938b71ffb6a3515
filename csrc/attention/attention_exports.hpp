// The C functions of attention for one type of number. Every thread that calls one takes units of the frame until
// none are left.
#include "attention/backward.hpp"
#include "attention/forward.hpp"

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
EXPTILT_EXPORT void EXPTILT_NAME(heaviest)(Attention* frame) { run<Heaviest<EXPTILT_NUMBER>>(frame); }
// frames[0] holds the parts; frames[1] gets the joined results.
EXPTILT_EXPORT void EXPTILT_NAME(join)(Attention* frames) { join<EXPTILT_NUMBER>(frames[0], frames[1]); }
EXPTILT_EXPORT int64_t EXPTILT_NAME(lanes)() { return Wide<EXPTILT_NUMBER>::lanes; }
EXPTILT_EXPORT int64_t EXPTILT_NAME(block_rows)() { return EXPTILT_ROWS; }

// For tests: e^x, tanh x and the slope of tanh of whole vectors, one row after the other.
EXPTILT_EXPORT void EXPTILT_NAME(elementary)(const EXPTILT_NUMBER* x, EXPTILT_NUMBER* out, int64_t vectors) {
  using W = Wide<EXPTILT_NUMBER>;
  for (int64_t j = 0, n = vectors * W::lanes; j < n; j += W::lanes) {
    typename W::V slope;
    W::store(out + n + j, W::tanh(W::load(x + j), slope));
    W::store(out + 2 * n + j, slope);
    W::store(out + j, W::exp(W::load(x + j)));
  }
}
