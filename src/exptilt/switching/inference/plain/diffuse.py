r"""The first steps of a series whose initial state is diffuse: exact limits, as Koopman and Durbin have them.

A diffuse state has variance κ with κ → ∞. While some of it is left, a law is x, P + κ D, and D = A A' with
one column of A for each direction that has not been seen. With S = S° + κ S∞ = H P H' + R + κ H D H', e the
innovation and r the rank of S∞,

    S^{-1} = B₀ + B₁/κ + …,   K = P H'B₀ + D H'B₁,   N = I − K H
    x ← x + K e,   P ← N P N' + K R K',   D ← N D N',   A ← A without the directions seen
    lim log p(y) + (r/2) log κ = −½ (m log 2π + log |S∞|₊ + log |S° where S∞ is 0| + e'B₀e)

In the limit a component has no weight beside one of smaller rank r. Mixtures collapse D as they do P: modes
that move diffuse states apart before they are seen give a mixture whose D has a larger rank than any of them.
Backwards, Rauch's gain has the same limit: J = P F'B₀ + D F'B₁, with the inverse of F (P + κD) F' + Q.

These steps are done here, in torch, one law at a time (they end as soon as nothing is diffuse), and the
compiled kernels go on from the law they leave. All is differentiable, where the rank does not change.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from ...arrays import LOG_TWO_PI, Run, Smoothing
from ...checks import plain, safe_log
from ..moments import condition, joseph, mixture, predict, rauch, terms
from ..problem import Matrices, Problem, stopped
from .step import Stepped, step

SMALL = 1e-10  # singular values below this, relative to the numbers they come from, count as zero


@dataclass(frozen=True)
class Law:
    """A Gaussian of covariance P + κ D, D = A A': mean ``(n,)``, P and D ``(n, n)``, A ``(n, q)``."""

    mean: torch.Tensor
    P: torch.Tensor
    D: torch.Tensor
    A: np.ndarray

    @property
    def shown(self) -> torch.Tensor:
        """The covariance, infinite where D is not zero."""
        return with_infinities(self.P, self.A)


def with_infinities(P: torch.Tensor, A: np.ndarray) -> torch.Tensor:
    """The limit of P + κ A A'."""
    D = torch.from_numpy(A @ A.T)
    there = D.abs() > SMALL * torch.from_numpy(np.abs(A) @ np.abs(A).T)
    return torch.where(there, torch.copysign(torch.full_like(D, torch.inf), D), P)


def initial_laws(mean: torch.Tensor, cov: torch.Tensor, diffuse: np.ndarray) -> list[Law]:
    """One law a mode; `cov` is zero where states are diffuse."""
    A = np.eye(len(diffuse))[:, diffuse]
    return [Law(x, P, torch.from_numpy(A @ A.T), A) for x, P in zip(mean, cov, strict=True)]


def _compressed(A: np.ndarray, size: np.ndarray) -> np.ndarray:
    """A factor of A A' with as many columns as its rank; `size` bounds the entries A was computed from."""
    U, s, _ = np.linalg.svd(A, full_matrices=False)
    kept = s > SMALL * np.abs(size).max(initial=0.0)
    return A if kept.all() and A.shape[1] == len(s) else np.asarray(U[:, kept] * s[kept])


def move(law: Law, W: torch.Tensor, c: torch.Tensor | float, Q: torch.Tensor) -> Law:
    """The law of W x + c + noise."""
    mean, P = predict(W, law.mean, law.P, c, Q)
    F = plain(W)
    return Law(mean, P, W @ law.D @ W.mT, _compressed(F @ law.A, np.abs(F) @ np.abs(law.A)))


