"""How a layer's own weights lie in memory: rewritten once, in place, for the paths that it takes.

Sparse kernels read the row of `down`'s transpose that belongs to a neuron; with thresholds on inputs they read all three
weights by columns. So `rewrite` gives such a parameter the strides of its transpose: it stays the same Parameter with
the same shape and values, and nothing is held twice. For the hot/cold path it also puts the neurons in order: the rows
of gate and up, the columns of down. That is an equivalent model, with other values at the same places. `restore` takes
both back.

A state_dict holds contiguous tensors (`save_contiguous`), in the order that the parameters have; a state that is loaded
is copied into the parameters as they lie. Optimizers, averages, masks and adapters that were made before a reordering no
longer fit."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn

from ..ops.dispatch import is_turned
from .find import Part

ROWS, COLUMNS = "rows", "columns"


def rewrite(
    parts: Sequence[nn.Module | Part | None],
    reads: Mapping[str, str],
    order: Sequence[int] | None = None,
    tied: Collection[int] = (),
) -> str:
    """Store the weights of gate, up and down as `reads` says, by the names "gate", "up" and "down": by ROWS or COLUMNS.

    order: the neurons, the one that comes first first; None leaves them. tied: ids of parameters that others have, too,
    which are not put in another order. Returns "", or why nothing was changed."""
    stored: dict[int, tuple[nn.Module, bool, bool]] = {}  # owner, turned, columns are the neurons
    for name, part in zip(("gate", "up", "down"), parts):
        if part is None or name not in reads and order is None:
            continue
        owner, transposed = (part.owner, part.transposed) if isinstance(part, Part) else (part, False)
        stored[id(owner)] = owner, (reads.get(name) == COLUMNS) != transposed, (name == "down") != transposed
    owners = [owner for owner, *_ in stored.values()]
    if why := next((why for owner in owners if (why := _fixed(owner))), ""):
        return why
    if order is not None:
        own = [p for owner in owners for p in owner._parameters.values() if p is not None]
        if any(id(p) in tied for p in own):
            return "its weights are tied to other modules', which need their order"
        if any(p.grad is not None for p in own):
            return "its weights have gradients, which have their order"
    for owner, turned, by_columns in stored.values():
        weight = owner._parameters["weight"]
        neurons_first = not by_columns
        with torch.inference_mode(weight.is_inference()), torch.no_grad():
            data = weight.data
            if order is not None:
                index = torch.tensor(order, device=data.device)
                halves = data.shape[0 if neurons_first else 1] // len(order)  # gate and up in one
                index = torch.cat([index + half * len(order) for half in range(halves)])
                data = data.index_select(0 if neurons_first else 1, index)
                bias = owner._parameters.get("bias")
                if bias is not None and bias.shape[0] == len(index) and not _is_down(owner, parts):
                    bias.data = bias.data.index_select(0, index)
            if turned != is_turned(data) or order is not None:
                weight.data = data.t().contiguous().t() if turned else data.contiguous()
    return ""


def restore(parts: Sequence[nn.Module | Part | None], order: Sequence[int] | None) -> None:
    """Store the weights contiguously, with the neurons in the order that they had before `rewrite` was given `order`."""
    back = None if order is None else torch.tensor(order).argsort().tolist()
    if back is not None:
        rewrite(parts, {}, back)
    for part in parts:
        owner = part.owner if isinstance(part, Part) else part
        if owner is not None and not _fixed(owner) and not owner._parameters["weight"].is_contiguous():
            weight = owner._parameters["weight"]
            with torch.inference_mode(weight.is_inference()), torch.no_grad():
                weight.data = weight.data.contiguous()


def _is_down(owner: nn.Module, parts: Sequence) -> bool:
    down = parts[2]
    return owner is (down.owner if isinstance(down, Part) else down)


def _fixed(owner: nn.Module) -> str:
    """Why the weight of a projection cannot be stored otherwise; "" where it can."""
    weight = owner._parameters.get("weight")
    if type(weight) is not nn.Parameter or weight.layout != torch.strided or weight.dim() != 2:
        return "its weights are parametrized, quantised, sharded or no plain parameters"
    if weight.is_meta:
        return "its weights have no memory (meta)"
    if weight.untyped_storage().nbytes() != weight.nbytes:
        return "its weights lie in one memory with other tensors"
    if weight.device.type == "cpu" and weight.is_shared():
        return "its weights lie in memory that processes share"
    return ""


def save_contiguous(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: dict) -> None:
    """Put a contiguous weight into the state of a projection: its hook for state_dict."""
    name = f"{prefix}weight"
    if isinstance(state.get(name), Tensor):
        state[name] = state[name].contiguous()
