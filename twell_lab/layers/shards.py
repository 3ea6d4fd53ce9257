"""Layers whose neurons transformers' tensor parallelism splits over processes (tp_plan).

Gate and up are split by rows ("colwise"), down by columns ("rowwise"). So what one process holds is a feed-forward
layer of some of the neurons, and the sum over all processes, with down's bias added once, is what the whole layer
gives. A SparseFFN computes its process's layer, and hands the result to what sums it for the dense one."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor, nn

_HOME = "transformers.distributed.tensor_parallel"
BY_ROWS, BY_COLUMNS = "rows", "columns"


class Split(NamedTuple):
    """How a projection is split. style: what transformers does before and after its forward; mesh: the processes."""

    by: str
    style: object
    mesh: object


def is_sharded(t) -> bool:
    """Whether a tensor is a DTensor, of which each process holds a part."""
    return hasattr(t, "device_mesh")


def part_of(t: Tensor) -> Tensor:
    """What this process holds of a tensor, in the same memory."""
    return t.to_local() if is_sharded(t) else t


def split_of(module: nn.Module) -> Split | None:
    """How a projection is split; None where it is not, or not in a way that is known here: each process's part of the
    neurons to itself, and one sum at the end."""
    forward = vars(module).get("forward")
    code = getattr(forward, "__code__", None)
    if code is None or forward.__module__ != _HOME or type(module) is not nn.Linear:
        return None
    found = {name: cell.cell_contents for name, cell in zip(code.co_freevars, forward.__closure__ or ())}
    style, mesh, beneath = (found.get(name) for name in ("self", "mesh", "original_forward"))
    if getattr(beneath, "__func__", None) is not nn.Linear.forward or beneath.__self__ is not module:
        return None
    layouts = tuple(str(getattr(style, name, None)) for name in ("input_layouts", "output_layouts"))
    known = {
        "ColwiseParallel": (BY_ROWS, ("R", "S(-1)"), "S(0)"),
        "RowwiseParallel": (BY_COLUMNS, ("S(-1)", "R"), "S(1)"),
    }
    by, wanted, lies = known.get(type(style).__name__, (None, None, None))
    placed = tuple(map(str, getattr(module._parameters.get("weight"), "placements", ())))
    if by is None or layouts != wanted or placed != (lies,) or not style.use_local_output:
        return None
    return Split(by, style, mesh)


class Summed:
    """The forward of a SparseFFN that holds one process's neurons: as every other forward in the model, each process
    has to call it. Where a gradient is needed, or the layer is to stay dense, the dense one computes."""

    def __init__(self, sparse: nn.Module, down: nn.Module) -> None:
        self.sparse, self.down, self.split = sparse, down, split_of(down)

    def __call__(self, x: Tensor) -> Tensor:
        sparse = self.sparse
        stays = sparse._watch is None and sparse.always_dense()
        if stays or torch.is_grad_enabled() and any(t.requires_grad for t in (x, *sparse.parameters())):
            return sparse.source(x)
        y = type(sparse).forward(sparse, x)
        return self.split.style.transform_output_post_forward(self.down, y, self.split.mesh)
