"""From data points to a code: where the curve runs, and where on it the workers sit."""

from typing import Literal, get_args

import numpy as np

from .arrays import Array, broken_rows, check_array, gram, rows_of
from .berrut import berrut_weights, chebyshev_second
from .code import Code
from .decoders import CURVE_RIDGE, BerrutDecoder, CurveDecoder, Decoder, InputDecoder, MeanDecoder, Ridge
from .kernels import KERNELS, KernelName, line_kernel, line_trend
from .manifold import (
    bisect_gaps,
    chebyshev_positions,
    chord_length_positions,
    diffusion_order,
    shortest_path,
    squared_distances,
)
from .ridge import FloatArray, KernelRidge

Scheme = Literal["systematic", "spline", "berrut", "replication", "uncoded"]
Order = Literal["path", "diffusion", "given"]
DecoderName = Literal["inputs", "curve", "berrut", "mean"]

# Ridge of the curve: nearly interpolation. Below 1e-11 the curve through Chebyshev points spikes in float64.
ENCODER_RIDGE = 1e-9

DEFAULT_DECODER: dict[str, DecoderName] = {
    "systematic": "inputs",
    "spline": "curve",
    "berrut": "berrut",
    "replication": "inputs",
    "uncoded": "inputs",
}


def fit_encoder(
    points: Array,
    workers: int,
    *,
    scheme: Scheme = "systematic",
    order: Order = "path",
    kernel: KernelName = "sobolev",
    encoder_ridge: Ridge = ENCODER_RIDGE,
    decoder: DecoderName | None = None,
    decoder_ridge: Ridge | None = None,
) -> Code:
    """
    Fits a code to data points.

    Args:
        points (array of shape `(K, ...)`):
            Data points, numpy or torch, on any device.
        workers (`int`):
            N, the number of workers, at least K.
        scheme (`str`, *optional*, defaults to `"systematic"`):
            What the workers get.

            - `systematic`: the first K the points themselves, the others points on the curve, in its largest gaps.
              Where N > 2 K, the points themselves again before that, as long as more than K workers are left.
            - `spline`: points on the curve, at Chebyshev positions of the second kind (LeTCC, arXiv 2406.00300).
            - `berrut`: the same with Berrut's rational curve (BACC, arXiv 2009.08327).
            - `replication`: the points themselves, round and round.
            - `uncoded`: the points themselves, once; N must be K.
        order (`str`, *optional*, defaults to `"path"`):
            How the curve runs through the points: `path` and `diffusion` follow the data (see `coded.gcc.manifold`);
            `given` takes them as they come, at Chebyshev positions of the first kind (standard GCC).
        kernel (`str`, *optional*, defaults to `"sobolev"`):
            RKHS of the curve: `sobolev` of order two (a natural cubic spline), `matern` (5/2) or `gaussian`.
        encoder_ridge (`float` or `"loo"`, *optional*, defaults to `1e-9`):
            Weight of the smoothness penalty of the curve, or chosen by leave-one-out on the points.
        decoder (`str`, *optional*):
            `inputs` (default for `systematic`, `replication` and `uncoded`), `curve` (default for `spline`), `berrut`
            (default for `berrut`) or `mean`; see `coded.gcc.decoders`.
        decoder_ridge (`float` or `"loo"`, *optional*):
            Weight of the penalty of the `inputs` (defaults to `"loo"`) and `curve` (defaults to `1e-9`) decoders.

    Returns:
        [`Code`].

    Raises:
        `ValueError`: If an option is unknown, `workers` does not fit the scheme, a ridge is negative, or a point holds
            NaN or infinity.
        `TypeError`: If `points` is no numpy array or torch tensor of real numbers.

    Example:
    ```python
    >>> t = np.linspace(0, 1, 8)
    >>> points = np.stack([np.cos(t), np.sin(t)], axis=1)
    >>> code = fit_encoder(points, 12)
    >>> answers = np.tanh(code.encode(points) @ [1.0, -2.0])
    >>> result = code.decode(np.delete(answers, [2, 3]), [0, 1, *range(4, 12)])    # workers 2 and 3 are late
    >>> np.abs(result.values - np.tanh(points @ [1.0, -2.0])).max() < 1e-3
    True
    ```
    """
    chosen = decoder or DEFAULT_DECODER.get(scheme, "inputs")
    _check_options(
        scheme, order, kernel, chosen, {"encoder_ridge": encoder_ridge, "decoder_ridge": decoder_ridge or 0}
    )
    check_array(points, "points")
    count = points.shape[0]
    _check_workers(scheme, workers, count)
    rows = rows_of(points)
    if broken := broken_rows(rows):
        raise ValueError(f"`points` holds NaN or infinity in points {broken}.")
    points_gram = gram(rows, centred=True)
    alpha = _positions(points_gram, order, scheme)
    beta = _worker_positions(alpha, workers, scheme)
    generator = _generator(alpha, beta, scheme, kernel, encoder_ridge, points_gram)
    decoders: dict[str, Decoder] = {
        "inputs": InputDecoder(points_gram, generator, "loo" if decoder_ridge is None else decoder_ridge),
        "curve": CurveDecoder(alpha, beta, kernel, CURVE_RIDGE if decoder_ridge is None else decoder_ridge),
        "berrut": BerrutDecoder(alpha, beta),
        "mean": MeanDecoder(count),
    }
    return Code(generator, decoders[chosen], alpha, beta)


