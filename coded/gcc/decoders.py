"""Decoders: from the answers of some workers to estimates at the data points, linear in the answers.

All but Berrut's are the kernel ridge regression of `coded.gcc.ridge`. They differ in where they say that an answer
lies:

- `CurveDecoder`: at its position beta on the line (the papers' decoder, LeTCC arXiv 2406.00300 section 3);
- `InputDecoder`: at the input that the worker evaluated, u_e(beta), among the other inputs (a Gaussian process);
- `MeanDecoder`: nowhere; every estimate is the mean of the answers (imputation);
- `BerrutDecoder`: rational interpolation on the line (BACC).

A decoder is fitted to a set of responders without their answers; that part is cached. Its free parameters (kernel,
ridge) are then chosen by the answers, of which the inner products are all that is needed.
"""

from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np

from .berrut import berrut_weights
from .kernels import KernelName, input_kernel, line_kernel, line_trend
from .manifold import squared_distances
from .ridge import FloatArray, KernelRidge

Ridge = float | Literal["loo"]

# Length scales tried by the input decoder, as shares of the root mean square distance between the data points. Twice
# that distance is a good guess on images and random polynomials; shorter ones are for rougher functions.
# At an infinite one the linear part is left, which recovers linear functions exactly.
LENGTHS = (0.6, 1.2, 2.4, np.inf)
# Weight of the linear part; 0 to 1 made no difference above 5% there.
LINEAR_WEIGHT = 0.1
CURVE_RIDGE = 1e-9  # of the curve decoder: leave-one-out on a curve smooths too much, f has no noise


@dataclass(frozen=True)
class Estimate:
    """
    How to decode one set of answers.

    Args:
        weights (`np.ndarray` of shape `(K, n)`):
            Estimates as combinations of the n answers.
        error (`np.ndarray` of shape `(K,)`):
            Expected root mean square error of each estimate, per number of the output; infinite where there are too
            few answers to judge.
    """

    weights: FloatArray
    error: FloatArray


class FittedDecoder(Protocol):
    """A decoder for one set of responders."""

    def estimate(self, outputs_gram: FloatArray) -> Estimate: ...

    def outlyingness(self, outputs_gram: FloatArray) -> FloatArray: ...


class Decoder(Protocol):
    """Fits itself to the workers (of N) that answered, given as ascending indices."""

    def fit(self, responders: tuple[int, ...]) -> FittedDecoder: ...


@dataclass
class _Candidate:
    """One kernel of a kernel decoder: the regression on the responders, and its kernel to the K data points."""

    regression: KernelRidge
    cross: FloatArray  # (K, n)
    cross_trend: FloatArray  # (K, p)
    prior: FloatArray  # (K,)
    ridges: tuple[float, ...]
    _matrices: dict[float, tuple[FloatArray, FloatArray]] = field(default_factory=dict)

    def matrices(self, ridge: float) -> tuple[FloatArray, FloatArray]:
        """Weights `(K, n)` and relative variances `(K,)`, computed once."""
        if ridge not in self._matrices:
            weights = self.regression.weights(ridge, self.cross, self.cross_trend)
            variance = self.regression.variance(ridge, weights, self.cross, self.prior)
            self._matrices[ridge] = weights, variance
        return self._matrices[ridge]

    def squared_errors(self, ridge: float, outputs_gram: FloatArray) -> FloatArray:
        """Expected squared error at each data point, `(K,)`."""
        _, variance = self.matrices(ridge)
        return variance * np.mean(self.regression.standardised(ridge, outputs_gram))


