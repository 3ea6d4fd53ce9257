"""Sparse adapters (SHiRA): 1 to 2% of the weights are trained, and switching adapters writes only those, in place.

    tuned = peft.get_peft_model(model, peft.ShiraConfig(r=16, target_modules=[...]))    # peft's own tuner trains it
    adapter = of_peft(tuned)              # which weights, and the values they should have
    model = tuned.unload()
    before = switch(model, adapter)       # writes them; returns the values that stood there
    switch(model, before)                 # the very bits of before

Method: Bhardwaj et al., "Sparse High Rank Adapters", arXiv 2406.13175. Training, masks and saving are peft's
(peft.ShiraConfig). peft merges by adding differences, and unmerges by subtracting them, which leaves the rounding of
both in the weights. Here the values that are overwritten are kept instead: as many as the adapter has.

**Under a sparse layer** (twell_lab.sparsify) nothing else is needed: `switch` tells torch that it wrote, so copies that
a layer holds in another order follow, and what fires is decided by the weights as they are. Which is why it gives what
the dense layer gives. Layers of peft's in the place of a projection are refused by name while they are there
(layers.hooks), merged or not; after `merge_and_unload` they are gone, and the layer goes on with the merged weights.

`switching` measures it beside fusing and unfusing a LoRA of as many parameters, W += B A, which writes all of W."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..core import InputError
from ..layers.anatomy import check_model
from ..layers.sparse_ffn import SparseFFN
from ..ops import clock
from .weights import check_sparsity, kept_of

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_MOST = 2**31 - 1  # weights in a matrix, as int32 counts them


@dataclass(frozen=True, eq=False)
class Change:
    """New values for some weights of one matrix.

    places: int32 [n], row * columns + column, ascending. values: [n], of the weight's dtype. shape: of the matrix.
    checked: whether the places are known to be good, and need not be looked at, which would wait for a GPU."""

    places: Tensor
    values: Tensor
    shape: tuple[int, int]
    checked: bool = False

    def __post_init__(self) -> None:
        if self.checked:
            return
        where, values, size = self.places, self.values, self.shape[0] * self.shape[1]
        if size > _MOST:
            raise InputError(f"a matrix of {size:,} weights; up to {_MOST:,} are accepted")
        if where.dtype != torch.int32 or where.dim() != 1 or where.shape != values.shape:
            raise InputError(
                f"places are {where.dtype} {list(where.shape)} and values {list(values.shape)}; accepted: torch.int32 "
                "[n] and [n]"
            )
        if len(where) and not 0 <= int(where.min()) <= int(where.max()) < size:
            raise InputError(f"places are {int(where.min())} to {int(where.max())}; accepted: 0 to {size - 1}")
        if bool((where.diff() <= 0).any()):
            raise InputError("places do not ascend, or one is there twice; accepted: each once, ascending")

    @property
    def nbytes(self) -> int:
        """Bytes of places and values."""
        return self.places.nbytes + self.values.nbytes


@dataclass(frozen=True, eq=False)
class Adapter:
    """What an adapter makes of a model: a Change for some of its parameters, by name."""

    changes: dict[str, Change]

    @property
    def nbytes(self) -> int:
        """Bytes of all changes."""
        return sum(each.nbytes for each in self.changes.values())

    def share(self, model: nn.Module) -> float:
        """How much of the model's parameters is written."""
        return sum(len(each.places) for each in self.changes.values()) / sum(p.numel() for p in model.parameters())

    def to(self, device: torch.device | str) -> Adapter:
        """The same, on another device."""
        moved = lambda c: Change(c.places.to(device), c.values.to(device), c.shape, checked=True)
        return Adapter({name: moved(change) for name, change in self.changes.items()})


