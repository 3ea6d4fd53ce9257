"""Sparse adapters (SHiRA): 1 to 2% of the weights are trained, and switching adapters writes only those, in place.

    tuned = peft.get_peft_model(model, peft.ShiraConfig(r=16, target_modules=[...]))    # peft's own tuner trains it
    adapter = of_peft(tuned)              # which weights, and the values they should have
    model = tuned.unload()
    before = switch(model, adapter)       # writes them; returns the values that stood there
    switch(model, before)                 # the very bits of before

Method: Bhardwaj et al., "Sparse High Rank Adapters", arXiv 2406.13175. Training, masks and saving are peft's. It merges
by adding differences and unmerges by subtracting them, which leaves the rounding of both in the weights; here the
values that are overwritten are kept instead. Layers of `sparsify` that own another representation (INT8, 2:4, blocks)
do not follow what is written."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core import InputError
from ..layers.find import check_model
from ..layers.sparse_ffn import SparseFFN
from .magnitude import kept_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Change(NamedTuple):
    """New values for some weights of one matrix: places, int64 [n], row * columns + column, each once; values, [n], of
    the weight's dtype; shape, of the matrix."""

    places: Tensor
    values: Tensor
    shape: tuple[int, int]


Adapter = dict[str, Change]  # what an adapter makes of a model's parameters, by name


def of_peft(model: nn.Module, name: str = "default") -> Adapter:
    """Return what a SHiRA adapter of a peft model makes of the base model's weights: W + scaling * difference, rounded
    once, by the parameters' names without peft's layers. InputError for a model without one of this name, unmerged."""
    check_model(model)
    changes, inner = {}, model
    while type(inner).__module__.partition(".")[0] == "peft":  # a PeftModel holds a tuner, and that the model
        inner = inner._modules["base_model" if "base_model" in inner._modules else "model"]
    for place, layer in inner.named_modules():
        if name not in getattr(layer, "shira_indices", ()):
            continue
        if layer.merged:
            raise InputError(f"{place} has adapters merged into it; accepted: unmerged ones (model.unmerge_adapter())")
        base = layer.get_base_layer().weight.detach()
        rows, columns = layer.shira_indices[name].to(base.device).long()
        wide = torch.promote_types(base.dtype, torch.float32)
        difference = layer.shira_weight[name].detach().to(base.device, wide) * layer.scaling[name]
        values = (base[rows, columns].to(wide) + difference).to(base.dtype)
        changes[f"{place}.weight".lstrip(".")] = Change(rows * base.shape[1] + columns, values, tuple(base.shape))
    if not changes:
        raise InputError(f"there is no SHiRA adapter {name!r:.80} in the model; the name of one that is, is accepted")
    return changes


@torch.no_grad()
def switch(model: nn.Module, adapter: Adapter) -> Adapter:
    """Write an adapter's values into a model, in place. Returns what stood there, which is an adapter, too. It belongs
    to the weights that it was made from: before another one, switch back.

    model: dense, or with layers that `sparsify` swapped; peft's own layers gone (`unload`). InputError, with nothing
    written, for layers whose neurons lie in another order, and for a parameter that the model does not have, or has in
    another shape, dtype or on another device."""
    check_model(model)
    if any(isinstance(layer, SparseFFN) and layer.order is not None for layer in model.modules()):
        raise InputError("the model's neurons lie in another order, which adapters do not fit; tl.densify(model) first")
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, change in adapter.items():
        weight = own.get(name)
        there = "not in the model" if weight is None else (tuple(weight.shape), weight.dtype, weight.device)
        wanted = change.shape, change.values.dtype, change.values.device
        if there != wanted or hasattr(weight, "device_mesh"):
            raise InputError(f"{name} is {there}; accepted: the model of the adapter, {wanted}, whole")
    before = {}
    for name, change in adapter.items():
        weight = own[name]
        # As whole numbers: a CPU scatters 16-bit values by way of float32, which changes NaNs, also in other places.
        bits = weight.view(_BITS[weight.itemsize])
        at = change.places // change.shape[1], change.places % change.shape[1]
        before[name] = Change(change.places, bits[at].view(weight.dtype), change.shape)
        bits.index_put_(at, change.values.view(bits.dtype))
    # The last one first: what was written twice, a tied weight under two names, has to end as it began.
    return dict(reversed(before.items()))


def drawn(model: nn.Module, share: float = 0.02, *, seed: int = 0) -> Adapter:
    """Return an adapter of random values in random places, this share of each matrix. InputError from 1 on."""
    draw, changes = torch.Generator().manual_seed(seed), {}
    for name, weight in model.named_parameters():
        if weight.dim() == 2:
            count = weight.numel() - kept_of(weight.numel(), share)
            # Each slice of the matrix gives one place: distinct and ascending without a permutation of them all.
            edges = torch.linspace(0, weight.numel(), count + 1, dtype=torch.float64).long()
            places = edges[:-1] + (torch.rand(count, generator=draw, dtype=torch.float64) * edges.diff()).long()
            values = 0.02 * torch.randn(count, generator=draw)
            changes[name] = Change(places.to(weight.device), values.to(weight), tuple(weight.shape))
    return changes
