"""What it takes to see who fires: a profile of a random model of the paper's 2B shape beside a plain forward of the
same tokens."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from ..analysis.profile import profile
from ..models.tiny import LanguageModel, ModelConfig
from ..ops import clock
from ..training.presets import named
from . import rows

PROFILING = "profiling"  # the kind of its rows
_SIZES = ("d_model", "d_ff", "layers", "heads", "context")


@dataclass(frozen=True)
class Shape:
    """What is profiled: a model of these sizes, on two batches of so many sequences of its whole context."""

    config: ModelConfig = field(default_factory=lambda: ModelConfig(**{name: named("2B")[name] for name in _SIZES}))
    sequences: int = 8


def small() -> Shape:
    """For a CPU."""
    return Shape(ModelConfig(d_model=64, layers=2, heads=2, d_ff=512, context=64), sequences=16)


@torch.no_grad()
def profiling_rows(shape: Shape, device: str | torch.device | None = None) -> list[dict]:
    """Two rows, of the plain forward and of the profile: milliseconds on the wall, in turns, bfloat16 on a GPU; there
    with the peak of memory, and the bytes of it beyond the forward's."""
    device = clock.present_device(device)
    on_gpu, sizes = device.type == "cuda", shape.config
    dtype = torch.bfloat16 if on_gpu else torch.float32
    torch.manual_seed(0)
    with torch.device(device):
        model = LanguageModel(sizes)
        batches = list(torch.randint(sizes.vocabulary, (2, shape.sequences, sizes.context)))
    model = model.to(dtype).eval().requires_grad_(False)

    def plain(turn: int) -> None:
        for ids in batches:
            model(ids)

    found: list = []

    def counted(turn: int) -> None:
        found[:] = [profile(model, batches)]

    calls = {"plain forward": plain, "profile": counted}
    timed = clock.time_bursts(calls, rows.drain, rounds=5, count=1)
    peaks = {path: clock.peak_bytes(call) for path, call in calls.items()} if on_gpu else {}
    layers = found[0].layers
    shared = {
        "kind": PROFILING,
        "device": clock.device_name(device),
        "dtype": str(dtype).removeprefix("torch."),
        "tokens": 2 * shape.sequences * sizes.context,
        "d_model": sizes.d_model,
        "d_ff": sizes.d_ff,
        "gated": sizes.gated,
        "layers": sizes.layers,
        "nnz": round(sum(layer.mean_nnz for layer in layers) / len(layers), 2),
        "workload": f"2 x {shape.sequences} x {sizes.context:,} random tokens, random weights",
    }
    plain_ms = clock.quartiles(timed["plain forward"][1])[0]
    made = []
    for path, (_, wall) in timed.items():
        facts = {"times_plain": round(clock.quartiles(wall)[0] / plain_ms, 4)}
        if peaks:
            facts |= {"peak_bytes": peaks[path], "extra_bytes": peaks[path] - peaks["plain forward"]}
        made.append(rows.row(shared, path, wall, plain_ms, **facts))
    return made
