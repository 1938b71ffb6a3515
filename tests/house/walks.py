"""The files that four calls pass, each traced in a process of its own: `python tests/house/walks.py`.

Prints JSON: for each call, as docs/architecture.md writes it, the steps (file, function) in order. A file
that is only imported on the way is not passed.
"""

import json
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import numpy as np
import torch

PACKAGE = Path(__file__).resolve().parents[2] / "src" / "exptilt"

Steps = list[tuple[str, str]]


@contextmanager
def traced() -> Iterator[Steps]:
    """Fills the list with the functions of the package that are entered inside the block."""
    steps: Steps = []
    imports = 0

    def note(frame: FrameType, event: str, _: object) -> None:
        nonlocal imports
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if event not in ("call", "return") or not path.is_relative_to(PACKAGE):
            return
        if name == "<module>":
            imports += 1 if event == "call" else -1
        elif event == "call" and not imports:
            steps.append((path.relative_to(PACKAGE).as_posix(), name))

    sys.setprofile(note)
    try:
        yield steps
    finally:
        sys.setprofile(None)


def attend() -> Steps:
    """A call, the same again, and one whose gradient is asked for."""
    import exptilt as xt

    query = torch.randn(1, 2, 20, 8)
    with traced() as steps:
        for x in (query, query, query.clone().requires_grad_()):
            result = xt.attend(x, x, x, causal=True)
            assert result.entropy.min() >= 0
        result.output.sum().backward()
    return steps


def watch() -> Steps:
    import transformers

    import exptilt as xt

    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 32}
    config = transformers.GPT2Config(**sizes, vocab_size=50, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(config).eval()
    with traced() as steps:
        with xt.lens.watch(model) as seen:
            model(input_ids=torch.arange(12).reshape(2, 6))
        seen.record.to_frame()
    return steps


def filter_series() -> Steps:
    """A filter, one with a diffuse start, and the gradient of a likelihood."""
    from exptilt.switching import SwitchingLinearGaussian

    def model(start: float, noise: object) -> SwitchingLinearGaussian:
        return SwitchingLinearGaussian(
            transition=[[0.9, 0.1], [0.2, 0.8]],
            dynamics=[[[1.0]], [[0.5]]],
            observation=[[[1.0]]] * 2,
            process_noise=[[[1.0]], [[2.0]]],
            observation_noise=noise,
            initial_probability=[0.5, 0.5],
            initial_mean=[[0.0]] * 2,
            initial_covariance=[[[start]]] * 2,
        )

    y = np.random.default_rng(0).normal(size=(50, 1))
    with traced() as steps:
        for start in (1.0, float("inf")):
            found = model(start, [[[1.0]]] * 2).filter(y)
            assert found.log_likelihood < 0 < found.mode_probability.min()
        noise = torch.ones(2, 1, 1, dtype=torch.float64, requires_grad=True)
        model(1.0, noise).filter(y).log_likelihood.backward()
    return steps


def project() -> Steps:
    from exptilt import families as f

    components = f.Gamma(torch.tensor([[2.0], [5.0]]), torch.tensor([[1.0], [2.0]]))
    mixture = f.Mixture(torch.tensor([0.3, 0.7]).log(), components)
    with traced() as steps:
        f.project(mixture, f.Gamma)
    return steps


CALLS: dict[str, Callable[[], Steps]] = {
    "attend(query, key, value, causal=True)": attend,
    "with watch(model) as seen: model(**inputs)": watch,
    "model.filter(y)": filter_series,
    "project(mixture, Gamma)": project,
}


def in_a_child(call: Callable[[], Steps]) -> Steps:
    """The steps of a call in a fork, where nothing that an earlier call has remembered is known."""
    ours, theirs = os.pipe()
    if not os.fork():
        status = 1
        try:
            with os.fdopen(theirs, "w") as pipe:
                json.dump(call(), pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(theirs)
    with os.fdopen(ours) as pipe:
        steps: Steps = json.load(pipe)
    os.wait()
    return steps


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(json.dumps({name: in_a_child(call) for name, call in CALLS.items()}))
