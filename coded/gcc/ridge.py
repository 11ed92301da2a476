"""Kernel ridge regression with an unpenalised trend, as linear operators: what encoder and decoder are made of.

Minimise over f = (trend) + h, h in the RKHS of the kernel k,

    sum_i |f(t_i) - y_i|^2  +  ridge * |h|_k^2.

By the representer theorem f(t) = sum_i c_i k(t, t_i) + d . trend(t) with (K + ridge I) c + T d = y and T' c = 0, so
every prediction is linear in y. With the second-order Sobolev kernel and the trend (1, t) it is the natural cubic
smoothing spline (Wahba 1990, section 1.3); with the trend 1 it is a Gaussian process with an unknown mean (universal
kriging).

One eigendecomposition of K on the complement of T serves every ridge. With B the operator of the coefficients, c = B
y:

    residual         y - f(t)      = ridge * B y
    leave-one-out    y_i - f_-i(t_i) = (B y)_i / B_ii
    posterior        Var f(t)      = scale^2 * (k(t, t) - 2 w . k(t) + w' (K + ridge I) w),   f(t) = w . y

and scale^2, the average of (B y)_i^2 / B_ii, makes the standardised leave-one-out residuals one on average.
"""

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

FloatArray = npt.NDArray[np.float64]

# The ridge is never below this share of the largest eigenvalue, so that no condition number exceeds its inverse; nor
# below this number itself (kernels here are of order one), which is for points that all coincide.
SMALLEST_RELATIVE_RIDGE = 1e-12
# Ridges tried by leave-one-out, as shares of the mean eigenvalue of the kernel.
RELATIVE_RIDGES = (1e-10, 1e-6, 1e-4, 1e-2, 1.0)
RANK_TOLERANCE = 1e-9  # a trend column whose part outside the others is smaller than this is left out


