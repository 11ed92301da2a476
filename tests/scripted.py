"""Completions that depend on nothing but the prompt and the step, so that a run can be computed by hand.

`Script` stands in for the model's sampling (TRL's `rollout_func`): completion j of the group of prompt i at step t has
a length and a reward that are functions of (seed, i, t, j).
"""

import random
from typing import Any

from datasets import Dataset

EOS, EVEN, ODD = 1, 3, 4  # "w0" is even, "w1" is odd, see tests/tiny.py


def numbered_prompts(count: int) -> Dataset:
    return Dataset.from_dict({"prompt": [f"w{i % 29} w{i // 29}" for i in range(count)], "index": list(range(count))})


def prompt_index(prompt: str) -> int:
    first, second = prompt.split()
    return int(first[1:]) + 29 * int(second[1:])


def outcome(seed: int, index: int, step: int, j: int) -> tuple[int, float]:
    """Length and reward of completion j of a prompt's group, at an optimizer step."""
    draw = random.Random(f"{seed}/{index}/{step}")
    success = draw.choice([0.0, 0.0, 0.5, 1.0])  # half of the prompts are hopeless
    mine = random.Random(f"{seed}/{index}/{step}/{j}")
    return 2 + int(mine.expovariate(0.2)) % 18, float(mine.random() < success)


class Script:
    """A rollout function. On several processes each has its own: whole groups live on one process."""

    def __init__(self, seed: int = 0) -> None:
        self.seed = seed
        self.sampled: list[int] = []

    def __call__(self, prompts: list[str], trainer: Any) -> dict[str, Any]:
        indices = [prompt_index(prompt) for prompt in prompts]
        size = trainer.num_generations
        lengths, rewards = [], []
        for start in range(0, len(indices), size):
            index = indices[start]
            assert indices[start : start + size] == [index] * size, "groups are whole"
            self.sampled.append(index)
            for j in range(size):
                length, reward = outcome(self.seed, index, trainer.state.global_step, j)
                lengths.append(length)
                rewards.append(reward)
        ids = [
            [EVEN if reward else ODD] * (length - 1) + [EOS] for length, reward in zip(lengths, rewards, strict=True)
        ]
        return {
            "prompt_ids": [[3 + i % 29, 3 + i // 29] for i in indices],
            "completion_ids": ids,
            "logprobs": [[-1.0] * len(row) for row in ids],
            "scripted_reward": rewards,
        }


def scripted_reward(completions: list[str], scripted_reward: list[float], **_: Any) -> list[float]:
    return scripted_reward
