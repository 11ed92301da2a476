"""What a group of size G is worth.

- `log`: log G. Diminishing returns at every size; the usual choice in network utility maximisation.
- `variance`: 1 - 1/G, the share of the reward's variance that the group-mean baseline of GRPO removes from the
  advantage of one completion. Saturates early.
- `signal`: the chance that a group is not all-right or all-wrong, E[1 - p^G - (1-p)^G] over prompts with success rate
  p: an all-equal group has zero advantage and teaches nothing. Estimated from the observed rewards, and meant for
  rewards with few distinct values; with continuous rewards every group has a signal and the smallest size wins.

`signal` uses the subset argument of `sagc.risk`: a group of n rewards, of which n_v equal v, tells the chance that a
group of g <= n is all-equal exactly, sum_v C(n_v, g) / C(n, g).
"""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from .events import FloatArray
from .risk import subset_share


def static_utility(name: str, sizes: Sequence[int]) -> FloatArray:
    """
    Utility of each size under `"log"` or `"variance"`.

    Args:
        name (`str`):
            `"log"` or `"variance"`.
        sizes (sequence of `int`):
            Group sizes.

    Returns:
        `np.ndarray` of shape `(len(sizes),)`.
    """
    array = np.asarray(sizes, dtype=np.float64)
    return np.asarray(np.log(array) if name == "log" else 1.0 - 1.0 / array)


def mixed_reward_curves(rewards: npt.ArrayLike, sizes: Sequence[int]) -> FloatArray:
    """
    Chance that a group of each size has rewards that are not all equal, from observed groups.

    Args:
        rewards (array-like of shape `(groups, n)`):
            Finite rewards of each group; rewards closer than 1e-6 count as equal.
        sizes (sequence of `int`):
            Group sizes, each between 1 and n.

    Returns:
        `np.ndarray` of shape `(groups, len(sizes))`.
    """
    array = np.round(np.asarray(rewards, dtype=np.float64), 6)
    equal = (array[:, :, None] == array[:, None, :]).sum(axis=2)  # how many share each completion's reward
    share = subset_share(array.shape[1], tuple(int(size) for size in sizes))
    all_equal = (share[equal] / equal[:, :, None]).sum(axis=1)
    return np.asarray(np.clip(1.0 - all_equal, 0.0, 1.0))


def informative_groups(rewards: npt.ArrayLike) -> npt.NDArray[np.bool_]:
    """
    Whether each group's rewards are not all equal: the `signal` of a group at its own size.

    Args:
        rewards (array-like of shape `(groups, n)`):
            Rewards; NaN marks a completion without one, which does not count.

    Returns:
        `np.ndarray` of bool of shape `(groups,)`: what [`mixed_reward_curves`] estimates for smaller sizes.
    """
    array = np.round(np.asarray(rewards, dtype=np.float64), 6)
    scored = ~np.isnan(array)
    highest = np.where(scored, array, -np.inf).max(axis=1)
    lowest = np.where(scored, array, np.inf).min(axis=1)
    return np.asarray(highest > lowest)


def extrapolate_mixed(curve: npt.ArrayLike, size: int, sizes: Sequence[int]) -> FloatArray:
    """
    Chance of a mixed group at sizes above those observed.

    The all-equal chance E[p^g + (1-p)^g] is log-convex in g, so its last observed ratio, continued, bounds it from
    below: the extrapolation is optimistic about larger groups, and trying them corrects it.

    Args:
        curve (array-like of shape `(2,)`):
            Chance of a mixed group at `size - 1` and at `size`.
        size (`int`):
            Largest observed size, at least 2.
        sizes (sequence of `int`):
            Sizes above `size`.

    Returns:
        `np.ndarray` of shape `(len(sizes),)`.
    """
    before, last = 1.0 - np.asarray(curve, dtype=np.float64)
    ratio = min(last / before, 1.0) if before > 0 else 0.0
    return np.asarray([1.0 - last * ratio ** (g - size) for g in sizes])
