"""Positions of the data on a curve: the manifold-aware part of the encoder.

Coded points lie on a curve through the data points. Where the data concentrate near a low-dimensional manifold, a
curve that visits neighbours one after another stays near it, and f along it is smooth; a curve in arbitrary order
crosses the ambient space at every step. Two ways to order:

- `path`: the shortest Hamiltonian path (nearest neighbours from several starts, then 2-opt);
- `diffusion`: the first non-trivial eigenvector of the random walk on the nearest-neighbour graph (Coifman and Lafon
  2006, alpha = 1; the Fiedler vector for a regular graph).

The positions then follow the steps of the path: in proportion to them where the workers sit in the gaps (systematic
codes), and warped like Chebyshev points where the workers sit at Chebyshev points, so that both keep to each other at
the ends (the other codes).
"""

import numpy as np

from .ridge import FloatArray

PATH_STARTS = (
    32  # starts of the nearest-neighbour paths, evenly spaced; more did not shorten paths of 16 to 170 points
)
NEIGHBOURS = 5  # of the graph that the random walk runs on
# Neighbours closer than this share of an even spacing are moved apart, so that equal points keep distinct positions
# and the curve has bounded curvature there.
SMALLEST_GAP = 0.02


def squared_distances(gram: FloatArray) -> FloatArray:
    """|x_i - x_j|^2 of shape `(K, K)` from inner products of shape `(K, K)`."""
    norms = np.diag(gram)
    result = np.maximum(norms[:, None] + norms[None, :] - 2.0 * gram, 0.0)
    np.fill_diagonal(result, 0.0)
    return result


def shortest_path(distances: FloatArray) -> list[int]:
    """
    A short Hamiltonian path: the best nearest-neighbour path, improved by 2-opt until no reversal shortens it.

    Args:
        distances (`np.ndarray` of shape `(K, K)`):
            Distances between the points.

    Returns:
        `list[int]`: the points in order. Deterministic.
    """
    count = len(distances)
    if count < 3:
        return list(range(count))
    starts = np.unique(np.linspace(0, count - 1, min(PATH_STARTS, count)).round().astype(int))
    paths = _nearest_neighbour_paths(distances, starts)
    lengths = distances[paths[:, :-1], paths[:, 1:]].sum(axis=1)
    return _two_opt(distances, paths[int(np.argmin(lengths))]).tolist()


def diffusion_order(squared: FloatArray) -> list[int]:
    """
    The points in the order of their first diffusion coordinate.

    Args:
        squared (`np.ndarray` of shape `(K, K)`):
            Squared distances between the points.

    Returns:
        `list[int]`: the points in order. Deterministic.
    """
    count = len(squared)
    if count < 3:
        return list(range(count))
    near = np.sort(squared, axis=1)[:, min(NEIGHBOURS, count - 1)]
    scale = np.sqrt(np.outer(near, near))
    affinity = np.exp(-squared / np.maximum(scale, np.finfo(np.float64).tiny))
    density = affinity.sum(axis=1)
    affinity /= np.outer(density, density)  # alpha = 1: independent of how densely the manifold is sampled
    degree = affinity.sum(axis=1)
    _, vectors = np.linalg.eigh(affinity / np.sqrt(np.outer(degree, degree)))
    coordinate = vectors[:, -2] / np.sqrt(degree)
    order = np.argsort(coordinate, kind="stable").tolist()
    return order if order[0] < order[-1] else order[::-1]  # an eigenvector's sign means nothing


def chord_length_positions(distances: FloatArray, order: list[int]) -> FloatArray:
    """
    Positions on [-1, 1] in proportion to the length of the path up to each point.

    Args:
        distances (`np.ndarray` of shape `(K, K)`):
            Distances between the points.
        order (`list[int]`):
            The path.

    Returns:
        `np.ndarray` of shape `(K,)`: a position for each point (not for each place in the order), all distinct.
    """
    if len(order) == 1:
        return np.zeros(1)
    along = _along(distances, order, exponent=1.0)
    positions = np.empty(len(order))
    positions[order] = 2.0 * along / along[-1] - 1.0
    return positions


