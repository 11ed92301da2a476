"""The counterfactual risk curve: what one observed group says about the event probability of other group sizes.

A group of n exchangeable completions tells the event probability of every smaller group *exactly* (unbiased, no
exploration needed), because a group of size g is as likely to be any of its C(n, g) subsets. Sort the lengths,
l_1 <= ... <= l_n, and condition on which l_j is the subset's longest, which has probability C(j-1, g-1) / C(n, g).
The other g-1 members are then a uniform subset of the first j-1, and with m = ceil(g / 2) the rank of the lower median

    longest >= tau * median   <=>   at least m of the g-1 others lie at or below l_j / tau,

a hypergeometric tail. Cut-off completions sit at the end of the order; if l_j is one of them the group is an event as
well when fewer than m of its members finished (its median is then cut off, see `sagc.events`). The two cases exclude
each other, and both are tails of the same table.

Sizes above n need a model. For the `ratio` event it is the one-parameter family of log-normal lengths: with
c = log(tau) / sigma the event is Z_(g) - Z_(m) >= c for g standard normals, so the observed probability at n fixes c
and c gives every other size. For the `absolute` event lengths are independent: p(g) = 1 - (1 - q)^g.
"""

from collections.abc import Sequence
from functools import lru_cache

import numpy as np
import numpy.typing as npt
from scipy.special import betainc
from scipy.stats import hypergeom, norm

from .events import BoolArray, FloatArray, StragglerEvent, check_lengths, lower_median_rank


def risk_curve(
    lengths: npt.ArrayLike, tau: float, sizes: Sequence[int], truncated: npt.ArrayLike | None = None
) -> FloatArray:
    """
    Event probability of every smaller group, from the lengths of one group.

    Equals the share of size-g subsets with `longest >= tau * lower median`, in closed form.

    Args:
        lengths (array-like of shape `(n,)`):
            Lengths of the n completions of one group.
        tau (`float`):
            Ratio that makes a straggler event, above 1.
        sizes (sequence of `int`):
            Group sizes, each between 1 and n.
        truncated (array-like of shape `(n,)`, *optional*):
            Whether each completion was cut off at the length limit.

    Returns:
        `np.ndarray` of shape `(len(sizes),)`: probabilities in [0, 1].

    Raises:
        `ValueError`: If `tau <= 1`, a size lies outside 1 to n, or a length is not a finite number >= 0.

    Example:
    ```python
    >>> risk_curve([10, 12, 30], tau=2.0, sizes=[2, 3])
    array([0.66666667, 1.        ])
    ```
    """
    groups = np.atleast_2d(np.asarray(lengths, dtype=np.float64))
    cut = None if truncated is None else np.atleast_2d(np.asarray(truncated, dtype=bool))
    curve: FloatArray = risk_curves(groups, StragglerEvent(tau=tau), sizes, cut)[0]
    return curve


def risk_curves(
    lengths: npt.ArrayLike, event: StragglerEvent, sizes: Sequence[int], truncated: npt.ArrayLike | None = None
) -> FloatArray:
    """
    Risk curves of many groups of the same size at once.

    Args:
        lengths (array-like of shape `(groups, n)`):
            Lengths of the completions of each group.
        event ([`StragglerEvent`]):
            Definition of the event.
        sizes (sequence of `int`):
            Group sizes, each between 1 and n.
        truncated (array-like of shape `(groups, n)`, *optional*):
            Whether each completion was cut off.

    Returns:
        `np.ndarray` of shape `(groups, len(sizes))`.
    """
    array, cut = check_lengths(lengths, truncated)
    count = array.shape[1]
    grid = tuple(int(size) for size in sizes)
    if any(size < 1 or size > count for size in grid):
        raise ValueError(f"sizes must lie between 1 and the number of observed completions ({count}), got {grid}.")
    if event.kind == "absolute":
        assert event.length is not None
        below = (array < event.length).sum(axis=1)
        return np.asarray(1.0 - subset_share(count, grid)[below])
    return _ratio_risk(array, cut, event.tau, grid)


