// Passes over series beyond the filter: smoother, adjoint, particles; and the likelihood of a hidden chain.
//
// They work on four modes at once or, where that would leave lanes empty, on four columns of one mode's matrices.
// The smoother is compiled for each number of states up to 4, where that gains a third; for larger ones the gain
// is not worth the compilation.
#include "switching/adjoint.hpp"
#include "switching/chain.hpp"
#include "switching/particles.hpp"
#include "switching/smoother.hpp"

EXPTILT_KERNEL(smooth_back, Smoothing) {
  switch (f.run->states) {
    case 1: smooth_by<Four, Fixed<1>>(f); break;
    case 2: smooth_by<Four, Fixed<2>>(f); break;
    case 3: smooth_by<Four, Fixed<3>>(f); break;
    case 4: smooth_by<Four, Fixed<4>>(f); break;
    default: lanes_pay(*f.run) ? smooth_by<Four, int>(f) : smooth_by<double, int>(f);
  }
  return 0;
}

EXPTILT_KERNEL(filter_adjoint, Adjoint) {
  AdjointPass(f).pass();
  return 0;
}

EXPTILT_KERNEL(swarm, Swarm) {
  Swarming(f).pass();
  return 0;
}

EXPTILT_KERNEL(chain_pass, HiddenChain) {
  f.log_likelihood = chain_pass(f);
  return 0;
}
