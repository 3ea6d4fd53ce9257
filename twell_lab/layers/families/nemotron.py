"""Nemotron, Arcee and this course's plain layers, which have Llama's names without a gate; MPT, which adds the residual
in its layer."""

from .family import Family

FAMILIES = (
    Family("Nemotron", up="up_proj", down="down_proj", activation="act_fn"),
    Family("MPT", up="up_proj", down="down_proj", activation="act", inside=True, residual=True),
)
