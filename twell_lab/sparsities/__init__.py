"""The other kinds of sparsity, one file a method: of weights (magnitude, weights, blocks, two_four, two_four_training;
of fewer bits in quantised and int8), of tokens and activations (microtiles, padding, experts, predictors, few_neurons,
kept_inputs), and what changes few weights (adapters). May import training and all below."""

from ..layers.paths import PATHS

# What of them is a path through a feed-forward layer: its name, and the file and class here that has it.
_PATHS = {
    "two_four": "two_four.TwoFour",
    "blocks": "blocks.Blocks",
    "int8": "int8.Int8",
    "fp8": "quantised.Fp8",
    "twell_int8": "int8.TwellInt8",
    "kept_inputs": "kept_inputs.KeptInputs",
}
PATHS.further |= {name: f"{__name__}.{place}" for name, place in _PATHS.items()}
