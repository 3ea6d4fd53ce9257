"""ViT and other image and speech encoders: most have OPT's names, some others."""

from .family import Family

FAMILIES = (
    Family("SAM", up="lin1", down="lin2", activation="act", inside=True),
    Family("Qwen-VL", up="linear_fc1", down="linear_fc2", activation="act_fn", inside=True),
    Family("Wav2Vec2", up="intermediate_dense", down="output_dense", activation="intermediate_act_fn", inside=True),
)
