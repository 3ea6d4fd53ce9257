"""How a layer's own weights lie in memory: rewritten once, in place, for the paths that it takes.

Sparse kernels read the row of `down`'s transpose that belongs to a neuron; with thresholds on inputs they read all
three weights by columns. So `rewrite` gives such a parameter the strides of its transpose: it stays the same Parameter
with the same shape and values, and nothing is held twice. For the hot/cold path it also puts the neurons in order: the
rows of gate and up, the columns of down. That is an equivalent model, with other values at the same places. `restore`
takes both back.

A state_dict holds contiguous tensors (`save_contiguous`), in the order that the parameters have; a state that is
loaded is copied into the parameters as they lie. Optimizers, averages and masks that were made before a reordering no
longer fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..ops.checks import is_turned
from .parts import Part, Projection, owner_of

ROWS, COLUMNS = "rows", "columns"


def rewrite(
    parts: Sequence[Projection | None],
    reads: Mapping[str, str],
    order: Sequence[int] | None = None,
    tied: Collection[int] = (),
    *,
    back: bool = False,
) -> str:
    """Store the weights of gate, up and down as `reads` says, by the names "gate", "up" and "down": by ROWS or COLUMNS.

    order: the neurons, the one that comes first first; None leaves them. tied: ids of parameters that others have, too,
    which are not put in another order. back: the order is that of before, which takes gradients along. Returns "", or
    why nothing was changed."""
    stored: dict[
        tuple[int, str], tuple[Projection, bool, bool]
    ] = {}  # turned; whether the neurons are its last dimension
    for name, part in zip(("gate", "up", "down"), parts):
        if part is not None and (name in reads or order is not None):
            transposed = isinstance(part, Part) and part.transposed
            turned = (reads.get(name) == COLUMNS) != transposed
            stored[id(owner_of(part)), _names(part)[0]] = part, turned, (name == "down") != transposed
    if why := next((why for part, *_ in stored.values() if (why := _fixed(part))), ""):
        return why
    if order is not None and not back:
        own = [p for part, *_ in stored.values() for p in owner_of(part)._parameters.values() if p is not None]
        if any(isinstance(part, Part) and part.index is not None for part, *_ in stored.values()):
            return "its weights lie in one tensor with those of other experts"
        if any(id(p) in tied for p in own):
            return "its weights are tied to other modules', which need their order"
        if any(p.grad is not None for p in own):
            return "its weights have gradients, which have their order"
    for part, turned, last in stored.values():
        weight, bias = (owner_of(part)._parameters.get(name) for name in _names(part))
        assert weight is not None
        with torch.inference_mode(weight.is_inference()), torch.no_grad():
            data = weight.data
            if order is not None:
                index = torch.tensor(order, device=data.device)
                if halves := data.shape[last] // len(order):  # gate and up in one
                    index = torch.cat([index + half * len(order) for half in range(halves)])
                data = data.index_select(int(last), index)
                if weight.grad is not None:
                    weight.grad = weight.grad.index_select(int(last), index)
                if bias is not None and part is not parts[2]:
                    bias.data = bias.data.index_select(0, index)
                    bias.grad = bias.grad if bias.grad is None else bias.grad.index_select(0, index)
            _store(weight, data, turned)
    return ""


def rows_and_columns(parts: Sequence[Projection | None], order: Sequence[int]) -> dict[int, list[Tensor | None]]:
    """Return where the rows and columns that matrices had before `rewrite` lie, now that the neurons are in this order:
    by the id of a parameter, its new rows and columns, int64 by old ones, or None where they are the same."""
    lies, places = torch.tensor(order).argsort(), {}
    for name, part in zip(("gate", "up", "down"), parts):
        weight = None if part is None else owner_of(part)._parameters[_names(part)[0]]
        if part is None or weight is None:
            continue
        last = int((name == "down") != (isinstance(part, Part) and part.transposed))
        halves = weight.shape[last] // len(order)  # gate and up in one
        both: list[Tensor | None] = [None, None]
        both[last] = torch.cat([lies + half * len(order) for half in range(halves)]).to(weight.device)
        places[id(weight)] = both
    return places


def turned_in(parts: Sequence[Projection | None]) -> set[int]:
    """Return the positions of those whose weights have the strides of a transpose as the model has them."""
    weights = {n: owner_of(part)._parameters.get(_names(part)[0]) for n, part in enumerate(parts) if part is not None}
    return {n for n, w in weights.items() if w is not None and not w.is_contiguous() and w.dim() == 2 and is_turned(w)}


def restore(parts: Sequence[Projection | None], order: Sequence[int] | None, turned: Collection[int] = ()) -> None:
    """Store the weights contiguously, those at these positions by columns, with the neurons as they were before
    `rewrite` was given `order`."""
    if order is not None:
        rewrite(parts, {}, torch.tensor(order).argsort().tolist(), back=True)
    for position, part in enumerate(parts):
        if part is not None and not _fixed(part):
            weight = owner_of(part)._parameters[_names(part)[0]]
            assert weight is not None
            with torch.inference_mode(weight.is_inference()), torch.no_grad():
                _store(weight, weight.data, position in turned)


def _store(weight: Parameter, data: Tensor, turned: bool) -> None:
    """Have the parameter hold these values, contiguous or with the strides of the transpose of a contiguous tensor."""
    if turned and not is_turned(data if data.dim() == 2 else data[0]):
        data = data.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif not turned:
        data = data.contiguous()
    if data is not weight.data:
        weight.data = data


def _names(part: Projection) -> tuple[str, str]:
    """Return what the owner of a projection calls its weight and its bias."""
    weight, bias = part.names if isinstance(part, Part) else ("weight", "bias")
    return weight, bias or ""


def _fixed(part: Projection) -> str:
    """Return why the weight of a projection cannot be stored otherwise; "" where it can."""
    weight = owner_of(part)._parameters.get(_names(part)[0])
    if type(weight) is not Parameter or weight.layout != torch.strided:
        return "its weights are parametrized, quantised, sharded or no plain parameters"
    if weight.is_meta:
        return "its weights have no memory (meta)"
    if weight.untyped_storage().nbytes() != weight.nbytes:
        return "its weights lie in one memory with other tensors"
    if weight.device.type == "cpu" and weight.is_shared():
        return "its weights lie in memory that processes share"
    return ""


def save_contiguous(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: dict) -> None:
    """Put contiguous tensors into the state of a module with rewritten weights: its hook for state_dict."""
    for name in module._parameters:
        if isinstance(state.get(prefix + name), Tensor):
            state[prefix + name] = state[prefix + name].contiguous()
