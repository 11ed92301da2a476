"""Colocated vLLM that tells when each completion was finished, and can stop those that are not needed.

TRL calls `LLM.generate` and keeps the tokens only. [`rollout_engine`] makes the trainer that is built inside it use a
subclass of `vllm.LLM` whose `generate` watches the engine's steps: a request's time is that of the step in which it
ended. Works on GPUs and, together with `trainers.vllm_cpu.colocated_on_cpu`, on CPUs.

What is touched of TRL 1.16: the name `LLM` in `trl.generation.vllm_generation`, exchanged while a trainer is built.
Of vLLM 0.32: `LLM.generate`, `LLM.request_counter` (requests of one call have consecutive numbers), `LLM.llm_engine`
with `step` and `abort_request`, and `RequestOutput.request_id` and `finished`; for the tokens of stopped requests,
`output_processor.external_req_ids` and `request_states` of the engine, and `RequestState.make_request_output`.
"""

import importlib.util
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from trl.generation import vllm_generation

from .sagc_config import SAGCArguments


class WatchedGeneration:
    """
    Mixin for `vllm.LLM` that watches the engine's steps during `generate`.

    Attributes:
        keep_first (`tuple[int, int]`, *optional*):
            Rows of each group in the coming calls and how many of them are needed: the others are stopped as soon as
            these have finished. `None` finishes all.
        finish_seconds (`list[float]`):
            Seconds from the start of the latest call to the end of each request; NaN for one that was stopped.
    """

    keep_first: tuple[int, int] | None = None
    finish_seconds: list[float]

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
            `list[RequestOutput]`: one for each prompt, in their order. That of a stopped request holds the tokens that
            it had by then.

        Raises:
            `ValueError`: If the prompts are not whole groups.
        """
        if self.keep_first is not None and len(prompts) % self.keep_first[0]:
            raise ValueError(f"keep_first={self.keep_first} needs whole groups, got {len(prompts)} prompts.")
        engine, step = self.llm_engine, self.llm_engine.step
        first, start = self.request_counter.counter, time.perf_counter()
        seconds: dict[int, float] = {}
        stopped: dict[int, Any] = {}

        def watched_step() -> list[Any]:
            outputs: list[Any] = step()
            now = time.perf_counter() - start
            for output in outputs:
                if output.finished:
                    seconds[int(output.request_id) - first] = now
            surplus = _surplus({*seconds}, {*stopped}, len(prompts), *self.keep_first) if self.keep_first else []
            if surplus:
                stopped.update({index: _so_far(engine, str(first + index)) for index in surplus})
                engine.abort_request([str(first + index) for index in surplus])
            return outputs

        engine.step = watched_step
        try:
            outputs: list[Any] = super().generate(prompts, *args, **kwargs)  # type: ignore[misc]
        except BaseException:  # Ctrl-C too: what still runs would turn up among the outputs of the next call
            engine.abort_request([str(first + index) for index in range(len(prompts))])
            raise
        finally:
            del engine.step
        self.finish_seconds = [seconds.get(index, float("nan")) for index in range(len(prompts))]
        return sorted([*outputs, *stopped.values()], key=lambda output: int(output.request_id))


def _surplus(finished: set[int], stopped: set[int], rows: int, sampled: int, kept: int) -> list[int]:
    """Running requests of groups that have enough."""
    surplus: list[int] = []
    for start in range(0, rows, sampled):
        group = {*range(start, start + sampled)}
        if len(group & finished) >= kept:
            surplus += sorted(group - finished - stopped)
    return surplus


def _so_far(engine: Any, request_id: str) -> Any:
    """The output of a running request, as vLLM makes it for one that is aborted on a server."""
    from vllm.v1.engine import FinishReason

    processor = engine.output_processor
    (internal_id,) = processor.external_req_ids[request_id]
    return processor.request_states[internal_id].make_request_output(
        new_token_ids=[], pooling_output=None, finish_reason=FinishReason.ABORT, stop_reason=None
    )


def rollout_llm(**options: Any) -> Any:
    """
    A `vllm.LLM` that watches its generation.

    Args:
        **options:
            Arguments of `vllm.LLM`.

    Returns:
        `vllm.LLM` with [`WatchedGeneration`].
    """
    from vllm import LLM

    return type("RolloutLLM", (WatchedGeneration, LLM), {})(**options)


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
