"""Confidence intervals for what the experiments count and average."""

import math

from scipy.stats import norm, t


def wilson(successes: int, trials: int, *, level: float = 0.95) -> tuple[float, float]:
    """Wilson's interval for a probability; sensible at 0 and at all successes too.

    Args:
        successes: how many.
        trials: out of how many, at least 1.
        level: confidence.

    Example:
        >>> [round(x, 3) for x in wilson(8, 10)]
        [0.49, 0.943]
    """
    z = float(norm.ppf((1 + level) / 2))
    share = successes / trials
    centre = (share + z**2 / (2 * trials)) / (1 + z**2 / trials)
    half = z / (1 + z**2 / trials) * math.sqrt(share * (1 - share) / trials + z**2 / (4 * trials**2))
    return max(0.0, centre - half), min(1.0, centre + half)


def student(mean: float, deviation: float, count: int, *, level: float = 0.95) -> tuple[float, float]:
    """Student's interval for a mean; all of the line where there is one sample only.

    Args:
        mean: of the samples.
        deviation: their standard deviation, with n − 1.
        count: n.
        level: confidence.
    """
    if count < 2:
        return -math.inf, math.inf
    half = float(t.ppf((1 + level) / 2, count - 1)) * deviation / math.sqrt(count)
    return mean - half, mean + half
