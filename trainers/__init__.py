"""TRL trainers that do not wait for stragglers."""

from .sagc_config import SAGCConfig
from .sagc_trainer import SAGCGRPOTrainer, SAGCMixin

__all__ = ["SAGCConfig", "SAGCGRPOTrainer", "SAGCMixin"]
