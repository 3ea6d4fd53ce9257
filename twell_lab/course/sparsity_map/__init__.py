"""The notebook on other sparsities: patterns of zeros in weights, what they cost a model, and what they gain."""
