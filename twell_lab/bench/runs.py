"""Whole trainings, by one process and by several: dense and through the kernels, replicated and sharded. The model
starts dense, L1 silences it, and each layer changes to the kernels once few enough neurons fire. A step includes the
reading of windows, clipping, AdamW and the rows of the history."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable
from pathlib import Path

import torch

from ..core import TwellError
from ..ops import clock
from ..training.config import TrainConfig
from ..training.loop import train
from ..training.parallel import joined
from ..training.presets import named
from . import rows as tables

LATE = 0.25  # the last share of a run's rows is timed: by then layers have changed to the kernels and are compiled
# The paper's 0.5B model, with bytes as tokens. L1 is fifteen times the paper's: there are 10 million tokens, not 10
# billion, to silence the model.
HALF = {**named("0.5B"), "tokenizer": None, "batch": 16, "accumulate": 1, "steps": 280, "warmup": 40, "l1": 3e-4}
HALF |= {"log_every": 10, "eval_every": 280, "eval_windows": 32, "checkpoint_every": 0}
HOWS = (1, "ddp"), (2, "ddp"), (2, "fsdp")  # in how many processes, and how these are joined


class RunFailed(TwellError, RuntimeError):
    """A training that was to be timed ended with an error; the message holds the end of its output."""


def rows(
    config: dict = HALF, hows: Iterable[tuple[int, str]] = HOWS, kernels: str = "auto", device: str = "cuda"
) -> list[dict]:
    """Train twice in each way, dense and with `kernels`; a row for each run: milliseconds a step over the last rows of
    the history, how that compares with the dense run in the same way, and what the model had become. config: fields of
    TrainConfig. Raises RunFailed where a run fails."""
    made, here = list[dict](), torch.empty(0, device=device)
    for processes, parallel in hows:
        where, dense = "1 GPU" if processes == 1 else f"{processes} GPUs, {parallel}", None
        for kind in ("off", kernels):
            path = f"{where}, {'dense' if kind == 'off' else kind}"
            fields = {**config, "parallel": parallel, "kernels": kind, "device": device}
            history, own = _history(fields, processes, path), TrainConfig(**fields)
            late, tokens = history[-max(1, round(LATE * len(history))) :], own.batch * own.context
            samples = [1e3 * tokens / line["tokens_per_s"] for line in late]
            mean = {key: round(sum(line[key] for line in late) / len(late), 4) for key in ("nnz", "ce")}
            said = {"parallel": parallel, "kernels": kind, "compiled": own.compile, "context": own.context}
            said |= {"processes": processes, "tokens": tokens, "l1": own.l1, "steps": own.steps, **mean}
            shared = tables.about("training run", here, "a whole training", **tables.sizes_of(own), **said)
            last = {key: late[-1][key] for key in ("val_bits_per_byte", "seconds", "peak_bytes") if key in late[-1]}
            dense = clock.quartiles(samples)[0] if dense is None else dense
            made.append(tables.row(shared | {"dtype": own.dtype}, path, samples, dense, **last))
    return made


def _history(fields: dict, processes: int, path: str) -> list[dict]:
    """Return the history of such a run. Its processes save nothing else: a checkpoint takes as long as many steps."""
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] * (processes > 1)
    roots = filter(None, (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")))
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "history.json")
        command = [sys.executable, *several, "-m", "twell_lab.bench.runs", json.dumps(fields), str(out)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(roots)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise RunFailed(f"{path}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
        return json.loads(out.read_text())


def _train(fields: str, out: str) -> None:
    """Train in one of the processes. fields: of the TrainConfig, as JSON; out: the file for the history."""
    with joined(json.loads(fields)["device"]) as world:
        result = train(TrainConfig(**json.loads(fields)), progress=False)
        if world.lead:
            Path(out).write_text(json.dumps(result.history))


if __name__ == "__main__":
    _train(*sys.argv[1:])
