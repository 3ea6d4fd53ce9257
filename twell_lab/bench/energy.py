"""The energy that calls take, by a GPU's own counter (NVML): all that the board takes, idle or not.

The counter moves every few hundredths of a second, so a measurement begins and ends where it moves. What is compared is
measured in turns, there and back, each after half a second of its own calls: a GPU that grows warmer takes more for the
same work."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping

import torch

from ..ops import clock

SECONDS = 1.0  # of one measurement, at least
WARM = 0.5  # seconds of calls before each measurement
_CHUNK = 0.02  # seconds of calls between two looks at the counter
_STILL = 2.0  # seconds after which a counter that has not moved counts as standing still

Meter = Callable[[], float]  # millijoules since the driver was loaded


def meter(device: torch.device) -> tuple[Meter | None, str]:
    """Return the energy counter of a device, and "", or None and why there is none."""
    if device.type != "cuda":
        return None, "it is read on an NVIDIA GPU alone"
    try:
        import pynvml
    except ImportError:
        return None, "it needs nvidia-ml-py: pip install nvidia-ml-py"
    try:
        pynvml.nvmlInit()
        # By its own name: CUDA_VISIBLE_DEVICES numbers the GPUs anew for CUDA, not for NVML.
        handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{torch.cuda.get_device_properties(device).uuid}")
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except (pynvml.NVMLError, AttributeError) as error:
        return None, f"NVML says: {error}"
    return functools.partial(pynvml.nvmlDeviceGetTotalEnergyConsumption, handle), ""


def energy_facts(
    read: Meter, calls: Mapping[str, Callable], wait: Callable[[], object], samples: int, tokens: int
) -> dict[str, dict]:
    """Return what the row of each call says of its energy: median, spread and samples of millijoules a token, of calls
    that compute so many. {} where the counter stands still. wait: returns once the device has finished."""
    taken: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(samples):
        for name in list(calls)[:: -1 if turn % 2 else 1]:
            if (one := millijoules(read, calls[name], wait)) is None:
                return {}
            taken[name].append(round(one / tokens, 6))
    return {
        name: dict(zip(("mj_per_token", "mj_spread"), clock.quartiles(sample)), mj_samples=sample)
        for name, sample in taken.items()
    }


def millijoules(read: Meter, call: Callable[[int], object], wait: Callable[[], object]) -> float | None:
    """Return the millijoules of one call, over SECONDS at least; None where the counter stands still."""
    wait()
    start = time.perf_counter()
    call(0)
    wait()
    start, once = time.perf_counter(), time.perf_counter() - start
    many, made, begun = max(1, round(_CHUNK / max(1e-6, once))), 0, None
    before, moved = read(), start
    while True:
        for turn in range(many):
            call(turn)
        wait()
        made, spent, now = made + many, read(), time.perf_counter()
        if spent == before:
            if now - moved > _STILL:
                return None
            continue
        before, moved = spent, now
        if begun is None and now - start >= WARM:
            begun = made, spent, now
        elif begun and now - begun[2] >= SECONDS:
            return (spent - begun[1]) / (made - begun[0])