def of_peft(model: nn.Module, name: str = "default") -> Adapter:
    """What one SHiRA adapter of a peft model makes of the base model's weights.

    Args:
        model: what peft.get_peft_model or peft.inject_adapter_in_model returned, nothing merged into its weights.
        name: of the adapter.

    Returns:
        Changes under the names that the parameters have once peft's layers are gone (`unload`). A new value is W +
        scaling * difference, added in float32 or wider and rounded to W's dtype once.

    Raises:
        InputError: for a model without a SHiRA adapter of this name, and for one that is merged.
    """
    check_model(model)
    changes, others = {}, set()
    inner = model
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
        places, order = (rows * base.shape[1] + columns).sort()
        wide = torch.promote_types(base.dtype, torch.float32)
        difference = layer.shira_weight[name].detach().to(base.device, wide) * layer.scaling[name]
        values = (base[rows, columns].to(wide) + difference)[order].to(base.dtype)
        changes[f"{place}.weight".lstrip(".")] = Change(places.to(torch.int32), values, tuple(base.shape))
    if not changes:
        there = ", ".join(map(repr, sorted(others))) or "none"
        raise InputError(f"there is no SHiRA adapter {name!r:.80} in the model; accepted: one of those there: {there}")
    return Adapter(changes)


@torch.no_grad()
def switch(model: nn.Module, adapter: Adapter) -> Adapter:
    """Write an adapter's values into a model, in place.

    Nothing is computed, so the adapter belongs to the weights that it was made from: before another one, switch back.
    Of two that are on at once, take the last off first.

    Args:
        model: dense, or with layers that `sparsify` swapped; peft's own layers gone (`unload`).
        adapter: of `of_peft`, or what another `switch` returned.

    Returns:
        The values that stood there, as an Adapter: switching to it gives the very bits of before.

    Raises:
        InputError: with nothing written, for a parameter that the model does not have, or has in another shape, dtype
            or on another device; and for layers whose neurons were reordered (`sparsify(reorder=True)`), where these
            places hold other weights.
    """
    check_model(model)
    if not isinstance(adapter, Adapter):
        raise InputError(f"adapter is a {type(adapter).__name__}; an Adapter is accepted")
    held = dict(model.named_parameters(remove_duplicate=False))
    moved = {id(p): n for n, m in model.named_modules() if isinstance(m, SparseFFN) and m.reordered for p in _of(m)}
    for name, change in adapter.changes.items():
        weight = held.get(name)
        if weight is None:
            raise InputError(f"the model has no parameter {name!r}; accepted: the model that the adapter was made for")
        found = tuple(weight.shape), weight.dtype, weight.device
        wanted = change.shape, change.values.dtype, change.values.device
        if found != wanted or hasattr(weight, "device_mesh"):
            shown = "{} {} on {}".format
            raise InputError(f"{name} is {shown(*found)}; accepted: {shown(*wanted)}, whole")
        if not weight.is_contiguous() and not weight.t().is_contiguous():
            raise InputError(f"{name} has strides {weight.stride()}; accepted: rows, or columns, one after the other")
        if id(weight) in moved:
            raise InputError(
                f"{name} belongs to {moved[id(weight)]!r}, whose neurons were reordered; accepted: densify(model), or "
                "a model that was swapped without reorder"
            )
    before = {}
    for name, change in adapter.changes.items():
        weight, places, (rows, columns) = held[name], change.places.long(), change.shape
        if not weight.is_contiguous():  # a turned one
            weight, places = weight.t(), places % columns * rows + places // columns
        # As whole numbers: a CPU scatters 16-bit values by way of float32, which changes NaNs, also in other places.
        bits, dtype = _BITS[weight.itemsize], weight.dtype
        flat = weight.view(-1).view(bits)
        before[name] = Change(change.places, flat.index_select(0, places).view(dtype), change.shape, checked=True)
        flat.scatter_(0, places, change.values.view(bits))
    # The last one first: what was written twice, a tied weight under two names, has to end as it began.
    return Adapter(dict(reversed(before.items())))


def _of(layer: SparseFFN) -> list[Tensor]:
    return [*layer.parameters(), *layer.source.parameters()]


