"""The few array operations of the codes, alike for numpy arrays and torch tensors on any device.

The data stay where they are; only K x K, n x n and N x K numbers come to the CPU, as float64.
"""

import math
from typing import Any

import numpy as np
from array_api_compat import array_namespace, device, is_numpy_array, is_torch_array

from .ridge import FloatArray

Array = Any  # a numpy array, or a torch tensor on any device

GRAM_CHUNK = 1 << 18  # numbers of a row that are held in float64 at a time


def check_array(values: Array, name: str, axes: int = 1) -> Array:
    """The namespace of a numpy array or torch tensor of real numbers with that many axes or more; others raise."""
    if not (is_numpy_array(values) or is_torch_array(values)):
        raise TypeError(f"`{name}` must be a numpy array or a torch tensor, got {type(values).__name__}.")
    xp = array_namespace(values)
    if values.ndim < axes:
        raise ValueError(f"`{name}` must have an axis of items, got a scalar.")
    if not xp.isdtype(values.dtype, ("integral", "real floating")):
        raise TypeError(f"`{name}` must hold real numbers, got {values.dtype}.")
    return xp


def rows_of(values: Array) -> Array:
    """Array of shape `(n, ...)` as `(n, size)`, floating (integers become float64)."""
    xp = array_namespace(values)
    flat = xp.reshape(values, (values.shape[0], math.prod(values.shape[1:])))
    return flat if xp.isdtype(flat.dtype, "real floating") else xp.astype(flat, xp.float64)


def combine(matrix: FloatArray, rows: Array) -> Array:
    """
    Linear combinations of rows, `matrix @ rows`, in the dtype and on the device of the rows.

    The matrix comes in float64 and is rounded once to the dtype of the product; half precisions are computed in
    float32.
    """
    xp = array_namespace(rows)
    half = rows.dtype not in (xp.float32, xp.float64)
    work = xp.astype(rows, xp.float32) if half else rows
    product = xp.asarray(matrix, dtype=work.dtype, device=device(rows)) @ work
    return xp.astype(product, rows.dtype) if half else product


def gram(rows: Array, *, centred: bool = False) -> FloatArray:
    """
    Inner products of rows, in float64 and divided by the number of columns.

    Args:
        rows (array of shape `(n, size)`):
            The rows, on any device.
        centred (`bool`, *optional*, defaults to `False`):
            Whether to subtract the mean of the rows first.

    Returns:
        `np.ndarray` of shape `(n, n)`.
    """
    xp = array_namespace(rows)
    columns = rows.shape[1]
    total = np.zeros((rows.shape[0], rows.shape[0]))
    step = max(1, GRAM_CHUNK // max(rows.shape[0], 1)) if columns > GRAM_CHUNK else max(columns, 1)
    for start in range(0, columns, step):
        block = xp.astype(rows[:, start : start + step], xp.float64)
        if centred:
            block = block - xp.mean(block, axis=0, keepdims=True)
        total += to_numpy(block @ xp.permute_dims(block, (1, 0)))
    return total / max(columns, 1)


def sampled_columns(rows: Array, most: int) -> Array:
    """At most `most` evenly spaced columns."""
    return rows[:, :: max(1, -(-rows.shape[1] // most))]


def broken_rows(rows: Array) -> list[int]:
    """Indices of the rows with a NaN or an infinity."""
    xp = array_namespace(rows)
    # A sum is one pass without temporaries; only where it is not finite (or overflowed) each number is looked at.
    suspects = np.flatnonzero(~np.isfinite(to_numpy(xp.sum(rows, axis=1))))
    return [int(row) for row in suspects if not bool(xp.all(xp.isfinite(rows[int(row), :])))]


def to_numpy(values: Array) -> np.ndarray:
    """A small array as numpy float64."""
    if isinstance(values, np.ndarray):
        return values.astype(np.float64)
    return values.detach().cpu().double().numpy()
