"""BERT and those built like it, whose parts lie in two modules of the layer: intermediate, and output, which also drops
out, adds the residual and normalises; ALBERT and DistilBERT."""

from .family import Family

FAMILIES = (
    Family(
        "BERT",
        up="intermediate.dense",
        down="output.dense",
        activation="intermediate.intermediate_act_fn",
        inside=True,
    ),
    Family("ALBERT", up="ffn", down="ffn_output", activation="activation", inside=True),
    Family("DistilBERT", up="lin1", down="lin2", activation="activation", inside=True),
)