def drawn(model: nn.Module, share: float = 0.02, *, seed: int = 0) -> Adapter:
    """An adapter that writes random values to random places of all matrices: for measurements.

    share: of each matrix's weights, above 0 and below 1. InputError for another share and a model without matrices."""
    check_sparsity(share)
    draw, changes = torch.Generator().manual_seed(seed), {}
    for name, weight in model.named_parameters():
        if weight.dim() != 2:
            continue
        count = weight.numel() - kept_of(weight.numel(), share)
        # Each slice of the matrix gives one place: distinct and ascending without a permutation of them all.
        edges = torch.linspace(0, weight.numel(), count + 1, dtype=torch.float64).long()
        places = edges[:-1] + (torch.rand(count, generator=draw, dtype=torch.float64) * edges.diff()).long()
        values = 0.02 * torch.randn(count, generator=draw)
        here = weight.device
        changes[name] = Change(places.to(here, torch.int32), values.to(here, weight.dtype), tuple(weight.shape))
    if not changes:
        raise InputError(f"{type(model).__name__} has no matrix among its parameters; one or more are accepted")
    return Adapter(changes)


# ---- what it costs ----

SWITCH, FUSE = "switch in place", "fuse LoRA"


@torch.no_grad()
def switching(model: nn.Module, share: float = 0.02, *, seconds: float = 2.0, seed: int = 0) -> list[dict]:
    """Measure switching an adapter on and off again beside fusing a LoRA of as many parameters and taking it off.

    The model has the bits of before afterwards. On a GPU by device events and on the wall, on a CPU on the wall, the
    calls in turn (twell_lab.ops.clock). Nothing of a forward is in it; a sparse layer that holds copies of weights
    makes them anew in its next one.

    Args:
        model: whose matrices are all written.
        share: of each matrix's weights that the sparse adapter has.
        seconds: about how long to measure, on a CPU.
        seed: of both adapters.

    Returns:
        Two rows, JSON-able: path, ms (on and off once; `samples`), parameters, written_bytes, and `worst_error`: the
        largest difference from the weights of before, once it is off again.
    """
    adapter = drawn(model, share, seed=seed)
    weights = {name: dict(model.named_parameters())[name].detach() for name in adapter.changes}
    kept = {name: weight.clone() for name, weight in weights.items()}
    device, draw = next(iter(weights.values())).device, torch.Generator().manual_seed(seed)
    factors = {}
    for name, weight in weights.items():
        rank = max(1, round(len(adapter.changes[name].places) / sum(weight.shape)))
        up, down = (torch.randn(*s, generator=draw) for s in ((weight.shape[0], rank), (rank, weight.shape[1])))
        factors[name] = [each.to(device, weight.dtype) for each in (0.01 * up, down)]

    def fuse(turn: int) -> None:
        for name, weight in weights.items():
            weight.addmm_(*factors[name])
        for name, weight in weights.items():
            weight.addmm_(*factors[name], alpha=-1)

    def swap(turn: int) -> None:
        switch(model, switch(model, adapter))

    calls: dict[str, Callable] = {SWITCH: swap, FUSE: fuse}
    errors = {}
    for path, call in calls.items():
        call(0)
        errors[path] = max(float((weights[name] - kept[name]).abs().max()) for name in weights)
        for name, weight in weights.items():
            weight.copy_(kept[name])
    walls: dict = {}
    if device.type == "cuda":
        samples = clock.time_cuda(calls, 10)
        walls = {path: wall for path, (_, wall) in clock.time_bursts(calls, torch.cuda.synchronize, count=2).items()}
    else:
        samples = clock.time_cpu(calls, seconds, cold=True)
    for name, weight in weights.items():
        weight.copy_(kept[name])
    written = [change.values for change in adapter.changes.values()]
    sizes = {
        SWITCH: (sum(each.numel() for each in written), sum(each.nbytes for each in written)),
        FUSE: (
            sum(each.numel() for pair in factors.values() for each in pair),
            sum(each.nbytes for each in weights.values()),
        ),
    }
    rows = []
    for path, taken in samples.items():
        ms, spread = clock.quartiles(taken)
        row = {"path": path, "ms": ms, "spread": spread, "parameters": sizes[path][0], "written_bytes": sizes[path][1]}
        row |= {"wall_ms": clock.quartiles(walls[path])[0]} if path in walls else {}
        rows.append(row | {"worst_error": errors[path], "samples": [round(each, 6) for each in taken]})
    return rows
