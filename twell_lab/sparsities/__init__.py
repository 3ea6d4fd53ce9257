"""The other kinds of sparsity, one file a method: of weights (magnitude, weights, prune, blocks, two_four with
semi_structured and two_four_training; fewer bits in quantised, int8, fp8 and twell_int8), of tokens and activations
(microtiles, padding, experts, neuron_experts, predictors, core_neurons, predicted, kept_inputs), and what changes few
weights or drops them (adapters, dropout).

May import training and all below."""

from ..layers.paths import PATHS

# What of them is a path through a feed-forward layer: its name, and the file here that has it.
_PATHS = {
    "two_four": "semi_structured",
    "blocks": "blocks",
    "int8": "int8",
    "fp8": "fp8",
    "twell_int8": "twell_int8",
    "predicted": "predicted",
    "experts": "neuron_experts",
    "kept_inputs": "kept_inputs",
}
PATHS.further |= {name: f"{__name__}.{file}" for name, file in _PATHS.items()}
