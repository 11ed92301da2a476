"""General coded computing: f at K points from N workers, without waiting for the slowest."""

from .code import Code, Decoded
from .encoders import fit_encoder
from .stragglers import first_responders, independent_stragglers, random_stragglers, worst_case_stragglers

__all__ = [
    "Code",
    "Decoded",
    "first_responders",
    "fit_encoder",
    "independent_stragglers",
    "random_stragglers",
    "worst_case_stragglers",
]
