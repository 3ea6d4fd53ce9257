"""How a layer's own weights lie in memory: rewritten once, in place, for the paths that it takes. A weight that kernels
read by columns gets the strides of its transpose: the same Parameter with the same shape and values. For the hot/cold
path the neurons are put in order: the rows of gate and up, the columns of down. That is an equivalent model, which
optimizers, averages, masks and adapters of before no longer fit. `restore` takes both back."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..ops.checks import is_turned
from .parts import Projection, owner_of, stored_by

ROWS, COLUMNS = "rows", "columns"


def rewrite(
    parts: Sequence[Projection | None],
    reads: Mapping[str, str],
    order: Sequence[int] | None = None,
    tied: Collection[int] = (),
) -> str:
    """Store the weights of gate, up and down as `reads` says, by the names "gate", "up" and "down": by ROWS or COLUMNS.

    order: the neurons, the one that comes first first; None leaves them. tied: ids of parameters that others have, too,
    which are not put in another order. Returns "", or why nothing was changed."""
    work = [(name, part) for name, part in _stored_once(parts) if name in reads or order is not None]
    own = [p for _, part in work for p in owner_of(part)._parameters.values() if p is not None]
    why = next(filter(None, (_fixed(part) for _, part in work)), "")
    if order is not None and not why:
        if any(getattr(part, "index", None) is not None for _, part in work):
            why = "its weights lie in one tensor with those of other experts"
        elif any(id(p) in tied for p in own):
            why = "its weights are tied to other modules', which need their order"
        elif any(p.grad is not None for p in own):
            why = "its weights have gradients, which have their order"
    for name, part in () if why else work:
        _lay(name, part, order, reads.get(name) == COLUMNS)
    return why


def restore(parts: Sequence[Projection | None], order: Sequence[int] | None) -> None:
    """Store the weights contiguously, with the neurons, and their gradients, as they were before `rewrite` was given
    `order`; what cannot be stored otherwise by now stays, and in an order all of them."""
    work, fixed = [*_stored_once(parts)], [bool(_fixed(part)) for _, part in _stored_once(parts)]
    back = None if order is None or any(fixed) else torch.tensor(order).argsort().tolist()
    for (name, part), stays in zip(work, fixed):
        if not stays:
            _lay(name, part, back, getattr(part, "transposed", False))


def _stored_once(parts: Sequence[Projection | None]) -> list[tuple[str, Projection]]:
    """Return the projections by name, those that share a parameter once."""
    named = zip(("gate", "up", "down"), parts)
    return list({id(stored_by(part)[0]): (name, part) for name, part in named if part is not None}.values())


def _lay(name: str, part: Projection, order: Sequence[int] | None, by_columns: bool) -> None:
    """Store a projection's weight by its columns or rows, and its neurons in this order, with bias and gradients."""
    (weight, bias), transposed = stored_by(part), bool(getattr(part, "transposed", False))
    with torch.inference_mode(weight.is_inference()), torch.no_grad():
        across = int((name == "down") != transposed)  # the dimension of the neurons
        for t, dim in ((weight, across), (None if name == "down" else bias, 0)) if order is not None else ():
            if t is not None:
                halves = range(t.shape[dim] // len(order))  # two where gate and up are one
                index = torch.cat([torch.tensor(order, device=t.device) + half * len(order) for half in halves])
                t.data = t.data.index_select(dim, index)
                t.grad = None if t.grad is None else t.grad.index_select(dim, index)
        data = weight.data
        if by_columns == transposed:
            weight.data = data.contiguous()
        elif not is_turned(data if data.dim() == 2 else data[0]):
            weight.data = data.transpose(-1, -2).contiguous().transpose(-1, -2)


def _fixed(part: Projection) -> str:
    """Return why the weight of a projection cannot be stored otherwise; "" where it can."""
    weight, _ = stored_by(part)
    if type(weight) is not Parameter or weight.layout != torch.strided:
        return "its weights are parametrized, quantised, sharded or no plain parameters"
    if weight.is_meta:
        return "its weights have no memory (meta)"
    if weight.untyped_storage().nbytes() != weight.nbytes:
        return "its weights lie in one memory with other tensors"
    shared = weight.device.type == "cpu" and weight.is_shared()
    return "its weights lie in memory that processes share" if shared else ""


def save_contiguous(module: nn.Module, state: dict[str, Tensor], prefix: str, metadata: dict) -> None:
    """Put contiguous tensors into a module's state: its hook for state_dict."""
    for name in module._parameters:
        if isinstance(state.get(prefix + name), Tensor):
            state[prefix + name] = state[prefix + name].contiguous()
