"""The operations: each in a file of its own, with its kernels, its launch, its reference and its tolerance.

`functional` is the face, `dispatch` picks kernels for a layer, `train` is the layer with gradients. An operation is
written for a `cuda.launch.Call`: what it takes without an annotation is a Buffer, in a reference a Tensor, or None
where the text says so. What public functions check is not checked again."""
