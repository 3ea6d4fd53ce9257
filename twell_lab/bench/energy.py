"""The energy that calls take, by a GPU's own counter (NVML): all that the board takes, idle or not.

The counter moves every few hundredths of a second. So calls go on for a second or more, and a measurement begins and
ends where the counter moves. What is compared is measured in turns, there and back, each after half a second of
its own calls: a GPU that grows warmer takes more for the same work, whichever that is."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Mapping

import torch

from ..ops import clock

SECONDS = 1.0  # of one measurement, at least
CALLS = 3  # of one measurement, at least: of calls that take a second, a single one says little
WARM = 0.5  # seconds of calls before each measurement
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
    read: Meter,
    calls: Mapping[str, Callable[[int], object]],
    wait: Callable[[], object],
    samples: int = 3,
    seconds: float = SECONDS,
) -> dict[str, list[float]]:
    """Millijoules of one call, for each of these calls: measured in turns, `samples` times each, over at least so many
    seconds and CALLS calls. {} where the counter stands still. wait: returns once the device has finished."""
    found: dict[str, list[float]] = {name: [] for name in calls}
    try:
        for turn in range(samples):
            for name in list(calls)[:: -1 if turn % 2 else 1]:
                found[name].append(_measured(read, calls[name], wait, seconds))
    except TimeoutError:
        return {}
    return found


def _measured(read: Meter, call: Callable[[int], object], wait: Callable[[], object], seconds: float) -> float:
    """Millijoules of one call, by one measurement. TimeoutError where the counter stands still."""
    wait()
    start = time.perf_counter()
    call(0)
    wait()
    taken = time.perf_counter() - start
    many, long = max(1, round(_CHUNK / max(1e-6, taken))), taken > _CHUNK

    def chunk() -> int:
        for turn in range(many):
            call(turn)
        wait()
        return many

    def until_moved() -> tuple[float, int]:
        """Return what the counter says when it has just moved, and the calls until then: none where calls are long,
        between which it is only waited for, some hundredths of a second in which the GPU has nothing to do."""
        before, made, end = read(), 0, time.perf_counter() + _STILL
        while (now := read()) == before:
            if time.perf_counter() > end:
                raise TimeoutError
            made += 0 if long else chunk()
        return now, made

    end = time.perf_counter() + WARM
    while time.perf_counter() < end:
        chunk()
    begun, _ = until_moved()
    made, end = 0, time.perf_counter() + seconds
    while time.perf_counter() < end or made < CALLS:
        made += chunk()
    ended, rest = until_moved()
    return (ended - begun) / (made + rest)


def facts(found: list[float], tokens: int) -> dict:
    """Return what a row says of its path's energy: the median and spread of millijoules a token, of those of a call
    with so many tokens; {} without any."""
    if not found:
        return {}
    each = [one / tokens for one in found]
    median, spread = clock.quartiles(each)
    return {"mj_per_token": median, "mj_spread": spread, "mj_samples": [round(one, 6) for one in each]}
