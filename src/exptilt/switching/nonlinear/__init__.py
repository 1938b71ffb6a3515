r"""Modes that are not linear: extended and unscented filters behind the same three recursions.

    x_t = f_{s_t}(x_{t−1}, u_t) + w_t,   y_t = h_{s_t}(x_t, u_t) + v_t

A Gaussian goes through a function g either by its tangent at the mean ("extended": mean g(x), covariance G P
G' with G the Jacobian) or by 2n + 1 points that carry mean and covariance ("unscented", Julier and Uhlmann).
Functions are written in torch or numpy, with the state (and the inputs) along the last axis. They are called
once, and their operations are recorded as terms such as sin(v3) or v1 · v2 (`recording.py`, `terms.py`). The
terms and their derivatives become instructions for an interpreter in the compiled core (`programs.py`), which
runs them over all points of a step: no compiler is needed to use a model. The filter keeps factors in place
of covariances (``csrc/nonlinear/square_root.hpp``), so these stay positive. Mixing, weights in logarithms,
collapse and missing components are as for linear modes.

Angles: differences of components that are named as angles are taken around the circle, and their means are
circular, in collapse, sigma points and innovations alike.
"""

from ..inference.results import Filtered, Smoothed
from ..learning.maximum_likelihood import fit_nonlinear
from .model import SwitchingNonlinear
from .recurrent import RecurrentSwitching

__all__ = ["RecurrentSwitching", "SwitchingNonlinear", "fit_nonlinear"]

NonlinearFiltered, NonlinearSmoothed = Filtered, Smoothed  # the names in older pickles
