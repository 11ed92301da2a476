"""Kernel ridge regression, splines and Berrut's interpolant against independent implementations."""

import baryrat
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.interpolate import CubicSpline, make_smoothing_spline

from coded.gcc.berrut import berrut_weights, chebyshev_second
from coded.gcc.kernels import KERNELS, input_kernel, line_kernel, line_trend
from coded.gcc.ridge import SMALLEST_RELATIVE_RIDGE, KernelRidge


def on_line(kernel: str, t: np.ndarray) -> KernelRidge:
    return KernelRidge.fit(line_kernel(kernel, t, t), line_trend(kernel, t))


def predict(kernel: str, ridge: float, t: np.ndarray, new: np.ndarray) -> np.ndarray:
    return on_line(kernel, t).weights(ridge, line_kernel(kernel, new, t), line_trend(kernel, new))


@pytest.mark.parametrize("ridge", [1e-6, 1e-3, 1.0, 100.0])
def test_sobolev_regression_is_scipys_smoothing_spline(ridge: float) -> None:
    rng = np.random.default_rng(0)
    t = np.sort(rng.uniform(-1, 1, 12))
    y, new = rng.normal(size=12), np.linspace(t[0], t[-1], 50)
    expected = make_smoothing_spline(t, y, lam=ridge)(new)
    np.testing.assert_allclose(predict("sobolev", ridge, t, new) @ y, expected, rtol=1e-6, atol=1e-8)


def test_sobolev_regression_without_penalty_is_the_natural_spline() -> None:
    rng = np.random.default_rng(1)
    t = np.sort(rng.uniform(-1, 1, 12))
    y, new = rng.normal(size=12), np.linspace(t[0], t[-1], 50)
    expected = CubicSpline(t, y, bc_type="natural")(new)
    np.testing.assert_allclose(predict("sobolev", 0.0, t, new) @ y, expected, rtol=1e-5, atol=1e-5)


def test_sobolev_kernel_is_its_defining_integral() -> None:
    s, t = np.array([-0.7, 0.2]), np.array([-0.1, 0.9])
    u = np.linspace(0, 2, 200_001)
    for i, left in enumerate(s + 1):
        for j, right in enumerate(t + 1):
            integral = np.trapezoid(np.maximum(left - u, 0) * np.maximum(right - u, 0), u)
            assert line_kernel("sobolev", s, t)[i, j] == pytest.approx(integral, rel=1e-6)


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("ridge", [1e-4, 0.1])
def test_closed_forms_equal_refitting_and_the_joint_gaussian(kernel: str, ridge: float) -> None:
    rng = np.random.default_rng(2)
    t, y = np.sort(rng.uniform(-1, 1, 9)), rng.normal(size=(9, 3))
    fitted = on_line(kernel, t)
    left_out = fitted.leave_one_out(ridge, y @ y.T)
    variances = []
    for i in range(9):
        rest = np.arange(9) != i
        others = on_line(kernel, t[rest])
        cross, trend = line_kernel(kernel, t[i : i + 1], t[rest]), line_trend(kernel, t[i : i + 1])
        weights = others.weights(ridge, cross, trend)
        assert left_out[i] == pytest.approx(np.sum((y[i] - weights @ y[rest]) ** 2), rel=1e-6)
        variances.append(
            others.variance(ridge, weights, cross, np.diag(line_kernel(kernel, t[i : i + 1], t[i : i + 1])))[0]
        )
    # The leave-one-out variance of an observation is that of f and of the noise, 1 / B_ii.
    expected = left_out / (np.array(variances) + ridge)
    np.testing.assert_allclose(fitted.standardised(ridge, y @ y.T), expected, rtol=1e-6)


def test_posterior_variance_is_that_of_a_gaussian_with_a_diffuse_mean() -> None:
    rng = np.random.default_rng(3)
    t, new, ridge, diffuse = np.sort(rng.uniform(-1, 1, 8)), np.array([-0.9, 0.05, 0.8]), 0.01, 1e4
    gram, cross = line_kernel("gaussian", t, t) + diffuse, line_kernel("gaussian", new, t) + diffuse
    inverse = np.linalg.inv(gram + ridge * np.eye(8))
    expected = 1.0 + diffuse - np.einsum("ij,jk,ik->i", cross, inverse, cross)
    weights = predict("gaussian", ridge, t, new)
    variance = on_line("gaussian", t).variance(ridge, weights, cross - diffuse, np.ones(3))
    np.testing.assert_allclose(variance, expected, rtol=1e-3, atol=1e-6)


@given(st.integers(1, 12), st.integers(0, 10_000))
@settings(max_examples=60, deadline=None)
def test_any_points_give_bounded_regressions_that_keep_constants(count: int, seed: int) -> None:
    rng = np.random.default_rng(seed)
    t = rng.choice(np.linspace(-1, 1, 7), count)  # with repetitions
    new = np.linspace(-1, 1, 5)
    for kernel in KERNELS:
        fitted = on_line(kernel, t)
        weights = fitted.weights(1e-9, line_kernel(kernel, new, t), line_trend(kernel, new))
        assert np.all(np.isfinite(weights))
        np.testing.assert_allclose(weights.sum(axis=1), 1.0, atol=1e-6)
        if fitted.degrees_of_freedom:
            damped = fitted.eigenvalues + fitted.bounded(0.0)
            assert damped.max() / damped.min() <= 1.01 / SMALLEST_RELATIVE_RIDGE


def test_best_ridge_is_small_without_noise_and_large_in_noise() -> None:
    rng = np.random.default_rng(4)
    t = np.linspace(-1, 1, 30)
    smooth, noise = np.sin(2 * t)[:, None], rng.normal(size=(30, 200))
    fitted = on_line("sobolev", t)
    assert fitted.best_ridge(smooth @ smooth.T) == min(fitted.ridge_grid())
    assert fitted.best_ridge(noise @ noise.T) == max(fitted.ridge_grid())


def test_input_kernel_is_its_formula() -> None:
    x = np.random.default_rng(5).normal(size=(4, 3))
    squared = ((x[:, None] - x[None]) ** 2).sum(axis=2)
    kernel = input_kernel(squared, x @ x.T, 1.5, 0.25)
    assert kernel[0, 1] == pytest.approx(np.exp(-np.sum((x[0] - x[1]) ** 2) / 4.5) + 0.25 * x[0] @ x[1])


@pytest.mark.parametrize("count", [1, 2, 7, 12])
def test_berrut_is_baryrats(count: int) -> None:
    rng = np.random.default_rng(6)
    nodes, values = rng.permutation(chebyshev_second(count) + 0.01 * rng.random(count)), rng.normal(size=count)
    order = np.argsort(nodes)
    reference = baryrat.BarycentricRational(nodes[order], values[order], (-1.0) ** np.arange(count))
    new = np.concatenate([np.linspace(-1, 1, 21), nodes])
    np.testing.assert_allclose(berrut_weights(nodes, new) @ values, reference(new), rtol=1e-10, atol=1e-10)
    np.testing.assert_allclose(berrut_weights(nodes, nodes), np.eye(count))
