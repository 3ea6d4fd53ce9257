"""T5 and its kin, plain (ReLU in the first release) and gated, with a dropout before the down projection."""

from .family import Family

FAMILIES = (
    Family("gated T5", gate="wi_0", up="wi_1", down="wo", activation="act", dropout="dropout"),
    Family("T5", up="wi", down="wo", activation="act", dropout="dropout"),
)