def see(
    law: Law, y: torch.Tensor, H: torch.Tensor, d: torch.Tensor, R: torch.Tensor
) -> tuple[Law, torch.Tensor, int] | None:
    """The law given y (nothing missing), log-density and rank; None if a covariance is singular."""
    n, m = len(law.mean), len(y)
    if m == 0:
        return law, torch.zeros((), dtype=torch.float64), 0
    e = y - H @ law.mean - d
    seen, bound = plain(H) @ law.A, np.abs(plain(H)) @ np.abs(law.A)
    _, s, directions = np.linalg.svd(seen)
    rank = int((s > SMALL * bound.max(initial=0.0)).sum())
    if rank:  # `first`: components that see all of the diffuse part; it is then removed from the rest
        from scipy.linalg import qr

        order = qr(seen.T, mode="r", pivoting=True)[1].copy()
        first, rest = torch.from_numpy(order[:rank]), torch.from_numpy(order[rank:])
        infinite = H @ law.D @ H.mT
        top = infinite[first][:, first]
        C = torch.linalg.solve(top, infinite[first][:, rest]).mT
        e1, H1, H2 = e[first], H[first], H[rest] - C @ H[first]
        R1, R12 = R[first][:, first], R[first][:, rest] - R[first][:, first] @ C.mT
        R2 = R[rest][:, rest] - C @ R[first][:, rest] - R12.mT @ C.mT
        e2 = e[rest] - C @ e1
    else:
        H1, e1, R1 = H[:0], e[:0], R[:0, :0]
        H2, e2, R2, R12 = H, e, R, R[:0]
        top = R1
    K2, density, bad = (
        condition(e2, H2 @ law.P @ H2.mT + R2, law.P @ H2.mT, terms(H2, law.P, R2))
        if rank < m
        else (H.new_zeros(n, 0), H.new_zeros(()), torch.tensor(False))
    )
    if bad:
        return None
    if rank:
        b = H1 @ law.P @ H2.mT + R12
        own = torch.linalg.solve(top, H1 @ law.D).mT  # D H₁' S∞^{-1}
        if rank < m:
            K2 = K2 - own @ torch.linalg.solve(H2 @ law.P @ H2.mT + R2, b.mT).mT
        K, Hs = torch.cat([own, K2], 1), torch.cat([H1, H2])
        noise = torch.cat([torch.cat([R1, R12], 1), torch.cat([R12.mT, R2], 1)])
        density = density - 0.5 * (rank * LOG_TWO_PI + torch.linalg.slogdet(top)[1])
    else:
        K, Hs, noise = K2, H2, R2
    mean, P = law.mean + K @ torch.cat([e1, e2]), joseph(K, Hs, law.P, noise)
    if not rank:
        return Law(mean, P, law.D, law.A), density, 0
    A = law.A @ directions[rank:].T
    left = torch.eye(n, dtype=P.dtype) - K @ Hs
    D = left @ law.D @ left.mT if A.shape[1] else torch.zeros_like(law.D)
    return Law(mean, P, D, A), density, rank


def collapse(weight: torch.Tensor, laws: Sequence[Law]) -> Law:
    """The law with the moments of a mixture, limit by limit."""
    mean, P = mixture(weight, torch.stack([law.mean for law in laws]), torch.stack([law.P for law in laws]))
    D = torch.einsum("j,jkl->kl", weight, torch.stack([law.D for law in laws]))
    A = laws[0].A
    if any(law.A.shape != A.shape or (law.A != A).any() for law in laws):
        parts = [np.sqrt(float(w)) * law.A for w, law in zip(weight.detach(), laws, strict=True)]
        A = _compressed(np.concatenate(parts, 1), np.concatenate([np.abs(part) for part in parts], 1))
    return Law(mean, P, D, A)


def carried(
    where: str, now: list[torch.Tensor], row: torch.Tensor, begun: bool, law: Law, j: int
) -> tuple[Law, torch.Tensor, int]:
    """A law moved by mode j (unless `begun`), then updated by the components of `row` that are not NaN."""
    _, W, c, Q, H, d, R = (value[j] for value in now)
    seen = ~torch.isnan(row)
    law = law if begun else move(law, W, c, Q)
    found = see(law, row[seen], H[seen], d[seen], R[seen][:, seen])
    if found is None:
        raise stopped(where, j, len(now[0]))
    return found


def as_row(step: Stepped) -> list[torch.Tensor]:
    """A step as a row of `Stored`, from `terms` to `mixing`."""
    means, covs = [law.mean for law in step.laws], [law.shown.reshape(-1) for law in step.laws]
    return [step.term, step.log_mode, torch.cat(means), torch.cat(covs), step.mixing.reshape(-1)]


@dataclass(frozen=True)
class DiffuseMoves:
    """Operations on diffuse laws for `step.step`, at one step of a series."""

    own: Matrices
    now: list[torch.Tensor]
    row: torch.Tensor
    begun: bool
    where: str

    def read(self, law: Law, i: int, j: int) -> Law:
        """The law of mode i as mode j reads it."""
        return move(law, self.own.maps[i, j], 0.0, self.own.spread[i, j]) if self.own.mapped else law

    def carry(self, law: Law, j: int) -> tuple[Law, torch.Tensor, int]:
        """The law moved by mode j and updated by the observation."""
        return carried(self.where, self.now, self.row, self.begun, law, j)

    def collapse(self, weight: torch.Tensor, laws: Sequence[Law]) -> Law:
        """The law with the moments of a mixture, limit by limit."""
        return collapse(weight, laws)


def first_steps(own: Matrices, y: torch.Tensor, problem: Problem, method: str) -> list[Stepped]:
    """Filter a series until nothing is diffuse."""
    laws, log_mode, out = (
        initial_laws(own.mean, own.cov, problem.diffuse),
        own.log_probability,
        list[Stepped](),
    )
    M = len(laws)
    for t, row in enumerate(y):
        now, begun, where = own.at(t), t == 0 and problem.first == 1, f"{method}: at step {t}"
        moves = DiffuseMoves(own, now, row, begun, where)
        out.append(step(moves, method, laws, log_mode, safe_log(now[0]), begun))
        laws, log_mode, term, _ = out[-1]
        if not torch.isfinite(term):
            raise stopped(where, M, M)
        if not any(law.A.shape[1] for law in laws):
            break
    return out