@dataclass(frozen=True)
class FittedKernelDecoder:
    """Kernel ridge decoder for one set of responders: kernels and ridges, among which the answers choose."""

    candidates: list[_Candidate]

    def _chosen(self, outputs_gram: FloatArray, robust: bool = False) -> tuple[_Candidate, float]:
        """
        The candidate whose mean squared error is least: leave-one-out at the answers, plus expected at the data
        points.

        The second term keeps away kernels that fit where the answers are and swing where they are not. When some
        answers may be wrong, the median of the first alone.
        """
        options = [(candidate, ridge) for candidate in self.candidates for ridge in candidate.ridges]
        if len(options) == 1 or not options[0][0].regression.degrees_of_freedom:
            return options[0]
        errors = []
        for candidate, ridge in options:
            left_out = candidate.regression.leave_one_out(ridge, outputs_gram)
            if robust:
                errors.append(np.median(left_out))
            else:
                errors.append(left_out.mean() + np.mean(candidate.squared_errors(ridge, outputs_gram)))
        return options[int(np.argmin(errors))]

    def estimate(self, outputs_gram: FloatArray) -> Estimate:
        """Weights and errors for answers with these inner products (per number of the output), shape `(n, n)`."""
        candidate, ridge = self._chosen(outputs_gram)
        weights, _ = candidate.matrices(ridge)
        if not candidate.regression.degrees_of_freedom:
            return Estimate(weights, np.full(len(weights), np.inf))
        return Estimate(weights, np.sqrt(candidate.squared_errors(ridge, outputs_gram)))

    def outlyingness(self, outputs_gram: FloatArray) -> FloatArray:
        """
        How far each answer lies from what the others say.

        The externally studentised deletion residual, t_i^2 = s_i / ((tr(B Y Y') - s_i) / (dof - 1)), with s_i the
        squared standardised leave-one-out residual: tr(B Y Y') - s_i is the misfit of the others alone.

        Args:
            outputs_gram (`np.ndarray` of shape `(n, n)`):
                Inner products of the answers.

        Returns:
            `np.ndarray` of shape `(n,)`: about 1 for an answer that fits.
        """
        candidate, ridge = self._chosen(outputs_gram, robust=True)
        regression = candidate.regression
        single = regression.standardised(ridge, outputs_gram)
        misfit = np.sum(regression.coefficients(ridge) * outputs_gram)
        others = np.maximum(misfit - single, np.finfo(np.float64).eps * max(misfit, 0.0))
        return np.sqrt(single * max(regression.degrees_of_freedom - 1, 1) / np.maximum(others, np.finfo(float).tiny))


@dataclass(frozen=True)
class CurveDecoder:
    """
    Kernel ridge regression along the line, from positions beta of the workers to positions alpha of the data.

    Args:
        alpha (`np.ndarray` of shape `(K,)`):
            Positions of the data points.
        beta (`np.ndarray` of shape `(N,)`):
            Positions of the workers.
        kernel (`str`):
            `sobolev` (then it is the natural cubic smoothing spline), `matern` or `gaussian`.
        ridge (`float` or `"loo"`):
            Weight of the penalty, or chosen for each set of answers by leave-one-out.
    """

    alpha: FloatArray
    beta: FloatArray
    kernel: KernelName
    ridge: Ridge

    def fit(self, responders: tuple[int, ...]) -> FittedKernelDecoder:
        answered = self.beta[list(responders)]
        regression = KernelRidge.fit(line_kernel(self.kernel, answered, answered), line_trend(self.kernel, answered))
        cross = line_kernel(self.kernel, self.alpha, answered)
        prior = np.diag(line_kernel(self.kernel, self.alpha, self.alpha))
        ridges = regression.ridge_grid() if self.ridge == "loo" else (self.ridge,)
        return FittedKernelDecoder([_Candidate(regression, cross, line_trend(self.kernel, self.alpha), prior, ridges)])


