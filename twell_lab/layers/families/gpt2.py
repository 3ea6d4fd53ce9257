"""GPT-2, whose Conv1D stores its weight transposed; GPT-Neo, GPT-BigCode and StarCoder2, which have its names with
plain projections; GPT-J and CodeGen. Each drops out after the down projection."""

from .family import Family

FAMILIES = (
    Family("GPT-2", up="c_fc", down="c_proj", activation="act", inside=True),
    Family("GPT-J", up="fc_in", down="fc_out", activation="act", inside=True),
)