def chebyshev_positions(distances: FloatArray, order: list[int]) -> FloatArray:
    """
    Chebyshev points of the first kind, moved along so that far neighbours are farther apart.

    With u the centripetal path length up to a point (the sum of the square roots of the steps, Lee 1989; half a mean
    step is added at either end) as a share of the whole, the position is -cos(pi u). Equal steps give -cos((2 k + 1)
    pi / 2 K).

    Args:
        distances (`np.ndarray` of shape `(K, K)`):
            Distances between the points. Ones off the diagonal ignore the data (standard GCC).
        order (`list[int]`):
            The path.

    Returns:
        `np.ndarray` of shape `(K,)`: a position for each point, all distinct, inside (-1, 1).
    """
    if len(order) == 1:
        return np.zeros(1)
    along = _along(distances, order, exponent=0.5)
    half_step = along[-1] / (len(order) - 1) / 2.0
    positions = np.empty(len(order))
    positions[order] = -np.cos(np.pi * (along + half_step) / (along[-1] + 2.0 * half_step))
    return positions


def _along(distances: FloatArray, order: list[int], exponent: float) -> FloatArray:
    """Length of the path, in powers of its steps, up to each place; every step is at least a share of the mean."""
    steps = distances[order[:-1], order[1:]] ** exponent
    mean = steps.mean()
    steps = np.maximum(steps, SMALLEST_GAP * mean) if mean > 0 else np.ones(len(order) - 1)
    return np.concatenate([[0.0], np.cumsum(steps)])


def bisect_gaps(positions: FloatArray, count: int) -> FloatArray:
    """
    New positions, each in the middle of the largest gap that is left.

    Args:
        positions (`np.ndarray` of shape `(K,)`):
            Positions that are taken.
        count (`int`):
            How many new ones.

    Returns:
        `np.ndarray` of shape `(count,)`. A single taken position has no gap; the new ones then equal it.
    """
    taken = np.sort(positions)
    if len(taken) == 1:
        return np.full(count, taken[0])
    new = np.empty(count)
    for index in range(count):
        gap = int(np.argmax(np.diff(taken)))
        new[index] = (taken[gap] + taken[gap + 1]) / 2.0
        taken = np.insert(taken, gap + 1, new[index])
    return new


def _nearest_neighbour_paths(distances: FloatArray, starts: np.ndarray) -> np.ndarray:
    """A path from each start that goes on to the nearest point not yet visited; shape `(starts, K)`."""
    count = len(distances)
    rows = np.arange(len(starts))
    paths = np.empty((len(starts), count), dtype=int)
    paths[:, 0] = starts
    visited = np.zeros((len(starts), count), dtype=bool)
    visited[rows, starts] = True
    for step in range(1, count):
        reach = np.where(visited, np.inf, distances[paths[:, step - 1]])
        paths[:, step] = np.argmin(reach, axis=1)
        visited[rows, paths[:, step]] = True
    return paths


def _two_opt(distances: FloatArray, path: np.ndarray) -> np.ndarray:
    """Reverses the segment that shortens the path most, until none does."""
    count = len(path)
    # A point at no distance from all others closes the path to a cycle, so that ends are no special case.
    padded = np.zeros((count + 1, count + 1))
    padded[:count, :count] = distances
    cycle = np.concatenate([[count], path])
    tolerance = 1e-12 * max(distances.max(), np.finfo(np.float64).tiny)
    while True:
        following = np.roll(cycle, -1)
        edges = padded[cycle, following]
        change = padded[np.ix_(cycle, cycle)] + padded[np.ix_(following, following)] - edges[:, None] - edges[None, :]
        change[np.tril_indices(count + 1, k=1)] = 0.0
        first, last = np.unravel_index(np.argmin(change), change.shape)
        if change[first, last] >= -tolerance:
            return cycle[1:]
        cycle[first + 1 : last + 1] = cycle[first + 1 : last + 1][::-1].copy()
