"""Reference solutions in cvxpy: the controller's choice as a convex program, and the optimum in hindsight.

They are oracles for tests and regret, not part of the control loop, which needs neither.
"""

import cvxpy as cp
import numpy as np
import numpy.typing as npt

from .events import FloatArray


def convex_group_size(utility: npt.ArrayLike, risk: npt.ArrayLike, v: float, queue: float) -> int:
    """
    The controller's drift-plus-penalty choice as a linear program over mixtures of sizes.

    Maximises `sum_g w_g (v U(g) - queue p(g))` over the simplex. A linear function over a simplex has a vertex among
    its optima, so the mixture's largest weight is the exact argmax up to ties.

    Args:
        utility (array-like of shape `(sizes,)`):
            U(g).
        risk (array-like of shape `(sizes,)`):
            p(g).
        v (`float`):
            Weight of the utility.
        queue (`float`):
            Virtual queue Q.

    Returns:
        `int`: index of the chosen size.
    """
    score = v * np.asarray(utility, dtype=np.float64) - queue * np.asarray(risk, dtype=np.float64)
    weights = cp.Variable(len(score), nonneg=True)
    cp.Problem(cp.Maximize(score @ weights), [cp.sum(weights) == 1]).solve()
    return int(np.argmax(np.asarray(weights.value)))


def hindsight_optimum(utility: npt.ArrayLike, risk: npt.ArrayLike, rho: float) -> tuple[float, FloatArray]:
    """
    Best average utility of one fixed mixture of group sizes, knowing all risks in advance.

    Maximises `mean_t sum_g w_g U_t(g)` over mixtures w, subject to `mean_t sum_g w_g p_t(g) <= rho`. Every fixed size
    that meets the budget is a mixture, so none does better.

    Args:
        utility (array-like of shape `(steps, sizes)` or `(sizes,)`):
            U_t(g).
        risk (array-like of shape `(steps, sizes)` or `(sizes,)`):
            True event probabilities p_t(g).
        rho (`float`):
            Straggler budget.

    Returns:
        `tuple`: the optimal average utility and the mixture, of shape `(sizes,)`.

    Raises:
        `ValueError`: If every size breaks the budget.
    """
    mean_utility = np.atleast_2d(np.asarray(utility, dtype=np.float64)).mean(axis=0)
    mean_risk = np.atleast_2d(np.asarray(risk, dtype=np.float64)).mean(axis=0)
    if mean_risk.min() > rho:
        raise ValueError(
            f"No group size meets the budget: the smallest average risk is {mean_risk.min():.3f} > {rho}."
        )
    weights = cp.Variable(len(mean_risk), nonneg=True)
    problem = cp.Problem(cp.Maximize(mean_utility @ weights), [cp.sum(weights) == 1, mean_risk @ weights <= rho])
    problem.solve()
    return float(problem.value), np.asarray(weights.value)
