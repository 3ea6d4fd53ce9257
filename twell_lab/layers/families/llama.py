"""Llama and the many that copied its layer: Mistral, Qwen, Gemma, OLMo, Granite, ...; dense and shared experts too."""

from .family import Family

FAMILIES = (
    Family("Llama", gate="gate_proj", up="up_proj", down="down_proj", activation="act_fn"),
    Family("Llama 4", gate="gate_proj", up="up_proj", down="down_proj", activation="activation_fn"),
)
