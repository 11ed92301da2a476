"""SAGC: group sizes for GRPO chosen online under a long-term budget on straggler events.

Importing this package needs numpy, scipy and cvxpy only. `sagc.controller` holds the control law.
"""

from .controller import ControllerConfig, ControllerState, Decision, GroupSizeController, choose_group_size, default_v
from .events import StragglerEvent, straggler_events
from .oracle import convex_group_size, hindsight_optimum
from .risk import risk_curve, risk_curves
from .utility import mixed_reward_curves

__all__ = [
    "ControllerConfig",
    "ControllerState",
    "Decision",
    "GroupSizeController",
    "StragglerEvent",
    "choose_group_size",
    "convex_group_size",
    "default_v",
    "hindsight_optimum",
    "mixed_reward_curves",
    "risk_curve",
    "risk_curves",
    "straggler_events",
]