@dataclass(frozen=True)
class KernelRidge:
    """
    Kernel ridge regression at fixed points; see the module's docstring.

    Args:
        gram (`np.ndarray` of shape `(n, n)`):
            Kernel between the points, K.
        trend (`np.ndarray` of shape `(n, p)`):
            Unpenalised functions at the points, T. Columns that depend on others at these points are not used, so one
            point is legal (the prediction is then constant).
    """

    gram: FloatArray
    trend: FloatArray
    basis: FloatArray  # (n, n - rank T), orthonormal, orthogonal to T; turned so that K is diagonal in it
    eigenvalues: FloatArray  # (n - rank T,), of K in that basis, ascending
    trend_inverse: FloatArray  # (p, n), with zero rows for the columns that are not used

    @classmethod
    def fit(cls, gram: FloatArray, trend: FloatArray) -> "KernelRidge":
        used = _independent_columns(trend)
        left, _ = np.linalg.qr(trend[:, used], mode="complete")
        complement = left[:, len(used) :]
        eigenvalues, turn = np.linalg.eigh(complement.T @ gram @ complement)
        inverse = np.zeros(trend.shape[::-1])
        inverse[used] = np.linalg.pinv(trend[:, used])
        return cls(gram, trend, complement @ turn, np.maximum(eigenvalues, 0.0), inverse)

    @property
    def degrees_of_freedom(self) -> int:
        """Points beyond those that the trend uses up; without any there are no residuals to judge by."""
        return len(self.eigenvalues)

    def bounded(self, ridge: float) -> float:
        """The ridge, raised where the condition number would exceed `1 / SMALLEST_RELATIVE_RIDGE`."""
        largest = max(1.0, float(self.eigenvalues[-1])) if self.degrees_of_freedom else 1.0
        return max(float(ridge), SMALLEST_RELATIVE_RIDGE * largest)

    def coefficients(self, ridge: float) -> FloatArray:
        """B of shape `(n, n)`: outputs to kernel coefficients."""
        return (self.basis / (self.eigenvalues + self.bounded(ridge))) @ self.basis.T

    def leave_one_out(self, ridge: float, outputs_gram: FloatArray) -> FloatArray:
        """
        Squared leave-one-out residuals.

        Args:
            ridge (`float`):
                Weight of the penalty.
            outputs_gram (`np.ndarray` of shape `(n, n)`):
                Inner products Y Y' of the outputs at the points.

        Returns:
            `np.ndarray` of shape `(n,)`: |y_i - f_-i(t_i)|^2, infinite where the others do not determine f(t_i).
        """
        squares, diagonal = self._squared_coefficients(ridge, outputs_gram)
        return np.divide(squares, diagonal**2, out=np.full_like(squares, np.inf), where=diagonal > 0)

    def ridge_grid(self) -> tuple[float, ...]:
        """Ridges worth trying."""
        mean = float(self.eigenvalues.mean()) if self.degrees_of_freedom else 1.0
        return tuple(float(share * mean) for share in RELATIVE_RIDGES)

    def best_ridge(self, outputs_gram: FloatArray) -> float:
        """The ridge of the grid with the least mean squared leave-one-out residual; see `leave_one_out`."""
        grid = self.ridge_grid()
        errors = [float(self.leave_one_out(ridge, outputs_gram).mean()) for ridge in grid]
        return grid[int(np.argmin(errors))]

    def standardised(self, ridge: float, outputs_gram: FloatArray) -> FloatArray:
        """Squared leave-one-out residuals over their relative variance, of shape `(n,)`; their mean is scale^2."""
        squares, diagonal = self._squared_coefficients(ridge, outputs_gram)
        return np.divide(squares, diagonal, out=np.zeros_like(squares), where=diagonal > 0)

    def _squared_coefficients(self, ridge: float, outputs_gram: FloatArray) -> tuple[FloatArray, FloatArray]:
        """|(B y)_i|^2 and B_ii."""
        scaled = self.basis / (self.eigenvalues + self.bounded(ridge))
        inner = self.basis.T @ outputs_gram @ self.basis
        return np.maximum(np.sum((scaled @ inner) * scaled, axis=1), 0.0), np.sum(scaled * self.basis, axis=1)

    def weights(self, ridge: float, cross: FloatArray, cross_trend: FloatArray) -> FloatArray:
        """
        Predictions as a matrix.

        Args:
            ridge (`float`):
                Weight of the penalty.
            cross (`np.ndarray` of shape `(m, n)`):
                Kernel between the new points and the points.
            cross_trend (`np.ndarray` of shape `(m, p)`):
                Trend at the new points.

        Returns:
            `np.ndarray` of shape `(m, n)`: W with f(new) = W y.
        """
        # In the basis first: where an eigenvalue vanishes the kernel columns do too, and B alone is as large as 1 /
        # ridge.
        ridge = self.bounded(ridge)
        damped = self.eigenvalues + ridge
        kernel_part = ((cross @ self.basis) / damped) @ self.basis.T
        explained = ((self.gram @ self.basis + ridge * self.basis) / damped) @ self.basis.T
        weights = kernel_part + cross_trend @ (self.trend_inverse @ (np.eye(len(self.gram)) - explained))
        # A trend is reproduced whatever the kernel does: what rounding took from it comes back.
        return weights + (cross_trend - weights @ self.trend) @ self.trend_inverse

    def variance(self, ridge: float, weights: FloatArray, cross: FloatArray, prior: FloatArray) -> FloatArray:
        """
        Relative posterior variance of the predictions (of f itself, without the noise that the ridge stands for).

        Args:
            ridge (`float`):
                Weight of the penalty.
            weights (`np.ndarray` of shape `(m, n)`):
                What `weights` returned for the new points.
            cross (`np.ndarray` of shape `(m, n)`):
                Kernel between the new points and the points.
            prior (`np.ndarray` of shape `(m,)`):
                Kernel of each new point with itself.

        Returns:
            `np.ndarray` of shape `(m,)`, to be multiplied by scale^2.
        """
        noisy = weights @ self.gram + self.bounded(ridge) * weights
        return np.maximum(prior - 2 * np.sum(weights * cross, axis=1) + np.sum(noisy * weights, axis=1), 0.0)


def _independent_columns(trend: FloatArray) -> list[int]:
    """Columns of the trend, from the first on, that are not combinations of earlier ones and fewer than the points."""
    used: list[int] = []
    for column in range(trend.shape[1]):
        candidate = trend[:, column]
        if used:
            others = trend[:, used]
            candidate = candidate - others @ np.linalg.lstsq(others, candidate, rcond=None)[0]
        scale = max(np.linalg.norm(trend[:, column]), np.finfo(np.float64).tiny)
        if len(used) < len(trend) and np.linalg.norm(candidate) > RANK_TOLERANCE * scale:
            used.append(column)
    return used
