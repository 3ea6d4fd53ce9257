"""The other kinds of sparsity, one file each: of weights, 2:4, blocks, predictors, adapters, dropout.

May import training and all below."""
