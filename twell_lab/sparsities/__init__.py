"""The other kinds of sparsity, one file a method: of weights (weights, two_four, blocks), of tokens and activations
(microtiles, experts, predictors), and what changes few weights or drops them (adapters, dropout).

May import training and all below."""
