"""Settings of every test process, made before transformers, wandb or tokenizers are imported."""

import os

# No test reaches a network: models come from the embedded file, and no run is reported anywhere.
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("WANDB_MODE", "disabled")
# The tokenizers' threads deadlock when worker processes are forked after first use.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
