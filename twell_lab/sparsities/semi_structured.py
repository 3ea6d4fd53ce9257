"""Products of 2:4 weights by torch's kernels (CUTLASS, cuSPARSELt), on GPUs from sm_80 on.

sparse = packed(prune_two_four(linear).weight)    # torch's 2:4 tensor; it is left as it was
y = product(x, sparse, linear.bias)               # under torch.no_grad(): it has no gradient
tl.sparsify(model, "two_four")                    # as a path of feed-forward layers whose weights are 2:4"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ..core import DeviceError, InputError
from ..formats.matrix import dtype_names
from ..ops import checks
from .checks import check_count, check_gpu, refusals
from .products import Product, Products
from .two_four import check_two_four

OLDEST = (8, 0)  # compute capability
DTYPES = (torch.float16, torch.bfloat16)  # of torch's: float32 would be 1:2, int8 is no weight that trains
_CUSPARSELT = torch.sparse.SparseSemiStructuredTensorCUSPARSELT
# torch's class of each backend, and of what rows and columns are to be multiples.
BACKENDS: dict[str, tuple[Any, tuple[int, int]]] = {
    "cutlass": (torch.sparse.SparseSemiStructuredTensorCUTLASS, (32, 64)),
    "cusparselt": (_CUSPARSELT, (16, 16)),
}


def usual_backend() -> str:
    """Return "cusparselt" where this build of torch has it, "cutlass" elsewhere."""
    return "cusparselt" if torch.backends.cusparselt.is_available() else "cutlass"


def tensor_kind(shape: Sequence[int], dtype: torch.dtype, device: torch.device, backend: str | None = None) -> Any:
    """Return torch's class of 2:4 tensors of a backend, for a weight (out, in) like this one. InputError for another
    backend than "cutlass" and "cusparselt", and for dtypes and shapes that it does not take; DeviceError for a CPU, a
    GPU before sm_80, and where this build of torch has no such backend."""
    backend = backend or usual_backend()
    if backend not in BACKENDS:
        raise InputError(f"backend is {backend!r:.80}; accepted: {', '.join(map(repr, BACKENDS))}")
    check_gpu("the weight", device, OLDEST, "2:4 products")
    kind, by = BACKENDS[backend]
    if dtype not in DTYPES or len(shape) != 2 or any(n % step or not n for n, step in zip(shape, by)):
        raise InputError(
            f"the weight holds {dtype} {[*shape]}; {backend} accepts {dtype_names(DTYPES)}, multiples of {by[0]} rows "
            f"and {by[1]} columns"
        )
    if backend == "cusparselt" and not torch.backends.cusparselt.is_available():
        raise DeviceError("this build of torch has no cuSPARSELt; backend='cutlass' is accepted")
    return kind


def product(x: Tensor, sparse: Any, bias: Tensor | None = None) -> Tensor:
    """Return y = x W^T + b with torch's 2:4 tensor W [out, in], as torch.nn.functional.linear gives it, of x [..., in].

    cuSPARSELt's product is called at once, so that y is written as it is wanted and not as y^T; torch's own way is
    taken with CUTLASS, and where something watches or changes operations. InputError for another sparse, x or bias,
    where one of them needs a gradient, and under autocast to another dtype."""
    if not isinstance(sparse, torch.sparse.SparseSemiStructuredTensor):
        raise InputError(f"sparse is a {type(sparse).__name__}; a 2:4 tensor of torch is accepted")
    if checks.needs_gradient(x, bias):
        raise InputError("x or bias needs a gradient, which this product does not have; torch.no_grad() is accepted")
    device = sparse.device.type
    if torch.is_autocast_enabled(device) and (cast := torch.get_autocast_dtype(device)) != sparse.dtype:
        raise InputError(f"autocast is to {cast}, and the weight holds {sparse.dtype}; autocast to that is accepted")
    watched = checks.watched(x, bias) or not checks.plain_eager()
    if watched or type(sparse) is not _CUSPARSELT or sparse.packed_t is not None:
        return F.linear(x, sparse, bias)
    out, inner = sparse.shape
    rows = x.reshape(-1, x.shape[-1]).contiguous()  # torch takes its strides for those of whole rows
    checks.check_tensor("x", rows, shape=(None, inner), dtype=sparse.dtype, device=sparse.device)
    if bias is not None:
        checks.check_tensor("bias", bias, shape=(out,), dtype=sparse.dtype, device=sparse.device)
    if not len(rows):
        return x.new_empty(*x.shape[:-1], out)
    missing = -len(rows) % _CUSPARSELT._DTYPE_SHAPE_CONSTRAINTS[x.dtype].dense_min_rows
    if missing:
        rows = F.pad(rows, (0, 0, 0, missing))
    elif rows.data_ptr() % 16:
        rows = rows.clone()
    how = {"bias": bias, "transpose_result": True, "alg_id": sparse.alg_id_cusparselt}
    y = torch._cslt_sparse_mm(sparse.packed, rows.t(), **how)
    return (y[:-missing] if missing else y).view(*x.shape[:-1], out)


@torch.no_grad()
def packed(weight: Tensor, backend: str | None = None) -> Any:
    """Return a 2:4 weight [out, in] on a GPU as torch's tensor, once it multiplied a row. backend: "cutlass" or
    "cusparselt"; None takes cuSPARSELt where torch has it. InputError for another weight; errors as `tensor_kind`."""
    backend, weight = backend or usual_backend(), weight.detach()
    kind = tensor_kind(weight.shape, weight.dtype, weight.device, backend)
    check_two_four(weight)
    with refusals(f"torch's {backend}"):
        sparse = kind.from_dense(weight.contiguous())
        product(weight.new_zeros(1, weight.shape[1]), sparse)
    return sparse


def searched(sparse: Any, tokens: int) -> Any:
    """Return the given tensor of cuSPARSELt [out, in], made fit for y = x W^T of about so many tokens: with the fastest
    algorithm (0.13 ms for 0.22 on an H100, 4,096 in each direction), and so that y is written as it is wanted. It is
    not done unasked, because it can end a process: with torch 2.11 one algorithm was an illegal instruction.
    InputError for another tensor or number."""
    check_count("tokens", tokens)
    if not isinstance(sparse, _CUSPARSELT):
        raise InputError(f"sparse is a {type(sparse).__name__}; a 2:4 tensor of cuSPARSELt is accepted")
    sparse.fuse_transpose_cusparselt = True  # torch's newer releases always do
    x = torch.zeros(tokens + -tokens % 16, sparse.shape[1], dtype=sparse.dtype, device=sparse.device)
    sparse.alg_id_cusparselt = torch._cslt_sparse_mm_search(sparse.packed, x.t(), transpose_result=True)
    return sparse


class TwoFour(Products):
    """Torch's 2:4 products for each projection that is 2:4 and that they take, dense ones for the others. Exact. GPUs
    from sm_80 on. The layer owns the kept values, 56% of the weights' bytes."""

    name = "two_four"
    patterned = True

    def product(self, weight: Tensor) -> Product:
        return partial(product, sparse=packed(weight))
