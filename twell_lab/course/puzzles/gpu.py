"""A reader's kernel on this machine's GPU. Only what the simulator found sound is launched here."""

from __future__ import annotations

from torch import Tensor

from ..capstone.gpu import Kernel
from .cases import Case


def results(text: str, name: str, cases: list[Case]) -> list[dict[str, Tensor]]:
    """The outputs of each launch of the kernel `name`, on the CPU. Raises as capstone.gpu.Kernel does."""
    kernel, found = Kernel(text, name), []
    for case in cases:
        there = {key: given.cuda() if isinstance(given, Tensor) else given for key, given in case.arguments.items()}
        kernel(case.grid, case.block, there.values())
        found.append({key: there[key].cpu() for key in case.wanted})
    return found
