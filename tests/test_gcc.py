"""Codes: exact where they must be, close where they estimate, and clear where they cannot."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coded.gcc import Code, fit_encoder
from coded.gcc.manifold import bisect_gaps, diffusion_order, shortest_path, squared_distances

SCHEMES = ("systematic", "spline", "berrut", "replication")
CODES: list[dict[str, Any]] = [
    *({"scheme": scheme, "order": order} for scheme in SCHEMES for order in ("path", "diffusion", "given")),
    *({"decoder": decoder} for decoder in ("curve", "mean")),
    *({"kernel": kernel, "decoder": "curve"} for kernel in ("matern", "gaussian")),
    {"scheme": "spline", "decoder": "inputs"},
    {"encoder_ridge": "loo", "decoder": "curve", "decoder_ridge": "loo"},
    {"decoder_ridge": 1e-6},
]


def arc(count: int, seed: int = 0, size: int = 5) -> np.ndarray:
    """Points on a curve in `size` dimensions, in random order."""
    rng = np.random.default_rng(seed)
    t = rng.permutation(np.linspace(0, 2, count))
    return np.stack([np.cos(t), np.sin(t), t, *(rng.normal(0, 0.01, (size - 3, count)))], axis=1)


def smooth(x: Any) -> Any:
    """A smooth function from 5 to 3 numbers."""
    weights = np.random.default_rng(7).normal(size=(5, 3))
    return torch.tanh(x @ torch.as_tensor(weights, dtype=x.dtype)) if torch.is_tensor(x) else np.tanh(x @ weights)


def without(workers: int, *missing: int) -> list[int]:
    return [worker for worker in range(workers) if worker not in missing]


@pytest.mark.parametrize("options", CODES, ids=str)
def test_every_code_estimates_a_smooth_function(options: dict[str, Any]) -> None:
    x = arc(16)
    code = fit_encoder(x, 24, **options)
    np.testing.assert_allclose(code.generator.sum(axis=1), 1.0, atol=1e-9)
    responders = without(24, 1, 5, 17, 20)
    result = code.decode(smooth(code.encode(x))[responders], responders)
    truth = smooth(x)
    rms = np.sqrt(np.mean((result.values - truth) ** 2))
    guess = np.sqrt(np.mean((truth - truth.mean(axis=0)) ** 2))
    given_order = options.get("order") == "given" and options["scheme"] in ("spline", "berrut")
    assert rms < guess * (1.0 if given_order or options.get("decoder") == "mean" else 0.5)
    np.testing.assert_array_equal(result.values[result.exact], truth[result.exact])
    assert np.all(result.error[result.exact] == 0) and np.all(result.error[~result.exact] > 0)


@pytest.mark.parametrize("scheme", ["systematic", "replication", "uncoded"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_answers_at_data_points_come_back_bit_for_bit(scheme: str, dtype: torch.dtype) -> None:
    x = torch.as_tensor(arc(8), dtype=dtype)
    code = fit_encoder(x, 8 if scheme == "uncoded" else 12, scheme=scheme)
    coded = code.encode(x)
    assert torch.equal(coded[:8], x) and coded.dtype == dtype
    answers = torch.randn(code.workers, 2, 3, generator=torch.Generator().manual_seed(0)).to(dtype)
    result = code.decode(answers)
    assert torch.equal(result.values, answers[:8]) and result.values.dtype == dtype
    assert result.exact.all() and not result.error.any()


def test_a_replica_is_exact() -> None:
    x = arc(6)
    code = fit_encoder(x, 9, scheme="replication")
    answers = smooth(code.encode(x))
    result = code.decode(answers[[7, 8, 3, 4, 5, 6]], [7, 8, 3, 4, 5, 6])
    np.testing.assert_array_equal(result.values, smooth(x))
    assert result.exact.all()


@pytest.mark.parametrize(
    ("options", "positions"),
    [
        ({}, np.linspace(-1, 1, 10)),
        ({"order": "given"}, np.linspace(-1, 1, 10)),
        ({"decoder": "curve"}, np.linspace(-1, 1, 10)),
        ({"scheme": "spline", "order": "given"}, -np.cos((2 * np.arange(10) + 1) * np.pi / 20)),
        ({"scheme": "spline", "decoder": "inputs"}, np.linspace(-1, 1, 10)),
    ],
    ids=str,
)
def test_linear_functions_are_recovered(options: dict[str, Any], positions: np.ndarray) -> None:
    rng = np.random.default_rng(0)
    direction, matrix = rng.normal(size=20), rng.normal(size=(20, 4))
    line = (positions if options.get("order") == "given" else rng.permutation(positions))[:, None] * direction
    code = fit_encoder(line, 15, **options)
    responders = without(15, 0, 3, 8, 12)
    result = code.decode((code.encode(line) @ matrix + 3.0)[responders], responders)
    np.testing.assert_allclose(result.values, line @ matrix + 3.0, atol=1e-8)


def test_linear_functions_of_points_in_general_position_are_recovered() -> None:
    rng = np.random.default_rng(0)
    x, matrix = rng.normal(size=(16, 5)), rng.normal(size=(5, 4))
    code = fit_encoder(x, 24)
    responders = without(24, 0, 3, 8, 12)
    result = code.decode((code.encode(x) @ matrix - 2.0)[responders], responders)
    np.testing.assert_allclose(result.values, x @ matrix - 2.0, atol=1e-8)


@pytest.mark.parametrize("options", CODES, ids=str)
@pytest.mark.parametrize("count", [1, 2, 5])
def test_degenerate_data_and_few_answers_are_legal(options: dict[str, Any], count: int) -> None:
    rng = np.random.default_rng(0)
    for x in (rng.normal(size=(count, 3)), np.ones((count, 3)), np.repeat(rng.normal(size=(1, 3)), count, axis=0)):
        for workers in (count, count + 3):
            code = fit_encoder(x, workers, **options)
            coded = code.encode(x)
            assert np.all(np.isfinite(coded))
            for responders in ([0], [workers - 1], without(workers, 0) or [0], list(range(workers))):
                result = code.decode(coded[responders], responders)
                assert np.all(np.isfinite(result.values)) and not np.any(np.isnan(result.error))
                if np.ptp(x, axis=0).max() == 0:
                    np.testing.assert_allclose(result.values, x, atol=1e-6)


def test_constant_functions_are_recovered_from_one_answer() -> None:
    for options in CODES:
        code = fit_encoder(arc(6), 9, **options)
        result = code.decode(np.full((1, 2), 4.25), [7])
        np.testing.assert_allclose(result.values, 4.25, rtol=1e-7)
        assert np.all(np.isinf(result.error) == ~result.exact)


def test_expected_errors_are_about_the_errors() -> None:
    expected, actual = [], []
    for seed in range(30):
        x = arc(16, seed)
        code = fit_encoder(x, 22)
        responders = without(22, *np.random.default_rng(seed).choice(22, 4, replace=False))
        result = code.decode(smooth(code.encode(x))[responders], responders)
        expected += list(result.error[~result.exact])
        actual += list(np.sqrt(((result.values - smooth(x)) ** 2).mean(axis=1))[~result.exact])
    assert 0.4 < np.sqrt(np.mean(np.square(actual)) / np.mean(np.square(expected))) < 2.5
    assert np.corrcoef(np.argsort(np.argsort(expected)), np.argsort(np.argsort(actual)))[0, 1] > 0.3


@pytest.mark.parametrize("options", CODES, ids=str)
def test_torch_and_numpy_agree_for_any_trailing_shape(options: dict[str, Any]) -> None:
    x = np.random.default_rng(0).normal(size=(6, 2, 3, 4))
    code, same = fit_encoder(x, 9, **options), fit_encoder(torch.as_tensor(x), 9, **options)
    np.testing.assert_allclose(same.generator, code.generator, atol=1e-9)
    responders = [8, 1, 2, 4, 6]
    answers = np.sin(code.encode(x))[responders].sum(axis=2)
    mine, theirs = code.decode(answers, responders), code.decode(torch.as_tensor(answers), responders)
    assert mine.values.shape == (6, 2, 4) and isinstance(theirs.values, torch.Tensor)
    np.testing.assert_allclose(theirs.values.numpy(), mine.values, atol=1e-9)
    np.testing.assert_allclose(theirs.error, mine.error, atol=1e-9)


def test_single_precision_loses_single_precision_only() -> None:
    x = arc(16)
    responders = without(24, 2, 3, 11, 19)
    for options in CODES:
        code = fit_encoder(x, 24, **options)
        answers = smooth(code.encode(x))[responders]
        double = code.decode(answers, responders)
        single = code.decode(answers.astype(np.float32), responders)
        assert single.values.dtype == np.float32
        np.testing.assert_allclose(single.values, double.values, atol=2e-4)


def test_the_order_of_answers_and_a_list_of_them_change_nothing() -> None:
    x = arc(10)
    code = fit_encoder(x, 15)
    answers = smooth(code.encode(x))
    responders = without(15, 4, 7, 13)
    first = code.decode(answers[responders], responders)
    shuffled = responders[::-1]
    for again in (code.decode(answers[shuffled], shuffled), code.decode(list(answers[shuffled]), tuple(shuffled))):
        np.testing.assert_allclose(again.values, first.values, atol=1e-12)
        np.testing.assert_array_equal(again.exact, first.exact)
    scalars = code.decode([np.float64(1.0)] * 12, responders)
    assert scalars.values.shape == (10,) and np.allclose(scalars.values, 1.0)


def test_gradients_flow_through_a_code() -> None:
    x = torch.as_tensor(arc(6)).requires_grad_()
    code = fit_encoder(x, 9)
    responders = without(9, 0, 7)
    code.decode(torch.tanh(code.encode(x))[responders], responders).values.sum().backward()
    assert x.grad is not None and bool((x.grad[1:] != 0).all())


def test_decoding_matrices_are_computed_once_for_each_set_of_responders() -> None:
    x = arc(10)
    code = fit_encoder(x, 15)
    calls: list[tuple[int, ...]] = []
    fit = code.decoder.fit
    counted = Code(
        code.generator, type("Counted", (), {"fit": lambda _, r: calls.append(r) or fit(r)})(), code.alpha, code.beta
    )
    answers = smooth(code.encode(x))
    for missing in (1, 2, 1, 2, 1):
        responders = without(15, missing)
        counted.decode(answers[responders], responders)
        counted.decode(answers[responders[::-1]], responders[::-1])
    assert len(calls) == 2


@given(st.integers(2, 7), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_the_path_is_close_to_the_shortest(count: int, seed: int) -> None:
    x = np.random.default_rng(seed).normal(size=(count, 2))
    distances = np.sqrt(squared_distances(x @ x.T))

    def length(path: Any) -> float:
        return float(distances[list(path[:-1]), list(path[1:])].sum())

    path = shortest_path(distances)
    assert sorted(path) == list(range(count))
    assert length(path) <= 1.15 * min(length(path) for path in itertools.permutations(range(count))) + 1e-12


@pytest.mark.parametrize("order", [shortest_path, lambda distances: diffusion_order(distances**2)])
def test_both_orders_follow_a_curve(order: Any) -> None:
    x = arc(40, size=3)
    path = order(np.sqrt(squared_distances(x @ x.T)))
    t = x[path, 2]
    assert np.all(np.diff(t) > 0) or np.all(np.diff(t) < 0)


def test_many_workers_hold_points_again_and_leave_at_most_k_for_the_curve() -> None:
    x = arc(4)
    for workers, copies in ((4, 1), (5, 1), (8, 1), (9, 2), (12, 2), (13, 3)):
        code = fit_encoder(x, workers)
        coded = code.encode(x)
        np.testing.assert_array_equal(coded[: 4 * copies], np.tile(x, (copies, 1)))
        assert len(code.beta) == workers and not (code.generator[4 * copies :] == 1.0).any()
        late = code.decode(smooth(coded)[4:], range(4, workers)) if workers > 8 else None
        assert late is None or late.exact.all()


def test_parity_positions_bisect_the_largest_gaps() -> None:
    np.testing.assert_allclose(bisect_gaps(np.array([0.5, -1.0, 1.0]), 3), [-0.25, -0.625, 0.125])
    np.testing.assert_allclose(bisect_gaps(np.array([0.3]), 2), [0.3, 0.3])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"workers": 3}, "3 workers for 4 points"),
        ({"scheme": "uncoded"}, "`workers` must be 4, got 6"),
        ({"scheme": "lagrange"}, "`scheme` must be one of systematic"),
        ({"order": "random"}, "`order` must be one of path"),
        ({"kernel": "cubic"}, "`kernel` must be one of sobolev"),
        ({"decoder": "gp"}, "`decoder` must be one of inputs"),
        ({"decoder": "berrut"}, "goes with `scheme='berrut'`"),
        ({"scheme": "berrut", "decoder": "curve"}, "goes with `scheme='berrut'`"),
        ({"encoder_ridge": -1.0}, "`encoder_ridge` must be 'loo' or a number"),
        ({"decoder_ridge": "cv"}, "`decoder_ridge` must be 'loo' or a number"),
        ({"points": np.zeros((0, 3))}, "`points` is empty"),
        ({"points": np.array([[1.0], [np.nan], [2.0], [np.inf]])}, r"NaN or infinity in points \[1, 3\]"),
    ],
)
def test_what_cannot_be_encoded_is_said(change: dict[str, Any], message: str) -> None:
    options: dict[str, Any] = {"points": arc(4), "workers": 6} | change
    with pytest.raises(ValueError, match=message):
        fit_encoder(options.pop("points"), options.pop("workers"), **options)


@pytest.mark.parametrize("points", [[[1.0, 2.0]], np.array([1 + 2j]), np.array(["a", "b"]), np.array([True]), None])
def test_points_must_be_arrays_of_numbers(points: Any) -> None:
    with pytest.raises(TypeError, match="`points` must"):
        fit_encoder(points, 4)


def test_what_cannot_be_decoded_is_said() -> None:
    x = arc(4)
    code = fit_encoder(x, 6)
    answers = smooth(code.encode(x))
    broken = answers.copy()
    broken[1, 0], broken[4, 2] = np.nan, -np.inf
    ragged = [*answers[:3], answers[3][:2]]
    cases: list[tuple[Any, Any, str]] = [
        (answers[:0], [], "No worker has answered"),
        (answers[:2], [1, 1], "distinct workers from 0 to 5"),
        (answers[:2], [1, 6], "distinct workers from 0 to 5"),
        (answers[:2], [1, -1], "distinct workers from 0 to 5"),
        (answers[:3], [1, 2], "3 answers for 2 responders"),
        (list(answers[:3]), [1, 2], "3 answers for 2 responders"),
        (broken, None, "workers 1, 4 hold NaN or infinity"),
        (broken[1:], [5, 4, 3, 2, 0], "workers 5, 2 hold NaN or infinity"),
        (ragged, [0, 1, 2, 5], r"worker 5 has shape \(2,\), most others have \(3,\)"),
    ]
    for responses, responders, message in cases:
        with pytest.raises(ValueError, match=message):
            code.decode(responses, responders)
    with pytest.raises(ValueError, match="4 points along its first axis, got shape"):
        code.encode(x[:3])
    with pytest.raises(ValueError, match=r"NaN or infinity in points \[2\]"):
        code.encode(np.where(np.arange(4)[:, None] == 2, np.nan, x))
    with pytest.raises(TypeError, match="answer of worker 5"):
        code.decode([answers[0], "late"], [0, 5])


def test_large_finite_answers_are_not_taken_for_broken_ones() -> None:
    code = fit_encoder(arc(4), 6)
    huge = np.full((6, 8), 3e38, dtype=np.float32)  # their sum overflows
    np.testing.assert_array_equal(code.decode(huge).values, huge[:4])


@pytest.mark.parametrize("options", [{}, {"scheme": "spline", "decoder": "inputs"}], ids=str)
@pytest.mark.parametrize("lies", [1, 3])
def test_wrong_answers_are_set_aside(options: dict[str, Any], lies: int) -> None:
    for seed in range(10):
        rng = np.random.default_rng(seed)
        x = arc(16, seed)
        code = fit_encoder(x, 28, **options)
        answers = smooth(code.encode(x))
        responders = without(28, *rng.choice(28, 2, replace=False))
        liars = sorted(rng.choice(responders, lies, replace=False).tolist())
        forged = answers.copy()
        forged[liars] += rng.normal(0, 1.0, size=(lies, 3))
        result = code.decode(forged[responders], responders, wrong=3)
        assert result.wrong == tuple(liars)
        honest = [worker for worker in responders if worker not in liars]
        np.testing.assert_allclose(result.values, code.decode(answers[honest], honest).values, atol=1e-12)


@pytest.mark.parametrize("options", [{"scheme": "spline"}, {"decoder": "curve"}, {"scheme": "berrut"}], ids=str)
def test_decoders_on_the_curve_lose_most_of_the_harm(options: dict[str, Any]) -> None:
    errors = []
    for seed in range(20):
        rng = np.random.default_rng(seed)
        x = arc(16, seed)
        code = fit_encoder(x, 28, **options)
        forged = smooth(code.encode(x))
        forged[rng.choice(28, 2, replace=False)] += rng.normal(0, 1.0, size=(2, 3))
        results = (code.decode(forged, wrong=3), code.decode(forged))
        errors.append([np.sqrt(np.mean((result.values - smooth(x)) ** 2)) for result in results])
    robust, naive = np.median(errors, axis=0)
    assert robust < 0.1 * naive


def test_honest_answers_are_rarely_set_aside() -> None:
    aside = 0
    for seed in range(30):
        x = arc(16, seed)
        code = fit_encoder(x, 28)
        aside += len(code.decode(smooth(code.encode(x)), wrong=3).wrong)
    assert aside <= 0.01 * 30 * 28


def test_more_wrong_answers_than_the_others_can_outvote_are_refused() -> None:
    x = arc(4)
    code = fit_encoder(x, 8)
    answers = smooth(code.encode(x))
    with pytest.raises(ValueError, match=r"`wrong=3`: 8 answers can bear from 0 to 2"):
        code.decode(answers, wrong=3)
    with pytest.raises(ValueError, match="`wrong=-1`"):
        code.decode(answers, wrong=-1)
