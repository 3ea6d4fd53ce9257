"""Phi-3, GLM-4 and Dia, where one projection computes gate and up; under other names ModernBERT and Granite's shared
experts."""

from .family import Family

FAMILIES = (
    Family("Phi-3", gate="gate_up_proj", up="gate_up_proj", down="down_proj", activation="activation_fn"),
    Family("ModernBERT", gate="Wi", up="Wi", down="Wo", activation="act", dropout="drop"),
    Family("Granite MoE", gate="input_linear", up="input_linear", down="output_linear", activation="activation"),
)