def _ratio_risk(array: FloatArray, cut: BoolArray, tau: float, grid: tuple[int, ...]) -> FloatArray:
    count = array.shape[1]
    ordered = np.sort(array, axis=1)
    finished = count - cut.sum(axis=1)
    position = np.arange(count)
    is_finished = position[None, :] < finished[:, None]
    # below[b, j]: finished completions i with tau * l_i <= l_j, for l_j > 0. All of them stand before j.
    below = ((tau * ordered[:, None, :] <= ordered[:, :, None]) & is_finished[:, None, :]).sum(axis=2)
    below[ordered == 0] = 0
    longest_weight, event_weight = _ratio_tables(count, grid)
    risk: FloatArray = event_weight[:, position, below].sum(axis=2).T
    if cut.any():
        # Median cut off: the longest is cut off and fewer than m of the others finished.
        enough_finished = event_weight[:, position, np.minimum(finished[:, None], position[None, :])]
        risk += ((longest_weight[:, None, :] - enough_finished) * ~is_finished).sum(axis=2).T
    return np.clip(risk, 0.0, 1.0)


@lru_cache(maxsize=64)
def _ratio_tables(count: int, grid: tuple[int, ...]) -> tuple[FloatArray, FloatArray]:
    """P(j is the longest), shape (sizes, n), and P(it is, and at least m others are marked), shape (sizes, n, n+1)."""
    before = np.arange(count)  # how many completions stand before the longest
    marked = np.arange(count + 1)
    longest = np.zeros((len(grid), count))
    event = np.zeros((len(grid), count, count + 1))
    for row, size in enumerate(grid):
        # C(j, g) - C(j - 1, g) = C(j - 1, g - 1): all of the subset lie among the first j, but not the first j - 1.
        longest[row] = np.diff(subset_share(count, (size,))[:, 0])
        if size == 1:
            continue  # a completion alone never exceeds its own median
        reachable = before >= size - 1
        tail = hypergeom.sf(
            lower_median_rank(size) - 1, before[reachable, None], np.minimum(marked, before[reachable, None]), size - 1
        )
        event[row, reachable] = longest[row, reachable, None] * tail
    return longest, event


@lru_cache(maxsize=256)
def subset_share(count: int, grid: tuple[int, ...]) -> FloatArray:
    """`C(k, g) / C(n, g)` for k = 0..n: the chance that all g lie among k marked ones. Shape (n + 1, sizes)."""
    marked = np.arange(count + 1, dtype=np.float64)[:, None]
    share = np.ones((count + 1, len(grid)))
    for column, size in enumerate(grid):
        drawn = np.arange(size, dtype=np.float64)[None, :]
        share[:, column] = np.prod(np.clip(marked - drawn, 0, None) / (count - drawn), axis=1)
    return share


def extrapolate_risk(risk: float, size: int, sizes: Sequence[int], event: StragglerEvent) -> FloatArray:
    """
    Event probability at other sizes, from that at one size and the family of the module's docstring.

    Args:
        risk (`float`):
            Event probability at `size`, in [0, 1].
        size (`int`):
            Group size at which `risk` was observed.
        sizes (sequence of `int`):
            Group sizes to predict.
        event ([`StragglerEvent`]):
            Definition of the event.

    Returns:
        `np.ndarray` of shape `(len(sizes),)`.
    """
    grid = tuple(int(g) for g in sizes)
    if event.kind == "absolute":
        per_completion = 1.0 - (1.0 - risk) ** (1.0 / size)
        return np.asarray([1.0 - (1.0 - per_completion) ** g for g in grid])
    family = _lognormal_family((size, *grid))
    # The family falls with c: interpolate on the negated axis, which rises.
    c = np.interp(-risk, -family[0], np.arange(family.shape[1]))
    return np.asarray([np.interp(c, np.arange(family.shape[1]), row) for row in family[1:]])


@lru_cache(maxsize=256)
def _lognormal_family(grid: tuple[int, ...]) -> FloatArray:
    """`P(Z_(g) - Z_(m) >= c)` for g standard normals, over a fixed axis of c. Shape (sizes, 96)."""
    c_axis = np.concatenate([[0.0], np.geomspace(1e-2, 9.0, 95)])[:, None]
    nodes, weights = np.polynomial.legendre.leggauss(96)
    longest = 9.0 * nodes[None, :]  # the longest, integrated over +-9 standard deviations
    below = norm.cdf(longest - c_axis) / np.maximum(norm.cdf(longest), 1e-300)
    family = np.empty((len(grid), len(c_axis)))
    for row, size in enumerate(grid):
        if size == 1:
            family[row] = 0.0
            continue
        rank = lower_median_rank(size)
        density = size * norm.pdf(longest) * norm.cdf(longest) ** (size - 1)
        # betainc(m, g - m, q) is P(at least m of g - 1 lie below).
        family[row] = 9.0 * (weights * density * betainc(rank, size - rank, np.clip(below, 0, 1))).sum(axis=1)
    return np.clip(family, 0.0, 1.0)
