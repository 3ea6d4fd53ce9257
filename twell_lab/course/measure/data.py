"""What the first notebooks measure, on a CPU and on a GPU, in milliseconds; a `clock` result maps names to samples."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ...bench.comparison import quantile
from ...ops import clock as clocks
from ..recorded import LOGNORMAL, ms, newest

Samples = dict[str, list[float]]

# ---- what a clock says ----


def clock(calls: dict[str, Callable[[], object]], device: str = "cpu", seconds: float = 0.5) -> Samples:
    """Milliseconds of each call, the calls in turn: device events with a cold cache on a GPU, wall time on a CPU.
    seconds: how long to measure altogether, on a CPU; each call is made at least 40 times."""
    timed = {name: (lambda turn, call=call: call()) for name, call in calls.items()}
    with torch.inference_mode():
        return clocks.time_cuda(timed) if device == "cuda" else clocks.time_cpu(timed, seconds)


def median(samples: list[float]) -> float:
    """The middle of the samples."""
    return clocks.quartiles(samples)[0]


def compare(samples: Samples, name: str, base: str) -> str:
    """One sentence on whether `name` is faster than `base`; a difference within the samples' spread counts as none."""
    (new, new_spread), (old, old_spread) = clocks.quartiles(samples[name]), clocks.quartiles(samples[base])
    sentence = f"{name}: {ms(new)} against {ms(old)} for {base}"
    # Half a distance between quartiles either side of the median is where the middle half of the samples lies.
    if abs(new - old) <= (new_spread + old_spread) / 2 or 0.95 <= old / new <= 1.05:
        busy = new_spread > new / 2 or old_spread > old / 2
        return f"{sentence}, no clear difference{': the samples spread as on a busy machine' * busy}."
    return f"{sentence}, {old / new:.1f}x as fast." if new < old else f"{sentence}, {new / old:.1f}x as slow."


def as_fast(samples: Samples, name: str, base: str) -> str:
    """Return how many times as fast as `base` a call is, by medians, and in brackets from its slower quartile and the
    base's faster one to the other way around: "2.24x (2.10 to 2.41)"."""
    x, low, high = ratios(samples[name], samples[base])
    return f"{x:.3g}x ({low:.3g} to {high:.3g})"


def ratios(new: list[float], old: list[float]) -> tuple[float, float, float]:
    """Old over new: of the medians, and from quartile to quartile; the lowest is above 1 where new is surely faster."""
    middle, low, high = (quantile(old, 1 - share) / quantile(new, share) for share in (0.5, 0.75, 0.25))
    return middle, low, high


# ---- right and wrong results ----


def relative_error(y: Tensor, exact: Tensor) -> float:
    """|y - exact| / |exact|, as norms over everything, in float64."""
    y, exact = y.double(), exact.double()
    return float((y - exact).norm() / exact.norm())


def runs_here(call: Callable[[], Tensor]) -> bool:
    """Return whether torch has what this call needs. Too little memory is an error nevertheless."""
    try:
        call()
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:
        return False
    return True


# ---- what was recorded ----


def recorded(kind: str) -> list[dict]:
    """Return the rows of this kind from the newest record of torch's own formats on each GPU, each with `where`."""
    return newest("density", "", lambda row: row["kind"] == kind)


def recorded_calls(d_model: int, d_ff: int, nnz: float) -> list[dict]:
    """Return recorded rows, by tokens, of layers of this size on a GPU's TwELL path, about this nnz: `ms` and
    `dense_ms` are the GPU's time; `wall_ms` and `dense_wall_ms` that of plain calls."""
    sizes = {"kind": "inference", "path": "forced twell", "d_model": d_model, "d_ff": d_ff, "workload": LOGNORMAL}
    wanted = lambda row: {**row, **sizes} == row and 0.8 * nnz < row["nnz"] < 1.25 * nnz
    return sorted(newest("inference", "", wanted), key=lambda row: row["tokens"])
