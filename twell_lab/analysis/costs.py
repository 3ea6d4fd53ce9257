"""What a feed-forward layer should cost on each path: counted bytes and operations (layers.paths) over rates that are
measured on the device."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from functools import partial

import torch

from ..layers.choice import DENSE, Choice
from ..layers.paths import PATHS, Path
from ..layers.paths.cost import Firing, Rates, Work
from ..layers.sparse_ffn import SparseFFN
from ..ops import clock, dispatch


def predict(choice: Choice, firing: Firing, rates: Rates, tokens: int, itemsize: int) -> dict[str, float]:
    """Return microseconds of one call with `tokens` tokens, by what they go to: gemm, rows, memory, launches, lost, and
    total; those of the dense path where nothing is predicted for the choice's. InputError for a choice that the layer
    does not take."""
    choice.check(firing.d_ff)
    work = Work(firing, rates, tokens, itemsize)
    seconds = PATHS[choice.path].cost(work, choice.hot) or PATHS[DENSE.path].cost(work)
    parts = {name: 1e6 * part for name, part in seconds.items()}
    return {**parts, "total": sum(parts.values())}


def by_choice(
    firing: Firing, rates: Rates, tokens: int, paths: Mapping[str, Path] = PATHS, hot: int | None = None
) -> dict[Choice, float]:
    """Return microseconds that so many tokens should take on each path that helps there.

    A path that splits has the hot size that should be best, or `hot`, and is left out where the hot neurons are not
    computed apart: the portable kernels pack them with the others (ops.dispatch)."""
    itemsize, found = getattr(torch, rates.dtype).itemsize, {}
    apart = rates.fuses and tokens >= dispatch.LEAST_PACKED
    for path in paths.values():
        if not path.helps(tokens, rates) or path.splits and not apart:
            continue
        choices = [Choice(path.name, n) for n in ([hot] if path.splits and hot else path.sizes(firing.d_ff))]
        totals = {choice: predict(choice, firing, rates, tokens, itemsize)["total"] for choice in choices}
        found |= dict(sorted(totals.items(), key=lambda total: total[1])[:1])
    return found


@torch.no_grad()
def measure_rates(device: str | torch.device | None = None, dtype: torch.dtype | None = None) -> Rates:
    """Measure a device with a few small calls (under a second, kernels compiled). dtype: by default that of
    ops.clock.dtype_for. Raises DeviceError for a device that is not there."""
    device = clock.present_device(device)
    large = device.type == "cuda"
    dtype = dtype or clock.dtype_for(device)
    source = torch.ones(2**28 if large else 2**25, dtype=torch.uint8, device=device)
    target, tiny = torch.empty_like(source), torch.zeros(8, 8, dtype=dtype, device=device)  # tiny: all launch
    n, k = (8192, 2048) if large else (512, 512)
    a, b = torch.ones(n, k, dtype=dtype, device=device), torch.ones(k, n, dtype=dtype, device=device)
    rows, d_model, d_ff = (4096, 2048, 4096) if large else (32, 512, 2048)
    fewer, more = (16, 80) if large else (2, 12)

    def repeat(times: int, turn: int) -> None:
        result = tiny
        for _ in range(times):
            result = torch.mm(result, result)

    calls = {"copy": lambda turn: target.copy_(source), "mm": lambda turn: torch.mm(a, b)}
    calls |= {name: partial(repeat, times) for name, times in (("few", 10), ("many", 50))}
    for nnz in (fewer, more):
        layer, inputs = clock.workload(rows, d_model, d_ff, nnz, "uniform", dtype, device)
        sparse = SparseFFN.from_module(layer.eval(), plan=Choice("twell"))
        calls[str(nnz)] = lambda turn, sparse=sparse, inputs=inputs: sparse(inputs[turn % len(inputs)])
    with torch.cuda.device(device) if large else nullcontext():
        samples = clock.time_cuda(calls, 10) if large else clock.time_calls(calls, device, seconds=0.4)
    # The least of each: what else runs on the device makes some calls longer, and differences of middles any number.
    took = {name: min(values) / 1e3 for name, values in samples.items()}
    read = rows * (more - fewer) * 2 * d_model * dtype.itemsize
    bandwidth = 2 * source.numel() / took["copy"]
    return Rates(
        device=clock.device_name(device),
        dtype=str(dtype).removeprefix("torch."),
        bandwidth=bandwidth,
        l2=read / max(took[str(more)] - took[str(fewer)], read / (1000 * bandwidth)),
        matmul=2 * n * n * k / took["mm"],
        launch=max(0.0, (took["many"] - took["few"]) / 40),
        cache=getattr(torch.cuda.get_device_properties(device), "L2_cache_size", 0) if large else 0,
        fuses=dispatch.fuses(a),
    )
