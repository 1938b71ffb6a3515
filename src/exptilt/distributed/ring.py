r"""Every process has some of the queries and some of the keys: the keys go around, the queries stay.

To the rules of ``tilting/derivatives`` a `Ring` is one more backend: it runs the sweeps of
``tilting/backends`` over keys that pass by. So the rules' derivatives hold here too, in the memory of two
processes' keys. This is exact because derivatives need of a query only its statistics over *all* keys (shift,
weight, gap, variance, output): with these, each key's share can be found wherever the key is.

    forward    keys and values travel; results join by `merge`
    tangent    their tangents travel too; results over the keys of k join by their weight w_k (see `tangent`)
    gradient   keys and values travel (and their tangents, if gradients of those are wanted), and behind them
               their gradients, to which each process adds its queries' part; after a full turn they are home

Who sees whom. Queries and keys of a process stand at the same places of the sequence where that matters
(causality, window). In order "contiguous" process r of P has the r-th part; its first queries see little and
its last ones much, and by causality the first process would wait for the last. In order "zigzag" the sequence
is cut into 2P parts, and process r has parts r and 2P − 1 − r. Then with the keys of process s

    s = r    queries see keys by causality within this process's part
    s < r    both parts of the queries see all of part s, and nothing of part 2P − 1 − s
    s > r    the second part of the queries sees both parts of the keys, the first part nothing

so that at each step every process sweeps the same number of pairs, half of all.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import signature
from typing import Any

import torch
from torch import Tensor

from exptilt._support.transforms import apply
from exptilt.distributed.collectives import Final
from exptilt.distributed.group import Members, agree
from exptilt.distributed.order import positions
from exptilt.distributed.pieces import Piece
from exptilt.distributed.travel import Homewards, Shape, tour
from exptilt.tilting.backends import dispatch
from exptilt.tilting.derivatives import identities
from exptilt.tilting.derivatives.identities import Statistics
from exptilt.tilting.problem import Gradients, Inputs, InputTangents, Needs, RowStatistics, wide_dtype
from exptilt.tilting.result import AttentionResult, by_tensor, merge
from exptilt.tilting.score_rule import ScoreRule


@dataclass(frozen=True)
class Ring:
    """The sweeps over the keys of all processes.

    Attributes:
        members: the group.
        order: "contiguous" or "zigzag".
        sizes: how many keys each process has.
        backend: name of the backend that sweeps the keys of one process.
    """

    members: Members
    order: str
    sizes: tuple[int, ...]
    backend: str

    def register(self) -> str:
        """Register this ring as a backend; returns its name for `Settings.backend`."""
        found = f"ring {self.members.name} {self.order} {self.sizes} {self.backend}"
        dispatch.register(found, self)
        return found

    # ---- who sees whom

    def piece(self, source: int, rule: ScoreRule, length_q: int, device: torch.device) -> Piece | None:
        """The piece of process `source`'s keys that this process's queries see; None if none."""
        mine = self.members.rank
        rows, keys, causal, window = slice(None), slice(None), False, None
        if rule.causal:
            if source == mine:
                causal = True
            elif self.order == "contiguous":
                if source > mine:
                    return None
            elif source < mine:
                keys = slice(0, self.sizes[source] // 2)
            else:
                rows = slice(length_q // 2, None)
        mask = None
        if rule.window is not None:
            if source == mine and self.order == "contiguous":
                window = rule.window
            else:
                own = positions(self.sizes, mine, self.order, device)[rows]
                seen = rule.sees(own[:, None], positions(self.sizes, source, self.order, device)[keys][None])
                assert seen is not None
                if not bool(seen.any()):
                    return None
                causal, mask = False, None if bool(seen.all()) else seen
        return Piece(rows, keys, ScoreRule(rule.scale, causal, window, rule.softcap), mask)

    def _visits(
        self, t: Inputs, rule: ScoreRule, more: Sequence[Tensor | None] = ()
    ) -> Iterator[tuple[int, Piece | None, list[Any]]]:
        """Rank of each process in turn, the piece of its keys that queries here see, and its tensors."""
        own = [t.key, t.value, t.log_weight, *more]
        axes = [-2, -2, -1, -2, -2, -1][: len(own)]
        shapes = [[_resized(x, axis, size) for x, axis in zip(own, axes, strict=True)] for size in self.sizes]
        for source, tensors in tour(self.members, own, shapes, "attend"):
            yield source, self.piece(source, rule, t.query.shape[-2], t.query.device), tensors

    # ---- the sweeps

    def forward(self, t: Inputs, rule: ScoreRule) -> tuple[Tensor, Tensor, Tensor]:
        """Output (..., Hq, Q, Dv), stacked `RowStatistics`, and the number of the best key of all."""
        shape, wide = t.query.shape[:-1], wide_dtype(t.query.dtype)
        zero = t.query.new_zeros(shape, dtype=wide)
        none = torch.full_like(zero, -torch.inf)
        output = zero.new_zeros(*shape, t.value.shape[-1])
        found = AttentionResult(output, none, zero, zero, zero, none, parts=(zero, zero, zero))
        best, place = zero.to(torch.int64), zero.to(torch.int64)  # number and position of the key
        for source, piece, (key, value, weight) in self._visits(t, rule):
            if piece is None:
                continue
            problem = piece.cut(_with_keys(t, (key, value, weight)))
            output, lines, at = _sweep(self.backend, "forward")(problem, piece.rule)[:3]
            part = _as_tilted(output, RowStatistics(*lines.unbind()))
            first = sum(self.sizes[:source]) + (piece.keys.start or 0)
            start = piece.rows.start or 0  # a piece's rows run from here to the last
            before = _rows(found, start)
            if problem.key.shape[-2]:  # of equal scores the first one in the sequence counts
                here = positions(self.sizes, source, self.order, at.device)[piece.keys][at]
                earlier = (part.score_max == before.score_max) & (here < place[..., piece.rows])
                better = (part.score_max > before.score_max) | earlier
                best[..., piece.rows] = torch.where(better, at + first, best[..., piece.rows])
                place[..., piece.rows] = torch.where(better, here, place[..., piece.rows])
            joined = merge([before, part]) if source != self.members.rank else part
            found = _with_rows(found, joined, start) if start else joined
        assert found.parts is not None
        _, weight, gap = found.parts
        six = found.log_normalizer, found.entropy, found.score_mean, found.score_variance, found.score_max
        return found.output, torch.stack([*six, weight, gap]), best

    def tangent(self, t: Inputs, dots: InputTangents, rows: Tensor, rule: ScoreRule) -> tuple[Tensor, Tensor]:
        r"""Σ p (ṡ v + v̇) and the sums 0, Σ p ṡ, Σ p c ṡ, Σ p c² ṡ, stacked.

        Over the keys of one process, with their own statistics, tangents are Ġ_k, x_k = E_k[c ṡ], V̇_k, ȯ_k.
        With w_k = e^{G_k − G} and d_k = μ_k − μ, sums over all keys are

            Σ p ṡ = Σ w_k Ġ_k     Σ p c ṡ = Σ w_k (x_k + d_k Ġ_k)     Σ p (ṡ v + v̇) = Σ w_k (ȯ_k + Ġ_k o_k)
            Σ p c² ṡ = Σ w_k (E_k[c_k² ṡ] + 2 d_k x_k + d_k² Ġ_k),    E_k[c_k² ṡ] = V̇_k − 2 x_k + V_k Ġ_k.
        """
        self._same("tangent", t, dots)
        shape = t.query.shape[:-1]
        pushed = rows.new_zeros(*shape, t.value.shape[-1])
        x0, x1, x2 = (rows.new_zeros(shape) for _ in range(3))
        shift, inverse, gap = rows[:3].unbind()
        moving = (dots.key, dots.value, dots.log_weight)
        for _, piece, (key, value, weight, *moved) in self._visits(t, rule, moving):
            if piece is None:
                continue
            problem, at = piece.cut(_with_keys(t, (key, value, weight))), piece.rows
            output, stacked = _sweep(self.backend, "forward")(problem, piece.rule)[:2]
            lines = RowStatistics(*stacked.unbind())
            stats = Statistics(output, identities.shift_of(lines), lines.weight, lines.gap, lines.variance)
            moves, known = piece.cut_dots(dots, *moved), identities.tangent_rows(stats)
            towards, sums = _sweep(self.backend, "tangent")(problem, moves, known, piece.rule)
            dot = identities.finish_tangent(towards, sums, stats, None, None)
            some = stats.weight != 0
            apart = torch.where(some, stats.shift - shift[..., at], 0.0)
            w = torch.where(some, stats.weight * torch.exp(apart) * inverse[..., at], 0.0)
            d = torch.where(w != 0, stats.gap + apart - gap[..., at], 0.0)
            G = torch.where(some, dot.log_normalizer, 0.0)
            square = dot.variance - 2 * dot.gap + stats.variance * G
            x0[..., at] += w * G
            x1[..., at] += w * (dot.gap + d * G)
            x2[..., at] += w * (square + 2 * d * dot.gap + d.square() * G)
            pushed[..., at, :] += w.unsqueeze(-1) * (dot.output + G.unsqueeze(-1) * output)
        return pushed, torch.stack([torch.zeros_like(x0), x0, x1, x2])

    def gradient(
        self,
        t: Inputs,
        cotangent: Tensor,
        output: Tensor,
        rows: Tensor,
        rule: ScoreRule,
        needs: Needs,
        dots: InputTangents | None = None,
        output_dot: Tensor | None = None,
    ) -> Gradients:
        """Gradients of the queries and keys here, summed around the ring; with `dots` those of a tangent."""
        moving = () if dots is None else (dots.key, dots.value, dots.log_weight)
        self._same("gradient" if dots is None else "second", t, dots or InputTangents(), needs)

        def sweep(source: int, piece: Piece, tensors: list[Any]) -> Gradients:
            at, problem = piece.rows, piece.cut(_with_keys(t, tensors))
            given = cotangent[..., at, :], output[..., at, :], rows[..., at]
            more: Any = ()
            if dots is not None and output_dot is not None:
                more = piece.cut_dots(dots, *tensors[3:]), output_dot[..., at, :]
            found: Gradients = _sweep(self.backend, "gradient")(problem, *given, piece.rule, needs, *more)
            return found

        return self._gradients(t, rule, needs, sweep, moving)

    def _gradients(
        self, t: Inputs, rule: ScoreRule, needs: Needs, sweep: "_Sweep", more: Sequence[Tensor | None] = ()
    ) -> Gradients:
        """`Gradients` of a backward sweep over the keys of all processes, by `_carry`."""
        lead, (heads, _, _) = t.query.shape[:-3], t.query.shape[-3:]
        kept = [
            (*lead, *t.key.shape[-3:]) if needs.key else None,
            (*lead, *t.value.shape[-3:]) if needs.value else None,
            (*lead, heads, t.key.shape[-2]) if needs.columns else None,
        ]
        query, rows, sums = self._carry(t, self._visits(t, rule, more), kept, sweep)
        none = query.new_empty(0)
        key, value, column_sum = (none.clone() if x is None else x for x in sums)
        row_sum = rows if needs.rows else none.clone()
        return Gradients(query if needs.query else none, key, value, column_sum, row_sum, none.clone())

    def _carry(
        self, t: Inputs, visits: "_Visits", kept: Sequence[tuple[int, ...] | None], sweep: "_Sweep"
    ) -> tuple[Tensor, Tensor, list[Tensor | None]]:
        """Gradients and row sums of this process's queries, gradients of its keys, summed around the ring.

        `kept` has the shapes of the keys' gradients: key (..., K, D), value (..., K, Dv), weight (..., K).
        """
        wide, axes = wide_dtype(t.query.dtype), (-2, -2, -1)
        query = t.query.new_zeros(t.query.shape, dtype=wide)
        rows = query.new_zeros(query.shape[:-1])
        like = [None if shape is None else query.new_empty(()).expand(shape) for shape in kept]

        def shapes(source: int) -> list[Shape]:
            return [_resized(x, axis, self.sizes[source]) for x, axis in zip(like, axes, strict=True)]

        behind = Homewards(self.members, shapes, "attend")
        for source, piece, tensors in visits:
            sums = [None if shape is None else query.new_zeros(shape[0]) for shape in shapes(source)]
            if piece is not None:
                found = sweep(source, piece, tensors)
                if found.query.dim() > 1:
                    query[..., piece.rows, :] += found.query
                if found.row_sum.dim() > 1:
                    rows[..., piece.rows] += found.row_sum
                for into, x, axis in zip(sums, (found.key, found.value, found.column_sum), axes, strict=True):
                    if into is not None:
                        start, stop, _ = piece.keys.indices(into.shape[axis])
                        into.narrow(axis, start, stop - start).add_(x)
            behind.add(source, sums, query.device)
        return query, rows, behind.arrive()

    # ---- the largest score

    def maximum_tangent(
        self, t: Inputs, dots: InputTangents, best: Tensor, maximum: Tensor, rule: ScoreRule
    ) -> Tensor:
        """Tangent of the largest score: that of the score of its key, on whichever process the key is."""
        moving = (dots.key, dots.value, dots.log_weight)

        def run(*given: Tensor) -> tuple[Tensor]:
            self._same("maximum_tangent", t, dots)
            found = torch.zeros_like(maximum)
            for source, _, (key, value, weight, *moved) in self._visits(t, rule, moving):
                here, at = self._at(source, best)
                problem = _with_keys(t, (key, value, weight))
                moved_by = InputTangents(dots.query, moved[0], moved[1], None, moved[2])
                moves = identities.maximum_tangent(problem, moved_by, at, maximum, rule)
                found = torch.where(here, moves, found)
            return (found,)

        given = [x for x in (*t[:6], *dots, maximum) if x is not None]
        result: Tensor = apply(Final, run, _TWICE, *given)[0]
        return result

    def maximum_gradient(
        self, t: Inputs, bar: Tensor, best: Tensor, maximum: Tensor, rule: ScoreRule
    ) -> InputTangents:
        """The transpose of ``maximum_tangent``: keys get their part from every process."""
        kept = [t.key.shape, None, None if t.log_weight is None else t.log_weight.shape]
        empty = bar.new_empty(0)

        def sweep(source: int, piece: Piece, tensors: list[Any]) -> Gradients:
            here, at = self._at(source, best)
            problem = _with_keys(t, tensors)
            found = identities.maximum_gradient(problem, torch.where(here, bar, 0.0), at, maximum, rule)
            query, key, weight = (
                empty if x is None else x for x in (found.query, found.key, found.log_weight)
            )
            return Gradients(query, key, empty, weight, empty, empty)

        def run(*_: Tensor) -> tuple[Tensor, ...]:
            self._same("maximum_gradient", t, InputTangents())
            everything = ScoreRule(rule.scale, softcap=rule.softcap)
            query, _rows, sums = self._carry(t, self._visits(t, everything), kept, sweep)
            return query, *(x for x in sums if x is not None)

        given = [x for x in (*t[:6], bar, maximum) if x is not None]
        query, key, *weight = apply(Final, run, _TWICE, *given)
        return InputTangents(query, key, log_weight=weight[0] if weight else None)

    def _at(self, source: int, best: Tensor) -> tuple[Tensor, Tensor]:
        """Whether each query's best key is on process `source`, and its number there."""
        first, size = sum(self.sizes[:source]), self.sizes[source]
        here = (best >= first) & (best < first + size)
        return here, torch.where(here, best - first, 0)

    def _same(self, what: str, t: Inputs, dots: InputTangents, needs: Needs | None = None) -> None:
        """Raise on every process unless all want the same derivatives."""
        facts = {
            "the kind of derivative": what,
            "the value's width": t.value.shape[-1],
            "batch and heads": tuple(t.query.shape[:-2]),
            "tangents of query, key, value, bias, log_weight, sink": tuple(x is not None for x in dots),
            "gradients by query, key, value, log_weight": None if needs is None else tuple(needs.flags()),
        }
        agree(self.members, f"the derivative of attend ({what})", facts)


