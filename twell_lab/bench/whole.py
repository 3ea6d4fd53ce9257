"""Records of whole models, by the steps of `bench.model`, what says most first, so that a recording may end early and
keep what it has: the paper's four sizes, drawn; every path of a layer; a model that is trained, beside its dense twin;
what a profile costs; and trainings by several processes."""

from __future__ import annotations

import functools
import gc
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from statistics import fmean

import torch
from torch import nn

from .. import core
from ..analysis.profile import profile
from ..models.tiny import LanguageModel, ModelConfig
from ..ops import clock
from ..training import sweep
from ..training.config import TrainConfig
from ..training.presets import named
from ..training.text import source
from . import drawn, rows
from .models import Bench

# ---- the paper's sizes, dense beside sparse ----

SIZES = drawn.NAMES[-4:]  # the paper's
RECORD = "bench-model"  # what the record is called, as that of `twell-lab bench model` is
BATCHES, SEQUENCES = (1, 8, 64), 64


def model_name(size: str) -> str:
    """Return what rows call the model, as those of `bench.model` do."""
    return f"drawn {size} Llama"


def of_size(size: str, left_out: dict[str, str], sequences: int = SEQUENCES, **how) -> rows.Sections:
    """Return the steps of the record of this size; the models are made when the first step needs them. sequences: of
    the longest forward. how: as for `bench.model`."""
    context = drawn.sizes_of(size).context
    many = sequences * context
    defaults = {"tokens": (context, many), "batches": BATCHES, "compiled": True, "graphs": True}
    bench = functools.cache(lambda: Bench(size, left_out=left_out, **{**defaults, **how}))

    def step(kind: str, tokens: int, head: bool, compiled: bool | None = None) -> list[dict]:
        return bench().rows(f"model_{kind}", tokens, head, compiled=compiled if head else False)

    return {
        "many sequences": rows.steps(step, ["forward"], [many], [True], [False]),
        "decode, one sequence": rows.steps(step, ["decode"], [1], [True]),
        "one sequence": rows.steps(step, ["forward"], [context], [True]),
        "decode": rows.steps(step, ["decode"], BATCHES[1:], [True]),
        "training step": [lambda: bench().train()],
        "without the LM head": [
            *rows.steps(step, ["forward"], [many], [False]),
            *rows.steps(step, ["decode"], BATCHES, [False]),
            *rows.steps(step, ["forward"], [context], [False]),
        ],
        "many sequences, compiled": rows.steps(step, ["forward"], [many], [True]),  # which takes longest
    }


# ---- every path, lossy ones with their error, and their loss where the model is trained ----

LOSSY = ("int8", "fp8", "twell_int8")


def paths(
    left_out: dict[str, str],
    size: str = "2B",
    tokens: tuple[int, ...] = (2048, 16 * 2048),
    sequences: int = 64,
    **how,
) -> rows.Sections:
    """Return the steps of the record: decoding and forwards of the small trained model that ships and of a drawn one.
    size, tokens: of the latter. sequences: of the other one's longest forward. how: as for `bench.model`."""
    both = {"plan": "twell", "batches": (1, 16), "graphs": True, "left_out": left_out, "paths": LOSSY, **how}

    def small() -> Bench:
        device = clock.present_device(both.get("device"))
        model = LanguageModel.load(core.data_dir() / "checkpoints" / "small").to(device, clock.dtype_for(device)).eval()
        text, context = source.standard_library().split()[1].tokens, model.config.context
        own = {"text": text, "tokens": (context, sequences * context), "cached": 64, "device": None}
        return Bench(model, about="trained small model", **both | own)

    def all_rows(bench: Bench) -> list[dict]:
        return [row for kind, count, head in bench.works if head for row in bench.rows(kind, count)]

    drawn_paths = both | {"tokens": tokens, "paths": ("hot_cold", *both["paths"])}
    return {
        "trained small model": [lambda: all_rows(small())],
        "drawn Llama": [lambda: all_rows(Bench(size, **drawn_paths))],
    }


# ---- a model trained with L1, from its first step to its speed, and its twin: the same start and text, without L1 ----

RUN = "trained"  # the kind of a training's row
L1, TWIN = "trained with L1", "dense twin"  # what rows call the two
_LAST = 0.2  # of the steps: `nnz_moved` says by how much the neurons that fire moved in them
SECONDS = 2.0  # as `seconds` of `bench.model`
LATE = 0.25  # the last share of a run's rows is timed: by then layers have changed to the kernels and are compiled


