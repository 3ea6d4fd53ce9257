"""The other kinds of sparsity, one file a method: of weights (weights, two_four, two_four_training, blocks;
quantised: fewer bits), of tokens and activations (microtiles, experts, predictors, kept_inputs), and what changes few
weights or drops them (adapters, dropout).

May import training and all below."""

from ..layers.paths import PATHS

# What of them is a path through a feed-forward layer: its name, and the file here that has it.
_PATHS = {
    "two_four": "two_four",
    "blocks": "blocks",
    "int8": "quantised",
    "fp8": "quantised",
    "twell_int8": "quantised",
    "predicted": "predictors",
    "experts": "experts",
    "kept_inputs": "kept_inputs",
}
PATHS.further |= {name: f"{__name__}.{file}" for name, file in _PATHS.items()}
