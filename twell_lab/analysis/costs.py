"""What a feed-forward layer should cost on each path: counted bytes and operations over rates measured on the device.

Each path says what is counted for it (`cost` in twell_lab.layers.paths), in the units of `layers.paths.cost`.
"""

from __future__ import annotations

import time

import torch
from torch import Tensor

from ..layers.choice import Choice
from ..layers.paths import PATHS, Path
from ..layers.paths.cost import Firing, Rates, Work
from ..layers.paths.dense import fused
from ..ops import dispatch, inference, measure

__all__ = ["Firing", "Rates", "clock", "compiling_saves", "measure_rates", "predict"]

_ROUNDS = 10  # of each timing on a GPU, where a median of ten is steady


def predict(
    choice: Choice, firing: Firing, rates: Rates, tokens: int, itemsize: int, path: Path | None = None
) -> dict[str, float]:
    """Microseconds of one call with `tokens` tokens, by what they go to: gemm, rows, memory, launches, lost, and
    total. path: the choice's path where it is fitted to the layer. InputError for a choice that the layer does not
    take."""
    choice.check(firing.d_ff)
    seconds = (path or PATHS[choice.path]).cost(Work(firing, rates, tokens, itemsize), choice.hot)
    parts = {name: 1e6 * each for name, each in seconds.items()}
    return {**parts, "total": sum(parts.values())}


def compiling_saves(firing: Firing, rates: Rates, tokens: int, itemsize: int) -> float:
    """Microseconds by which torch.compile should shorten the dense path: relu and multiply in one pass over their
    values."""
    if not firing.gated or fused(Work(firing, rates, tokens, itemsize)):
        return 0.0
    return 1e6 * (2 * tokens * firing.d_ff * itemsize / rates.bandwidth + rates.launch)


# ---- what the device reaches ----


@torch.no_grad()
def measure_rates(device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> Rates:
    """Measure a device with a few small calls (under a second, kernels compiled). dtype: by default
    that of ops.measure.dtype_for."""
    device = measure.present_device(device)
    large = device.type == "cuda"
    dtype = dtype or measure.dtype_for(device)
    itemsize = dtype.itemsize
    source = torch.ones(2**28 if large else 2**25, dtype=torch.uint8, device=device)
    target, tiny = torch.empty_like(source), torch.zeros(8, 8, dtype=dtype, device=device)
    n, k = (8192, 2048) if large else (512, 512)
    a, b = torch.ones(n, k, dtype=dtype, device=device), torch.ones(k, n, dtype=dtype, device=device)
    calls = {
        "copy": lambda turn: target.copy_(source),
        "mm": lambda turn: torch.mm(a, b),
        "few": lambda turn: _repeat(tiny, 10),
        "many": lambda turn: _repeat(tiny, 50),
    }
    shape = (4096, 2048, 4096) if large else (32, 512, 2048)
    counts = (16, 80) if large else (2, 12)
    for nnz in counts:
        calls[f"nnz {nnz}"] = _sparse_call(shape, nnz, dtype, device)
    # The least of each: what else runs on the device makes some calls longer, and differences of middles any number.
    took = {name: min(values) for name, values in _samples(calls, device, seconds=0.4).items()}
    entries = shape[0] * (counts[1] - counts[0])
    added = took[f"nnz {counts[1]}"] - took[f"nnz {counts[0]}"]
    bandwidth = 2 * source.numel() / took["copy"]
    rows = entries * 2 * shape[1] * itemsize
    properties = torch.cuda.get_device_properties(device) if large else None
    return Rates(
        device=measure.device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        bandwidth=bandwidth,
        l2=rows / max(added, rows / (1000 * bandwidth)),
        matmul=2 * n * n * k / took["mm"],
        launch=max(0.0, (took["many"] - took["few"]) / 40),
        cache=getattr(properties, "L2_cache_size", 0),
        fuses=dispatch.fuses(a),
    )


def _repeat(tiny: Tensor, times: int) -> None:
    """So many operations, each too small to take any time but that of its launch."""
    for _ in range(times):
        tiny = torch.mm(tiny, tiny)


def _sparse_call(shape: tuple[int, int, int], nnz: int, dtype: torch.dtype, device: torch.device):
    """One call of the twell path on a drawn layer, every neuron firing equally often."""
    layer, inputs = measure.workload(*shape, nnz, "uniform", dtype, device)
    weights = (layer.gate_proj.weight, layer.up_proj.weight, layer.down_proj.weight)
    down_t = weights[2].t().contiguous()
    return lambda turn: inference.infer(inputs[turn % len(inputs)], *weights, down_t=down_t, path="twell")


def clock(calls: dict, device: torch.device, seconds: float = 0.15) -> dict[str, float]:
    """Median seconds of each call, as `_samples` takes them."""
    return {name: measure.quartiles(values)[0] for name, values in _samples(calls, device, seconds).items()}


def _samples(calls: dict, device: torch.device, seconds: float) -> dict[str, list[float]]:
    """Seconds of each call: on a GPU by measure.time_cuda; on a CPU in turns, for about `seconds` in all.

    On a CPU a call is timed as it comes, warm, at least three times: measure.time_cpu takes forty calls or more, which
    would be minutes for the large token counts of a plan.
    """
    if device.type == "cuda":
        with torch.cuda.device(device):
            samples = measure.time_cuda(calls, _ROUNDS)
        return {name: [each / 1e3 for each in values] for name, values in samples.items()}
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call(0)
    end, turn = time.perf_counter() + seconds, 0
    while turn < 3 or (turn < 50 and time.perf_counter() < end):
        for name, call in calls.items():
            start = time.perf_counter()
            call(turn)
            taken[name].append(time.perf_counter() - start)
        turn += 1
    return taken