# The paper's 0.5B, with bytes as tokens and windows half as long: attention is the only part of a step that is cheaper
# for it. L1 is five times the paper's: it has a three hundredth of the tokens to silence the model.
_TRAINED = {**named("0.5B"), "tokenizer": None, "context": 1024, "batch": 32, "accumulate": 1, "steps": 1100}
_TRAINED |= {"warmup": 100, "l1": 1e-4, "kernels": "auto", "checkpoint_every": 0, "device": "cuda"}
_TRAINED |= {"log_every": 10, "eval_every": 250, "eval_windows": 256}


CONFIG = TrainConfig(**_TRAINED)
_SMALL = {"d_model": 64, "layers": 2, "heads": 2, "d_ff": 512, "context": 64, "batch": 16, "steps": 120, "warmup": 10}
_SMALL |= {"l1": 2e-3, "kernels": "auto", "device": "cpu", "log_every": 5, "eval_every": 60, "eval_windows": 64}
SMALL = TrainConfig(**_SMALL)  # for a CPU: a minute on two cores


def run_rows(name: str, config: TrainConfig, models: dict[str, nn.Module]) -> list[dict]:
    """Train a model, and put it into `models` as it is measured: in evaluation mode, bfloat16 on a GPU. Returns a row:
    what sweep.run returns, with the history's `ms` a step, `nnz_moved`, and `total_seconds`, from the drawing of
    weights to the count of who fires."""
    start, text = time.perf_counter(), source.standard_library()
    facts, result = sweep.run(name, replace(config, text=text))
    dtype = torch.bfloat16 if config.device == "cuda" else torch.float32
    models[name] = result.model.to(dtype).eval().requires_grad_(False)
    del result, facts["label"], facts["bytes"]
    torch.compiler.reset()  # gives back what the training held
    gc.collect()
    history, tokens = facts["history"], config.batch * config.context
    history["ms"] = [float(f"{1e3 * tokens / rate:.5g}") for rate in history["tokens_per_s"]]
    late = history["ms"][-max(1, round(LATE * len(history["ms"]))) :]
    sizes = {"tokens": tokens, "read": facts.pop("tokens"), "nnz": facts["mean_nnz"], **rows.sizes_of(config)}
    workload = f"training step, {config.batch} x {config.context:,} tokens, {text.name}"
    shared = rows.about(RUN, next(models[name].parameters()), workload, **sizes) | {"dtype": config.dtype}
    facts |= {"firing": facts.pop("layers"), "steps": config.steps}
    facts |= {"nnz_moved": round(sweep.settled(facts, _LAST), 5)}
    facts["total_seconds"] = round(time.perf_counter() - start, 2)
    return core.finite(rows.table(facts | shared, {f"{name}, kernels {config.kernels}": late}, base=None))


def trained(left_out: dict[str, str], config: TrainConfig | None = None, **how) -> rows.Sections:
    """Return the steps of the record. The twin is not trained where less time is left than the model with L1 took.
    Both are measured on text that was held out, where their own neurons fire. config: of the model with L1. how: as for
    `bench.model`."""
    config, models = config or (CONFIG if torch.cuda.is_available() else SMALL), dict[str, nn.Module]()
    configs = {L1: config, TWIN: replace(config, l1=0.0, kernels="off")}
    counts = [count * config.context for count in (2, config.batch)]
    batches = how.setdefault("batches", (1, 16))

    @functools.cache
    def bench(name: str) -> Bench:
        own = {"paths": ("twell",), "graphs": config.device == "cuda"} if name == L1 else {}
        held_out = source.standard_library().split()[1].tokens
        own |= {
            "text": held_out,
            "cached": config.context // 2,
            "left_out": left_out,
            "about": name,
            "seconds": SECONDS,
        }
        return Bench(models[name], tokens=counts, **own | how)

    def step(name: str, kind: str, tokens: int) -> list[dict]:
        return bench(name).rows(f"model_{kind}", tokens) if name in models else []

    return {
        "training": [functools.partial(run_rows, name, own, models) for name, own in configs.items()],
        "decode": rows.steps(step, [L1], ["decode"], batches),
        "forward": rows.steps(step, [L1], ["forward"], counts),
        "training step": [lambda: bench(L1).train(counts[-1])],
        TWIN: [
            *rows.steps(step, [TWIN], ["forward"], counts[-1:]),
            *rows.steps(step, [TWIN], ["decode"], batches[-1:]),
        ],
    }


# ---- what it takes to count who fires ----


