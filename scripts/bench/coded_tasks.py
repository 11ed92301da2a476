"""Data and functions for the benchmarks of coded computing; images come inside scikit-learn and scikit-image.

A task is a function to be computed by workers, a way to draw K data points, and a seed: groups of different seeds are
different draws. `selection` groups served to choose the variants and constants of `coded.gcc`; figures are reported on
`report` groups, which are drawn from other images.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.ndimage import rotate
from skimage.data import lfw_subset
from sklearn.datasets import load_digits, load_sample_image
from sklearn.neural_network import MLPClassifier

Split = Literal["selection", "report"]
Function = Callable[[np.ndarray], np.ndarray]
TRAINING_DIGITS = 900


@dataclass(frozen=True)
class Task:
    """f on groups of points: `draw(K, seed, split)` returns points of shape `(K, size)`."""

    name: str
    function: Function
    draw: Callable[[int, int, Split], np.ndarray]


def network(classifier: MLPClassifier) -> Function:
    """The logits of a trained network (ReLU), without its softmax."""

    def forward(x: np.ndarray) -> np.ndarray:
        layers = list(zip(classifier.coefs_, classifier.intercepts_, strict=True))
        for index, (weights, bias) in enumerate(layers):
            x = x @ weights + bias
            if index < len(layers) - 1:
                x = np.maximum(x, 0.0)
        return x

    return forward


def polynomial(size: int, outputs: int = 10, degree: int = 3) -> Function:
    """A random polynomial in `size` variables: outputs of degree 1 to `degree`, each a product of linear forms."""
    rng = np.random.default_rng(size)
    forms = rng.normal(size=(degree, size, outputs)) / np.sqrt(size)

    def evaluate(x: np.ndarray) -> np.ndarray:
        terms = np.cumprod(x[None] @ forms, axis=0)
        return terms.sum(axis=0)

    return evaluate


def _generator(name: str, seed: int, split: Split) -> np.random.Generator:
    return np.random.default_rng([sum(name.encode()), seed, 2 if split == "report" else 0])


def _half(count: int, split: Split) -> np.ndarray:
    """Indices of the half of the images that belongs to the split."""
    return np.arange(count)[split == "report" :: 2]


def digit_tasks() -> list[Task]:
    """Two functions on three kinds of groups: any digits, one digit, one image at many angles (a true manifold)."""
    images, labels = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(images))
    images, labels = images[order] / 16.0, labels[order]
    classifier = MLPClassifier((64, 64), max_iter=300, random_state=0)
    classifier.fit(images[:TRAINING_DIGITS], labels[:TRAINING_DIGITS])
    images, labels = images[TRAINING_DIGITS:], labels[TRAINING_DIGITS:]

    def mixed(count: int, seed: int, split: Split) -> np.ndarray:
        return images[_generator("mixed", seed, split).choice(_half(len(images), split), count, replace=False)]

    def one_class(count: int, seed: int, split: Split) -> np.ndarray:
        rng = _generator("class", seed, split)
        half = _half(len(images), split)
        same = half[labels[half] == rng.integers(10)]
        return images[rng.choice(same, count, replace=False)]

    def rotated(count: int, seed: int, split: Split) -> np.ndarray:
        rng = _generator("rotated", seed, split)
        image = images[rng.choice(_half(len(images), split))].reshape(8, 8)
        angles = rng.uniform(-90, 90, count)
        return np.stack([rotate(image, angle, reshape=False, order=1).ravel() for angle in angles])

    functions = {"network": network(classifier), "polynomial": polynomial(64)}
    draws = {"digits": mixed, "one digit": one_class, "rotated digit": rotated}
    return [Task(f"{f}, {d}", functions[f], draws[d]) for f in functions for d in draws]


def face_tasks() -> list[Task]:
    """Faces of the LFW subset (25 x 25): a network that tells faces from other patches, and a polynomial."""
    patches = lfw_subset().reshape(200, -1).astype(np.float64)
    is_face = np.arange(200) < 100
    classifier = MLPClassifier((64,), max_iter=300, random_state=0).fit(patches[::2], is_face[::2])
    faces = patches[1:100:2]

    def draw(count: int, seed: int, split: Split) -> np.ndarray:
        return faces[_generator("faces", seed, split).choice(_half(len(faces), split), count, replace=False)]

    functions = {"network": network(classifier), "polynomial": polynomial(625)}
    return [Task(f"{name}, faces", function, draw) for name, function in functions.items()]


def window_tasks() -> list[Task]:
    """A 24 x 24 window that moves over a photograph in small random steps, seen in random order; both functions."""
    photographs = [load_sample_image(name).mean(axis=2) / 255.0 for name in ("china.jpg", "flower.jpg")]

    def draw(count: int, seed: int, split: Split) -> np.ndarray:
        rng = _generator("window", seed, split)
        photograph = photographs[split == "report"]
        steps = rng.integers(-3, 4, size=(count, 2)).cumsum(axis=0)
        corner = rng.integers(100, np.array(photograph.shape) - 124) + steps
        corner = np.clip(corner, 0, np.array(photograph.shape) - 24)
        return np.stack([photograph[r : r + 24, c : c + 24].ravel() for r, c in rng.permutation(corner)])

    rng = np.random.default_rng(0)
    first, second = rng.normal(size=(576, 64)) / 24, rng.normal(size=(64, 10)) / 8
    functions: dict[str, Function] = {
        "random network": lambda x: np.maximum((x - 0.5) @ first * 4, 0) @ second,
        "polynomial": polynomial(576),
    }
    return [Task(f"{name}, moving window", function, draw) for name, function in functions.items()]


def all_tasks() -> list[Task]:
    """Every task, network inference first."""
    tasks = [*digit_tasks(), *face_tasks(), *window_tasks()]
    return sorted(tasks, key=lambda task: "polynomial" in task.name)


def relative_error(estimate: np.ndarray, truth: np.ndarray) -> float:
    """Mean squared error over all K outputs, in units of their variance within the group."""
    return float(np.mean((estimate - truth) ** 2) / np.mean((truth - truth.mean(axis=0)) ** 2))
