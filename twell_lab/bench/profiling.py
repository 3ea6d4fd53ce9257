"""Time what it takes to count who fires: a profile of a random model of the paper's 2B shape beside a plain forward of
the same tokens."""

from __future__ import annotations

import torch

from ..analysis.profile import profile
from ..models.tiny import LanguageModel, ModelConfig
from ..ops import clock
from ..training.presets import named
from . import rows

PROFILING = "profiling"  # the kind of its rows
LARGE = ModelConfig(**{name: named("2B")[name] for name in ("d_model", "d_ff", "layers", "heads", "context")})
SMALL = ModelConfig(d_model=64, layers=2, heads=2, d_ff=512, context=64)  # for a CPU


@torch.no_grad()
def profiling_rows(sizes: ModelConfig | None = None, sequences: int = 8) -> list[dict]:
    """Return two rows, of the plain forward and of the profile, on two batches of so many sequences: milliseconds on
    the wall, in turns; on a GPU in bfloat16, with the peak of memory and the bytes of it beyond the forward's.

    sizes: of the model, by default LARGE on a GPU and SMALL without one."""
    device = clock.present_device(None)
    on_gpu = device.type == "cuda"
    sizes = sizes or (LARGE if on_gpu else SMALL)
    torch.manual_seed(0)
    with torch.device(device):
        model = LanguageModel(sizes).to(torch.bfloat16 if on_gpu else torch.float32).eval().requires_grad_(False)
        batches = list(torch.randint(sizes.vocabulary, (2, sequences, sizes.context)))
    calls: rows.Calls = {
        "plain forward": lambda turn: [model(ids) for ids in batches],
        "profile": lambda turn: profile(model, batches),
    }
    timed = clock.time_bursts(calls, rows.drain, rounds=5, count=1)
    peaks = {path: clock.peak_bytes(call) for path, call in calls.items()} if on_gpu else {}
    nnzs = [layer.mean_nnz for layer in profile(model, batches).layers]
    said = {"tokens": 2 * sequences * sizes.context, "nnz": round(sum(nnzs) / len(nnzs), 2), **rows.sizes_of(sizes)}
    workload = f"2 x {sequences} x {sizes.context:,} random tokens, random weights"
    shared = rows.about(PROFILING, model.head.weight, workload, **said)
    plain, made = clock.quartiles(timed["plain forward"][1])[0], []
    for path, (_, wall) in timed.items():
        facts = {"times_plain": round(clock.quartiles(wall)[0] / plain, 4)}
        if peaks:
            facts |= {"peak_bytes": peaks[path], "extra_bytes": peaks[path] - peaks["plain forward"]}
        made.append(rows.row(shared, path, wall, plain, **facts))
    return made
