"""The other kinds of sparsity, one file each: of weights, 2:4, blocks, micro-tiles, experts.

May import training and all below."""
