"""The other kinds of sparsity, one file each: of weights, 2:4, blocks. May import training and all below."""
