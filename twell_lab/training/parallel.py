"""Several processes that train one model: torchrun starts them, torch's DDP or FSDP2 joins them.

Every process draws the windows of the whole step and takes its share of them, so that a step reads the same batch
whatever the number of processes. Gradients and the numbers of the history are averaged over processes."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from ..core import DeviceError, InputError
from ..layers.find import firing_layers
from ..ops.clock import present_device


@dataclass(frozen=True)
class World:
    """This process among all that train the model: its number, how many there are, and the device it computes on. The
    first one writes files and prints."""

    device: torch.device
    rank: int = 0
    size: int = 1

    def mean(self, values: Tensor) -> Tensor:
        """Return the average over processes, which each of them gets."""
        if self.size > 1:
            dist.all_reduce(values)
            values = values / self.size
        return values

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true in any process. With several processes it waits for the device."""
        return flag if self.size == 1 else self.mean(torch.tensor(float(flag), device=self.device)).item() > 0

    def led(self, act: Callable[[], object]) -> None:
        """Call `act` in the first process while the others wait. An InputError there is raised in all of them."""
        raised: list[InputError | None] = [None]
        try:
            if self.rank == 0:
                act()
        except InputError as error:
            raised = [error]
        if self.size > 1:
            dist.broadcast_object_list(raised, src=0)
        if raised[0] is not None:
            raise raised[0]


@contextmanager
def joined(device: str | None) -> Iterator[World]:
    """A context with this process's World: one of several processes under torchrun, otherwise the only one.

    device: as in TrainConfig; under torchrun each process gets a GPU of its own, or all of them share the CPU.
    DeviceError for a device that is not there and for more processes on this machine than it has GPUs; InputError where
    one GPU is named for several processes."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1:
        yield World(present_device(device))
        return
    wanted = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    if wanted.type == "cuda":
        processes, gpus = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"])), torch.cuda.device_count()
        if wanted.index is not None:
            raise InputError(
                f"device is {device!r} for {processes} processes; accepted: 'cuda', of which each takes one, or 'cpu'"
            )
        if processes > gpus:
            raise DeviceError(
                f"{processes} processes were started on a machine with {gpus} GPUs; accepted: --nproc-per-node {gpus} "
                "or fewer, or --device cpu"
            )
        device = f"cuda:{int(os.environ.get('LOCAL_RANK', '0'))}"
    own = present_device(device)
    if own.type == "cuda":
        torch.cuda.set_device(own)
    if begin := not dist.is_initialized():
        dist.init_process_group("nccl" if own.type == "cuda" else "gloo")
    try:
        yield World(own, dist.get_rank(), dist.get_world_size())
    finally:
        if begin:
            dist.destroy_process_group()
            if own.type == "cpu":
                # A thread of gloo's outlives the group after DDP and FSDP2, and holds the tensors of a message for a
                # moment. Where it frees one while Python ends, the process is aborted (pytorch issue 190489).
                time.sleep(0.2)


def blocks(model: nn.Module) -> list[nn.Module]:
    """Return the layers of a model, attention included: what its feed-forward layers are parts of, or where these stand
    in a list, they themselves."""
    layers = firing_layers(model)
    above = [model.get_submodule(layer.name.rpartition(".")[0]) for layer in layers]
    found = [layer.module if isinstance(one, nn.ModuleList) else one for layer, one in zip(layers, above)]
    return [*dict.fromkeys(found)]


def shard(model: nn.Module, world: World) -> None:
    """Leave each process a share of every weight, in place (FSDP2): those of a layer are gathered while it computes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    mesh = init_device_mesh(world.device.type, (world.size,))
    for block in (*blocks(model), model):
        fully_shard(block, mesh=mesh)


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor as one piece, gathered if FSDP2 sharded it: every process must call it. Without gradient."""
    tensor = tensor.detach()
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def local(tensor: Tensor) -> Tensor:
    """Return this process's part of a tensor that FSDP2 sharded; any other tensor as it is. Without gradient."""
    tensor = tensor.detach()
    return tensor.to_local() if hasattr(tensor, "to_local") else tensor


def put(into: Any, value: Tensor) -> None:
    """Copy a whole tensor into one that may be sharded, in place. Every process must call it with the same `value`."""
    if hasattr(into, "placements"):
        from torch.distributed.tensor import distribute_tensor

        value = distribute_tensor(value.to(into.device, into.dtype), into.device_mesh, into.placements)
    with torch.no_grad():
        into.copy_(value)
