r"""Watch the heads of a model while it trains.

Two things go wrong with attention in training, and both can be read off the tilted measures long before the
loss shows it:

    logit growth       max_ij s_ij rises without bound: the tilt outruns what its number format holds
    entropy collapse   H → 0: a head looks at one key whatever the query, and its gradient, the covariance of
                       the keys, vanishes with it

Every k-th step runs inside a `watch`; its record becomes one reading a head (`readings`), which is logged
(`logs`) and held against two thresholds. All other steps run untouched, so the cost is that of one watched
step in k.
"""

import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch.distributed as dist
from torch import nn

from exptilt._support.checks import whole
from exptilt._support.errors import ArgumentError, ExptiltWarning
from exptilt._support.transforms import uncompiled
from exptilt.lens.training.logs import Log, open_log
from exptilt.lens.training.readings import HeadReading, read_heads, spans_processes
from exptilt.lens.watching.record import Record
from exptilt.lens.watching.watch import Watch, watch


class TrainingMonitor:
    """Log each head's maximum logit, entropy and log-normalizer every k steps; warn of heads gone wrong.

    In a plain loop, the block holds the forward pass and, if there is activation checkpointing, the backward
    pass too::

        monitor = xt.lens.TrainingMonitor(model, every=50)
        for batch in batches:
            with monitor.step():
                loss = model(**batch).loss
                loss.backward()
            optimizer.step()

    With the Trainer of transformers and of Lightning it is a callback, ``Trainer(..., callbacks=[monitor])``,
    and reads the first batch of a step.

    A reading at step n is of the weights after n updates. Where torch.distributed runs, a reading covers the
    batches of all processes; all of them must take part, and the first one logs and warns. A warning names
    layer and head, and is not repeated until the head has recovered.

    Args:
        model: the model that is trained, or its DistributedDataParallel wrapper.
        every: k, the number of steps from one reading to the next.
        log: "csv", "tensorboard", "wandb", or a function of (step, list of readings).
        folder: for the files of the log.
        max_logit: warn when a head's largest score passes this; None for no warning. MuonClip clips at 100.
        min_entropy: warn when a head's mean entropy, in nats, falls below this; None for no warning.

    Attributes:
        record: the last watched step's record in this process, for `clip_qk_`; None before the first.
        readings: the last readings, one per head.

    Example:
        >>> model = torch.nn.MultiheadAttention(16, 4, batch_first=True)
        >>> monitor = xt.lens.TrainingMonitor(
        ...     model, every=2, log=lambda step, readings: print(step, len(readings), "heads")
        ... )
        >>> x = torch.randn(2, 10, 16)
        >>> for _ in range(4):
        ...     with monitor.step():
        ...         output, _ = model(x, x, x)
        0 4 heads
        2 4 heads
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        every: int = 50,
        log: str | Callable[[int, Sequence[HeadReading]], object] = "csv",
        folder: str | Path = "attention-log",
        max_logit: float | None = 100.0,
        min_entropy: float | None = 0.05,
    ) -> None:
        if not isinstance(model, nn.Module):
            raise ArgumentError(
                f"TrainingMonitor: model is a {type(model).__name__}. Pass the torch.nn.Module that is "
                "trained."
            )
        for name, value in (("max_logit", max_logit), ("min_entropy", min_entropy)):
            if value is not None and not value > 0:
                raise ArgumentError(
                    f"TrainingMonitor: {name} is {value!r}. Pass a number above 0, or None for no warning."
                )
        parallel = nn.parallel.DistributedDataParallel
        self.model: nn.Module = model.module if isinstance(model, parallel) else model
        self.every = whole("TrainingMonitor", "every", every)
        self.max_logit, self.min_entropy = max_logit, min_entropy
        self.record: Record | None = None
        self.readings: list[HeadReading] = []
        self._log: Log = open_log(log, folder)
        self._next = 0
        self._due: int | None = None  # the step that a trainer's callback is watching
        self._warned: set[tuple[str, int, int]] = set()
        self._open: Watch | None = None
        self._seen: Watch | None = None
        self._hooks: list[Any] = []
        self._uncompiled = ExitStack()

    @contextmanager
    def step(self, number: int | None = None) -> Iterator[None]:
        """Context manager around one step of a plain loop; every k-th step is watched.

        Args:
            number: updates made before this step; None counts on from the last call, starting at 0.
        """
        number = self._next if number is None else number
        self._next = number + 1
        if number % self.every:
            yield
            return
        self._begin()
        try:
            yield
        except BaseException:
            self._let_go()
            raise
        self._finish()
        self._take(number)

    def _begin(self) -> None:
        """Open a watch, or warn if that fails."""
        with self._never_fatal():
            self._open = watch(self.model, check=False).__enter__()

    @contextmanager
    def _never_fatal(self) -> Iterator[None]:
        """Turn errors of the monitor into warnings: they must not end a training run."""
        try:
            yield
        except Exception as problem:
            said = " ".join(str(problem).split())
            text = f"TrainingMonitor: no reading of this step ({type(problem).__name__}: {said})"
            warnings.warn(text, ExptiltWarning, stacklevel=4)

    def _take(self, step: int) -> None:
        """Keep the record and readings of a watched step, log the readings, and warn."""
        seen, self._seen = self._seen, None
        if seen is None and not spans_processes():
            return
        with self._never_fatal():
            # Where other processes have a reading, this one takes part without one of its own.
            self.record = Record() if seen is None else seen.record
            self.readings = read_heads(self.record, {} if seen is None else seen.modules.layer_names())
            if spans_processes() and dist.get_rank() != 0:
                return
            self._log(step, self.readings)
        for reading in self.readings:
            self._judge(step, reading)

    def _judge(self, step: int, reading: HeadReading) -> None:
        """Warn if a head has crossed a threshold that it had not crossed at the last reading."""
        r, top, low = reading, self.max_logit or math.inf, self.min_entropy or 0.0
        lost = not r.finite and not (self.max_logit is None and self.min_entropy is None)
        high = r.score_max > top and not lost
        for what, bad, text in (
            ("finite", lost, "scores are no longer finite numbers"),
            ("logit", high, f"largest logit {r.score_max:.4g} has passed {top:g}"),
            ("entropy", r.entropy < low, f"entropy has collapsed to {r.entropy:.4g} nats, below {low:g}"),
        ):
            key = (what, r.layer, r.head)
            if bad and key not in self._warned:
                place = f"TrainingMonitor: step {step}, layer {r.layer} ({r.name}), head {r.head}: "
                warnings.warn(place + text, ExptiltWarning, stacklevel=2)
            (self._warned.add if bad else self._warned.discard)(key)

    def close(self) -> None:
        """Close the log and remove all hooks from the model; a Trainer calls this at the end of training."""
        self._let_go()
        getattr(self._log, "close", _nothing)()

    # The methods of a transformers TrainerCallback, without importing transformers.

    def __getattr__(self, name: str) -> Any:
        """A function that does nothing, for events of a trainer that do not matter here."""
        if name.startswith("on_") or name in _LIGHTNING:
            return _nothing
        raise AttributeError(f"TrainingMonitor has no attribute {name!r}")

    def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Trainer event before a step: have the next forward pass watched if it is a k-th step.

        Args:
            args: the Trainer's arguments.
            state: its state, with the number of the step.
            control: its control.
            others: model, optimizer and so on.
        """
        self._let_go()
        self._next, self._due = state.global_step + 1, None
        if state.global_step % self.every == 0:
            self._due = state.global_step
            self._uncompiled.enter_context(uncompiled())  # now: hooks run inside what is compiled
            self._hooks = [
                self.model.register_forward_pre_hook(self._before_forward),
                self.model.register_forward_hook(self._after_forward, always_call=True),
            ]

    def _before_forward(self, module: nn.Module, arguments: Any) -> None:
        if self._open is not None:  # the next batch of the same step: the backward pass of the first is over
            self._finish()
        elif self._seen is None:
            self._begin()

    def _after_forward(self, module: nn.Module, arguments: Any, output: Any) -> None:
        """End the watch; `output` is None if the forward pass raised."""
        # Layers under activation checkpointing run again in backward and must find the same attention there:
        # the watch stays open.
        if output is None:
            self._let_go()
        elif not any(getattr(part, "gradient_checkpointing", False) for part in self.model.modules()):
            self._finish()

    def _finish(self) -> None:
        """Close the watch normally, and keep it for `on_step_end`."""
        seen = self._open
        if seen is not None:
            self._open = None
            with self._never_fatal():
                seen.__exit__(None, None, None)
                self._seen = seen
        self._let_go(keep=self._seen)

    def _let_go(self, keep: Watch | None = None) -> None:
        """Remove all hooks and close an open watch; `keep` is the finished watch still to be read."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._uncompiled.close()
        seen, self._open, self._seen = self._open, None, keep
        if seen is not None:  # closed as after an exception: no complaint about missed attention
            seen.__exit__(RuntimeError, None, None)

    def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        """Trainer event after a step: log the readings of a watched step, and warn.

        Args:
            args, control, others: as in `on_step_begin`.
            state: the Trainer's state, which has counted the step by now.
        """
        self._read()

    def _read(self) -> None:
        """End the watch of a trainer's step, and take its reading if one is due."""
        self._finish()
        due, self._due = self._due, None
        if due is not None:
            self._take(due)

    def on_train_end(self, args: Any, state: Any, control: Any = None, **others: Any) -> None:
        """Event of either trainer at the end of training: close the log.

        Args:
            args, state, control, others: whatever the trainer passes, which is not used.
        """
        self.close()

    # The methods of a Lightning Callback, without importing Lightning.

    @property
    def state_key(self) -> str:
        """The name by which Lightning's trainer keeps callbacks apart."""
        return type(self).__name__

    def on_train_batch_start(self, trainer: Any, *others: Any) -> None:
        """Lightning event before a batch: watch it if it is the first of a k-th step.

        Args:
            trainer: Lightning's trainer, with the number of the step.
            others: the module, the batch and its number.
        """
        step = int(trainer.global_step)
        if step >= self._next:
            self._next = step + 1
            if step % self.every == 0:
                self._due = step
                self._begin()

    def on_train_batch_end(self, *others: Any) -> None:
        """Lightning event after a batch: log the readings of a watched one, and warn.

        Args:
            others: the trainer, the module, outputs, the batch and its number.
        """
        self._read()

    def on_exception(self, *others: Any) -> None:
        """Lightning event when training fails: close the log and remove all hooks.

        Args:
            others: the trainer, the module and the exception.
        """
        self._let_go()


# Methods of a Lightning callback that are no events.
_LIGHTNING = ("setup", "teardown", "state_dict", "load_state_dict")


def _nothing(*args: Any, **others: Any) -> None:
    """Do nothing: the handler of events of trainers that the monitor ignores."""
