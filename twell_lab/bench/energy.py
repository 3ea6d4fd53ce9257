"""The energy that calls take, by a GPU's own counter (NVML): all that the board takes, idle or not.

The counter moves every few hundredths of a second. So calls go on for a second or more, and a measurement begins and
ends where the counter moves."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable

import torch

from ..ops import measure

SECONDS = 1.0  # of one measurement, at least
WARM = 0.5  # seconds of calls before the first one
_CHUNK = 0.02  # seconds of calls between two looks at the counter
_STILL = 2.0  # seconds after which a counter that has not moved counts as standing still

Meter = Callable[[], float]  # millijoules since the driver was loaded


def meter(device: torch.device) -> tuple[Meter | None, str]:
    """The energy counter of a device, and "", or None and why there is none."""
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


def millijoules(
    read: Meter, call: Callable[[int], object], wait: Callable[[], object], samples: int = 3, seconds: float = SECONDS
) -> list[float]:
    """Millijoules of one call, measured `samples` times over at least so many seconds each, after WARM seconds of
    calls; [] where the counter stands still. wait: returns once the device has finished."""
    wait()
    start = time.perf_counter()
    call(0)
    wait()
    many = max(1, round(_CHUNK / max(1e-6, time.perf_counter() - start)))

    def chunk() -> int:
        for turn in range(many):
            call(turn)
        wait()
        return many

    def until_moved() -> tuple[float, int]:
        """What the counter says when it has just moved, and the calls until then."""
        before, made, end = read(), 0, time.perf_counter() + _STILL
        while (now := read()) == before:
            if time.perf_counter() > end:
                raise TimeoutError
            made += chunk()
        return now, made

    end = time.perf_counter() + WARM
    while time.perf_counter() < end:
        chunk()
    found = []
    try:
        begun, _ = until_moved()
        for _ in range(samples):
            made, end = 0, time.perf_counter() + seconds
            while time.perf_counter() < end:
                made += chunk()
            ended, rest = until_moved()
            found.append((ended - begun) / (made + rest))
            begun = ended
    except TimeoutError:
        return []
    return found


def facts(read: Meter | None, call: Callable[[int], object], wait: Callable[[], object], tokens: int, samples: int):
    """What a row says of its path's energy: the median and spread of millijoules a token; {} without a counter."""
    found = [] if read is None else [each / tokens for each in millijoules(read, call, wait, samples)]
    if not found:
        return {}
    median, spread = measure.quartiles(found)
    return {"mj_per_token": median, "mj_spread": spread, "mj_samples": [round(each, 6) for each in found]}
