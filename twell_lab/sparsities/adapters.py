"""Sparse adapters (SHiRA): 1 to 2% of the weights are trained, and switching adapters writes only those, in place.

    tuned = peft.get_peft_model(model, peft.ShiraConfig(r=16, target_modules=[...]))    # peft's own tuner trains it
    adapter = of_peft(tuned)              # which weights, and the values they should have
    model = tuned.unload()
    before = switch(model, adapter)       # writes them; returns the values that stood there
    switch(model, before)                 # the very bits of before

Method: Bhardwaj et al., "Sparse High Rank Adapters", arXiv 2406.13175. Training, masks and saving are peft's
(peft.ShiraConfig). peft merges by adding differences and unmerges by subtracting them, which leaves the rounding of
both in the weights. Here the values that are overwritten are kept instead: as many as the adapter has.

A layer of `sparsify` reads the model's own parameters, and needs nothing else. Where its neurons lie in another order,
`switch` writes where they lie now: an Adapter is always one of the dense model. Layers that own another representation
(INT8, 2:4, blocks) do not follow what is written."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

from ..core import InputError
from ..layers import storage
from ..layers.find import check_model
from ..layers.sparse_ffn import SparseFFN
from ..ops import clock
from .magnitude import kept_of

SWITCH, FUSE = "switch in place", "fuse LoRA"
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


class Change(NamedTuple):
    """New values for some weights of one matrix.

    places: int64 [n], row * columns + column, each once. values: [n], of the weight's dtype. shape: of the matrix."""

    places: Tensor
    values: Tensor
    shape: tuple[int, int]


Adapter = dict[str, Change]  # what an adapter makes of a model's parameters, by name


def of_peft(model: nn.Module, name: str = "default") -> Adapter:
    """Return what one SHiRA adapter of a peft model makes of the base model's weights.

    model: what peft.get_peft_model or peft.inject_adapter_in_model returned, nothing merged into its weights. The
    changes have the names that the parameters have once peft's layers are gone (`unload`). A new value is W + scaling *
    difference, rounded to W's dtype once. InputError for a model without a SHiRA adapter of this name, or a merged
    one."""
    check_model(model)
    changes, others, inner = {}, set(), model
    while type(inner).__module__.partition(".")[0] == "peft":  # a PeftModel holds a tuner, and that the model
        inner = inner._modules["base_model" if "base_model" in inner._modules else "model"]
    for place, layer in inner.named_modules():
        if not hasattr(layer, "shira_indices"):
            continue
        others.update(layer.shira_indices)
        if layer.merged:
            raise InputError(f"{place} has adapters merged into it; accepted: unmerged ones (model.unmerge_adapter())")
        if name not in layer.shira_indices:
            continue
        base = layer.get_base_layer().weight.detach()
        rows, columns = layer.shira_indices[name].to(base.device).long()
        wide = torch.promote_types(base.dtype, torch.float32)
        difference = layer.shira_weight[name].detach().to(base.device, wide) * layer.scaling[name]
        values = (base[rows, columns].to(wide) + difference).to(base.dtype)
        changes[f"{place}.weight".lstrip(".")] = Change(rows * base.shape[1] + columns, values, tuple(base.shape))
    if not changes:
        there = ", ".join(map(repr, sorted(others))) or "none"
        raise InputError(f"there is no SHiRA adapter {name!r:.80} in the model; accepted: one of those there: {there}")
    return changes


@torch.no_grad()
def switch(model: nn.Module, adapter: Adapter) -> Adapter:
    """Write an adapter's values into a model, in place.

    Nothing is computed, so the adapter belongs to the weights that it was made from: before another one, switch back.

    model: dense, or with layers that `sparsify` swapped; peft's own layers gone (`unload`). adapter: of `of_peft`, or
    what another `switch` returned. Returns the values that stood there, as an Adapter: switching to it gives the very
    bits of before. InputError, with nothing written, for a parameter that the model does not have, or has in another
    shape, dtype or on another device."""
    check_model(model)
    own = dict(model.named_parameters(remove_duplicate=False))
    for name, change in adapter.items():
        weight = own.get(name)
        if weight is None:
            raise InputError(f"the model has no parameter {name!r}; accepted: the model that the adapter was made for")
        there = tuple(weight.shape), weight.dtype, weight.device
        wanted = change.shape, change.values.dtype, change.values.device
        if there != wanted or hasattr(weight, "device_mesh"):
            shown = "{} {} on {}".format
            raise InputError(f"{name} is {shown(*there)}; accepted: {shown(*wanted)}, whole")
    before, lies = {}, {}
    for layer in model.modules():
        if isinstance(layer, SparseFFN) and layer.order is not None:
            lies.update(storage.rows_and_columns(layer.parts, layer.order))
    for name, change in adapter.items():
        weight = own[name]
        # As whole numbers: a CPU scatters 16-bit values by way of float32, which changes NaNs, also in other places.
        bits = weight.view(_BITS[weight.itemsize])
        row_and_column = change.places // change.shape[1], change.places % change.shape[1]
        order = lies.get(id(weight), (None, None))
        at = tuple(old if new is None else new[old] for old, new in zip(row_and_column, order))
        before[name] = Change(change.places, bits[at].view(weight.dtype), change.shape)
        bits.index_put_(at, change.values.view(bits.dtype))
    # The last one first: what was written twice, a tied weight under two names, has to end as it began.
    return dict(reversed(before.items()))


