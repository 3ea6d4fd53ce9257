"""2:4: of each four neighbouring weights of a row at most two are not zero, which tensor cores from sm_80 on skip.

    prune(model, mask=two_four_mask)    # weights.prune: the two largest of each four stay, and train on
    model = to_linears(model)
    fast = to_semi_structured(layer)    # a layer with torch's 2:4 tensor and its kernels (CUTLASS, cuSPARSELt)
    y = product(x, fast.weight)         # its product alone

Method: Mishra et al., arXiv 2104.08378, who prune once by magnitude and train again with these zeros. With
`prune(..., gradient="dense")`, and again every few steps, the two largest are chosen anew while it trains, which is the
straight-through way of Zhou et al. (arXiv 2102.04010, there with a decay of what is not kept).

**Which products gain.** The instruction multiplies a first operand [m, k] that is 2:4 along k with a dense second one
[k, n]; the second, and the result, cannot be sparse. A linear layer has three products:

- y = x W^T, computed as y^T = W x^T: the first operand is W [out, in], k is in. It gains if W is 2:4 along its rows, as
  it is here.
- dx = dy W, computed as dx^T = W^T dy^T: the first operand is W^T [in, out], k is out. It gains only if W is 2:4 along
  its columns too: of each 4 x 4 weights at most two in each row and column, as `transposable=True` prunes (Hubara et
  al., arXiv 2102.08124).
- dW = dy^T x: k is the tokens, W no operand. That half of dW will not be used spares nothing: it is the result. It
  gains only if dy or x is 2:4 along the tokens, as activations after a squared ReLU can be made (Haziza et al., arXiv
  2503.16672).

What the instruction gives is y^T, and the next layer reads y. cuSPARSELt writes it turned as it is stored (`product`),
which torch calls fusing the transpose; an operation of its own would read and write y once more. `bound(fused=False)`
counts that: of 4,096 in each direction 1.32 times as fast as dense are then left of 1.58, at most.

**Why about 1.6x and not 2x** is counted by `linear_products` and `bound`. Half of the operations are left, but not half
of the bytes: a kept value of 16 bits brings 2 bits that say where it was, so W shrinks to 56%; x and y do not shrink at
all. With few tokens, where reading W is what takes the time, that is 1.78x at most. With many, each tile of y still
fetches all of its part of x, now in half the time; by this count what the L2 cache has to serve then takes longest.

As a path of a feed-forward layer: `tl.plan(..., paths=["two_four"])`, `tl.sparsify(model, "two_four")`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..analysis.costs import Rates
from ..core import DeviceError, InputError
from ..formats.matrix import dtype_names
from ..layers.paths.converted import Products
from ..layers.paths.cost import Work
from ..ops import checks
from .weights import checked_linear, checked_weight

OLDEST = (8, 0)  # compute capability
# What torch's backends convert: the dtypes (float32 would be 1:2, int8 is no weight that trains), and of what rows and
# columns are to be multiples.
DTYPES = (torch.float16, torch.bfloat16)
MULTIPLES = {"cutlass": (32, 64), "cusparselt": (16, 16)}
TILE = (256, 256)


# ---- the pattern ----


def _groups(weight: Tensor) -> Tensor:
    """[out, in / 4, 4]. InputError for a width that four does not divide."""
    if weight.shape[1] % 4:
        raise InputError(f"the weight has shape {list(weight.shape)}; a multiple of 4 columns is accepted")
    return weight.reshape(len(weight), weight.shape[1] // 4, 4)


def two_four_mask(weight: Tensor, *, transposable: bool = False) -> Tensor:
    """Keep the two largest in magnitude of each four neighbours in a row; of equal ones the first.

    Args:
        weight: [out, in], floating-point values of 16 bits or more; in is a multiple of 4.
        transposable: keep at most two in each row and each column of every 4 x 4 weights, so that the transpose is 2:4
            too: greedily, the largest first where there is room for it, of equal ones the first in row order. Some
            tiles then keep fewer than 8. out is a multiple of 4, too.

    Returns:
        bool [out, in], True for what is kept.

    Raises:
        InputError: for another width, and for a weight that is no matrix, on meta or not finite.
    """
    sizes = checked_weight(weight).abs()
    groups = _groups(sizes)
    if not transposable:
        order = groups.argsort(dim=-1, descending=True, stable=True)
        return torch.zeros_like(groups, dtype=torch.bool).scatter_(-1, order[..., :2], True).view(sizes.shape)
    rows, columns = sizes.shape
    if rows % 4:
        raise InputError(
            f"the weight has shape {list(sizes.shape)}; a multiple of 4 rows is accepted where transposable"
        )
    tiles = sizes.reshape(rows // 4, 4, columns // 4, 4).transpose(1, 2).reshape(-1, 16)
    order = tiles.argsort(dim=-1, descending=True, stable=True)
    each = torch.arange(len(tiles), device=sizes.device)
    kept = torch.zeros(len(tiles), 4, 4, dtype=torch.bool, device=sizes.device)
    for place in order.unbind(1):
        row, column = place // 4, place % 4
        kept[each, row, column] = (kept[each, row].sum(-1) < 2) & (kept[each, :, column].sum(-1) < 2)
    return kept.view(rows // 4, columns // 4, 4, 4).transpose(1, 2).reshape(rows, columns)


def is_two_four(weight: Tensor) -> bool:
    """Whether each four neighbours in a row hold at most two values that are not zero. InputError as `check_two_four`
    for what has no such groups."""
    return bool(((_groups(checked_weight(weight)) != 0).sum(-1) <= 2).all())


def check_two_four(weight: Tensor) -> None:
    """Raise InputError, naming the first four neighbours of which more than two are not zero; and for a width that is
    no multiple of 4, or a weight that is no matrix, on meta or not finite."""
    groups = _groups(checked_weight(weight))
    wrong = ((groups != 0).sum(-1) > 2).nonzero()
    if len(wrong):
        row, group = wrong[0].tolist()
        raise InputError(
            f"row {row}, columns {4 * group} to {4 * group + 3} hold {groups[row, group].tolist()}; at most two values "
            f"of these four that are not zero are accepted ({len(wrong):,} of {groups[..., 0].numel():,} groups have "
            "more): prune_two_four"
        )


@torch.no_grad()
def prune_two_four(linear: nn.Linear, *, transposable: bool = False) -> nn.Linear:
    """Set to zero what `two_four_mask` does not keep, in place; returns the layer. To train with these zeros:
    `weights.prune(layer, mask=two_four_mask)`, which takes whole models too. InputError for a module that is not
    exactly an nn.Linear, or has hooks, and as `two_four_mask`."""
    weight = checked_linear(linear).weight
    weight.masked_fill_(~two_four_mask(weight, transposable=transposable), 0)
    return linear


# ---- torch's 2:4 tensors ----


def check_convertible(
    shape: Iterable[int], dtype: torch.dtype, backend: str, capability: tuple[int, int] | None
) -> None:
    """Whether torch's backend takes a 2:4 weight like this one.

    Args:
        shape: (out, in): multiples of (32, 64) for "cutlass", of (16, 16) for "cusparselt".
        dtype: float16 or bfloat16.
        backend: "cutlass" or "cusparselt".
        capability: (major, minor) of the GPU that holds it; None for a CPU.

    Raises:
        InputError: for another backend, dtype or shape.
        DeviceError: for a CPU, and a GPU before sm_80, whatever the dtype and shape.
    """
    if backend not in tuple(MULTIPLES):
        raise InputError(f"backend is {backend!r:.80}; accepted: {', '.join(map(repr, MULTIPLES))}")
    if capability is None or tuple(capability) < OLDEST:
        where = "a CPU" if capability is None else "a GPU of compute capability {}.{}".format(*capability)
        raise DeviceError(f"the weight is on {where}; GPUs of {OLDEST[0]}.{OLDEST[1]} and newer have 2:4 products")
    if dtype not in DTYPES:
        raise InputError(f"the weight holds {dtype}; accepted: {dtype_names(DTYPES)}")
    sizes, by = [*shape], MULTIPLES[backend]
    if len(sizes) != 2:
        raise InputError(f"the weight has shape {sizes}; [out, in] is accepted")
    rows, columns = sizes
    if not rows or not columns or rows % by[0] or columns % by[1]:
        raise InputError(
            f"the weight has shape {[rows, columns]}; {backend} accepts multiples of {by[0]} rows and {by[1]} columns"
        )


def usual_backend() -> str:
    """ "cusparselt" where this build of torch has it, "cutlass" elsewhere."""
    return "cusparselt" if torch.backends.cusparselt.is_available() else "cutlass"


def tensor_kind(shape: Iterable[int], dtype: torch.dtype, device: torch.device, backend: str) -> Any:
    """torch's class of 2:4 tensors of a backend. Raises as `check_convertible` for what it does not take, and
    DeviceError where this build of torch has no such backend."""
    capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
    check_convertible(shape, dtype, backend, capability)
    if backend == "cusparselt" and not torch.backends.cusparselt.is_available():
        raise DeviceError("this build of torch has no cuSPARSELt; backend='cutlass' is accepted")
    return {
        "cutlass": torch.sparse.SparseSemiStructuredTensorCUTLASS,
        "cusparselt": torch.sparse.SparseSemiStructuredTensorCUSPARSELT,
    }[backend]


def product(x: Tensor, sparse: Any, bias: Tensor | None = None) -> Tensor:
    """y = x W^T + b with torch's 2:4 tensor W [out, in], as torch.nn.functional.linear gives it.

    torch dispatches a product of such a tensor in Python: it makes the transpose, a tensor again, and from 2.13 on goes
    through an operator written in Python. Here cuSPARSELt's product is called at once, on what the tensor has packed,
    and y is written as it is wanted. That spares the host little, 3% of 0.85 ms beside an H100 (in a run without a
    record; 4,096 in each direction): most of its time goes into that call, which plans each product anew. torch's own
    way is taken with CUTLASS, and where something watches or transforms operations: in compiled code, under autocast to
    W's own dtype, in modes and torch.func.

    Args:
        x: [..., in], in W's dtype and on its device.
        sparse: of `to_semi_structured` (its weight), or of torch's `to_sparse_semi_structured`.
        bias: [out], or None. Where it needs a gradient it is added afterwards, since torch's product has none.

    Raises:
        InputError: for another sparse, x or bias, under autocast to another dtype, which torch does not cast such a
            tensor to, and for an x that needs a gradient, which torch does not have: of dx = dy W the transpose is not
            packed.
    """
    if not isinstance(sparse, torch.sparse.SparseSemiStructuredTensor):
        raise InputError(f"sparse is a {type(sparse).__name__}; a 2:4 tensor of torch is accepted")
    if checks.needs_gradient(x):
        raise InputError(
            "x needs a gradient, which the product with a 2:4 tensor does not have; x.detach(), torch.no_grad() and "
            "the dense layer are accepted"
        )
    device = sparse.device.type
    if torch.is_autocast_enabled(device) and (cast := torch.get_autocast_dtype(device)) != sparse.dtype:
        raise InputError(f"autocast is to {cast}, and the weight holds {sparse.dtype}; autocast to that is accepted")
    if checks.needs_gradient(bias):
        return product(x, sparse) + bias
    if checks.watched(x, bias) or not (
        checks.plain_eager() and type(sparse) is _CUSPARSELT and sparse.packed_t is None
    ):
        return F.linear(x, sparse, bias)
    out, inner = sparse.shape
    for name, given, shape, fits in (
        ("x", x, f"[..., {inner}]", x.shape[-1:] == (inner,)),
        ("bias", bias, f"[{out}]", bias is None or bias.shape == (out,)),
    ):
        if given is not None and not (fits and given.dtype == sparse.dtype and given.device == sparse.device):
            raise InputError(
                f"{name} is {given.dtype} {list(given.shape)} on {given.device}; {sparse.dtype} {shape} on "
                f"{sparse.device} is accepted"
            )
    rows = x.reshape(-1, inner).contiguous()  # torch takes its strides for those of whole rows
    many = len(rows)
    if not many:
        return x.new_empty(*x.shape[:-1], out)
    missing = -many % _CUSPARSELT._DTYPE_SHAPE_CONSTRAINTS[x.dtype].dense_min_rows
    if missing:
        rows = F.pad(rows, (0, 0, 0, missing))
    elif rows.data_ptr() % 16:
        rows = rows.clone()
    y = torch._cslt_sparse_mm(
        sparse.packed, rows.t(), bias=bias, transpose_result=True, alg_id=sparse.alg_id_cusparselt
    )
    return (y[:many] if missing else y).view(*x.shape[:-1], out)


_CUSPARSELT = torch.sparse.SparseSemiStructuredTensorCUSPARSELT


class SemiStructuredLinear(nn.Linear):
    """x W^T + b for inference, with W as torch's 2:4 tensor: x [..., in_features], y [..., out_features]. Made by
    `to_semi_structured`; its product, and what it refuses, is `product`."""

    def forward(self, x: Tensor) -> Tensor:
        return product(x, self.weight, self.bias)


def to_semi_structured(
    linear: nn.Linear, *, backend: str | None = None, tokens: int | None = None
) -> SemiStructuredLinear:
    """An nn.Linear for inference whose weight is torch's 2:4 tensor, so that its product skips the zeros.

    Args:
        linear: 2:4 along its rows (`prune_two_four`), on a GPU. It is left as it was; the bias is shared.
        backend: "cutlass" (in torch for GPUs of 8.x) or "cusparselt"; None takes cuSPARSELt where torch has it.
        tokens: None, or for about how many tokens the fastest of cuSPARSELt's algorithms is searched (`searched`);
            CUTLASS has nothing to search.

    Returns:
        An nn.Linear of the same widths. Its weight has half of the values, and 2 bits for each; neither it nor x has a
        gradient (`product`).

    Raises:
        InputError: for weights that are not 2:4, dtypes and shapes as `check_convertible` says, and a module that is
            not exactly an nn.Linear, or has hooks.
        DeviceError: for a CPU, a GPU before sm_80, and a backend that this build of torch does not have or whose
            kernels refuse this GPU. One product is tried.
    """
    if tokens is not None:
        _check_tokens(tokens)
    weight = checked_linear(linear).weight.detach()
    backend = backend or usual_backend()
    kind = tensor_kind(weight.shape, weight.dtype, weight.device, backend)
    check_two_four(weight)
    made = SemiStructuredLinear(linear.in_features, linear.out_features, False, "meta", weight.dtype)
    made.bias = linear.bias
    try:
        sparse = kind.from_dense(weight.contiguous())
        if tokens is not None and backend == "cusparselt":
            sparse = searched(sparse, tokens)
        made.weight = nn.Parameter(sparse, requires_grad=False)
        with torch.no_grad():
            made(weight.new_zeros(1, linear.in_features))
    except torch.OutOfMemoryError:
        raise
    except RuntimeError as error:
        raise DeviceError(
            f"torch's {backend} does not run on this device: {str(error).splitlines()[0]:.200}; accepted: a backend "
            "and a GPU that it runs on"
        ) from error
    return made.train(linear.training)


def _check_tokens(tokens: int) -> None:
    if type(tokens) is not int or tokens < 1:
        raise InputError(f"tokens is {tokens!r:.80}; a whole number from 1 up is accepted")


def searched(sparse: Any, tokens: int) -> Any:
    """The given tensor of cuSPARSELt [out, in], made fit for y = x W^T of about so many tokens: with the fastest
    algorithm, and so that y is written as it is wanted and not as y^T.

    cuSPARSELt runs one algorithm after the other to find it. On an H100 the product of 4,096 in each direction then
    takes 0.13 ms instead of 0.22 (bfloat16; dense 0.18). It is not done unasked, because it can end a process: with
    torch 2.11 and a weight of 192 x 256 an algorithm was an illegal instruction, after which the GPU cannot be used.

    Raises:
        InputError: for another tensor, and for tokens that are no whole number from 1 up.
    """
    if not isinstance(sparse, torch.sparse.SparseSemiStructuredTensorCUSPARSELT):
        raise InputError(f"sparse is a {type(sparse).__name__}; a 2:4 tensor of cuSPARSELt is accepted")
    _check_tokens(tokens)
    sparse.fuse_transpose_cusparselt = True  # torch's newer releases always do
    x = torch.empty(tokens + -tokens % 16, sparse.shape[1], dtype=sparse.dtype, device=sparse.device)
    sparse.alg_id_cusparselt = torch._cslt_sparse_mm_search(sparse.packed, x.zero_().t(), transpose_result=True)
    return sparse


# ---- what it can gain ----


@dataclass(frozen=True)
class Product:
    """One product of a linear layer as the tensor cores compute it, first operand [m, k] times second [k, n], counted.

    name: what it gives. first, second: the operands. m, n, k: sizes. itemsize: bytes of a value. sparse: whether the
    first operand is 2:4; where it is not, both counts are those of the dense product. why: in words. tile: rows and
    columns of the result for which the operands are fetched once."""

    name: str
    first: str
    second: str
    m: int
    n: int
    k: int
    itemsize: int
    sparse: bool
    why: str
    tile: tuple[int, int]

    def first_bytes(self, two_four: bool) -> float:
        """Bytes of the first operand: as 2:4 half of its values, and 2 bits for each of these."""
        kept = self.m * self.k / 2
        return kept * (self.itemsize + 2 / 8) if two_four and self.sparse else 2 * kept * self.itemsize

    def operations(self, two_four: bool) -> float:
        """Multiplications and additions."""
        return 2 * self.m * self.n * self.k / (2 if two_four and self.sparse else 1)

    def memory(self, two_four: bool) -> float:
        """Bytes from and to memory: each operand and the result once."""
        return self.first_bytes(two_four) + self.itemsize * (self.k * self.n + self.m * self.n)

    def turning(self) -> float:
        """Bytes from and to memory of turning the result by an operation of its own: read, and written again."""
        return 2 * self.itemsize * self.m * self.n

    def fetched(self, two_four: bool) -> float:
        """Bytes that the tiles of the result fetch from the L2 cache, each the rows and columns that it is made of."""
        down, across = -(-self.m // self.tile[0]), -(-self.n // self.tile[1])
        return across * self.first_bytes(two_four) + down * self.itemsize * self.k * self.n

    def seconds(self, rates: Rates, two_four: bool) -> dict[str, float]:
        """How long its operations, its bytes of memory and what its tiles fetch take at these rates, each alone. The
        product takes no less than the longest."""
        return {
            "operations": self.operations(two_four) / rates.matmul,
            "memory": self.memory(two_four) / rates.bandwidth,
            "fetched": self.fetched(two_four) / rates.l2,
        }

    def row(self, rates: Rates) -> dict:
        """What is counted, JSON-able: product, first, second, m, n, k, sparse and why; operations, memory, fetched and
        limit (which of these takes longest), each as [dense, 2:4]; and the bound of this product alone."""
        counted: dict = {}
        for name in ("operations", "memory", "fetched"):
            counted[name] = [getattr(self, name)(two_four) for two_four in (False, True)]
        limits = [max(took, key=took.__getitem__) for took in (self.seconds(rates, False), self.seconds(rates, True))]
        sizes = {
            "product": self.name,
            "first": self.first,
            "second": self.second,
            "m": self.m,
            "n": self.n,
            "k": self.k,
        }
        return {
            **sizes,
            "sparse": self.sparse,
            "why": self.why,
            **counted,
            "limit": limits,
            "bound": bound([self], rates),
        }


def linear_products(
    tokens: int,
    d_in: int,
    d_out: int,
    *,
    itemsize: int = 2,
    transposable: bool = False,
    tile: tuple[int, int] = TILE,
) -> tuple[Product, Product, Product]:
    """The three products of a linear layer with a 2:4 weight [d_out, d_in]: y, dx and dW, as this module's first lines
    tell them.

    Args:
        tokens, d_in, d_out: sizes, from 1 up.
        itemsize: bytes of a value, 1 or 2.
        transposable: whether W is 2:4 along its columns as well.
        tile: rows and columns of the result for which operands are fetched once. 256 x 256 is what two blocks of 128 x
            256 make that share what they fetch, as Hopper's clusters do.

    Raises:
        InputError: for sizes and tiles that are no whole numbers from 1 up, and another itemsize.
    """
    if not isinstance(tile, tuple) or len(tile) != 2:
        raise InputError(f"tile is {tile!r:.80}; two whole numbers from 1 up, (rows, columns), are accepted")
    for name, value in (("tokens", tokens), ("d_in", d_in), ("d_out", d_out), *(("a tile", each) for each in tile)):
        if type(value) is not int or value < 1:
            raise InputError(f"{name} is {value!r:.80}; a whole number from 1 up is accepted")
    if itemsize not in (1, 2):
        raise InputError(f"itemsize is {itemsize!r:.80}; 1 or 2 bytes are accepted")
    both = "W is 2:4 along its columns too" if transposable else "W is 2:4 along its rows, and k runs down its columns"
    forward = "W is 2:4 along its rows, which k runs along"
    neither = "W is no operand; dy^T or x^T would have to be 2:4 along the tokens"
    return (
        Product("y = x W^T", "W", "x^T", d_out, tokens, d_in, itemsize, True, forward, tile),
        Product("dx = dy W", "W^T", "dy^T", d_in, tokens, d_out, itemsize, transposable, both, tile),
        Product("dW = dy^T x", "dy^T", "x", d_out, d_in, tokens, itemsize, False, neither, tile),
    )


def bound(products: Iterable[Product], rates: Rates, *, fused: bool = True) -> float:
    """How many times as fast as dense these products, one after the other, can be at most with 2:4.

    Each takes as long as the longest of its `seconds`. Launches, and clocks that fall under load, are not counted.
    rates: such as `analysis.predict.rates_of("H100 SXM")`; for other GPUs that scales the rate of the L2 cache from the
    H100's, and the bound of many tokens is only as good. Half of the operations count at the dense rate.

    fused: the result of a sparse product is written as it is wanted; with False, an operation of its own turns it."""
    chosen = list(products)
    dense, two_four = (sum(max(each.seconds(rates, how).values()) for each in chosen) for how in (False, True))
    if not fused:
        two_four += sum(each.turning() for each in chosen if each.sparse) / rates.bandwidth
    return dense / two_four


# ---- as a path ----


@cache
def _refused(device: torch.device, dtype: torch.dtype) -> str:
    """Why torch's 2:4 kernels do not run on this GPU; "" where they do. One small product is tried, once."""
    try:
        to_semi_structured(nn.Linear(64, 64, device=device, dtype=dtype).requires_grad_(False).apply(prune_two_four))
    except DeviceError as error:
        return str(error)
    return ""


