"""Whole trainings, from the first step on, by one process and by several: dense and through the kernels, replicated and
sharded.

Where bench.training times steps of layers and models that stand still, these are runs of the trainer:
the model starts dense, L1 silences it, each layer goes over to the kernels when it fires little enough, and a step
includes the reading of windows, clipping, AdamW and the rows of the history.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch

from ..core.errors import InputError, TwellError
from ..ops import measure
from ..training.config import TrainConfig
from ..training.loop import train
from ..training.parallel import joined
from ..training.presets import named

LATE = 0.25  # the share of a run's rows, its last ones, that are timed: layers have gone over, and graphs are compiled
# The paper's 0.5B with bytes for tokens. An L1 fifteen times the paper's, since 10 million tokens have to do for 10
# billion.
HALF = {
    **named("0.5B"),
    "tokenizer": None,
    "batch": 16,
    "accumulate": 1,
    "steps": 280,
    "warmup": 40,
    "l1": 3e-4,
    "log_every": 10,
    "eval_every": 280,
    "eval_windows": 32,
    "checkpoint_every": 0,
}


class RunFailed(TwellError, RuntimeError):
    """A training that was to be timed ended with an error: what it said."""


@dataclass(frozen=True)
class How:
    """By how many processes, joined by what, and through which kernels."""

    processes: int
    parallel: str
    kernels: str

    @property
    def path(self) -> str:
        where = "1 GPU" if self.processes == 1 else f"{self.processes} GPUs, {self.parallel}"
        return f"{where}, {'dense' if self.kernels == 'off' else self.kernels}"


HOWS = tuple(
    How(processes, parallel, kernels)
    for processes, parallel in ((1, "ddp"), (2, "ddp"), (2, "fsdp"))
    for kernels in ("off", "auto")
)


def rows(config: dict = HALF, hows: tuple[How, ...] = HOWS, device: str = "cuda") -> list[dict]:
    """Train once each way; a row for each: ms a step (median and quartiles over the last rows of the history), beside
    the dense run by as many processes joined in the same way, and what the run had come to.

    config: fields of TrainConfig. Raises RunFailed, with the end of what it said, where one of them fails, and
    InputError for a way without the dense run that it is to be compared with."""
    for how in hows:
        if How(how.processes, how.parallel, "off") not in hows:
            raise InputError(
                f"hows has {how.path!r} without the dense run beside it; accepted: with "
                f"{How(how.processes, how.parallel, 'off')}"
            )
    made = {how: _row(config, how, _history(config, how, device), device) for how in hows}
    for how, each in made.items():
        each["dense_ms"] = made[How(how.processes, how.parallel, "off")]["ms"]
        each["x_dense"] = each["dense_ms"] / each["ms"]
    return [*made.values()]


def _history(config: dict, how: How, device: str) -> list[dict]:
    """The history of such a run, made in processes of its own that save nothing else: a checkpoint takes as long as
    many steps."""
    several = (
        ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={how.processes}"]
        if how.processes > 1
        else []
    )
    fields = {**config, "parallel": how.parallel, "kernels": how.kernels, "device": device}
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "history.json")
        here = str(Path(__file__).resolve().parents[2])
        paths = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
        done = subprocess.run(
            [sys.executable, *several, "-m", "twell_lab.bench.runs", json.dumps(fields), out],
            capture_output=True,
            text=True,
            env={**os.environ, "PYTHONPATH": paths},
        )
        if done.returncode:
            raise RunFailed(f"{how.path}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
        return json.loads(out.read_text())


def _train(fields: str, out: str) -> None:
    """One of the processes."""
    with joined(json.loads(fields)["device"]) as world:
        result = train(TrainConfig(**json.loads(fields)), progress=False)
        if world.lead:
            Path(out).write_text(json.dumps(result.history))


def _row(config: dict, how: How, history: list[dict], device: str) -> dict:
    whole = TrainConfig(**config)
    tokens = whole.batch * whole.context
    late = history[-max(1, round(LATE * len(history))) :]
    samples = [1e3 * tokens / row["tokens_per_s"] for row in late]
    ms, spread = measure.quartiles(samples)
    mean = lambda name: sum(row[name] for row in late) / len(late)  # noqa: E731
    return {
        "kind": "training run",
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "dtype": whole.dtype,
        "path": how.path,
        "processes": how.processes,
        "parallel": how.parallel,
        "kernels": how.kernels,
        "tokens": tokens,
        "context": whole.context,
        "d_model": whole.d_model,
        "d_ff": whole.d_ff,
        "layers": whole.layers,
        "gated": whole.gated,
        "l1": whole.l1,
        "steps": whole.steps,
        "compiled": whole.compile,
        "ms": ms,
        "spread": spread,
        "tokens_per_s": round(1e3 * tokens / ms),
        "nnz": round(mean("nnz"), 2),
        "nnz_layers": [round(each, 1) for each in history[-1]["nnz_layers"]],
        "ce": round(mean("ce"), 4),
        "val_bits_per_byte": round(history[-1]["val_bits_per_byte"], 4),
        "seconds": round(history[-1]["seconds"], 1),
        **({"peak_bytes": history[-1]["peak_bytes"]} if "peak_bytes" in history[-1] else {}),
        "samples": [round(each, 3) for each in samples],
    }


if __name__ == "__main__":
    _train(*sys.argv[1:])
