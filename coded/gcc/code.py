"""General coded computing: evaluate f at K points on N workers without waiting for the slowest ones.

    coded = G x        worker n evaluates f at row n of the coded points (G: N x K, the generator)
    estimates = D_F f(coded)_F        from the answers of the workers F that came in (D_F: K x |F|)

f may be anything (a neural network): nothing is recovered algebraically, the estimates rest on smoothness along a
curve through the points, or among them. *Learning-Theoretic Foundation for General Coded Computing: The Straggler
Setting* (encoder and decoder in an RKHS); *Manifold-Aware General Coded Computing* (the curve follows the data).

    code = fit_encoder(points, N)
    coded = code.encode(points)
    result = code.decode(answers, responders)     # result.values, result.error, result.exact
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
from array_api_compat import array_namespace, device

from .arrays import Array, broken_rows, check_array, combine, gram, rows_of, sampled_columns
from .decoders import Decoder
from .ridge import FloatArray
from .robust import find_wrong

# The free parameters of the decoder are chosen on this many numbers of each answer, evenly spaced (on all when some
# answers may be wrong).
SAMPLED_COLUMNS = 1 << 13
CACHED_RESPONDER_SETS = 256
FILL_CHUNK = 1 << 22  # numbers of a product that exist besides the result


@dataclass(frozen=True)
class Decoded:
    """
    What `Code.decode` returns.

    Args:
        values (array of shape `(K, ...)`):
            f at the data points, in the dtype and on the device of the answers.
        error (`np.ndarray` of shape `(K,)`):
            Expected root mean square error per number of each output: 0 where exact, infinite where there were too few
            answers to judge.
        exact (`np.ndarray` of shape `(K,)`):
            Whether the output is a worker's answer at that very point (`True`) or an estimate.
        wrong (`tuple[int, ...]`):
            Workers whose answers the robust decoder set aside.
    """

    values: Array
    error: FloatArray
    exact: np.ndarray
    wrong: tuple[int, ...] = ()


class Code:
    """
    An encoder and the decoder that goes with it. Made by [`fit_encoder`] (`coded.gcc.encoders`).

    Args:
        generator (`np.ndarray` of shape `(N, K)`):
            Encoder. Its rows sum to one.
        decoder (`Decoder`):
            Fits itself to a set of responders.
        alpha (`np.ndarray` of shape `(K,)`):
            Positions of the data points on the curve.
        beta (`np.ndarray` of shape `(N,)`):
            Positions of the workers on the curve.
    """

    def __init__(self, generator: FloatArray, decoder: Decoder, alpha: FloatArray, beta: FloatArray) -> None:
        self.generator, self.decoder, self.alpha, self.beta = generator, decoder, alpha, beta
        ones = (generator == 1.0).sum(axis=1) == 1
        self._holds = np.where(ones & ((generator != 0.0).sum(axis=1) == 1), generator.argmax(axis=1), -1)
        self._fitted = lru_cache(maxsize=CACHED_RESPONDER_SETS)(decoder.fit)

    @property
    def workers(self) -> int:
        """N, the number of workers."""
        return self.generator.shape[0]

    @property
    def points(self) -> int:
        """K, the number of data points."""
        return self.generator.shape[1]

    def encode(self, x: Array) -> Array:
        """
        The points that the workers evaluate f at.

        Args:
            x (array of shape `(K, ...)`):
                Data points, or anything that belongs to them and mixes like them (numpy or torch, any device).

        Returns:
            Array of shape `(N, ...)`; a worker that holds a data point gets it bit for bit.

        Raises:
            `ValueError`: If the first axis is not K, or a point holds NaN or infinity.
            `TypeError`: If `x` is no numpy array or torch tensor of real numbers.
        """
        xp = check_array(x, "x")
        if x.shape[0] != self.points:
            raise ValueError(f"`x` must have {self.points} points along its first axis, got shape {tuple(x.shape)}.")
        rows = rows_of(x)
        if broken := broken_rows(rows):
            raise ValueError(f"`x` holds NaN or infinity in points {broken}; a coded point would carry it everywhere.")
        mixed = np.flatnonzero(self._holds < 0)
        coded = xp.empty((self.workers, rows.shape[1]), dtype=rows.dtype, device=device(rows))
        for worker in np.flatnonzero(self._holds >= 0).tolist():
            coded[worker] = rows[int(self._holds[worker])]
        _fill(coded, mixed, self.generator[mixed], rows)
        return xp.reshape(coded, (self.workers, *x.shape[1:]))

    def decode(
        self, responses: Array | Sequence[Array], responders: Sequence[int] | None = None, *, wrong: int = 0
    ) -> Decoded:
        """
        f at the data points, from the answers that came in.

        Args:
            responses (array of shape `(n, ...)`, or n arrays):
                Answers of the workers, in the order of `responders`.
            responders (sequence of `int`, *optional*):
                Which of the N workers they come from. Defaults to all, in order.
            wrong (`int`, *optional*, defaults to 0):
                How many of the answers may be wrong (not missing): at most that many outliers are set aside, see
                `coded.gcc.robust`.

        Returns:
            [`Decoded`]: estimates, their errors, and which are exact.

        Raises:
            `ValueError`: If there is no answer, the responders are not distinct workers, shapes differ, an answer
            holds
                NaN or infinity (the error names the worker), or `wrong` is more than the answers can bear.
            `TypeError`: If the answers are no numpy arrays or torch tensors of real numbers.
        """
        responders = list(range(self.workers)) if responders is None else [int(worker) for worker in responders]
        responses = _stacked(responses, responders, self.workers)
        xp = array_namespace(responses)
        rows = rows_of(responses)
        if broken := broken_rows(rows):
            names = ", ".join(str(responders[row]) for row in broken)
            raise ValueError(
                f"Answers of workers {names} hold NaN or infinity; leave these workers out of `responders`."
            )
        suspects: tuple[int, ...] = ()
        if wrong:
            suspects = find_wrong(self._fitted, responders, gram(rows), wrong)
        values, error, exact = self._decode_rows(rows, [w if w not in suspects else -1 for w in responders])
        return Decoded(xp.reshape(values, (self.points, *responses.shape[1:])), error, exact, suspects)

    def _decode_rows(self, rows: Array, responders: list[int]) -> tuple[Array, FloatArray, np.ndarray]:
        """Decodes answers of shape `(n, size)`; a responder of -1 marks an answer to be ignored."""
        xp = array_namespace(rows)
        source: dict[int, int] = {}
        for row, worker in enumerate(responders):
            if worker >= 0 and self._holds[worker] >= 0:
                source.setdefault(int(self._holds[worker]), row)
        values = xp.empty((self.points, rows.shape[1]), dtype=rows.dtype, device=device(rows))
        for point, row in source.items():
            values[point] = rows[row]
        exact = np.isin(np.arange(self.points), list(source))
        error = np.zeros(self.points)
        missing = np.flatnonzero(~exact)
        if len(missing):
            used = sorted((worker, row) for row, worker in enumerate(responders) if worker >= 0)
            places = [row for _, row in used]
            fitted = self._fitted(tuple(worker for worker, _ in used))
            sample = gram(sampled_columns(rows, SAMPLED_COLUMNS))[np.ix_(places, places)]
            estimate = fitted.estimate(sample)
            weights = np.zeros((self.points, len(responders)))
            weights[:, places] = estimate.weights
            _fill(values, missing, weights[missing], rows)
            error[missing] = estimate.error[missing]
        return values, error, exact


def _fill(target: Array, places: np.ndarray, matrix: FloatArray, rows: Array) -> None:
    """Writes combinations of rows, `matrix @ rows`, into places of the target, some columns at a time."""
    step = max(1, FILL_CHUNK // max(len(places), 1))
    for start in range(0, rows.shape[1] if len(places) else 0, step):
        columns = slice(start, start + step)
        product = combine(matrix, rows[:, columns])
        for index, place in enumerate(places.tolist()):
            target[place, columns] = product[index]


def _stacked(responses: Array | Sequence[Array], responders: list[int], workers: int) -> Array:
    """The answers as one array of shape `(n, ...)`, checked against the responders."""
    if not responders:
        raise ValueError("No worker has answered: decoding needs at least one answer.")
    if len(set(responders)) != len(responders) or not all(0 <= worker < workers for worker in responders):
        raise ValueError(f"`responders` must be distinct workers from 0 to {workers - 1}, got {responders}.")
    if isinstance(responses, (list, tuple)):
        if len(responses) != len(responders):
            raise ValueError(f"{len(responses)} answers for {len(responders)} responders.")
        for worker, response in zip(responders, responses, strict=True):
            check_array(response, f"answer of worker {worker}", axes=0)
        shapes = [tuple(response.shape) for response in responses]
        usual = max(set(shapes), key=shapes.count)
        for worker, shape in zip(responders, shapes, strict=True):
            if shape != usual:
                raise ValueError(f"The answer of worker {worker} has shape {shape}, most others have {usual}.")
        stacked: Array = array_namespace(*responses).stack(responses)
    else:
        stacked = responses
    check_array(stacked, "responses")
    if stacked.shape[0] != len(responders):
        raise ValueError(f"{stacked.shape[0]} answers for {len(responders)} responders.")
    return stacked
