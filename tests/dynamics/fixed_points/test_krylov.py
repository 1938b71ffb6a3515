"""GMRES and Arnoldi against dense linear algebra."""

import pytest
import torch

from dynamics.fixed_points.problems import F64, close, contraction, generator
from exptilt.dynamics.fixed_points import krylov
from exptilt.dynamics.fixed_points.krylov import arnoldi, gmres


def operator(matrices: torch.Tensor, calls: list[int]):
    def apply(v: torch.Tensor) -> torch.Tensor:
        calls.append(1)
        return (matrices @ v.unsqueeze(-1)).squeeze(-1)

    return apply


def test_arnoldi_relation() -> None:
    matrices, start = (
        torch.randn(3, 7, 7, dtype=F64, generator=generator(0)),
        torch.randn(3, 7, dtype=F64, generator=generator(1)),
    )
    basis, hessenberg = arnoldi(operator(matrices, []), start, 5)
    close(basis @ basis.mT, torch.eye(6, dtype=F64).expand(3, 6, 6), 1e-12)
    close(matrices @ basis[:, :5].mT, basis.mT @ hessenberg, 1e-11)
    close(basis[:, 0], start / start.norm(dim=-1, keepdim=True), 1e-12)


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("tolerance", [1e-2, 1e-5, 1e-9])
def test_gmres_stops_at_the_first_space_that_is_large_enough(tolerance: float, verify: bool) -> None:
    """The least residual over each Krylov space, by dense least squares, says when."""
    n = 20
    a, b = (
        torch.eye(n, dtype=F64) - contraction(n, 0.9, 2),
        torch.randn(1, n, dtype=F64, generator=generator(2)),
    )
    powers = [b[0]]
    for size in range(1, n + 1):  # noqa: B007
        space = torch.linalg.qr(torch.stack(powers, 1)).Q
        y = torch.linalg.lstsq(a @ space, b[0][:, None]).solution
        if (a @ space @ y - b[0][:, None]).norm() <= tolerance * b.norm():
            break
        powers.append(a @ space[:, -1])
    calls: list[int] = []
    solution, missed = gmres(operator(torch.eye(n, dtype=F64) - a[None], calls), b, tolerance, verify=verify)
    assert len(calls) == size + verify  # one more to see the residual with
    assert 0 < float(missed) <= tolerance * float(b.norm())
    close(missed, (b - solution @ a.mT).norm(dim=-1), 1e-12)


def test_gmres_restarts_zero_rows_and_exhausted_spaces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(krylov, "_RESTART", 5)
    monkeypatch.setattr(krylov, "_MAX_RESTARTS", 60)
    n = 24
    matrices = torch.stack(
        [
            torch.eye(n, dtype=F64) - contraction(n, 0.8, 3),
            torch.eye(n, dtype=F64),
            3 * torch.eye(n, dtype=F64),
        ]
    )
    right = torch.randn(3, n, dtype=F64, generator=generator(4))
    right[1] = 0
    solution, missed = gmres(operator(torch.eye(n, dtype=F64) - matrices, []), right, 1e-12)
    close(solution, torch.linalg.solve(matrices, right), 1e-10)
    assert (missed <= 1e-12 * right.norm(dim=-1)).all()


def test_gmres_says_when_there_is_no_answer() -> None:
    calls: list[int] = []
    solution, missed = gmres(
        operator(torch.eye(3, dtype=F64)[None], calls), torch.ones(1, 3, dtype=F64), 1e-9, verify=False
    )
    close(missed, torch.tensor([3.0], dtype=F64).sqrt(), 1e-12)
    assert solution.isfinite().all()
    assert len(calls) == 2


def test_gmres_goes_on_where_no_step_helps() -> None:
    """A cyclic shift: b − Au does not fall at all before the space is whole. And a skew matrix, for which
    <r, Ar> = 0.
    """
    n = 12
    skew = torch.randn(n, n, dtype=F64, generator=generator(6))
    for a in (torch.eye(n, dtype=F64).roll(1, 0), skew - skew.mT):
        right, calls = torch.eye(n, dtype=F64)[:1], []
        solution, missed = gmres(operator(torch.eye(n, dtype=F64) - a, calls), right, 1e-11)
        close(solution, torch.linalg.solve(a, right.mT).mT, 1e-10)
        assert len(calls) == n + 1
        assert float(missed) <= 1e-11


@pytest.mark.parametrize("memory", [2**28, 1])
def test_gmres_of_slow_rotations(memory: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """0.99 times a rotation: 30 vectors hardly help, and a space begun anew forgets them; it has to grow.
    An easy sample is no bar.
    """
    monkeypatch.setattr(krylov, "_MEMORY", memory)
    n = 80
    turn = torch.linalg.qr(torch.randn(n, n, dtype=F64, generator=generator(7))).Q
    matrices = torch.stack([0.99 * turn, contraction(n, 0.95, 7)])
    right, calls = torch.randn(2, n, dtype=F64, generator=generator(8)), []
    solution, missed = gmres(operator(matrices, calls), right, 1e-10)
    easy = torch.linalg.solve(torch.eye(n, dtype=F64) - matrices[1], right[1])
    close(solution[1], easy, 1e-8)
    if memory > 1:
        close(solution[0], torch.linalg.solve(torch.eye(n, dtype=F64) - matrices[0], right[0]), 1e-7)
        assert (missed <= 1e-10 * right.norm(dim=-1)).all()
        assert (
            len(calls) <= 30 + 1 + n + 1
        )  # a space of 30, which is swift here, a whole one, and a look at the residual after each
    else:  # restarts go on as long as they bring something
        assert missed[0] < 0.5 * right[0].norm()


def test_gmres_gives_up_in_time() -> None:
    """J has the eigenvalue 1, and b a part along it: nothing helps, and the space does not grow to all 400
    dimensions.
    """
    n = 400
    spectrum = torch.linspace(-1, 1, n, dtype=F64)
    calls: list[int] = []
    _, missed = gmres(operator(torch.diag(spectrum), calls), torch.ones(1, n, dtype=F64), 1e-10)
    assert float(missed) >= 1 - 1e-9
    assert len(calls) < n