@dataclass(frozen=True)
class InputDecoder:
    """
    Gaussian process on the inputs, from what the workers evaluated to the data points.

    The kernel is exp(-|x - x'|^2 / (2 length^2)) + LINEAR_WEIGHT * x . x' around an unknown mean; length and ridge are
    chosen by leave-one-out.

    Args:
        points_gram (`np.ndarray` of shape `(K, K)`):
            Inner products of the data points, centred.
        generator (`np.ndarray` of shape `(N, K)`):
            Encoder; its rows sum to one.
        ridge (`float` or `"loo"`):
            Weight of the penalty, or chosen for each set of answers by leave-one-out.
    """

    points_gram: FloatArray
    generator: FloatArray
    ridge: Ridge

    def fit(self, responders: tuple[int, ...]) -> FittedKernelDecoder:
        count, answered = len(self.points_gram), len(responders)
        stacked = np.concatenate([np.eye(count), self.generator[list(responders)]])
        inner = stacked @ self.points_gram @ stacked.T
        scale = np.mean(np.diag(self.points_gram))
        inner /= scale if scale > 0 else 1.0
        squared = squared_distances(inner)
        spread = np.sqrt(squared[:count, :count].sum() / max(count * (count - 1), 1)) or 1.0
        ones, candidates = np.ones((answered, 1)), []
        for share in LENGTHS:
            kernel = input_kernel(squared, inner, share * spread, LINEAR_WEIGHT)
            regression = KernelRidge.fit(kernel[count:, count:], ones)
            cross, prior = kernel[:count, count:], np.diag(kernel)[:count]
            ridges = regression.ridge_grid() if self.ridge == "loo" else (self.ridge,)
            candidates.append(_Candidate(regression, cross, np.ones((count, 1)), prior, ridges))
        return FittedKernelDecoder(candidates)


@dataclass(frozen=True)
class MeanDecoder:
    """Every estimate is the mean of the answers; the error is their standard deviation. For K data points."""

    count: int

    def fit(self, responders: tuple[int, ...]) -> FittedKernelDecoder:
        answered = len(responders)
        regression = KernelRidge.fit(np.eye(answered), np.ones((answered, 1)))
        cross, ones = np.zeros((self.count, answered)), np.ones((self.count, 1))
        return FittedKernelDecoder([_Candidate(regression, cross, ones, np.ones(self.count), (0.0,))])


@dataclass(frozen=True)
class BerrutDecoder:
    """
    Berrut's rational interpolant along the line (BACC). It has no parameter to choose.

    Args:
        alpha (`np.ndarray` of shape `(K,)`):
            Positions of the data points.
        beta (`np.ndarray` of shape `(N,)`):
            Positions of the workers.
    """

    alpha: FloatArray
    beta: FloatArray

    def fit(self, responders: tuple[int, ...]) -> "FittedBerrutDecoder":
        answered = self.beta[list(responders)]
        others = np.zeros((len(answered), len(answered)))
        for index in range(len(answered)) if len(answered) > 1 else ():
            rest = np.arange(len(answered)) != index
            others[index, rest] = berrut_weights(answered[rest], answered[index : index + 1])[0]
        nearest = np.abs(self.alpha[:, None] - answered[None, :]).argsort(axis=1, kind="stable")[:, :2]
        spline = CurveDecoder(self.alpha, self.beta, "sobolev", CURVE_RIDGE).fit(responders)
        return FittedBerrutDecoder(berrut_weights(answered, self.alpha), others, nearest, spline)


@dataclass(frozen=True)
class FittedBerrutDecoder:
    """Berrut's decoder for one set of responders; the error of an estimate is the leave-one-out error next to it."""

    weights: FloatArray  # (K, n)
    others: FloatArray  # (n, n): each answer as predicted from the others
    nearest: np.ndarray  # (K, 1 or 2): the answers next to each data point
    spline: FittedKernelDecoder  # which finds wrong answers

    def estimate(self, outputs_gram: FloatArray) -> Estimate:
        """Weights and errors for answers with these inner products (per number of the output), shape `(n, n)`."""
        if len(self.others) < 2:
            return Estimate(self.weights, np.full(len(self.weights), np.inf))
        residual = np.eye(len(self.others)) - self.others
        squares = np.maximum(np.sum((residual @ outputs_gram) * residual, axis=1), 0.0)
        return Estimate(self.weights, np.sqrt(squares[self.nearest].mean(axis=1)))

    def outlyingness(self, outputs_gram: FloatArray) -> FloatArray:
        """How far each answer lies from a spline through the others; shape `(n,)`."""
        return self.spline.outlyingness(outputs_gram)
