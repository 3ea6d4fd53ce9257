"""Sparse weights by magnitude: the smallest of a layer's weights become zero, once or again and again while it trains.

    model = prune(model, 0.9)                   # every nn.Linear becomes a SparseLinear with 90% of its weights zero
    print(*table(model), sep="\\n")              # what is left of each, and its bytes
    model = to_linears(model)                   # nn.Linear again, with zeros in them

Two ways to train what was pruned, by `gradient`:

- "masked": the kept weights alone are parameters. What is gone stays gone (Han et al., arXiv 1506.02626).
- "dense": all weights stay parameters, forward uses the kept ones, and the gradient goes to all of them as if none were
  zero (straight-through; Bengio et al., arXiv 1308.3432; for masks Guo et al., arXiv 1608.04493). `update` picks the
  largest anew, so weights come back.

And one to train zeros in: `proximal_step`, L1 by soft-thresholding.

torch has magnitude pruning too, `torch.nn.utils.prune.l1_unstructured` and `global_unstructured`: it keeps the dense
weight and a dense mask beside it, and leaves open which of equal magnitudes go. Here neither is stored, exactly as many
weights go as were asked for, and of equal magnitudes the first in row order stay."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from math import inf

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.parameter import is_lazy

from ..core import InputError
from ..formats import CSR
from ..formats.matrix import as_matrix, row_pointers, rows_of
from ..layers.find import Only, StandIn, check_model, replaced, selected
from ..layers.parts import owner_of
from ..layers.probe import HOOKS, raise_all, title
from ..layers.weights import Weights

Mask = Callable[[Tensor], Tensor]  # from a weight [out, in] to bool [out, in], True for what is kept

GRADIENTS = ("masked", "dense")
PRODUCTS = ("dense", "csr")
_MOST = 2**31 - 1  # weights: cuSPARSE's 32-bit indices


# ---- which weights are kept ----


def check_sparsity(sparsity: float) -> float:
    """The share of the weights that become zero. InputError for anything but a number from 0 up to, but not, 1."""
    if isinstance(sparsity, bool) or not isinstance(sparsity, (int, float)) or not 0 <= sparsity < 1:
        raise InputError(f"sparsity is {sparsity!r:.80}; a share of the weights, from 0 up to, but not, 1, is accepted")
    return float(sparsity)


def kept_of(count: int, sparsity: float) -> int:
    """How many of `count` values stay at this sparsity: round(sparsity * count) go, as torch.nn.utils.prune counts."""
    return count - round(check_sparsity(sparsity) * count)


def largest(sizes: Tensor, count: int) -> Tensor:
    """Which values are the `count` largest: bool, of the shape of `sizes`, exactly `count` of them True.

    Of equal values the first in row order are taken, on every device. The count-th largest value is found by
    torch.topk, which does not sort, and all others are held against it.

    Args:
        sizes: any shape, of finite numbers.
        count: 0 to sizes.numel().
    """
    flat = sizes.reshape(-1)
    if count in (0, flat.numel()):
        return torch.full_like(sizes, count > 0, dtype=torch.bool)
    threshold = flat.topk(count, sorted=False).values.min()
    above, equal = flat > threshold, flat == threshold
    return (above | equal & (equal.cumsum(0) <= count - above.sum())).view(sizes.shape)


def checked_weight(weight: Tensor) -> Tensor:
    """The weight [out, in] without its history. InputError unless it is a dense matrix of finite floating-point values
    of 16 bits or more, that are there (not on meta)."""
    weight = as_matrix(weight).detach()
    if not weight.isfinite().all():
        raise InputError("the weight holds a value that is not finite; finite weights are accepted")
    return weight


def checked_layer(weights: Weights) -> None:
    """`checked_weight` for the gate, up and down that a feed-forward layer has."""
    for weight in weights[:3]:
        if weight is not None:
            checked_weight(weight)


def magnitude_mask(weight: Tensor, sparsity: float) -> Tensor:
    """Keep the weights of largest magnitude.

    Args:
        weight: [out, in], floating-point values of 16 bits or more.
        sparsity: from 0 up to, but not, 1. Exactly round(sparsity * out * in) weights go, zeros among them first; of
            equal magnitudes the last in row order.

    Returns:
        bool [out, in], True for what is kept.

    Raises:
        InputError: for another sparsity, and for a weight that is no matrix, on meta or not finite.
    """
    weight = checked_weight(weight)
    return largest(weight.abs(), kept_of(weight.numel(), sparsity))


def threshold_mask(weight: Tensor, threshold: float) -> Tensor:
    """Keep the weights above a threshold in magnitude: bool [out, in]. With 0 what is not zero; one pass over them, but
    how many stay depends on the weights. InputError as `magnitude_mask`, and for a threshold that is no finite number
    from 0 up."""
    if isinstance(threshold, bool) or not isinstance(threshold, (int, float)) or not 0 <= threshold < inf:
        raise InputError(f"threshold is {threshold!r:.80}; a finite number from 0 up is accepted")
    sizes = checked_weight(weight).abs()
    rounded = torch.tensor(threshold, dtype=torch.float64).to(sizes.dtype).item()  # as torch would round it to compare
    return sizes >= rounded if rounded > threshold else sizes > rounded


def _pattern(mask: Tensor) -> tuple[Tensor, Tensor]:
    """Row pointers int32 [rows + 1] and columns int32 [nnz] of what a mask keeps."""
    return row_pointers(mask.sum(1)).to(torch.int32), mask.nonzero()[:, 1].to(torch.int32)


# ---- the layer ----


class _StraightThrough(torch.autograd.Function):
    """The kept values of a dense weight, zeros elsewhere; its gradient passes as if all had been kept."""

    @staticmethod
    def forward(ctx, dense: Tensor, row: Tensor, column: Tensor) -> Tensor:
        return torch.zeros_like(dense).index_put_((row, column), dense[row, column])

    @staticmethod
    def backward(ctx, gradient: Tensor):
        return gradient, None, None


class SparseLinear(nn.Module):
    """x W^T + b, with W stored as its kept values and their indices (CSR): x [..., in_features], y [..., out_features].

    Parameters and buffers, and so what `state_dict` holds:
        values: [nnz], the kept weights row by row, with gradient="masked".
        dense: [out_features, in_features], all weights, with gradient="dense"; forward uses the kept ones.
        bias: [out_features], or None.
        column: int32 [nnz], ascending within a row. pointer: int32 [out_features + 1], where each row begins.

    A state of any number of kept weights loads into any SparseLinear of the same widths and gradient, also strictly;
    where the number differs, `values` becomes a new Parameter: load before you make the optimizer.

    What runs is said by `product`. "dense": W is filled with zeros for each call and torch's dense product runs, so
    that zeros cost as much time as other weights, and the dense W as long as the call, or its graph, lives. "csr":
    torch's sparse product (cuSPARSE; on a CPU MKL, float32 and float64 alone), which is the faster one only where
    weights are sparse enough for this device and number of tokens. It skips what is not kept, also where x is infinite
    or NaN there, of which "dense" makes NaN.

    Args:
        in_features, out_features, bias, device, dtype: as of nn.Linear, which also draws the weights.
        sparsity: from 0 up to, but not, 1; the smallest of the drawn weights go.
        gradient: "masked" or "dense", as this module's first lines describe them.
        product: "dense" or "csr"; the latter with gradient="masked" alone.

    Raises:
        InputError: for other values of these, for device="meta", and for 2^31 weights and more.
    """

    column: Tensor
    pointer: Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        sparsity: float = 0.0,
        gradient: str = "masked",
        product: str = "dense",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_sparsity(sparsity)
        drawn = nn.Linear(in_features, out_features, bias, device, dtype)
        self._take(drawn, magnitude_mask(drawn.weight, sparsity), gradient, product)

    @classmethod
    def from_linear(
        cls, linear: nn.Linear, mask: Tensor | None = None, *, gradient: str = "masked", product: str = "dense"
    ) -> SparseLinear:
        """Of an nn.Linear, whose values are copied.

        Args:
            linear: with a weight of its own, of finite floating-point values of 16 bits or more.
            mask: bool [out, in], True for what is kept (`magnitude_mask`, ...); None keeps what is not zero. Kept zeros
                are stored, and train.
            gradient, product: as of the class.

        Raises:
            InputError: for a module that is not exactly an nn.Linear, or has hooks; for a weight on meta or one that is
                not finite; for a mask of another shape or dtype, and for other names.
        """
        checked_linear(linear)
        layer = cls.__new__(cls)
        nn.Module.__init__(layer)
        layer._take(linear, threshold_mask(linear.weight, 0) if mask is None else mask, gradient, product)
        return layer.train(linear.training)

    def _take(self, linear: nn.Linear, mask: Tensor, gradient: str, product: str) -> None:
        if gradient not in GRADIENTS or product not in PRODUCTS or (gradient, product) == ("dense", "csr"):
            raise InputError(
                f"gradient is {gradient!r:.80} and product {product!r:.80}; accepted: 'masked' with 'dense' or 'csr', "
                "and 'dense' with 'dense'"
            )
        weight = checked_weight(linear.weight)
        if weight.numel() > _MOST:
            raise InputError(f"the weight has {weight.numel():,} values; up to {_MOST:,} are accepted")
        _check_mask(mask, weight)
        self.out_features, self.in_features = weight.shape
        self.gradient, self.product = gradient, product
        learns = linear.weight.requires_grad
        if gradient == "masked":
            self.values = nn.Parameter(weight[mask], learns)
        else:
            self.dense = nn.Parameter(weight.clone(memory_format=torch.contiguous_format), learns)
        bias = linear.bias
        self.bias = None if bias is None else nn.Parameter(bias.detach().clone(), bias.requires_grad)
        for name, buffer in zip(("pointer", "column"), _pattern(mask)):
            self.register_buffer(name, buffer)

    @property
    def nnz(self) -> int:
        """How many weights are kept; zeros among them count."""
        return self.column.numel()

    @property
    def sparsity(self) -> float:
        """The share of the weights that are not kept; 0 where there are none."""
        return 1 - self.nnz / everything if (everything := self.out_features * self.in_features) else 0.0

    @property
    def weight(self) -> Tensor:
        """W, [out_features, in_features], made anew: the kept weights and zeros. Gradients go where `gradient` says."""
        row, column = self._places()
        if self.gradient == "dense":
            return _StraightThrough.apply(self.dense, row, column)
        return self.values.new_zeros(self.out_features, self.in_features).index_put((row, column), self.values)

    @property
    def mask(self) -> Tensor:
        """Which weights are kept, bool [out_features, in_features], made anew."""
        found = torch.zeros(self.out_features, self.in_features, dtype=torch.bool, device=self.column.device)
        return found.index_put_(self._places(), found.new_ones(()))

    def _places(self) -> tuple[Tensor, Tensor]:
        return rows_of(self.pointer, self.nnz), self.column.long()

    def csr(self) -> CSR:
        """The kept weights in the form that the kernels of this project take, without their history."""
        values = self.values if self.gradient == "masked" else self.dense[self._places()]
        return CSR(self.pointer.long(), self.column, values.detach(), (self.out_features, self.in_features))

    def forward(self, x: Tensor) -> Tensor:
        """y [..., out_features] of x [..., in_features]. InputError for the "csr" product of 16-bit values on a CPU,
        which torch does not have."""
        if self.product == "dense":
            return F.linear(x, self.weight, self.bias)
        cast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if cast else x.dtype
        if x.device.type == "cpu" and dtype.itemsize < 4:
            raise InputError(
                f"product 'csr' of {dtype} on a CPU; accepted there: float32 and float64, without autocast"
            )
        shape = self.out_features, self.in_features
        weight = torch.sparse_csr_tensor(self.pointer, self.column, self.values, shape, check_invariants=False)
        # Turned in a copy: an entry then reads the values of neighbouring tokens side by side, not each in a sector.
        y = (weight @ x.reshape(-1, self.in_features).t().contiguous()).t()
        y = y if self.bias is None else y + self.bias
        return y.reshape(*x.shape[:-1], self.out_features)

    @torch.no_grad()
    def update(
        self,
        sparsity: float | None = None,
        *,
        threshold: float | None = None,
        mask: Tensor | None = None,
        optimizer: torch.optim.Optimizer | None = None,
    ) -> SparseLinear:
        """Choose anew which weights are kept, in place; returns the layer.

        With gradient="masked" weights can only go; `values` becomes a new, shorter Parameter. With "dense" all weights
        are asked again, also those that were not kept.

        Args:
            sparsity: exactly this share of all weights is zero afterwards, as `magnitude_mask` chooses.
            threshold: weights above it in magnitude stay, as `threshold_mask` chooses.
            mask: bool [out, in], True for what is kept. One of these three.
            optimizer: one made before, which `values` is a parameter of: it takes the new one, and keeps its state of
                what is kept. One that is not passed would go on with the old parameter.

        Raises:
            InputError: for none of the three or several, for wrong ones, and with gradient="masked" for a sparsity at
                which weights that are gone would be kept, or an optimizer that does not have `values`.
        """
        if sum(each is not None for each in (sparsity, threshold, mask)) != 1:
            raise InputError("update takes one of sparsity, threshold and mask")
        if mask is None:
            mask = threshold_mask(self.every(), threshold) if sparsity is None else self.at(sparsity)
        _check_mask(mask, self.every())
        if self.gradient == "masked":
            if optimizer is not None:
                self._groups(optimizer)  # which is refused before anything changes
            stay = mask[self._places()]
            mask = self.mask & mask
            if not stay.all():
                self._shorten(stay, optimizer)
        self.pointer, self.column = _pattern(mask)
        return self

    def every(self) -> Tensor:
        """All weights that may be kept, [out, in], without their history; zeros for those that are gone for good."""
        return (self.dense if self.gradient == "dense" else self.weight).detach()

    def sizes(self) -> Tensor:
        """The magnitudes that the choice goes by, [out, in]: -1 for what is gone for good."""
        found = checked_weight(self.every()).abs()
        return found if self.gradient == "dense" else found.masked_fill_(~self.mask, -1)

    def at(self, sparsity: float) -> Tensor:
        """The mask that `update` would choose for this sparsity, bool [out, in]."""
        count = kept_of(self.out_features * self.in_features, sparsity)
        if self.gradient == "masked" and count > self.nnz:
            raise InputError(
                f"sparsity is {sparsity}: {count:,} weights would be kept, of which {self.nnz:,} are left; accepted: "
                f"{self.sparsity:.6g} and more, or a layer with gradient='dense', whose weights come back"
            )
        return largest(self.sizes(), count)

    def _shorten(self, stay: Tensor, optimizer: torch.optim.Optimizer | None) -> None:
        old = self.values
        new = nn.Parameter(old.detach()[stay], old.requires_grad)
        if optimizer is not None:
            for group in self._groups(optimizer):
                group["params"] = [new if each is old else each for each in group["params"]]
            if old in optimizer.state:
                optimizer.state[new] = {
                    name: each[stay] if isinstance(each, Tensor) and each.shape == old.shape else each
                    for name, each in optimizer.state.pop(old).items()
                }
        self.values = new

    def _groups(self, optimizer: torch.optim.Optimizer) -> list[dict]:
        groups = [group for group in optimizer.param_groups if any(each is self.values for each in group["params"])]
        if not groups:
            raise InputError("the optimizer does not have this layer's values; one that was made of them is accepted")
        return groups

    def to_linear(self) -> nn.Linear:
        """An nn.Linear with copies of the kept weights, and zeros where none are."""
        weight = self.weight.detach()
        linear = nn.Linear(self.in_features, self.out_features, self.bias is not None, "meta", weight.dtype)
        learns = (self.dense if self.gradient == "dense" else self.values).requires_grad
        linear.weight = nn.Parameter(weight, learns)
        if self.bias is not None:
            linear.bias = nn.Parameter(self.bias.detach().clone(), self.bias.requires_grad)
        return linear.train(self.training)

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, strict, missing, unexpected, errors):
        pointer, column = (state_dict.get(prefix + name) for name in ("pointer", "column"))
        if pointer is not None and column is not None:
            values = state_dict.get(prefix + "values", column) if self.gradient == "masked" else column
            if wrong := _wrong(pointer, column, values, self.out_features, self.in_features):
                errors.append(f"{prefix.rstrip('.') or type(self).__name__}: {wrong}")
                return
            if column.numel() != self.nnz:
                self.column = self.column.new_empty(column.shape)
                if self.gradient == "masked":
                    self.values = nn.Parameter(self.values.detach().new_empty(column.shape), self.values.requires_grad)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, strict, missing, unexpected, errors)

    def extra_repr(self) -> str:
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"nnz={self.nnz}, sparsity={self.sparsity:.4g}, gradient={self.gradient!r}, product={self.product!r}"
        )


def _check_mask(mask: Tensor, weight: Tensor) -> None:
    if not isinstance(mask, Tensor) or mask.dtype != torch.bool or mask.shape != weight.shape:
        said = f"{mask.dtype} {list(mask.shape)}" if isinstance(mask, Tensor) else f"{mask!r:.80}"
        raise InputError(f"the mask is {said}; accepted: torch.bool {list(weight.shape)}")


def _wrong(pointer: Tensor, column: Tensor, values: Tensor, rows: int, columns: int) -> str | None:
    """Why stored indices are none of a matrix [rows, columns], if so."""
    if pointer.is_meta or column.is_meta:
        return "the indices are on meta; accepted: tensors that hold their values"
    shapes = [list(each.shape) for each in (pointer, column, values)]
    if shapes != [[rows + 1], [column.numel()], [column.numel()]]:
        return f"pointer, column and values have shapes {shapes}; accepted: [{rows + 1}], [nnz] and [nnz]"
    counts = pointer.diff()
    if int(pointer[0]) != 0 or int(pointer[-1]) != column.numel() or bool((counts < 0).any()):
        return f"pointer does not rise from 0 to {column.numel()}, the number of columns"
    if column.numel() and not 0 <= int(column.min()) <= int(column.max()) < columns:
        return f"column holds {int(column.min())} to {int(column.max())}; accepted: 0 to {columns - 1}"
    row = rows_of(pointer)
    if bool(((column.diff() <= 0) & (row.diff() == 0)).any()):
        return "column does not ascend within each row, or names one twice"
    return None


# ---- whole models ----


def prune(
    model: nn.Module,
    sparsity: float | None = None,
    *,
    mask: Mask | None = None,
    scope: str = "layer",
    only: Only | None = None,
    gradient: str = "masked",
    product: str = "dense",
    optimizer: torch.optim.Optimizer | None = None,
) -> nn.Module:
    """Make the nn.Linear layers of a model SparseLinear, in place; those that are already are updated.

    Args:
        model: any module. An nn.Linear itself is returned as a SparseLinear.
        sparsity: the share of the weights that go, those of least magnitude, as `magnitude_mask` chooses.
        mask: in its stead, a function from a weight [out, in] to bool [out, in], True for what is kept, such as
            `two_four.two_four_mask`.
        scope: "layer": each layer has this sparsity. "global": all together have it; the smallest weights of all go, of
            equal ones the last in the model's order. A layer may then lose all of its weights (Tanaka et al., arXiv
            2006.05467); `table` shows it.
        only: the layers for which only(name, module) is true; the others stay as they are.
        gradient, product: of layers that become SparseLinear.
        optimizer: as in `SparseLinear.update`, for layers that are updated. One for layers that become SparseLinear has
            to be made afterwards.

    Returns:
        The model.

    Raises:
        InputError: with nothing changed, for a model without such layers; for wrong arguments; for a layer whose class
            only derives from nn.Linear, that has hooks, shares its weight with another module, is part of a layer that
            `sparsify` swapped, or whose weight is on meta or not finite; and for layers that have fewer weights left
            than would be kept.
    """
    check_model(model)
    if (sparsity is None) == (mask is None) or not (mask is None or callable(mask)):
        raise InputError(f"sparsity is {sparsity!r:.80} and mask {mask!r:.80}; a share or a function, one, is accepted")
    if scope not in ("layer", "global") or (scope == "global" and sparsity is None):
        raise InputError(f"scope is {scope!r:.80}; 'layer' is accepted, and with a sparsity 'global'")
    if sparsity is not None:
        check_sparsity(sparsity)
    layers = prunable(model, only)
    if scope == "global":
        masks = _global(layers, sparsity)
    else:
        masks = _by_layer(layers, sparsity, mask)
    made = {}
    for layer, chosen in zip(layers.values(), masks, strict=True):
        if isinstance(layer, nn.Linear):
            made[layer] = SparseLinear.from_linear(layer, chosen, gradient=gradient, product=product)
        elif optimizer is not None and layer.gradient == "masked":
            layer._groups(optimizer)
    for layer, chosen in zip(layers.values(), masks, strict=True):
        if isinstance(layer, SparseLinear):
            layer.update(mask=chosen, optimizer=optimizer)
    return replaced(model, made)


def to_linears(model: nn.Module) -> nn.Module:
    """Make the SparseLinear layers of a model nn.Linear again, in place, with zeros for what was pruned; returns the
    model. InputError for anything but a module."""
    check_model(model)
    return replaced(model, {each: each.to_linear() for each in model.modules() if isinstance(each, SparseLinear)})


def table(model: nn.Module) -> list[dict]:
    """One row for each nn.Linear and SparseLinear of a model, JSON-able.

    layer: its name. shape: [out, in]. nnz: how many weights are not zero, or kept. sparsity: the share of the others.
    row_nnz: the least and the most in a row. empty_columns: inputs that no weight reads. bytes: of the stored weight,
    with its indices. dense_bytes: of W as nn.Linear holds it. masked_bytes: of that and a mask of one byte a weight.
    InputError for a layer whose weight is not there (on meta, or lazy)."""
    check_model(model)
    rows = []
    for name, layer in model.named_modules():
        if not isinstance(layer, (nn.Linear, SparseLinear)):
            continue
        if is_lazy(layer.weight) or layer.weight.is_meta:
            raise InputError(f"the weight of {title(name, layer)} holds no values; one that does is accepted")
        weight, stored = layer.weight.detach(), [layer.weight.detach()]
        if weight.layout == torch.sparse_bsr:
            stored = [weight.crow_indices(), weight.col_indices(), weight.values()]
            weight = weight.to_dense()
        kept = layer.mask if isinstance(layer, SparseLinear) else weight != 0
        by_row = kept.sum(1)
        if isinstance(layer, SparseLinear):
            stored = [layer.pointer, layer.column, layer.dense if layer.gradient == "dense" else layer.values]
        rows.append(
            {
                "layer": name,
                "shape": list(weight.shape),
                "nnz": int(by_row.sum()),
                "sparsity": 1 - int(by_row.sum()) / weight.numel() if weight.numel() else 0.0,
                "row_nnz": [int(by_row.min()), int(by_row.max())] if len(by_row) else [0, 0],
                "empty_columns": int((~kept.any(0)).sum()),
                "bytes": sum(each.nbytes for each in stored),
                "dense_bytes": weight.nbytes,
                "masked_bytes": weight.nbytes + weight.numel(),
            }
        )
    return rows


def _obstacles(name: str, module: nn.Module) -> list[str]:
    """Why this module cannot become a SparseLinear."""
    said = title(name, module)
    if type(module) is not nn.Linear:
        return [f"{said} is not a plain torch.nn.Linear, which is accepted"]
    if any(vars(module)[kind] for kind in HOOKS) or not isinstance(module._parameters.get("weight"), nn.Parameter):
        return [f"{said} has hooks, or a weight that is computed; accepted: one without"]
    if any(hasattr(each, "device_mesh") for each in module.parameters()):
        return [f"{said} has sharded weights (DTensor); accepted: whole ones"]
    return []


def checked_linear(module: nn.Module) -> nn.Linear:
    """The module. InputError unless it is exactly an nn.Linear, without hooks, with whole weights of its own."""
    raise_all(_obstacles("", module))
    return module


def prunable(model: nn.Module, only: Only | None) -> dict[str, nn.Linear | SparseLinear]:
    """The layers to prune, by name; what predictors (sparsities.predictors.LowRank) are made of is none. InputError for
    those that cannot be, and where there are none."""
    found, reasons = {}, []
    aside = {part for each in model.modules() if getattr(each, "set_aside", False) for part in each.modules()}
    swapped = [each.feed_forward("") for each in model.modules() if isinstance(each, StandIn)]
    theirs = {owner_of(part) for each in swapped for part in (each.gate, each.up, each.down) if part is not None}
    holders = Counter(id(each) for module in model.modules() for each in module._parameters.values())
    for name, module in model.named_modules():
        if not isinstance(module, (nn.Linear, SparseLinear)) or module in aside or not selected(only, name, module):
            continue
        found[name] = module
        if isinstance(module, SparseLinear):
            continue
        reasons += _obstacles(name, module)
        if module in theirs:
            reasons.append(f"{title(name, module)} belongs to a layer that was swapped; accepted: densify(model) first")
        if holders[id(module._parameters.get("weight"))] > 1:
            reasons.append(
                f"{title(name, module)} shares its weight with another module; accepted: layers with weights of their "
                "own, and an `only` that leaves this one out"
            )
    raise_all(reasons)
    if not found:
        raise InputError(f"no nn.Linear to prune in {type(model).__name__}; accepted: one that `only` takes, or more")
    return found


def _by_layer(layers: dict[str, nn.Linear | SparseLinear], sparsity: float | None, mask: Mask | None) -> list[Tensor]:
    """Masks of the layers, each for itself. InputError, with the layer's name, for what it does not take."""
    masks = []
    for name, layer in layers.items():
        try:
            if mask is not None:
                chosen = mask(checked_weight(layer.weight if isinstance(layer, nn.Linear) else layer.every()))
                _check_mask(chosen, layer.weight)
            elif isinstance(layer, SparseLinear):
                chosen = layer.at(sparsity)
            else:
                chosen = magnitude_mask(layer.weight, sparsity)
        except InputError as error:
            raise InputError(f"{title(name, layer)}: {error}") from None
        masks.append(chosen)
    return masks


