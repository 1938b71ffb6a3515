"""Find the parts of a transformer around an attention call by what flows through them, not by their names.

    block        nearest module around the attention that is an element of a ``ModuleList``; its input is the
                 residual stream
    projection   module with a weight matrix inside the block that receives the concatenated heads: what it
                 adds for one head alone is the head's write
    middle       residual stream after attention: what the first norm after the projection receives; but a
                 norm of the projection's own output is added to the stream, and one of the block's input
                 belongs to an MLP beside the attention
    factor       scaling between projection and stream, added_ij = a_i b_j projected_ij: a norm without mean
                 (once its root mean square is fixed, it only scales) or a constant
    query way    the block run again on other hidden states and stopped at its attention call

So pre-norm and post-norm, parallel and sandwiched blocks, fused or separate projections, rotary embeddings
and norms of queries need no case of their own; where a part cannot be found, the measures that need it say
so.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from exptilt.lens.watching.call import AttentionCall, Request
from exptilt.lens.watching.torch_hook import FunctionalMode
from exptilt.lens.watching.watch import Watch

Arguments = tuple[tuple[Any, ...], dict[str, Any]]


class _Stop(Exception):  # not an error: raised to leave a block once its query and key are known
    def __init__(self, query: Tensor, key: Tensor):
        self.query, self.key = query, key


class DoesNotRunAgainError(Exception):
    """A part of a model cannot be run on other hidden states than its own."""


@dataclass
class NormEvent:
    """One call of a norm: what went in and came out, each ``(1, token, width)``."""

    before: Tensor
    after: Tensor
    late: bool  # after the output projection


@dataclass
class Passage:
    """Everything seen of one block in one forward pass; tensors are ``(1, token, width)``."""

    hidden: Tensor  # residual stream before the block
    arguments: Arguments  # of the block, as it was called
    calls: list[AttentionCall] = field(default_factory=list)
    projection: nn.Module | None = None  # module that receives the heads of the first call
    projected: Tensor | None = None  # output of the projection
    norms: list[NormEvent] = field(default_factory=list)  # norms of the stream's width
    output: Tensor | None = None  # residual stream after the block

    def middle(self) -> Tensor | None:
        """Residual stream after attention, ``(1, token, width)``."""
        if self.projected is None:
            return None
        for event in self.norms:
            if event.late and not torch.equal(event.before, self.hidden):
                own = torch.equal(event.before, self.projected)
                return self.hidden + event.after if own else event.before
        return self.hidden + self.projected

    def writes(self) -> Tensor | None:
        """``(head, token, width)``: what each head alone adds to the stream; None if `factor` is.

        The writes and the projection's bias, scaled alike, sum to ``middle() - hidden``.
        """
        factor = self.factor()
        if self.projection is None or factor is None:
            return None
        heads = self.calls[0].tilted.output[0].detach()
        count, _, dim = heads.shape
        # The projection's matrix, whatever kind of layer it is: its outputs for the unit vectors less its
        # output for zero.
        probe = torch.cat([torch.eye(count * dim), torch.zeros(1, count * dim)]).to(heads)
        said: Tensor = self.projection(probe[None])[0]
        return heads @ (said[:-1] - said[-1]).reshape(count, dim, -1) * factor

    def factor(self) -> Tensor | None:
        """``(token, width)`` or a scalar: ratio of what attention adds to the stream to what is projected.

        None unless the ratio is a constant or a product of a number per token and one per channel.
        """
        middle = self.middle()
        if self.projected is None or middle is None:
            return None
        projected, precision = self.projected[0], torch.finfo(self.projected.dtype).eps
        near = max(1e-4, 8 * precision)
        event = next((e for e in self.norms if e.late and torch.equal(e.before, self.projected)), None)
        if event is not None:
            added = event.after[0]
            factor = _scaling(projected, added)
            slack = near * added.double().norm()
        else:
            added = middle[0] - self.hidden[0]
            sizes = middle.double().norm() + self.hidden.double().norm()
            slack = near * added.double().norm() + 4 * precision * sizes
            factor = torch.ones((), dtype=projected.dtype, device=projected.device)
            if (projected - added).double().norm() > slack:
                p = projected.double()
                factor = ((p * added).sum() / p.square().sum()).to(projected.dtype)
        return factor if (factor * projected - added).double().norm() <= slack else None


def _scaling(x: Tensor, y: Tensor) -> Tensor:
    """(token, width): a_i b_j such that a_i b_j x_ij is nearest to y_ij, by alternating least squares."""
    wide = x.double()
    tiny = torch.finfo(wide.dtype).tiny
    size = wide.norm(dim=1, keepdim=True).clamp_min(tiny)
    u = wide / size  # a norm makes all tokens about equally long, so a_i starts near 1/|x_i|
    both = u * y.double()
    a = torch.ones_like(u[:, :1])
    for _ in range(12):
        b = (a * both).sum(0) / (a * u).square().sum(0).clamp_min(tiny)
        a = (both * b).sum(1, keepdim=True) / (u * b).square().sum(1, keepdim=True).clamp_min(tiny)
    found: Tensor = a * b / size
    return found.to(x.dtype)


def write_size(write: Tensor, hidden: Tensor) -> Tensor:
    """Length of each head's write over the length of the token it goes to, root mean square: ``(head,)``.

    `write` is ``(head, token, width)``, hidden ``(token, width)``. The ratio is taken token by token, since
    the first token of a trained model may be a hundred times as long as the others.
    """
    size = hidden.double().square().sum(-1)
    share = write.double().square().sum(-1) / size.clamp_min(torch.finfo(torch.float64).tiny)
    return share[:, size > 0].mean(1).sqrt()


def inputs(model: nn.Module, ids: Tensor) -> dict[str, Any]:
    """Keyword arguments with which a model reads token ids ``(token,)`` or ``(batch, token)``.

    A decoder reads the same text as its encoder.
    """
    config: Any = model.config
    batch = ids.reshape(-1, ids.shape[-1]).to(next(model.parameters()).device)
    given: dict[str, Any] = {"input_ids": batch}
    if getattr(config, "is_encoder_decoder", False):
        given["decoder_input_ids"] = batch
    return given | ({"use_cache": False} if hasattr(config, "use_cache") else {})


def stream(arguments: Arguments) -> Tensor | None:
    """The hidden states among the arguments of a block: the first tensor ``(batch, token, width)``."""
    args, kwargs = arguments
    found = args[0] if args else kwargs.get("hidden_states")
    return found if isinstance(found, Tensor) and found.dim() == 3 and found.is_floating_point() else None


def block_of(model: nn.Module, name: str) -> str | None:
    """Dotted name of the block around a module; None if no ``ModuleList`` is around it."""
    modules = dict(model.named_modules())
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        if isinstance(modules.get(".".join(parts[: length - 1])), nn.ModuleList):
            return ".".join(parts[:length])
    return None


def _first(output: Any) -> Tensor | None:
    found = output[0] if isinstance(output, tuple | list) and output else output
    return found if isinstance(found, Tensor) else None


class Tracer:
    """Hooks on the blocks of a model, and the observer to give to `watch`.

    When a block has run, and before the next one does, `finish` gets its name and its `Passage`.
    """

    def __init__(self, model: nn.Module, finish: Callable[[str, Passage], None]):
        self.model, self._finish = model, finish
        self._open: list[tuple[str, Passage]] = []
        self.stopping = False  # whether a part is only run again for its queries
        self._watch: Watch | None = None

    @contextmanager
    def attached(self, watch: Watch) -> Iterator[None]:
        """Keep hooks on the blocks around attention; `watch` is open, with `observe` as its observer."""
        self._watch = watch
        names = [watch.modules.name(module) for module in watch.modules.attending()]
        with ExitStack() as hooks:
            hooks.callback(self._open.clear)
            for block in {block for name in names if (block := block_of(self.model, name)) is not None}:
                self._attach(block, hooks)
            yield

    def _attach(self, name: str, hooks: ExitStack) -> None:
        block = self.model.get_submodule(name)

        def add(handle: Any) -> None:
            hooks.callback(handle.remove)

        add(block.register_forward_pre_hook(lambda _, a, k: self._enter(name, (a, k)), with_kwargs=True))
        add(block.register_forward_hook(lambda _, a, output: self._leave(name, output)))
        for module in block.modules():
            weight = getattr(module, "weight", None)
            if "norm" in type(module).__name__.lower() and not list(module.children()):
                add(module.register_forward_hook(lambda _, a, output: self._norm(a, output)))
            elif isinstance(weight, Tensor) and weight.dim() == 2:
                add(module.register_forward_hook(self._project))

    def _enter(self, name: str, arguments: Arguments) -> None:
        if not self.stopping and (hidden := stream(arguments)) is not None:
            self._open.append((name, Passage(hidden, arguments)))

    def _leave(self, name: str, output: Any) -> None:
        if not self.stopping and self._open and self._open[-1][0] == name:
            passage = self._open[-1][1]
            passage.output = _first(output)
            self._finish(name, passage)
            self._open.pop()

    def _norm(self, args: tuple[Any, ...], output: Any) -> None:
        if self.stopping or not self._open or not args:
            return
        passage, before = self._open[-1][1], args[0]
        if isinstance(before, Tensor) and before.shape == passage.hidden.shape:
            passage.norms.append(NormEvent(before, output, passage.projection is not None))

    def _project(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self.stopping or not self._open or not args or not isinstance(args[0], Tensor):
            return
        passage = self._open[-1][1]
        if len(passage.calls) != 1 or passage.projection is not None:
            return
        heads = passage.calls[0].tilted.output.transpose(1, 2).flatten(2)
        if args[0].shape == heads.shape and torch.equal(args[0], heads) and _first(output) is not None:
            passage.projection, passage.projected = module, output

    def observe(self, call: AttentionCall) -> None:
        """Observer for `watch`: adds the call to the passage of the running block."""
        if self.stopping:
            raise _Stop(call.query, call.key)
        if self._open:
            self._open[-1][1].calls.append(call)

    def run_again(self, module: nn.Module, arguments: Arguments, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Query ``(batch, Hq, token, D)`` and key ``(batch, Hkv, key, D)`` of a module on other states.

        The block or attention module runs again with the `arguments` of a call on a batch of one, but on
        hidden states ``(batch, token, width)``, and only as far as its first attention. Raises
        `DoesNotRunAgainError` if the module needs more than that (Zamba 2's takes the embeddings as well).
        """

        def stop(request: Request) -> Tensor:
            raise _Stop(request.query, request.key)

        args, kwargs = arguments
        args, kwargs = ((hidden, *args[1:]), kwargs) if args else (args, {**kwargs, "hidden_states": hidden})
        self.stopping = True
        caught = self._watch.intercepted if self._watch is not None else None
        assert caught is not None
        attend, caught.attend = caught.attend, stop  # stops before attention is computed
        try:
            with FunctionalMode(caught):  # a mode is off inside itself, where this may be called
                module(*args, **kwargs)
        except _Stop as seen:
            return seen.query, seen.key
        except Exception as problem:  # of any kind: the model's own code runs on hidden states of ours
            raise DoesNotRunAgainError(f"{type(module).__name__} runs only as it was called") from problem
        finally:
            self.stopping = False
            caught.attend = attend
        raise DoesNotRunAgainError(f"{type(module).__name__} does not attend when it runs again")
