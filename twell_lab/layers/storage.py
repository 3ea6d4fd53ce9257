"""How a layer's own weights lie in memory: rewritten once, in place, for the paths that it takes.

A weight that kernels read by columns gets the strides of its transpose: the same Parameter with the same shape and
values, and nothing is held twice. For the hot/cold path the neurons are put in order: the rows of gate and up, the
columns of down. That is an equivalent model, which optimizers, averages, masks and adapters of before no longer fit.
`restore` takes both back. A state_dict holds contiguous tensors, in the order that the parameters have."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from ..ops.checks import is_turned
from .parts import Projection, owner_of

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
    work = {id(weight): (name, *one) for name, *one, weight in _each(parts) if name in reads or order is not None}
    if why := next(filter(None, (_fixed(part) for _, part, _ in work.values())), ""):
        return why
    if order is not None and not back:
        own = [p for _, part, _ in work.values() for p in owner_of(part)._parameters.values() if p is not None]
        if any(getattr(part, "index", None) is not None for _, part, _ in work.values()):
            return "its weights lie in one tensor with those of other experts"
        if any(id(p) in tied for p in own):
            return "its weights are tied to other modules', which need their order"
        if any(p.grad is not None for p in own):
            return "its weights have gradients, which have their order"
    for name, part, transposed in work.values():
        weight, bias = _stored(part)
        assert weight is not None
        with torch.inference_mode(weight.is_inference()), torch.no_grad():
            data, last = weight.data, int((name == "down") != transposed)
            if order is not None:
                halves = range(data.shape[last] // len(order))  # two where gate and up are one
                index = torch.cat([torch.tensor(order, device=data.device) + half * len(order) for half in halves])
                data = data.index_select(last, index)
                if weight.grad is not None:
                    weight.grad = weight.grad.index_select(last, index)
                if bias is not None and name != "down":
                    bias.data = bias.data.index_select(0, index)
                    bias.grad = bias.grad if bias.grad is None else bias.grad.index_select(0, index)
            _store(weight, data, (reads.get(name) == COLUMNS) != transposed)
    return ""


def turned_in(parts: Sequence[Projection | None]) -> set[int]:
    """Return the ids of the weights that have the strides of a transpose as the model has them."""
    weights = [weight for *_, weight in _each(parts) if weight is not None]
    return {id(w) for w in weights if not w.is_contiguous() and w.dim() == 2 and is_turned(w)}


def restore(parts: Sequence[Projection | None], order: Sequence[int] | None, turned: Collection[int] = ()) -> None:
    """Store the weights contiguously, those with these ids by columns, with the neurons as they were before `rewrite`
    was given `order`."""
    if order is not None:
        rewrite(parts, {}, torch.tensor(order).argsort().tolist(), back=True)
    for _, part, _, weight in _each(parts):
        if not _fixed(part):
            with torch.inference_mode(weight.is_inference()), torch.no_grad():
                _store(weight, weight.data, id(weight) in turned)


def _each(parts: Sequence[Projection | None]) -> Iterator[tuple]:
    """Yield the name of each projection that is there, itself, whether it is stored transposed, and its parameter."""
    for name, part in zip(("gate", "up", "down"), parts):
        if part is not None:
            yield name, part, bool(getattr(part, "transposed", False)), _stored(part)[0]


def _store(weight: Parameter, data: Tensor, turned: bool) -> None:
    if turned and not is_turned(data if data.dim() == 2 else data[0]):
        data = data.transpose(-1, -2).contiguous().transpose(-1, -2)
    elif not turned:
        data = data.contiguous()
    if data is not weight.data:
        weight.data = data


def _stored(part: Projection) -> tuple[Parameter | None, Parameter | None]:
    """Return the parameters that the module of a projection has for its weight and its bias."""
    own, (weight, bias) = owner_of(part)._parameters, getattr(part, "names", ("weight", "bias"))
    return own.get(weight), own.get(bias or "")


def _fixed(part: Projection) -> str:
    """Return why the weight of a projection cannot be stored otherwise; "" where it can."""
    weight, _ = _stored(part)
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
    """Put contiguous tensors into a module's state: its hook for state_dict."""
    for name in module._parameters:
        if isinstance(state.get(prefix + name), Tensor):
            state[prefix + name] = state[prefix + name].contiguous()
