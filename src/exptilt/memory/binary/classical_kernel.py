"""Units of a classical network flipped one after another, compiled.

The field h = Wσ is kept up to date: looking at a unit costs nothing, a flip costs one row of W. A sweep that flips few units is then of
order N instead of N².
"""

from exptilt._support.kernels import kernel


@kernel("the kernel of a classical network")
def sweep(weight, state, field, order, tie):  # type: ignore[no-untyped-def]
    """Visit units in that order in each row of state (B, N), in place, with field (B, N) = state @ weight."""
    for b in range(state.shape[0]):
        s, h = state[b], field[b]
        for i in order:
            if h[i] * s[i] < -tie:
                s[i] = -s[i]
                change, row = 2 * s[i], weight[i]
                for j in range(s.size):
                    h[j] += change * row[j]
