"""What notebook 08 computes: workloads, counts, and recorded times beside predictions. Kernels run in the simulator or
on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import torch
from torch import Tensor

from ...bench import forward
from ...cuda.launch import run
from ...formats.twell import TILE, TwELL
from ...ops import clock as clocks
from ...ops.gated import gated
from ...simulator import Counts, Fault, predicted_time
from ..notebook import sixteen_bits
from ..recorded import newest, timed_here

NO_TAIL = (None, None, None)
D_FF, NNZ = 5632, 29  # of the workloads that are timed


# ---- workloads: the same on every machine ----


def noise(shape: tuple[int, ...], seed: int) -> np.ndarray:
    """Pseudo-random numbers from -1 to 1, float64, the same everywhere: splitmix64 of each element's position."""
    z = np.arange(1, int(np.prod(shape)) + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15) + np.uint64(seed << 32)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    z = (z ^ (z >> np.uint64(31))) >> np.uint64(11)
    return (z.astype(np.float64) * 2.0**-52 - 1.0).reshape(shape)


def gate(rows: int, d_ff: int = D_FF, nnz: int = NNZ) -> Tensor:
    """A gate before its ReLU, bfloat16 [rows, d_ff], made from whole numbers, so that counts are the same everywhere:
    `nnz` positives a row, most often the columns that fire most in bench's "lognormal" workload."""
    rates = np.maximum(clocks.firing_rates(d_ff, nnz).numpy(), 1e-12)
    draw = np.log((noise((rows, d_ff), 5) + 1) / 2 + 1e-12) / rates
    fires = np.zeros((rows, d_ff), bool)
    np.put_along_axis(fires, np.argsort(-draw, axis=1)[:, :nnz], True, axis=1)
    size = np.abs(noise((rows, d_ff), 6)) + 0.01
    return torch.from_numpy(np.where(fires, size, -size)).to(torch.bfloat16)


class Layer:
    """A packed gate and the weights of a layer, made as in `gate`, on which `.gated(version)` launches kernels. The
    counts of a launch depend on which neurons fire, not on the values."""

    def __init__(self, tokens: int, d_model: int = 2048, d_ff: int = D_FF, nnz: int = NNZ) -> None:
        self.gate = gate(tokens, d_ff, nnz)
        self.x, self.up, self.down_t = (
            torch.from_numpy(noise(shape, 10 + i)).to(torch.bfloat16)
            for i, shape in enumerate(((tokens, d_model), (d_ff, d_model), (d_ff, d_model)))
        )
        self.packed, self.weights = TwELL.from_gate(self.gate).packed, (self.up, self.down_t, None, None)

    def gated(self, version: int) -> Tensor:
        """y [tokens, d_model] of a gated layer."""
        return run(gated, self.x, self.packed, self.gate, NO_TAIL, *self.weights, TILE, version)

    def off_by(self, y: Tensor) -> float:
        """The error of y, a result of `gated`, against float64: |y - exact| / |exact|, over all values."""
        g, x, up, down_t = (t.double() for t in (self.gate, self.x, self.up, self.down_t))
        exact = (g.relu() * (x @ up.T)) @ down_t
        return float((y.double() - exact).norm() / exact.norm())


def fault_of(call: Callable[[], object]) -> Fault | None:
    """Return what the simulator finds wrong with a launch, or None."""
    try:
        call()
    except Fault as fault:
        return fault
    return None


# ---- recorded, measured, predicted ----


def recorded(tokens: int, device: str = "H100") -> dict[str, dict]:
    """kernel -> its row, with `where`, at this many tokens; {} if nothing is recorded on a GPU with `device` in its
    name."""
    rows = newest("", device, lambda row: row.get("kind") == "kernel" and row["tokens"] == tokens)
    return {row["path"]: row for row in rows}


def yours(tokens: int = 16384) -> dict[str, dict]:
    """kernel -> its row, measured now on this machine's GPU; {} where there is none that can do it."""
    rows = timed_here(lambda: forward.kernel_versions(tokens, dtype=sixteen_bits("cuda")))
    return {row["path"]: row for row in rows}


def against_time(
    counts: Mapping[str, Counts], times: Mapping[str, dict], own: Mapping[str, dict] | None = None
) -> list[dict]:
    """Predicted and measured times, a row for each kernel: version; predicted_ms, by what bounds it; measured_ms, its
    `ratio` to the longest of these, and where; the reader's yours_ms, and yours (what to call it).

    counts: kernel -> its counts, scaled to the size that was timed. times: `recorded`, on an H100, for which the
    prediction is; own: `yours`."""
    often, rows = clocks.firing_rates(D_FF, NNZ).numpy(), []
    for version, count in counts.items():
        read = {name: often for name in ("up", "down_t") if name in count.footprints}  # as neurons of a `Layer` fire
        bounds = {name: 1e3 * seconds for name, seconds in predicted_time(count, rows=read).bounds.items()}
        time, mine = times.get(version, {}), (own or {}).get(version, {})
        ms = time.get("ms")
        row = {"version": version, "predicted_ms": bounds, "measured_ms": ms, "where": time.get("where", "")}
        row |= {"ratio": ms and ms / max(bounds.values()), "yours_ms": mine.get("ms"), "yours": mine.get("where", "")}
        rows.append(row)
    return rows
