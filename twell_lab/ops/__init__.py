"""The operations: each in a file of its own, with its kernels, its launch, its reference and its tolerance.

`functional` is the face, `dispatch` picks kernels for a layer, `train` is the layer with gradients."""
