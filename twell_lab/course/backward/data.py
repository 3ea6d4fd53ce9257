"""The backward pass of a sparse layer, as notebook 11 computes it: a small layer, what is kept, and training steps,
recorded and the reader's own. A layer is y = h Wd^T with h = g * u, g = relu(x Wg^T), u = x Wu^T. dy is the gradient of
the loss in y, and c * sum |h| is added to the loss. Rows of steps are those of kind "training", each with `where`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn

from ...ops import clock as clocks
from ..measure.data import relative_error
from ..notebook import sixteen_bits
from ..recorded import GRAPH, LOGNORMAL, newest, timed_here

KIND = "training"  # how the records' names begin, too
TOKENS, D_MODEL, D_FF = 16384, 2048, 5632
SIZE = 2**-6  # of what comes from above: with 1, weights' gradients would pass what float16 holds, on GPUs that need it
SPARSE = "forced twell"

# ---- a layer small enough to draw ----


class Case(NamedTuple):
    """A gated layer, its input, and the gradient that comes back from above: all float64. x, dy: [tokens, d_model];
    gate, up: [d_ff, d_model]; down: [d_model, d_ff]."""

    x: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    dy: Tensor

    @property
    def weights(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.gate, self.up, self.down


def drawn(tokens: int = 24, d_model: int = 16, d_ff: int = 40, seed: int = 0) -> Case:
    """A random layer in which few neurons fire, two of them never; every eighth token makes many fire."""
    generator = torch.Generator().manual_seed(seed)
    x, dy = (torch.randn(tokens, d_model, generator=generator, dtype=torch.float64) for _ in range(2))
    gate, up = (torch.randn(d_ff, d_model, generator=generator, dtype=torch.float64) / 4 for _ in range(2))
    down = torch.randn(d_model, d_ff, generator=generator, dtype=torch.float64) / 6
    x[:, 0], gate[:, 0] = 1.2, -1.0  # a dimension that silences everybody, as a bias would,
    x[3::8, 0] = 0.2  # less so at some tokens,
    gate[[d_ff // 3, d_ff // 2], 0] = -9.0  # and altogether in two neurons
    return Case(x, gate, up, down, dy)


# ---- memory by tensor ----


@contextmanager
def saved_tensors(module: nn.Module) -> Iterator[list[dict]]:
    """A context in which what autograd saves is listed: shape and bytes. Tensors that share memory count once; the
    module's parameters are left out, since they are in memory anyway."""
    ours = {parameter.untyped_storage().data_ptr() for parameter in module.parameters()}
    found: list[dict] = []
    alive: list[Tensor] = []  # holds them, so that no memory is freed and used again while they are counted

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in ours and storage.nbytes():
            ours.add(storage.data_ptr())
            alive.append(tensor)
            found.append({"shape": list(tensor.shape), "bytes": storage.nbytes()})
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        yield found
    alive.clear()


# ---- training steps ----


def recorded(device: str = "H100") -> list[dict]:
    """Steps of layers on TOKENS tokens and of whole models that were recorded on a GPU with `device` in its name; of
    equal measurements the newest."""

    def wanted(row: dict) -> bool:
        known = row.get("kind") == KIND and row.get("nnz") is not None and not row["path"].endswith(GRAPH)
        return known and (row["tokens"] == TOKENS or row["workload"].startswith("whole step"))

    return newest(KIND, device, wanted)


def layers(rows: Iterable[dict]) -> list[dict]:
    """The rows of one gated layer of TOKENS, D_MODEL and D_FF in which a few neurons fire often, by nnz."""
    sizes = {"tokens": TOKENS, "d_model": D_MODEL, "d_ff": D_FF, "workload": LOGNORMAL}
    found = [row for row in rows if sizes.items() <= row.items() and row.get("gated", True)]
    return sorted(found, key=lambda row: row["nnz"])


def yours(nnzs: Iterable[float] = (8, 29, 120), tokens: int = TOKENS) -> list[dict]:
    """The dense and the sparse step, eager, checked and timed on this machine's GPU, as rows of `timed_here`."""
    from ...bench import forward

    drawn = lambda nnz: forward.Case(tokens, nnz, dtype=sixteen_bits("cuda")).draw()[:2]
    return timed_here(lambda: [row for nnz in nnzs for row in step_rows(*drawn(nnz), nnz)])


def step_rows(layer, inputs: list[Tensor], nnz: float) -> list[dict]:
    """The training step of one gated layer, dense and sparse, checked and timed on this GPU: rows as recorded. inputs:
    [tokens, d_model] each. Raises WrongResult if a gradient is off by 5% of its norm or more."""
    from ...bench import training as tables

    weights = tuple(each.weight.detach().requires_grad_() for each in (layer.gate_proj, layer.up_proj, layer.down_proj))
    inputs = [x.detach().requires_grad_() for x in inputs]
    grads = [torch.randn_like(x) * SIZE for x in inputs]
    layers = {"dense eager": tables.dense_layer, SPARSE: tables.our_layer("twell")}
    calls = {path: tables.step_of(each, weights, inputs, grads) for path, each in layers.items()}
    for mine, theirs in zip(calls[SPARSE](0), calls["dense eager"](0), strict=True):
        off = relative_error(mine.detach(), theirs.detach())
        if not off < 0.05:
            raise clocks.WrongResult(f"a gradient is off by {off:.2g} of its norm: nothing was timed")
    d_ff, d_model = layer.gate_proj.weight.shape
    shared = {"kind": KIND, "device": torch.cuda.get_device_name(), "workload": LOGNORMAL, "gated": True}
    shared |= {"tokens": len(inputs[0]), "d_model": d_model, "d_ff": d_ff, "nnz": nnz}
    ms = {path: clocks.quartiles(samples)[0] for path, samples in clocks.time_cuda(calls).items()}
    return [shared | {"path": path, "ms": each, "x_dense": ms["dense eager"] / each} for path, each in ms.items()]