def back_gain(P: np.ndarray, A: np.ndarray, F: np.ndarray, Q: np.ndarray) -> np.ndarray:
    """Rauch's gain J in the limit, for a law of covariance P + κ A A' moved by F with noise Q."""
    FA = F @ A
    U, s, _ = np.linalg.svd(FA)
    rank = int((s > SMALL * (np.abs(F) @ np.abs(A)).max(initial=0.0)).sum())
    seen, rest = U[:, :rank], U[:, rank:]
    finite = F @ P @ F.T + Q
    B0 = rest @ np.linalg.pinv(rest.T @ finite @ rest, hermitian=True) @ rest.T
    free = np.eye(len(P)) - B0 @ finite
    B1 = free @ (seen / s[:rank] ** 2) @ seen.T @ free.T
    return np.asarray(P @ F.T @ B0 + A @ FA.T @ B1)


def smooth_first(
    run: Run, problem: Problem, series: int, steps: list[Stepped], s: Smoothing, known: np.ndarray
) -> None:
    """Kim's pass over the first steps of a series, in the limit; starts from the law in `s.initial_…`."""
    p, own, start = run.p, Matrices(problem, series), run.starts[series]
    M, n = own.mean.shape
    maps, spread = plain(own.maps), plain(own.spread)
    probability = s.initial_probability[series].copy()
    mean, cov = s.initial_mean[series].reshape(M, n), s.initial_covariance[series].reshape(M, n, n)
    for t in range(len(steps) - 1, -1, -1):
        row = start + t
        s.probability[row], s.mean[row], s.covariance[row] = probability, mean.reshape(-1), cov.reshape(-1)
        if t == 0 and p.first:
            s.pairs[row] = np.diag(probability).reshape(-1)[: s.pairs.shape[1]]
            break
        log_mode = steps[t - 1].log_mode if t else own.log_probability
        laws = steps[t - 1].laws if t else initial_laws(own.mean, own.cov, problem.diffuse)
        now = [plain(value) for value in own.at(t)[:4]]
        joint = np.exp(plain(log_mode))[:, None] * now[0]
        reach = joint.sum(0)
        pair = probability * np.where(reach > 0, joint / np.where(reach > 0, reach, 1.0), 0.0)
        s.pairs[row] = pair.reshape(-1)[: s.pairs.shape[1]]
        new_mean, new_cov = np.empty((M, n)), np.empty((M, n, n))
        for j, law in enumerate(laws):
            x, P = plain(law.mean), plain(law.P)
            new_mean[j], new_cov[j] = x, P
            parts = []
            for k in np.flatnonzero(pair[j] > 0).tolist():
                W, noise = now[1][k], now[3][k]
                F, noise = W @ maps[j, k], noise + W @ spread[j, k] @ W.T
                J = back_gain(P, law.A, F, noise)
                gap = mean[k] - F @ x - now[2][k]
                parts.append((pair[j, k], *rauch(x, P, J, F, noise, gap, cov[k])))
                later = mean[k], cov[k], cov[k] @ J.T
                _add_pair(s, k, parts[-1], later, F, now[2][k], known[row])
            if parts:
                weight = np.array([part[0] for part in parts])
                means, covs = (np.stack([part[k] for part in parts]) for k in (1, 2))
                new_mean[j], new_cov[j] = mixture(weight / weight.sum(), means, covs)
        probability, mean, cov = pair.sum(1), new_mean, new_cov
    s.initial_probability[series], s.initial_mean[series] = probability, mean.reshape(-1)
    s.initial_covariance[series] = cov.reshape(-1)


def _add_pair(
    s: Smoothing,
    k: int,
    part: tuple[float, np.ndarray, np.ndarray],
    later: tuple[np.ndarray, np.ndarray, np.ndarray],
    F: np.ndarray,
    c: np.ndarray,
    known: np.ndarray,
) -> None:
    """Add a pair of modes to the sums for EM, as `add_pair` of csrc/switching/smoother.hpp does."""
    weight, x, P = part
    mean, cov, cross = later
    n, r, z = len(x), mean - c - F @ x, np.concatenate([x, known])
    cross_r = cross - F @ P
    zz, rz = np.outer(z, z), np.outer(r, z)
    zz[:n, :n] += P
    rz[:, :n] += cross_r
    s.total[k] += weight
    s.zz[k] += weight * zz
    s.rz[k] += weight * rz
    s.rr[k] += weight * (np.outer(r, r) + cov - F @ cross.T - cross_r @ F.T)