def _positions(points_gram: FloatArray, order: Order, scheme: Scheme) -> FloatArray:
    """alpha of shape `(K,)`."""
    squared = squared_distances(points_gram)
    distances = np.sqrt(squared)
    if order == "given":
        return chebyshev_positions(np.ones_like(distances), list(range(len(distances))))
    path = shortest_path(distances) if order == "path" else diffusion_order(squared)
    at_chebyshev_points = scheme in ("spline", "berrut")
    return (chebyshev_positions if at_chebyshev_points else chord_length_positions)(distances, path)


def _worker_positions(alpha: FloatArray, workers: int, scheme: Scheme) -> FloatArray:
    """beta of shape `(N,)`."""
    if scheme in ("spline", "berrut"):
        return chebyshev_second(workers)
    if scheme == "systematic":
        held = _copies(workers, len(alpha)) * len(alpha)
        return np.concatenate([np.resize(alpha, held), bisect_gaps(alpha, workers - held)])
    return alpha[np.arange(workers) % len(alpha)]


def _generator(
    alpha: FloatArray, beta: FloatArray, scheme: Scheme, kernel: KernelName, ridge: Ridge, points_gram: FloatArray
) -> FloatArray:
    """G of shape `(N, K)`."""
    count, workers = len(alpha), len(beta)
    if scheme in ("replication", "uncoded") or count == 1:
        return np.eye(count)[np.arange(workers) % count]
    if scheme == "berrut":
        return berrut_weights(alpha, beta)
    regression = KernelRidge.fit(line_kernel(kernel, alpha, alpha), line_trend(kernel, alpha))
    if ridge == "loo":
        ridge = regression.best_ridge(points_gram)
    if scheme == "spline":
        return regression.weights(ridge, line_kernel(kernel, beta, alpha), line_trend(kernel, beta))
    copies = _copies(workers, count)
    parity = beta[copies * count :]
    weights = regression.weights(ridge, line_kernel(kernel, parity, alpha), line_trend(kernel, parity))
    return np.concatenate([np.tile(np.eye(count), (copies, 1)), weights])


def _copies(workers: int, count: int) -> int:
    """How often a systematic code holds every point: so often that at most K workers are left for the curve."""
    return max(1, -(-workers // count) - 1)


def _check_options(scheme: str, order: str, kernel: str, decoder: str, ridges: dict[str, Ridge]) -> None:
    known = {
        "scheme": (scheme, get_args(Scheme)),
        "order": (order, get_args(Order)),
        "kernel": (kernel, KERNELS),
        "decoder": (decoder, get_args(DecoderName)),
    }
    for name, (value, options) in known.items():
        if value not in options:
            raise ValueError(f"`{name}` must be one of {', '.join(options)}, got {value!r}.")
    if (decoder == "berrut") != (scheme == "berrut"):
        raise ValueError(
            "`decoder='berrut'` goes with `scheme='berrut'` and with nothing else: its signs are the code."
        )
    for name, ridge in ridges.items():
        if ridge != "loo" and not (isinstance(ridge, (int, float)) and ridge >= 0):
            raise ValueError(f"`{name}` must be 'loo' or a number >= 0, got {ridge!r}.")


def _check_workers(scheme: str, workers: int, count: int) -> None:
    if count == 0:
        raise ValueError("`points` is empty: there must be at least one data point.")
    if workers < count:
        raise ValueError(f"`workers` must be at least the number of points: {workers} workers for {count} points.")
    if scheme == "uncoded" and workers != count:
        raise ValueError(
            f"`scheme='uncoded'` has one worker for each point: `workers` must be {count}, got {workers}."
        )
