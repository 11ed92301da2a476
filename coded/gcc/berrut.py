"""Berrut's rational interpolation, the code of BACC (Jahani-Nezhad and Maddah-Ali, arXiv 2009.08327).

With nodes t_0 < ... < t_n the interpolant is

    r(t) = sum_i [(-1)^i / (t - t_i)] y_i  /  sum_i [(-1)^i / (t - t_i)],

free of poles on the line for any nodes (Berrut 1988). The signs alternate in the order of the nodes that answered.
"""

import numpy as np
import numpy.typing as npt

from .ridge import FloatArray


def berrut_weights(nodes: npt.ArrayLike, targets: npt.ArrayLike) -> FloatArray:
    """
    Berrut's interpolant as a matrix.

    Args:
        nodes (array-like of shape `(n,)`):
            Distinct positions of the known values, in any order.
        targets (array-like of shape `(m,)`):
            Positions to evaluate at.

    Returns:
        `np.ndarray` of shape `(m, n)`: W with r(targets) = W y; rows sum to one, and a target at a node takes its
        value.
    """
    known = np.asarray(nodes, dtype=np.float64)
    signs = np.empty(len(known))
    signs[np.argsort(known, kind="stable")] = np.where(np.arange(len(known)) % 2 == 0, 1.0, -1.0)
    gaps = np.asarray(targets, dtype=np.float64)[:, None] - known[None, :]
    at_node = gaps == 0
    terms = signs / np.where(at_node, 1.0, gaps)
    hit = at_node.any(axis=1, keepdims=True)
    terms = np.where(hit, at_node.astype(np.float64), terms)
    return terms / terms.sum(axis=1, keepdims=True)


def chebyshev_second(count: int) -> FloatArray:
    """Chebyshev points of the second kind, ascending: cos(k pi / (count - 1)); 0 for a single one."""
    return np.cos(np.arange(count)[::-1] * np.pi / (count - 1)) if count > 1 else np.zeros(1)