def _global(layers: dict[str, nn.Linear | SparseLinear], sparsity: float) -> list[Tensor]:
    """Masks that keep the largest weights of all layers together."""
    all_sizes = [
        each.sizes() if isinstance(each, SparseLinear) else checked_weight(each.weight).abs()
        for each in layers.values()
    ]
    device, dtype = all_sizes[0].device, all_sizes[0].dtype
    for each in all_sizes:
        dtype = torch.promote_types(dtype, each.dtype)
    together = torch.cat([each.reshape(-1).to(device, dtype) for each in all_sizes])
    chosen = largest(together, kept_of(together.numel(), sparsity))
    gone = int((together[chosen] < 0).sum())
    if gone:
        left = int((together >= 0).sum())
        raise InputError(
            f"sparsity is {sparsity}: {int(chosen.sum()):,} weights would be kept, of which {left:,} are left; "
            f"accepted: {1 - left / together.numel():.6g} and more"
        )
    parts = chosen.split([each.numel() for each in all_sizes])
    return [part.view(each.shape).to(each.device) for part, each in zip(parts, all_sizes)]


# ---- training zeros in ----


@torch.no_grad()
def proximal_step(
    optimizer: torch.optim.Optimizer,
    l1: float,
    weights: Iterable[nn.Parameter],
    closure: Callable[[], Tensor] | None = None,
):
    """One step of the optimizer, then the proximal step of l1 * sum |w|, soft-thresholding by l1 times the rate:

        w <- sign(w) max(|w| - lr * l1, 0)

    which gives exact zeros, where the gradient of |w| in the loss only swings about zero. After plain SGD this is
    ISTA (Daubechies et al., arXiv math/0307152; Parikh and Boyd, "Proximal Algorithms", 2014), whose fixed points
    minimise loss + l1 * sum |w|. After Adam and the like it is decoupled from their scaling, as AdamW decouples decay;
    the same points are fixed only where their steps are scaled alike.

    In 16 bits a weight shrinks only if lr * l1 is more than half of its last place: train in float32.

    Args:
        optimizer: whose step comes first; the learning rate is that of each weight's group.
        l1: the coefficient, from 0 up.
        weights: parameters of the optimizer that are shrunk; biases and norms are usually not among them.
        closure: what `optimizer.step` takes.

    Returns:
        What `optimizer.step` does.

    Raises:
        InputError: before the step, for a coefficient that is no finite number from 0 up, and for weights that the
            optimizer does not have.
    """
    if isinstance(l1, bool) or not isinstance(l1, (int, float)) or not 0 <= l1 < inf:
        raise InputError(f"l1 is {l1!r:.80}; a finite number from 0 up is accepted")
    groups = {id(each): group for group in optimizer.param_groups for each in group["params"]}
    shrunk = [*{id(each): each for each in weights}.values()]  # each once
    if strange := [each for each in shrunk if id(each) not in groups]:
        raise InputError(
            f"{len(strange)} of {len(shrunk)} weights, the first of shape {list(strange[0].shape)}, are none of the "
            "optimizer's; its own parameters are accepted"
        )
    result = optimizer.step(closure)
    for weight in shrunk:
        weight.copy_(F.softshrink(weight, float(groups[id(weight)]["lr"]) * l1))
    return result
