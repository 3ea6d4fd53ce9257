"""The other kinds of sparsity, one file each; none is here yet. May import training and all below."""