_Sweep = Callable[[int, Piece, list[Any]], Gradients]
_Visits = Iterator[tuple[int, Piece | None, list[Any]]]
_TWICE = (
    "attend: second derivatives of score_max are not known where queries are sharded. Leave it out of what "
    "is differentiated twice, or use queries='replicated'."
)


def _with_keys(t: Inputs, tensors: Sequence[Any]) -> Inputs:
    """The own queries and another process's key, value and log_weight."""
    key, value, log_weight = tensors[:3]
    return t._replace(key=key, value=value, log_weight=log_weight)


def _resized(x: Tensor | None, axis: int, size: int) -> Shape:
    """Shape and dtype of a tensor with another number of keys."""
    if x is None:
        return None
    shape = list(x.shape)
    shape[axis] = size
    return tuple(shape), x.dtype


def _sweep(backend: str, name: str) -> Callable[..., Any]:
    """The backend's sweep `name`, over some of the keys with statistics over all."""
    found = dispatch.sweep(backend, name)
    return partial(found, whole=False) if "whole" in signature(found).parameters else found


def _as_tilted(output: Tensor, lines: RowStatistics) -> AttentionResult:
    parts = identities.shift_of(lines), lines.weight, lines.gap
    return AttentionResult(output, *lines[:5], parts=parts)


def _rows(x: AttentionResult, start: int) -> AttentionResult:
    """The result for the queries from `start` on."""
    return by_tensor(lambda same, axis: same[0].narrow(axis, start, same[0].shape[axis] - start), x)


def _with_rows(x: AttentionResult, new: AttentionResult, start: int) -> AttentionResult:
    """The result with the queries from `start` on replaced by those of `new`."""
    return by_tensor(lambda both, axis: torch.cat([both[0].narrow(axis, 0, start), both[1]], axis), x, new)
