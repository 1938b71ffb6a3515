"""The processes of a group: who they are, whether they agree, and the error when one of them is gone.

A mistake on one process must not leave the others waiting. So before anything large is sent, each process
tells all others in 24 bytes what it is about to do (`agree`): a hash of the facts that must be equal for all,
the number of its keys, and whether its own arguments were refused. If they do not agree, every process raises
the same error, with the details of all.

Once they agree, waiting ends in one of three ways: the others answer, the connection to one of them breaks
(it was killed), or the timeout of the group has passed (it is stuck, or never made the call). The last two
become a `GroupError`. The timeout is that of ``init_process_group(timeout=...)`` or ``new_group``.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from exptilt._support.errors import ArgumentError, BackendError, ExptiltError

Group = Any  # torch.distributed.ProcessGroup, which builds of torch without distributed do not have


class GroupError(ExptiltError, RuntimeError):
    """The processes of a group do not agree, or one of them did not answer in time."""


class Members:
    """This process among those of its group.

    Attributes:
        group: the process group; None is that of all processes.
        rank: the number of this process in the group.
        count: number of processes in the group.
    """

    def __init__(self, caller: str, group: Group = None) -> None:
        if torch.compiler.is_compiling():
            raise BackendError(
                f"{caller}: a call that waits for other processes cannot be compiled. "
                "Wrap it in torch.compiler.disable."
            )
        if not dist.is_available():
            hint = "Install a build of torch that has it."
            raise GroupError(f"{caller}: this build of torch has no torch.distributed. {hint}")
        if not dist.is_initialized():
            raise GroupError(
                f"{caller}: no group: torch.distributed is not initialised. Start the script with torchrun "
                "and call torch.distributed.init_process_group('gloo') first ('nccl' on GPUs)."
            )
        if group is not None and not isinstance(group, dist.ProcessGroup):
            got = (
                "which this process does not belong to" if group == dist.GroupMember.NON_GROUP_MEMBER else ""
            )
            got = got or f"a {type(group).__name__}"
            hint = "Pass what torch.distributed.new_group returned on a member, or None for all processes."
            raise ArgumentError(f"{caller}: group is {got}. {hint}")
        self.group: Any = dist.group.WORLD if group is None else group
        self.rank, self.count = dist.get_rank(self.group), dist.get_world_size(self.group)

    @property
    def device(self) -> torch.device:
        """Device of the tensors that are made here and sent to the group: nccl takes no CPU tensors."""
        return torch.device("cuda" if dist.get_backend(self.group) == "nccl" else "cpu")

    @contextmanager
    def waiting(self, caller: str) -> Iterator[None]:
        """Turn a failure of torch.distributed into a `GroupError` that says what to look for."""
        try:
            yield
        except RuntimeError as problem:
            if isinstance(problem, ExptiltError):
                raise
            raise GroupError(
                f"{caller}: rank {self.rank} of {self.count} did not get an answer from the others "
                f"({str(problem).splitlines()[0][:200]}). One of them has ended, is stuck, or made another "
                "call: see the first error in the logs of the other ranks, and start all of them again. How "
                "long to wait is init_process_group(timeout=...)."
            ) from problem

    def reduce(self, x: Tensor, how: str, caller: str) -> Tensor:
        """The sum ("sum") or maximum ("max") of a tensor over all processes, as a new tensor."""
        found = x.detach().clone(memory_format=torch.contiguous_format)
        if self.count > 1:
            operation = dist.ReduceOp.SUM if how == "sum" else dist.ReduceOp.MAX
            with self.waiting(caller):
                dist.all_reduce(found, operation, group=self.group)
        return found

    def collect(self, x: Tensor, caller: str) -> list[Tensor]:
        """The tensors of all processes, of one shape, in the order of the ranks."""
        x = x.detach().contiguous()
        found = [torch.empty_like(x) for _ in range(self.count)]
        with self.waiting(caller):
            dist.all_gather(found, x, group=self.group)
        return found

    def rows(self, x: Tensor, sizes: tuple[int, ...], caller: str) -> list[Tensor]:
        """The tensors (..., sizes[rank], ·) of all processes, which may differ in their number of rows."""
        short = max(sizes) - x.shape[-2]
        padded = torch.nn.functional.pad(x.detach(), (0, 0, 0, short))
        return [part[..., :n, :] for part, n in zip(self.collect(padded, caller), sizes, strict=True)]


def agree(
    members: Members, caller: str, facts: dict[str, Any], *, count: int = 0, problem: Exception | None = None
) -> tuple[int, ...]:
    """Raise on every process if the processes differ in a fact, or if one has a problem.

    `problem` is the error that this process would have raised alone. Facts are compared by their `repr`.
    Returns the counts of all processes, which may differ.
    """
    if members.count == 1:
        if problem is not None:
            raise problem
        return (count,)
    text = repr((caller, sorted(facts.items())))
    mark = int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little", signed=True)
    told = members.collect(torch.tensor([mark, count, problem is not None], device=members.device), caller)
    marks, counts, problems = zip(*(x.tolist() for x in told), strict=True)
    if not any(problems) and len(set(marks)) == 1:
        return counts
    details: list[Any] = [None] * members.count
    with members.waiting(caller):
        dist.all_gather_object(
            details, (None if problem is None else str(problem), caller, facts), group=members.group
        )
    if problem is not None:
        raise problem
    for rank, (text_of, _, _) in enumerate(details):
        if text_of is not None:
            raise GroupError(f"{caller}: rank {rank} was refused, so no rank goes on. It says: {text_of}")
    raise GroupError(
        f"{caller}: {_difference(details)} Pass the same on every rank; only the number of a rank's own rows "
        "(keys, pairs, outcomes) may differ."
    )


@contextmanager
def refused_together(caller: str, group: Group) -> Iterator[None]:
    """If the block refuses its arguments, every process raises; the others learn of it when they `agree`."""
    try:
        yield
    except ArgumentError as problem:
        if group is not None:
            agree(Members(caller, group), caller, {}, problem=problem)
        raise


def _difference(details: list[Any]) -> str:
    """A sentence that names the first difference between two processes."""
    _, first, known = details[0]
    for rank, (_, caller, facts) in enumerate(details):
        if caller != first:
            return f"rank 0 calls {first}, rank {rank} calls {caller}."
        for name in {**known, **facts}:
            if known.get(name) != facts.get(name):
                return f"{name} is {known.get(name)!r} on rank 0 and {facts.get(name)!r} on rank {rank}."
    return "the ranks differ."
