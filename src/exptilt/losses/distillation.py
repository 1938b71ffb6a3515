r"""Distillation without the logits: the divergence of two linear heads over one vocabulary.

    KL(p‖q) = Σ_j p_j log(p_j / q_j),   p_j ∝ e^{t_j / T},   q_j ∝ e^{s_j / T},
    s_ij = softcap(⟨h_i, w_j⟩) + b_j for the student, t likewise for the teacher.

The scores of a few tokens exist at a time, all outcomes of each; from them come the loss and, where only a
first gradient may be asked for, the gradient at once. Every other derivative computes the scores again, a few
tokens at a time (``tilting/derivatives/rows.py``). Each term is written as p log(p/q) − p + q, which is never
negative and keeps its digits where the two distributions nearly agree.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from exptilt._support import checks
from exptilt._support.errors import ArgumentError
from exptilt._support.transforms import autocasts, full_precision, is_concrete
from exptilt.distributed.group import Group, refused_together
from exptilt.losses.cross_entropy import Vocabulary, cast
from exptilt.losses.embeddings import REDUCTIONS, linear_head
from exptilt.losses.heads import Heads

DIRECTIONS = ("forward", "reverse", "js")


class LinearKL(NamedTuple):
    """The loss and statistics of each token, which carry no derivatives; NaN where tokens are ignored.

    Attributes:
        loss: ``()``, or ``(...)``: as without statistics.
        divergence: ``(...)``, the loss of each token.
        log_normalizer: ``(...)``, the student's G = log Σ_j e^{s_j / T}.
        entropy: ``(...)``, of the student's distribution, in nats.
        teacher_log_normalizer: ``(...)``, the teacher's; 0 for a teacher of top outcomes.
        teacher_entropy: ``(...)``, of the teacher's distribution; the outcomes left over count as one.
    """

    loss: Tensor
    divergence: Tensor
    log_normalizer: Tensor
    entropy: Tensor
    teacher_log_normalizer: Tensor
    teacher_entropy: Tensor


def linear_kl(
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor | None = None,
    teacher_weight: Tensor | None = None,
    *,
    teacher_top: tuple[Tensor, Tensor] | None = None,
    bias: Tensor | None = None,
    teacher_bias: Tensor | None = None,
    softcap: float | None = None,
    teacher_softcap: float | None = None,
    temperature: float = 1.0,
    direction: str = "forward",
    mixing: float = 0.5,
    ignore: Tensor | None = None,
    reduction: str = "mean",
    statistics: bool = False,
    group: Group = None,
) -> Any:
    r"""Divergence between a student's linear head and a teacher's, without either matrix of logits.

    ``forward`` is KL(teacher ‖ student), ``reverse`` is KL(student ‖ teacher), and ``js`` with β = mixing is
    β KL(teacher ‖ m) + (1 − β) KL(student ‖ m), m = β teacher + (1 − β) student. Exact in all derivatives,
    by the student's tensors and by the teacher's if they need one: backwards, forwards, twice, under
    `torch.func` and `torch.compile`. The loss is not multiplied by T².

    Args:
        hidden: ``(..., D)``, the student's; float64, float32, bfloat16 or float16 (the last two are summed in
            float32, and the loss is float32).
        weight: ``(V, D)``, one row for each outcome.
        teacher_hidden: ``(..., E)``, the teacher's, for the same tokens; E may differ from D.
        teacher_weight: ``(V, E)``, over the same outcomes in the same order.
        teacher_top: (index, log-probability), both ``(..., k)``, in place of the teacher's tensors: its k
            most probable outcomes at this temperature. The probability left over is one more outcome, for the
            student all others together: the divergence of the two coarser distributions, a lower bound.
        bias: ``(V,)``, the student's.
        teacher_bias: ``(V,)``, the teacher's.
        softcap: c > 0, for logits c·tanh(s/c) of the student.
        teacher_softcap: the same for the teacher.
        temperature: T > 0; both distributions are those of logits divided by T.
        direction: ``forward``, ``reverse`` or ``js``.
        mixing: β of ``js``, between 0 and 1.
        ignore: booleans ``(...)``, True for tokens that do not count; None if all do.
        reduction: ``mean`` over the tokens that count, ``sum``, or ``none`` (0 for tokens that do not).
        statistics: also return statistics of each token, from the same sweep.
        group: processes that share the vocabulary, as for `linear_cross_entropy`: hidden tensors are the same
            on each, weights and biases are its own outcomes.

    Returns:
        The loss: one number, or ``(...)`` with ``reduction="none"``; with statistics a record of the loss,
        and of divergence, log_normalizer, entropy, teacher_log_normalizer, teacher_entropy of each token.

    Example:
        >>> h, W = torch.zeros(3, 8), torch.randn(100, 8)
        >>> xt.losses.linear_kl(h, W, torch.zeros(3, 4), torch.randn(100, 4))  # both are uniform
        tensor(0.)
    """
    caller = "linear_kl"
    teacher = {"teacher_hidden": teacher_hidden, "teacher_weight": teacher_weight}
    with refused_together(caller, group):
        for name, word, among in (("reduction", reduction, REDUCTIONS), ("direction", direction, DIRECTIONS)):
            checks.choice(caller, name, word, among)
        checks.number(caller, "temperature", temperature, above=0)
        checks.number(caller, "mixing", mixing, above=0, below=1)
        for name, cap in (("softcap", softcap), ("teacher_softcap", teacher_softcap)):
            if cap is not None:
                checks.number(caller, name, cap, above=0, otherwise=", or None")
        linear_head(caller, hidden, weight, "...", bias=bias)
        _check_teacher(caller, hidden, weight, teacher_hidden, teacher_weight, teacher_top, teacher_bias)
        counted = _counted(caller, hidden, ignore, reduction)
    numbers = softcap, teacher_softcap, float(temperature), direction, float(mixing)
    tensors = {"hidden": hidden, "weight": weight, "bias": bias, "teacher_bias": teacher_bias, **teacher}
    options: dict[str, Any] = {
        "softcap": softcap,
        "teacher_softcap": teacher_softcap,
        "temperature": temperature,
    }
    options |= {"direction": direction, "mixing": mixing, "reduction": reduction, "statistics": statistics}
    own = _vocabulary(caller, group, tensors, teacher_top, counted, options)
    if teacher_top is not None and is_concrete(teacher_top[0]):
        _check_top(caller, *teacher_top, own.outcomes)
    kept = None if counted is None or not is_concrete(hidden) else counted.reshape(-1).nonzero()[:, 0]
    with full_precision(hidden.device):
        given = {name: x if x is None else cast(x) for name, x in tensors.items()}
        if teacher_top is not None:
            given["index"], given["log_probability"] = teacher_top[0].long(), cast(teacher_top[1])
        rows = {name: x for name, x in given.items() if x is not None and name in _ROWS}
        for name, x in rows.items():
            flat = x.reshape(-1, x.shape[-1])
            if kept is not None:
                flat = flat[kept]
            elif counted is not None and x.is_floating_point():
                flat = torch.where(counted.reshape(-1, 1), flat, 0.0)
            rows[name] = flat
        shared = {name: x for name, x in given.items() if x is not None and name not in _ROWS}
        head = Heads(own, tuple(rows), tuple(shared), *numbers, statistics)
        losses, *said = head.losses([*rows.values(), *shared.values()], reduction != "none")
        if is_concrete(losses) and bool(losses.isnan().any()):
            checks.finite(caller, **{name: x for name, x in tensors.items() if x is not None})
            raise ArgumentError(
                f"{caller}: the divergence of some token is NaN: scores overflow, or every outcome of one "
                "side has the score −inf. Pass smaller hidden states or finite biases."
            )
        shape = hidden.shape[:-1]

        def spread(x: Tensor, empty: float) -> Tensor:
            if counted is None:
                return x.reshape(shape)
            if kept is None:
                return torch.where(counted, x.reshape(shape), empty)
            return x.new_full((counted.numel(),), empty).index_copy(0, kept, x).reshape(shape)

        each = spread(losses, 0.0)
        loss = each if reduction == "none" else each.sum()
        if reduction == "mean":
            loss = loss / (each.numel() if counted is None else counted.sum())
        if not statistics:
            return loss
        return LinearKL(loss, spread(losses.detach(), torch.nan), *(spread(x, torch.nan) for x in said))


_ROWS = ("hidden", "teacher_hidden", "index", "log_probability")


def _check_teacher(
    caller: str,
    hidden: Tensor,
    weight: Tensor,
    teacher_hidden: Tensor | None,
    teacher_weight: Tensor | None,
    top: tuple[Tensor, Tensor] | None,
    teacher_bias: Tensor | None,
) -> None:
    if top is None:
        if teacher_hidden is None or teacher_weight is None:
            raise ArgumentError(
                f"{caller}: there is no teacher. Pass teacher_hidden and teacher_weight, or teacher_top."
            )
        linear_head(caller, teacher_hidden, teacher_weight, "...", teacher_bias=teacher_bias)
        if teacher_weight.shape[0] != weight.shape[0]:
            raise ArgumentError(
                f"{caller}: weight has {weight.shape[0]} outcomes, teacher_weight has "
                f"{teacher_weight.shape[0]}. A divergence needs one vocabulary: pass the rows "
                "of the outcomes that both have, in one order."
            )
        if not autocasts(hidden.device):
            checks.alike(caller, hidden=hidden, teacher_hidden=teacher_hidden)
        if teacher_hidden.shape[:-1] != hidden.shape[:-1]:
            raise ArgumentError(
                f"{caller}: hidden is {tuple(hidden.shape)}, teacher_hidden is "
                f"{tuple(teacher_hidden.shape)}. Pass one row of each for every token."
            )
        return
    if teacher_hidden is not None or teacher_weight is not None or teacher_bias is not None:
        raise ArgumentError(f"{caller}: teacher_top stands for the teacher. Leave its other tensors out.")
    index, log_probability = top
    for name, x in (("index", index), ("log-probability", log_probability)):
        floats = name != "index"
        if not isinstance(x, Tensor) or x.is_floating_point() != floats or x.shape[:-1] != hidden.shape[:-1]:
            got = f"{tuple(x.shape)} {x.dtype}" if isinstance(x, Tensor) else type(x).__name__
            kind = "floating-point numbers" if floats else "whole numbers"
            raise ArgumentError(
                f"{caller}: the {name} of teacher_top is {got}. Pass {kind} ({tuple(hidden.shape[:-1])}, k), "
                "as torch.topk gives them."
            )
    if index.shape != log_probability.shape or not index.shape[-1] > 0:
        raise ArgumentError(
            f"{caller}: teacher_top has indices {tuple(index.shape)} and log-probabilities "
            f"{tuple(log_probability.shape)}. Pass two tensors of one shape, (..., k) with k ≥ 1."
        )


def _check_top(caller: str, index: Tensor, log_probability: Tensor, outcomes: int) -> None:
    right = (index >= 0) & (index < outcomes)
    checks.entries(caller, "the index of teacher_top", index, right, f"from 0 to {outcomes - 1}")
    if index.shape[-1] > 1 and bool((index.sort(-1).values.diff(dim=-1) == 0).any()):
        raise ArgumentError(
            f"{caller}: teacher_top names an outcome twice. Pass k different ones for a token."
        )
    if not is_concrete(log_probability):
        return
    mass = log_probability.detach().to(torch.float64).exp().sum(-1)
    if not bool((mass <= 1 + 4 * index.shape[-1] * torch.finfo(log_probability.dtype).eps).all()):
        raise ArgumentError(
            f"{caller}: the probabilities of teacher_top add up to {float(mass.max()):.6g}. Pass "
            "log-probabilities of the whole vocabulary: logits.log_softmax(-1).topk(k), not of the k alone, "
            "not logits."
        )


def _counted(caller: str, hidden: Tensor, ignore: Tensor | None, reduction: str) -> Tensor | None:
    if ignore is not None and (
        not isinstance(ignore, Tensor) or ignore.dtype != torch.bool or ignore.shape != hidden.shape[:-1]
    ):
        got = f"{tuple(ignore.shape)} {ignore.dtype}" if isinstance(ignore, Tensor) else type(ignore).__name__
        raise ArgumentError(
            f"{caller}: ignore is {got}. Pass booleans {tuple(hidden.shape[:-1])}, "
            "True for tokens not to count."
        )
    if reduction == "mean" and (
        hidden[..., 0].numel() == 0 or (ignore is not None and is_concrete(ignore) and bool(ignore.all()))
    ):
        raise ArgumentError(
            f"{caller}: no token counts, so there is no mean. Leave such batches out, or pass "
            "reduction='sum'."
        )
    return None if ignore is None else ~ignore


def _vocabulary(
    caller: str,
    group: Group,
    tensors: dict[str, Tensor | None],
    top: tuple[Tensor, Tensor] | None,
    counted: Tensor | None,
    options: dict[str, Any],
) -> Vocabulary:
    """The vocabulary, once all processes of the group agree on options, rows that count, and the teacher."""
    hidden, weight = tensors["hidden"], tensors["weight"]
    assert hidden is not None
    assert weight is not None
    marks = hidden.new_ones(hidden.shape[:-1], dtype=torch.bool) if counted is None else counted
    if top is not None and group is not None:
        marks = torch.cat([marks.reshape(-1).long(), top[0].reshape(-1).long()])
    teacher = {name: x for name, x in tensors.items() if name.startswith("teacher")}
    teacher["log-probabilities of teacher_top"] = None if top is None else top[1]
    for name, x in teacher.items():
        options[f"the last axis and dtype of {name}"] = (
            None if x is None else (x.shape[-1] * (x.dim() > 1), x.dtype)
        )
        options[f"whether {name} needs a gradient"] = x is not None and is_concrete(x) and x.requires_grad
    return Vocabulary.of(caller, group, hidden, weight, tensors["bias"], marks, options)
