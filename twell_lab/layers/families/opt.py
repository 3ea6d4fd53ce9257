"""OPT and BART, whose decoder layer holds the parts beside its attention; Phi and CLIP, which have the same names in a
module of their own."""

from .family import Family

FAMILIES = (Family("OPT", up="fc1", down="fc2", activation="activation_fn", inside=True),)
