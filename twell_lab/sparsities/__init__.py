"""The other kinds of sparsity, one file a method: of weights (magnitude, weights, prune, blocks, two_four with
semi_structured and two_four_training; fewer bits in quantised, int8, fp8 and twell_int8), of tokens and activations
(microtiles, padding, experts, neuron_experts, predictors, core_neurons, predicted, kept_inputs), and what changes few
weights or drops them (adapters, dropout).

May import training and all below."""

from ..layers.paths import PATHS

# What of them is a path through a feed-forward layer: its name, and the file and class here that has it.
_PATHS = {
    "two_four": "semi_structured.TwoFour",
    "blocks": "blocks.Blocks",
    "int8": "int8.Int8",
    "fp8": "fp8.Fp8",
    "twell_int8": "twell_int8.TwellInt8",
    "predicted": "predicted.Predicted",
    "experts": "neuron_experts.AsExperts",
    "kept_inputs": "kept_inputs.KeptInputs",
}
PATHS.further |= {name: f"{__name__}.{place}" for name, place in _PATHS.items()}