def drawn(model: nn.Module, share: float = 0.02, *, seed: int = 0) -> Adapter:
    """Return an adapter that writes random values to random places of all matrices: for measurements.

    share: of each matrix's weights, below 1. InputError for another share and a model without matrices."""
    draw, changes = torch.Generator().manual_seed(seed), {}
    for name, weight in model.named_parameters():
        if weight.dim() != 2:
            continue
        count = weight.numel() - kept_of(weight.numel(), share)
        # Each slice of the matrix gives one place: distinct and ascending without a permutation of them all.
        edges = torch.linspace(0, weight.numel(), count + 1, dtype=torch.float64).long()
        places = edges[:-1] + (torch.rand(count, generator=draw, dtype=torch.float64) * edges.diff()).long()
        values = 0.02 * torch.randn(count, generator=draw)
        changes[name] = Change(places.to(weight.device), values.to(weight), tuple(weight.shape))
    if not changes:
        raise InputError(f"{type(model).__name__} has no matrix among its parameters; one or more are accepted")
    return changes


@torch.no_grad()
def switching(model: nn.Module, share: float = 0.02, *, seconds: float = 2.0) -> list[dict]:
    """Measure switching an adapter on and off once beside fusing a LoRA of as many parameters and taking it off.

    The model has the bits of before afterwards. On a GPU by device events and on the wall, on a CPU on the wall for
    about so many seconds. share: of each matrix's weights. Returns two rows, JSON-able: path, ms (`samples`),
    parameters, written_bytes, and `worst_error`: the largest difference from the weights of before, once it is off."""
    adapter, own = drawn(model, share), dict(model.named_parameters())
    weights = {name: own[name].detach() for name in adapter}
    first = {name: weight.clone() for name, weight in weights.items()}
    on_gpu, draw, factors = next(iter(weights.values())).is_cuda, torch.Generator().manual_seed(0), {}
    for name, weight in weights.items():
        rank = max(1, round(len(adapter[name].places) / sum(weight.shape)))
        up, down = (torch.randn(*s, generator=draw) for s in ((weight.shape[0], rank), (rank, weight.shape[1])))
        factors[name] = (0.01 * up).to(weight), down.to(weight)

    def fuse(turn: int) -> None:
        for alpha in (1, -1):
            for name, weight in weights.items():
                weight.addmm_(*factors[name], alpha=alpha)

    def restore() -> None:
        for name, weight in weights.items():
            weight.copy_(first[name])

    calls = {SWITCH: lambda turn: switch(model, switch(model, adapter)), FUSE: fuse}
    errors = {}
    for path, call in calls.items():
        call(0)
        errors[path] = max(float((weights[name] - first[name]).abs().max()) for name in weights)
        restore()
    samples = clock.time_cuda(calls, 10) if on_gpu else clock.time_cpu(calls, seconds, cold=True)
    bursts = clock.time_bursts(calls, torch.cuda.synchronize, count=2) if on_gpu else {}
    restore()
    values = [change.values for change in adapter.values()]
    trained = {SWITCH: values, FUSE: [t for pair in factors.values() for t in pair]}
    written = {SWITCH: values, FUSE: weights.values()}
    rows = []
    for path, taken in samples.items():
        ms, spread = clock.quartiles(taken)
        row = {"path": path, "ms": ms, "spread": spread, "parameters": sum(t.numel() for t in trained[path])}
        row |= {"written_bytes": sum(t.nbytes for t in written[path]), "worst_error": errors[path]}
        row |= {"wall_ms": clock.quartiles(bursts[path][1])[0]} if on_gpu else {}
        rows.append(row | {"samples": [round(ms, 6) for ms in taken]})
    return rows
