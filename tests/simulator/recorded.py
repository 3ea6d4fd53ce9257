"""Launches of one block whose steps and counts the tests look at: packing in its first two versions, and sum.cu."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from twell_lab import simulator
from twell_lab.simulator import Run


def gate(rows: int = 1, columns: int = 512, seed: int = 0, shift: float = 1.5) -> torch.Tensor:
    """Values that fire now and then."""
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((rows, columns)) - shift).bfloat16()


def pack(version: int, values: torch.Tensor, words: int = 32) -> Run:
    """Pack tiles of 256 columns: a thread a tile, or a warp a tile with `count` watched."""
    rows, columns = values.shape
    packed = torch.zeros(rows, columns // 256, words, dtype=torch.int32)
    return simulator.compile("smxx_pack.cu", {"VALUE_BF16": True}).launch(
        f"pack_v{version}",
        1,
        packed[..., 0].numel() * (1 if version == 1 else 32),
        (values.bfloat16(), packed, rows, columns, 256, words),
        watch="counts",
        trace=0,
        values={"smxx_pack.cu:count += __popc(here)": "count"} if version == 2 else None,
    )


def block_sum(x: np.ndarray | None = None) -> Run:
    """64 threads copy x into shared memory, read it across the two warps, and add to y with atomics."""
    x = np.arange(64) if x is None else x
    arguments = (torch.from_numpy(x).float(), torch.zeros(32))
    program = simulator.compile(Path(__file__).with_name("sum.cu"))
    return program.launch("block_sum", 1, 64, arguments, watch="counts", trace=0)
