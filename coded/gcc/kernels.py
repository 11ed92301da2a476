"""Kernels on the line (for curves through the data) and on the inputs (for the decoder that sees where points lie)."""

from typing import Literal, get_args

import numpy as np
import numpy.typing as npt

from .ridge import FloatArray

KernelName = Literal["sobolev", "matern", "gaussian"]
KERNELS: tuple[str, ...] = get_args(KernelName)

# Length scale of the Matern and Gaussian kernels on [-1, 1]. Among 0.1 to 1 the best or close to it for 8 to 32 points
# on smooth curves; with a fixed small ridge the Gaussian kernel oscillates, more so at shorter scales.
LENGTH_SCALE = 1.0


def line_kernel(name: KernelName, s: npt.ArrayLike, t: npt.ArrayLike) -> FloatArray:
    """
    Kernel between positions on [-1, 1].

    - `sobolev`, second order: with positions moved to [0, 2], m = min(s, t) and M = max(s, t),

          k(s, t) = integral of (s - u)_+ (t - u)_+ du = m^2 (3 M - m) / 6,

      whose norm is the integral of f''^2; the functions 1 and t are outside it and belong to the trend.
    - `matern` with smoothness 5/2: (1 + r + r^2 / 3) exp(-r), r = sqrt(5) |s - t| / LENGTH_SCALE.
    - `gaussian`: exp(-(s - t)^2 / (2 LENGTH_SCALE^2)).

    Args:
        name (`str`):
            `sobolev`, `matern` or `gaussian`.
        s (array-like of shape `(m,)`):
            Positions.
        t (array-like of shape `(n,)`):
            Positions.

    Returns:
        `np.ndarray` of shape `(m, n)`.
    """
    left = np.asarray(s, dtype=np.float64)[:, None]
    right = np.asarray(t, dtype=np.float64)[None, :]
    if name == "sobolev":
        smaller, larger = np.minimum(left, right) + 1.0, np.maximum(left, right) + 1.0
        return smaller**2 * (3.0 * larger - smaller) / 6.0
    distance = np.abs(left - right) / LENGTH_SCALE
    return _stationary(name, distance)


def line_trend(name: KernelName, t: npt.ArrayLike) -> FloatArray:
    """Unpenalised functions at positions: (1, t) for `sobolev`, 1 for the others; shape `(n, 2)` or `(n, 1)`."""
    positions = np.asarray(t, dtype=np.float64)
    ones = np.ones_like(positions)
    return np.stack([ones, positions], axis=1) if name == "sobolev" else ones[:, None]


def input_kernel(
    squared_distances: FloatArray, inner_products: FloatArray, length: float, linear: float
) -> FloatArray:
    """
    Kernel between inputs: exp(-|x - x'|^2 / (2 length^2)) + linear * x . x'.

    Args:
        squared_distances (`np.ndarray` of shape `(m, n)`):
            |x - x'|^2.
        inner_products (`np.ndarray` of shape `(m, n)`):
            x . x', centred.
        length (`float`):
            Length scale.
        linear (`float`):
            Weight of the linear part.

    Returns:
        `np.ndarray` of shape `(m, n)`.
    """
    return np.exp(-squared_distances / (2.0 * length**2)) + linear * inner_products


def _stationary(name: KernelName, distance: FloatArray) -> FloatArray:
    if name == "gaussian":
        return np.exp(-(distance**2) / 2.0)
    scaled = np.sqrt(5.0) * distance
    return (1.0 + scaled + scaled**2 / 3.0) * np.exp(-scaled)
