"""Trackers of other packages on one scenario each, in an interpreter that has them.

    python tracking_worker.py RIVAL IN.npz OUT.npz

IN holds a model and measurements; OUT gets filtered means, the log-likelihood if the rival has one, and the
least seconds of processor time a step over some repeats (compilation is not counted).
"""

import sys
import time
from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

import numpy as np

Answer = dict[str, Any]


def least(run: Callable[[], Any], repeats: int) -> tuple[Any, float]:
    """The last result, and the least processor time."""
    times = []
    for _ in range(repeats):
        begin = time.process_time()
        result = run()
        times.append(time.process_time() - begin)
    return result, min(times)


def filterpy(d: Any) -> Answer:
    """The IMM estimator."""
    from filterpy.kalman import IMMEstimator, KalmanFilter

    def run() -> np.ndarray:
        filters = []
        for k in range(len(d["transition"])):
            one = KalmanFilter(d["F"].shape[-1], len(d["H"]))
            one.x, one.P = d["x"][:, None].copy(), d["P"].copy()
            one.F, one.Q, one.H, one.R = d["F"][k], d["Q"][k], d["H"], d["R"]
            filters.append(one)
        imm, out = IMMEstimator(filters, d["start"].copy(), d["transition"].copy()), []
        for row in d["y"]:
            imm.predict()
            imm.update(row[:, None])
            out.append(imm.x[:, 0].copy())
        return np.array(out)

    mean, seconds = least(run, 5)
    return {"mean": mean, "seconds": seconds / len(d["y"])}


def stonesoup(d: Any) -> Answer:
    """The unscented filter of a nearly constant velocity, seen by bearing and range."""
    from stonesoup.models.measurement.nonlinear import CartesianToBearingRange
    from stonesoup.models.transition.linear import CombinedLinearGaussianTransitionModel, ConstantVelocity
    from stonesoup.predictor.kalman import UnscentedKalmanPredictor
    from stonesoup.types.detection import Detection
    from stonesoup.types.hypothesis import SingleHypothesis
    from stonesoup.types.state import GaussianState
    from stonesoup.updater.kalman import UnscentedKalmanUpdater

    pace = float(d["pace"])
    moves = CombinedLinearGaussianTransitionModel([ConstantVelocity(pace), ConstantVelocity(pace)])
    sensor = CartesianToBearingRange(ndim_state=4, mapping=(0, 2), noise_covar=d["R"])
    begin = datetime(2020, 1, 1)
    seen = [
        Detection(row[:, None], timestamp=begin + timedelta(seconds=k + 1), measurement_model=sensor)
        for k, row in enumerate(d["y"])
    ]

    def run() -> np.ndarray:
        predictor, updater = UnscentedKalmanPredictor(moves), UnscentedKalmanUpdater(sensor)
        state, out = GaussianState(d["x"][:, None], d["P"], timestamp=begin), []
        for one in seen:
            ahead = predictor.predict(state, timestamp=one.timestamp)
            state = updater.update(SingleHypothesis(ahead, one))
            out.append(np.asarray(state.state_vector, dtype=float)[:, 0])
        return np.array(out)

    mean, seconds = least(run, 5)
    return {"mean": mean, "seconds": seconds / len(d["y"])}


def dynamax(d: Any) -> Answer:
    """The Rao–Blackwellised particle filter of its switching models."""
    import jax
    import jax.numpy as jnp
    from dynamax.slds.inference import DiscreteParamsSLDS, LGParamsSLDS, ParamsSLDS, rbpfilter

    jax.config.update("jax_enable_x64", True)
    M, n, m = len(d["transition"]), d["F"].shape[-1], len(d["H"])
    chain = DiscreteParamsSLDS(*(jnp.array(d[k]) for k in ("start", "transition", "transition")))
    linear = LGParamsSLDS(
        initial_mean=jnp.tile(d["x"], (M, 1)),
        initial_cov=jnp.tile(d["P"], (M, 1, 1)),
        dynamics_weights=jnp.array(d["F"]),
        dynamics_cov=jnp.array(d["Q"]),
        dynamics_bias=jnp.zeros((M, n)),
        dynamics_input_weights=jnp.zeros((M, n, 1)),
        emission_weights=jnp.tile(d["H"], (M, 1, 1)),
        emission_cov=jnp.tile(d["R"], (M, 1, 1)),
        emission_bias=jnp.zeros((M, m)),
        emission_input_weights=jnp.zeros((M, m, 1)),
        initialized=True,
    )
    params, y, count = ParamsSLDS(chain, linear), jnp.array(d["y"]), int(d["particles"])
    run = jax.jit(lambda key: rbpfilter(count, params, y, key))

    def once() -> Any:
        out = run(jax.random.PRNGKey(0))
        jax.block_until_ready(out["means"])
        return out

    once()
    out, seconds = least(once, 5)
    weights, means = np.asarray(out["weights"]), np.asarray(out["means"])
    weights = weights.reshape(len(d["y"]), -1) if weights.shape[0] == len(d["y"]) else weights.T
    means = means if means.shape[0] == len(d["y"]) else means.swapaxes(0, 1)
    mean = np.einsum("tk,tkn->tn", weights / weights.sum(1, keepdims=True), means)
    return {"mean": mean, "seconds": seconds / len(d["y"])}


if __name__ == "__main__":
    rival, source, target = sys.argv[1:]
    with np.load(source) as given:
        found = {"filterpy": filterpy, "stonesoup": stonesoup, "dynamax": dynamax}[rival](dict(given))
    np.savez(target, **found)
