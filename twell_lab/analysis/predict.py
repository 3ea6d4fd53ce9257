"""What a layer should take on a GPU that one does not have: the cost model (analysis.costs) with rates made of the
vendor's figures (data/gpus.json), of which every GPU is taken to reach the shares that an H100 reached; the rate of the
L2 cache, which no vendor gives, is the same multiple of the memory's. And how far off that is where layers were
measured."""

from __future__ import annotations

import re
from collections.abc import Iterable
from functools import lru_cache
from statistics import median_low

import torch
from torch import Tensor

from .. import core, records
from ..core import InputError
from ..formats.twell import TILE, WORDS
from ..layers.choice import DENSE, Choice
from ..layers.paths import PATHS
from ..ops import clock
from ..simulator import H100
from .costs import Firing, Rates, by_choice
from .costs import predict as parts_of
from .profile import FiringProfile

# What an H100 80GB HBM3 reaches: operations a second of torch's gate GEMM for 16,384 tokens ("part: gate GEMM" of the
# record portable-20261121T143453Z), and about how many seconds one more launch takes (analysis.costs.measure_rates).
_MATMUL, _LAUNCH = 7.65e14, 2.5e-6
_REACHED = "H100 SXM"
_WORTH = 0.9  # of the dense layers' time: a plan wants a gain of 10% where it only predicts
_WIDEST = 2**18  # d_ff
_FORCED = re.compile(r"forced (\w+)(?: (\d+))?")  # in records, a path that all layers took


@lru_cache(maxsize=256, typed=True)
def firing_of(nnz: float, d_model: int = 2048, d_ff: int = 5632, gated: bool = True, kind: str = "lognormal") -> Firing:
    """Return how a layer fires of whose d_ff neurons nnz fire for a token on average, independently of each other, each
    as often as ops.clock.firing_rates says. InputError for sizes, an nnz and a workload that no such layer has."""
    if not all(type(size) is int for size in (d_model, d_ff)) or min(d_model, d_ff) < 1 or d_ff > _WIDEST:
        said = f"d_model is {d_model!r:.80} and d_ff {d_ff!r:.80}"
        raise InputError(f"{said}; whole numbers from 1 up are accepted, up to {_WIDEST:,} of d_ff")
    frequency = clock.firing_rates(d_ff, nnz, kind)
    fitting, excess = 1.0, 0.0
    for tile in frequency.split(TILE):
        sums = _sums(tile)
        fitting *= sums[:WORDS].sum().item()
        excess += (sums * (torch.arange(sums.numel()) - (WORDS - 1)).clamp(min=0)).sum().item()
    frequency = frequency.sort(descending=True).values
    return Firing(d_model, gated, frequency, _sums(frequency), max(0.0, 1 - fitting), excess)


def _sums(rates: Tensor) -> Tensor:
    """Return the probability that 0, 1, ..., n of n neurons fire at these rates: float64 [n + 1]."""
    sums = torch.stack([1 - rates, rates], 1)  # a polynomial for each neuron, multiplied in pairs until one is left
    while len(sums) > 1:
        if len(sums) % 2:
            sums = torch.cat([sums, torch.eye(1, sums.shape[1], dtype=sums.dtype)])
        size = 2 * sums.shape[1] - 1
        sums = torch.fft.irfft(torch.fft.rfft(sums[::2], size) * torch.fft.rfft(sums[1::2], size), size)
    return sums[0, : len(rates) + 1].clamp(min=0)


def datasheets() -> list[dict]:
    return core.read_json(core.data_dir() / "gpus.json", "datasheet")["gpus"]


def rates_of(gpu: str) -> Rates:
    """Return the rates that a GPU should reach, by its name in data/gpus.json or its driver's name, or words of it that
    no other one has. InputError for another name."""
    sheets, asked = datasheets(), str(gpu).lower()
    words = {*asked.split()}
    alike = [sheet for sheet in sheets if asked in map(str.lower, [sheet["name"], *sheet["driver_names"]])]
    alike = alike or [sheet for sheet in sheets if words and words <= {*sheet["name"].lower().split()}]
    shortest = min((len(sheet["name"].split()) for sheet in alike), default=0)  # "5070" is no "RTX 5070 Ti"
    named = [sheet for sheet in alike if len(sheet["name"].split()) == shortest]
    if len(named) != 1:
        raise InputError(f"gpu is {gpu!r:.80}; accepted: {', '.join(sheet['name'] for sheet in alike or sheets)}")
    (sheet,), (reached,) = named, (sheet for sheet in sheets if sheet["name"] == _REACHED)
    bandwidth = sheet["bandwidth_gb_s"] * H100.memory_bytes_per_s / reached["bandwidth_gb_s"]
    return Rates(
        device=sheet["name"],
        dtype=sheet["tensor_dtype"],
        bandwidth=bandwidth,
        l2=bandwidth * H100.l2_bytes_per_s / H100.memory_bytes_per_s,
        matmul=sheet["tensor_tflops"] * _MATMUL / reached["tensor_tflops"],
        launch=_LAUNCH,
        cache=(sheet["l2_mb"] or reached["l2_mb"]) * 2**20,
        fuses=sheet["capability"] == "9.0",  # Hopper, whose instructions the kernels that fuse need
    )


