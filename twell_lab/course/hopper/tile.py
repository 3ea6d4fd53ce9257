"""What a tile goes through in kernels/sm90_gate_pack.cu, computed: who holds which sum (by the PTX ISA:
wgmma.mma_async, accumulators of m64nNk16), which rows overflow, and when the warpgroups work."""

from __future__ import annotations

import torch
from torch import Tensor

from ...cuda.launch import Buffer, Call, run
from ...formats import packed_and_pool
from ...formats.twell import POOL_ROWS, TILE
from ...ops import gate_pack
from ...ops.gated import gated_pooled

ROWS = 64  # of a tile, for each consumer warpgroup: those of one wgmma
QUAD = 4  # lanes that share a row


# ---- who holds which sum ----


def sums() -> tuple[Tensor, Tensor, Tensor]:
    """(warp of its warpgroup, lane, register) of each sum of a 64 x 256 tile: int64 [64, 256] each."""
    row, column = torch.meshgrid(torch.arange(ROWS), torch.arange(TILE), indexing="ij")
    lane = row % 8 * QUAD + column % 8 // 2
    register = column // 8 * 4 + row % 16 // 8 * 2 + column % 2
    return row // 16, lane, register


# ---- rows that overflow ----


def overflow(counts: list[int], dtype: torch.dtype, d_model: int = 64) -> tuple[list[int], float]:
    """(the rows listed as lost, the error of the others against float64, relative) of the kernels that read words and
    pool, in the simulator, on 16 drawn rows of one tile. counts: of values that each row keeps. StackError without a
    C++ compiler."""
    gate = -torch.rand(POOL_ROWS, TILE)
    for row, count in enumerate(counts):
        gate[row, torch.randperm(TILE)[:count]] = torch.rand(count) + 0.01
    gate = gate.to(dtype)
    x, up, down_t = (torch.randn(rows, d_model).to(dtype) for rows in (POOL_ROWS, TILE, TILE))
    packed, shared, _ = packed_and_pool(gate)
    listed, y = torch.zeros(1 + POOL_ROWS, dtype=torch.int32), torch.zeros_like(x)
    run(_multiply, x, packed, shared, up, down_t, listed, torch.zeros_like(x), y)
    lost = sorted(row if row >= 0 else ~row for row in listed[1 : 1 + int(listed[0])].tolist())
    stored = [row for row in range(POOL_ROWS) if row not in lost]
    exact = (gate.double().relu() * (x.double() @ up.double().T)) @ down_t.double()
    return lost, float((y.double() - exact)[stored].norm() / exact[stored].norm())


def _multiply(call: Call, x, packed, shared, up, down_t, listed, their_x, y) -> Buffer:
    gated_pooled(call, x, packed, shared, up, down_t, None, None, None, listed, their_x, y)
    return y


# ---- when the warpgroups work ----

PRODUCER, TENSOR, PACKING = "copy engine", "tensor cores", "consumers' warps"


def schedule(beside: bool, tiles: int = 3, steps: int = 8, load: float = 0.7, pack: float = 1.0) -> list[dict]:
    """Who does what when, in a model of the pipeline: rows with who, what, stage (None: none), start and end.

    A step of a product takes 1, filling its stage `load`, packing a tile `pack`. The copy engine fills a stage as soon
    as it was read; a step waits for its stage. beside: tiles are packed in pieces, one in each step of the next tile;
    otherwise the tensor cores wait while a tile is packed."""
    found: list[dict] = []

    def work(who: str, start: float, end: float, what: str = "", stage: int | None = None) -> None:
        found.append({"who": who, "what": what, "stage": stage, "start": start, "end": end})

    free, engine, now = [0.0] * gate_pack.STAGES, 0.0, 0.0
    for tile in range(tiles):
        for step in range(steps):
            stage = (tile * steps + step) % gate_pack.STAGES
            filled = max(engine, free[stage])
            engine = filled + load
            work(PRODUCER, filled, engine, f"{step}", stage)
            start = max(now, engine)
            now = free[stage] = start + 1
            work(TENSOR, start, now, f"{step}", stage)
            if beside and tile:
                work(PACKING, start, start + pack / steps)
        if not beside or tile == tiles - 1:
            work(PACKING, now, now + pack, "pack")
            now += pack
    return found
