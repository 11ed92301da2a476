"""The shuffled stream of prompts that dynamic sampling draws from."""

from collections.abc import Iterator
from itertools import islice
from typing import Any

import torch
from datasets import Dataset, IterableDataset


class PromptStream:
    """
    Endless stream of a training set: each epoch has every row once, in an order drawn from the seed and the epoch.

    A data loader hands out batches of a fixed size and reads ahead, so refills cannot be drawn from it. All processes
    hold the same stream and take their share of each draw.

    Args:
        dataset ([`~datasets.Dataset`] or [`~datasets.IterableDataset`]):
            Training set.
        seed (`int`):
            Seed of the orders.
        shuffle (`bool`):
            Whether to shuffle; an iterable dataset is shuffled through a buffer.
    """

    def __init__(self, dataset: Dataset | IterableDataset, seed: int, shuffle: bool) -> None:
        self.dataset, self.seed, self.shuffle = dataset, seed, shuffle
        self.epoch = 0
        self.position = 0  # rows taken in this epoch
        self._rows = self._rows_of_epoch()

    def take(self, count: int) -> list[dict[str, Any]]:
        """
        Takes the next rows, over the border of epochs if need be.

        Args:
            count (`int`):
                Number of rows.

        Returns:
            `list[dict]`

        Raises:
            `ValueError`: If the training set is empty.
        """
        rows: list[dict[str, Any]] = []
        while len(rows) < count:
            found = list(islice(self._rows, count - len(rows)))
            rows += found
            self.position += len(found)
            if len(rows) < count:
                if self.position == 0:
                    raise ValueError("train_dataset is empty: there is no prompt to sample.")
                self.epoch, self.position = self.epoch + 1, 0
                self._rows = self._rows_of_epoch()
        return rows

    def _rows_of_epoch(self) -> Iterator[dict[str, Any]]:
        dataset, seed = self.dataset, self.seed + self.epoch
        if isinstance(dataset, IterableDataset):
            return islice(iter(dataset.shuffle(seed=seed) if self.shuffle else dataset), self.position, None)
        order = list(range(len(dataset)))
        if self.shuffle:
            order = torch.randperm(len(dataset), generator=torch.Generator().manual_seed(seed)).tolist()
        return (dataset[index] for index in order[self.position :])

    def state_dict(self) -> dict[str, int]:
        """Position, as plain JSON types."""
        return {"epoch": self.epoch, "position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Goes to a saved position. A streamed dataset is read again up to there."""
        self.epoch, self.position = int(state["epoch"]), int(state["position"])
        self._rows = self._rows_of_epoch()