@torch.no_grad()
def profiling_rows(sizes: ModelConfig | None = None, sequences: int = 8) -> list[dict]:
    """Return the rows of a plain forward of a random model and of its profile, on two batches of so many sequences; on
    a GPU in bfloat16, with the peak of memory and the bytes of it beyond the forward's. sizes: of the
    model, by default the paper's 2B on a GPU and a small one without."""
    device, plain = clock.present_device(None), "plain forward"
    on_gpu = device.type == "cuda"
    if sizes is None:
        large = {name: named("2B")[name] for name in ("d_model", "d_ff", "layers", "heads", "context")}
        sizes = ModelConfig(**large if on_gpu else dict(d_model=64, layers=2, heads=2, d_ff=512, context=64))
    torch.manual_seed(0)
    with torch.device(device):
        model = LanguageModel(sizes).to(torch.bfloat16 if on_gpu else torch.float32).eval().requires_grad_(False)
        batches = list(torch.randint(sizes.vocabulary, (2, sequences, sizes.context)))
    calls: rows.Calls = {plain: lambda turn: [model(ids) for ids in batches]}
    calls["profile"] = lambda turn: profile(model, batches)
    nnz = fmean(layer.mean_nnz for layer in profile(model, batches).layers)
    said = {"tokens": 2 * sequences * sizes.context, "nnz": round(nnz, 2), **rows.sizes_of(sizes)}
    workload = f"2 x {sequences} x {sizes.context:,} random tokens, random weights"
    shared = rows.about("profiling", model.head.weight, workload, **said)
    made = rows.measured(shared, calls, base=plain, rounds=5)
    for row in made if on_gpu else ():
        row["extra_bytes"] = row["peak_bytes"] - made[0]["peak_bytes"]
    return made


PROFILING: rows.Sections = {"profiling": [profiling_rows]}

# ---- whole trainings, by one process and by several, dense and through the kernels ----

# The paper's 0.5B model, with bytes as tokens. L1 is fifteen times the paper's: there are 10 million tokens, not 10
# billion, to silence the model.
HALF = {**named("0.5B"), "tokenizer": None, "batch": 16, "accumulate": 1, "steps": 280, "warmup": 40, "l1": 3e-4}
HALF |= {"log_every": 10, "eval_every": 280, "eval_windows": 32, "checkpoint_every": 0}
HOWS = (1, "ddp"), (2, "ddp"), (2, "fsdp")  # in how many processes, and how these are joined


def training_runs(
    config: dict = HALF, hows: Iterable[tuple[int, str]] = HOWS, kernels: str = "auto", device: str = "cuda"
) -> list[dict]:
    """Train twice in each way, dense and with `kernels`; a row for each run: milliseconds a step over the last rows of
    the history, how that compares with the dense run in the same way, and what the model had become. config: fields of
    TrainConfig. Raises TwellError, with the end of its output, where a run fails."""
    made, here = list[dict](), torch.empty(0, device=device)
    for processes, parallel in hows:
        where = "1 GPU" if processes == 1 else f"{processes} GPUs, {parallel}"
        samples, facts = rows.Samples(), dict[str, dict]()
        for kind in ("off", kernels):
            path = f"{where}, {'dense' if kind == 'off' else kind}"
            fields = {**config, "parallel": parallel, "kernels": kind, "device": device}
            history, own = _history(fields, processes, path), TrainConfig(**fields)
            late = history[-max(1, round(LATE * len(history))) :]
            samples[path] = [1e3 * own.batch * own.context / line["tokens_per_s"] for line in late]
            facts[path] = {key: round(sum(line[key] for line in late) / len(late), 4) for key in ("nnz", "ce")}
            last = ("val_bits_per_byte", "seconds", "peak_bytes")
            facts[path] |= {"kernels": kind} | {key: late[-1][key] for key in last if key in late[-1]}
        said = {"parallel": parallel, "compiled": own.compile, "context": own.context, "processes": processes}
        said |= {"tokens": own.batch * own.context, "l1": own.l1, "steps": own.steps}
        shared = rows.about("training run", here, "a whole training", **rows.sizes_of(own), **said)
        made += rows.table(shared | {"dtype": own.dtype}, samples, facts, base=f"{where}, dense")
    return made


def _history(fields: dict, processes: int, path: str) -> list[dict]:
    """Return the history of such a run of `twell-lab train`."""
    several = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={processes}"] * (processes > 1)
    roots = filter(None, (str(Path(__file__).resolve().parents[2]), os.environ.get("PYTHONPATH")))
    with tempfile.TemporaryDirectory() as folder:
        config, out = Path(folder, "config.json"), Path(folder, "run")
        config.write_text(json.dumps(fields))
        command = [sys.executable, *several, "-m", "twell_lab", "train", "--config", str(config), "--out", str(out)]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(roots)}
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        if done.returncode:
            raise core.TwellError(f"{path}: exit status {done.returncode}\n{(done.stdout + done.stderr)[-4000:]}")
        return [json.loads(line) for line in Path(out, "metrics.jsonl").read_text().splitlines()]
