"""Colocated vLLM that tells when each completion was finished, and can stop those that are not needed.

TRL calls `LLM.generate` and keeps the tokens only. [`rollout_engine`] makes the trainer that is built inside it use a
subclass of `vllm.LLM` whose `generate` watches the engine's steps: a request's time is that of the step in which it
ended. Works on GPUs and, together with `trainers.vllm_cpu.colocated_on_cpu`, on CPUs.

What is touched of TRL 1.16: the name `LLM` in `trl.generation.vllm_generation`, exchanged while a trainer is built.
Of vLLM 0.32: `LLM.generate`, `LLM.request_counter` (requests of one call have consecutive numbers), `LLM.llm_engine`
with `step` and `abort_request`, and `RequestOutput.request_id` and `finished`.
"""

import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trl.generation import vllm_generation

from .sagc_config import SAGCArguments


class WatchedGeneration:
    """Mixin for `vllm.LLM` that watches the engine's steps during `generate`."""

    keep_first: tuple[int, int] | None = None
    """Rows of each group in the coming calls and how many of them are needed; `None` finishes all."""
    finish_seconds: list[float]
    """Seconds from the start of the latest call to the end of each request; NaN for one that was stopped."""

    request_counter: Any
    llm_engine: Any

    def generate(self, prompts: list[Any], *args: Any, **kwargs: Any) -> list[Any]:
        """
        Generates as `vllm.LLM.generate` does.

        Args:
            prompts (`list`):
                Prompts; with `keep_first` consecutive groups of rows.
            *args, **kwargs:
                Passed on to `vllm.LLM.generate`.

        Returns:
            `list[RequestOutput]`: one for each prompt. In the place of a stopped one is another of its group.
        """
        engine, step = self.llm_engine, self.llm_engine.step
        first, start = self.request_counter.counter, time.perf_counter()
        seconds = [float("nan")] * len(prompts)
        finished: dict[int, Any] = {}
        stopped: set[int] = set()

        def watched_step() -> list[Any]:
            outputs: list[Any] = step()
            now = time.perf_counter() - start
            for output in outputs:
                index = int(output.request_id) - first
                if output.finished and seconds[index] != seconds[index]:
                    seconds[index], finished[index] = now, output
            if self.keep_first is not None:
                surplus = _surplus(finished, stopped, len(prompts), *self.keep_first)
                stopped.update(surplus)
                if surplus:
                    engine.abort_request([str(first + index) for index in surplus])
            return outputs

        engine.step = watched_step
        try:
            outputs: list[Any] = super().generate(prompts, *args, **kwargs)  # type: ignore[misc]
        finally:
            del engine.step
        for index in stopped:
            seconds[index] = float("nan")
        self.finish_seconds = seconds
        if not stopped:
            return outputs
        sampled = self.keep_first[0] if self.keep_first else 1
        kept = {index: output for index, output in finished.items() if index not in stopped}
        stand_in = {index // sampled: output for index, output in kept.items()}
        return [kept.get(index, stand_in[index // sampled]) for index in range(len(prompts))]


def _surplus(finished: dict[int, Any], stopped: set[int], rows: int, sampled: int, kept: int) -> list[int]:
    """Running requests of groups that have enough."""
    surplus = []
    for start in range(0, rows, sampled):
        group = range(start, start + sampled)
        if sum(index in finished for index in group) >= kept:
            surplus += [index for index in group if index not in finished and index not in stopped]
    return surplus


@contextmanager
def rollout_engine(args: SAGCArguments) -> Iterator[None]:
    """
    Makes a trainer that is built inside this context, with colocated vLLM, use an engine that is watched.

    Does nothing unless `args` asks for colocated vLLM, so a trainer may use it always. The engine also takes
    `vllm_enable_prefix_caching`, and room for the `extra_rollouts` that TRL does not know of.

    Args:
        args ([`SAGCArguments`]):
            The trainer's configuration.
    """
    if not (args.use_vllm and args.vllm_mode == "colocate") or importlib.util.find_spec("vllm") is None:
        yield  # without vLLM, TRL says what to install
        return
    from vllm import LLM

    rollout_llm = type("RolloutLLM", (WatchedGeneration, LLM), {})

    def build(**options: Any) -> Any:
        if args.vllm_enable_prefix_caching is not None:
            options["enable_prefix_caching"] = args.vllm_enable_prefix_caching
        extra = args.prompts_per_process * args.vllm_tensor_parallel_size * args.extra_rollouts
        return rollout_llm(**{**options, "max_num_seqs": options["max_num_seqs"] + extra})

    original = vllm_generation.LLM
    vllm_generation.LLM = build
    try:
        yield
    finally:
        vllm_generation.LLM = original
