"""TRL trainers that do not wait for stragglers."""

from .dapo_config import SAGCDAPOConfig
from .dapo_trainer import SAGCDAPOTrainer
from .sagc_config import SAGCArguments, SAGCConfig, SAGCRLOOConfig
from .sagc_trainer import SAGCGRPOTrainer, SAGCMixin, SAGCRLOOTrainer

__all__ = [
    "SAGCArguments",
    "SAGCConfig",
    "SAGCDAPOConfig",
    "SAGCDAPOTrainer",
    "SAGCGRPOTrainer",
    "SAGCMixin",
    "SAGCRLOOConfig",
    "SAGCRLOOTrainer",
]