class TwoFour(Products):
    """A feed-forward layer whose weights are 2:4, through torch's kernels: each projection of which that is so and
    which they take, the others densely. Exact: nothing is pruned. Needs a GPU from sm_80 on.

    It holds the kept values beside the weights, 56% of their bytes. A row of x that is not finite gives NaN."""

    name = "two_four"
    patterned = True

    def product(self, weight: Tensor):
        rows, columns = weight.shape
        dense = nn.Linear(columns, rows, False, "meta", weight.dtype)
        dense.weight = nn.Parameter(weight, requires_grad=False)
        made = to_semi_structured(dense).weight
        parts = [getattr(made, name) for name in ("packed", "meta", "packed_t", "meta_t")]
        return lambda x, bias: product(x, made, bias), [part for part in parts if part is not None]

    def weigh(self, weight: Tensor) -> tuple[float, ...]:
        tensor_kind(weight.shape, weight.dtype, weight.device, usual_backend())
        check_two_four(weight)
        if weight.is_cuda and (refused := _refused(weight.device, weight.dtype)):
            raise DeviceError(refused)
        return (linear_products(1, *weight.shape)[0].first_bytes(True),)

    def seconds(self, work: Work, n: int, k: int, counted: tuple[float, ...]) -> float:
        product = linear_products(work.tokens, k, n, itemsize=work.itemsize)[0]
        return max(product.seconds(work.rates, True).values())


PATHS = (TwoFour(),)
