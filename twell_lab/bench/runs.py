"""Whole trainings, from the first step on, by one process and by several: dense and through the kernels, replicated and
sharded.

bench.training times steps of layers and models that do not change. These are runs of the trainer: the model starts
dense, L1 silences it, and each layer changes to the kernels once few enough neurons fire. A step includes the reading
of windows, clipping, AdamW and the rows of the history.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from ..core import InputError, TwellError
from ..ops import clock
from ..training.config import TrainConfig
from ..training.loop import train
from ..training.parallel import joined
from ..training.presets import named
from .rows import row

LATE = 0.25  # the last share of a run's rows is timed: by then layers have changed to the kernels and are compiled
# The paper's 0.5B model, with bytes as tokens. L1 is fifteen times the paper's: there are 10 million tokens, not 10
# billion, to silence the model.
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
    """A training that was to be timed ended with an error; the message holds the end of its output."""


@dataclass(frozen=True)
class How:
    """How a training runs: in how many processes, joined how ("ddp", "fsdp"), and with which kernels ("off", ...)."""

    processes: int
    parallel: str
    kernels: str

    @property
    def dense(self) -> How:
        """The run that this one is compared with."""
        return replace(self, kernels="off")

    @property
    def path(self) -> str:
        """Return what a row calls it."""
        where = "1 GPU" if self.processes == 1 else f"{self.processes} GPUs, {self.parallel}"
        return f"{where}, {'dense' if self.kernels == 'off' else self.kernels}"


HOWS = tuple(
    How(processes, parallel, kernels)
    for processes, parallel in ((1, "ddp"), (2, "ddp"), (2, "fsdp"))
    for kernels in ("off", "auto")
)


def rows(config: dict = HALF, hows: tuple[How, ...] = HOWS, device: str = "cuda") -> list[dict]:
    """Train once in each way; a row for each.

    A row holds milliseconds a step (median and spread over the last rows of the history), how that compares with the
    dense run by as many processes joined in the same way, and what the model had become. config: fields of TrainConfig.
    Raises RunFailed where a run fails, and InputError, before any run, for a way without its dense run."""
    for how in hows:
        if how.dense not in hows:
            raise InputError(f"hows has {how.path!r} without the dense run beside it; accepted: with {how.dense}")
    histories = {how: _history(config, how, device) for how in hows}
    late = {how: history[-max(1, round(LATE * len(history))) :] for how, history in histories.items()}
    return [_row(TrainConfig(**config), how, late[how], late[how.dense], device) for how in hows]


def _history(config: dict, how: How, device: str) -> list[dict]:
    """The history of such a run. Its processes save nothing else, as a checkpoint takes as long as many steps."""
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
    """What each of the processes does. fields: of the TrainConfig, as JSON; out: the file for the history."""
    with joined(json.loads(fields)["device"]) as world:
        result = train(TrainConfig(**json.loads(fields)), progress=False)
        if world.lead:
            Path(out).write_text(json.dumps(result.history))


def _row(config: TrainConfig, how: How, late: list[dict], dense: list[dict], device: str) -> dict:
    """One row, of the last rows of a run's history, beside those of the dense run."""
    last, tokens = late[-1], config.batch * config.context
    samples, of_dense = ([1e3 * tokens / each["tokens_per_s"] for each in rows] for rows in (late, dense))
    mean = lambda name: sum(each[name] for each in late) / len(late)  # noqa: E731
    shared = {
        "kind": "training run",
        "device": torch.cuda.get_device_name() if device == "cuda" else device,
        "dtype": config.dtype,
        "processes": how.processes,
        "parallel": how.parallel,
        "kernels": how.kernels,
        "tokens": tokens,
        "context": config.context,
        "d_model": config.d_model,
        "d_ff": config.d_ff,
        "layers": config.layers,
        "gated": config.gated,
        "l1": config.l1,
        "steps": config.steps,
        "compiled": config.compile,
    }
    facts = {
        "tokens_per_s": round(1e3 * tokens / clock.quartiles(samples)[0]),
        "nnz": round(mean("nnz"), 2),
        "nnz_layers": [round(each, 1) for each in last["nnz_layers"]],
        "ce": round(mean("ce"), 4),
        "val_bits_per_byte": round(last["val_bits_per_byte"], 4),
        "seconds": round(last["seconds"], 1),
        **({"peak_bytes": last["peak_bytes"]} if "peak_bytes" in last else {}),
    }
    return row(shared, how.path, samples, clock.quartiles(of_dense)[0], **facts)


if __name__ == "__main__":
    _train(*sys.argv[1:])