def predict(
    gpu: str,
    nnz: float,
    d_model: int = 2048,
    d_ff: int = 5632,
    *,
    gated: bool = True,
    tokens: Iterable[int] = (1, 16, 256, 2048, 16384),
) -> list[dict]:
    """Return what one layer of these sizes should take on a GPU, by the GPU's own time: a row for each number of tokens
    at once and path, with the best hot size of hot/cold.

    gpu: a name in data/gpus.json ("RTX 4090"), or what its driver calls it. nnz: how many neurons fire for a token, on
    average. InputError for what is not known, and for sizes that no layer has.

    Rows: gpu, tokens, path, ms, x_dense, and read_mb (the weights that the call needs at least once, in decimal
    megabytes)."""
    if type(nnz) not in (int, float):
        raise InputError(f"nnz is {nnz!r:.80}; a number is accepted")
    rates, firing, rows = rates_of(gpu), firing_of(nnz, d_model, d_ff, gated), []
    row_mb = d_model * getattr(torch, rates.dtype).itemsize / 1e6
    for count in tokens:
        if type(count) is not int or not 0 < count < 2**31:
            raise InputError(f"tokens is {count!r:.80}; whole numbers from 1 up to 2**31 - 1 are accepted")
        took = by_choice(firing, rates, count)
        for choice, us in took.items():
            fired = (1 - (1 - firing.frequency[choice.hot :]) ** count).sum().item()  # neurons, by any of the tokens
            needed = choice.hot + fired if PATHS[choice.path].packs else d_ff  # rows of down, and of up behind a gate
            row = {"gpu": rates.device, "tokens": count, "path": str(choice), "ms": us / 1e3}
            rows.append({**row, "x_dense": took[DENSE] / us, "read_mb": (d_ff + (2 if gated else 1) * needed) * row_mb})
    return rows


def verdict(profile: FiringProfile) -> str:
    """Say in two sentences what a profile counted, whether that is sparse enough for an H100 with one token at once and
    with 16,384, and what to do."""
    layers = [layer for layer in profile.layers if layer.tokens]
    if not layers:
        return "No layer saw a token: there is nothing to say."
    shares = []
    for count in (1, 16384):
        took = [by_choice(Firing.of(layer), rates_of(_REACHED), count) for layer in layers]
        shares.append(sum(min(us.values()) for us in took) / sum(us[DENSE] for us in took))
    densities, neurons = [layer.density for layer in layers], sum(layer.d_ff for layer in layers)
    mean, dead = (sum(values) / neurons for values in zip(*((layer.mean_nnz, layer.dead) for layer in layers)))
    todo = "too dense at this width: train with an L1 penalty, and where the activation is no ReLU, tl.relufy first"
    if shares[1] <= _WORTH:
        todo = "tl.plan chooses a path for each layer"
    elif shares[0] <= _WORTH:
        todo = "worth it for few tokens at once; for many, train with a larger L1 penalty"
    share = f"{min(densities):.2%} to {max(densities):.2%}" if layers[1:] else f"{mean:.2%}"
    middle = f", {mean:.2%} on average" if layers[1:] else ""
    fire = f"{share} of the neurons fire for a token{middle}; {dead:.1%} of all fired for none"
    takes = f"{shares[0]:.2f} of the time that dense ones take for 1 token, and {shares[1]:.2f} for 16,384"
    return f"{fire}. On a GPU such as {_REACHED} the layers should take {takes}: {todo}."


def errors(recorded: list[records.Record] | None = None) -> list[dict]:
    """Return how far off predictions are for each recorded GPU that data/gpus.json knows: gpu, layers (how many were
    compared: drawn workloads in records of inference, on each path by itself, of equal ones the newest), and least,
    median and most of predicted over measured time. recorded: oldest first; by default all."""
    names = {name: sheet["name"] for sheet in datasheets() for name in sheet["driver_names"]}
    ratios: dict[str, dict[tuple, float]] = {}
    for record in records.load_all() if recorded is None else recorded:
        for row in record.rows if record.name == "inference" else ():
            path, kind = _FORCED.fullmatch(row["path"]), row["workload"].removeprefix("independent, ")
            if not path or kind not in ("lognormal", "uniform") or row["device"] not in names:
                continue
            firing = firing_of(row["nnz"], row["d_model"], row["d_ff"], row["gated"], kind)
            choice = Choice(path[1], int(path[2] or 0))
            us = parts_of(choice, firing, rates_of(row["device"]), row["tokens"], 2)["total"]
            key = row["tokens"], row["d_model"], row["d_ff"], round(row["nnz"]), kind, row["gated"], choice
            ratios.setdefault(names[row["device"]], {})[key] = us / 1e3 / row["ms"]
    summary = lambda of: {"layers": len(of), "least": min(of), "median": median_low(of), "most": max(of)}
    return [{"gpu": gpu, **summary(ratio.values())} for gpu, ratio in ratios.items()]
