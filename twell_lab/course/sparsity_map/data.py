"""What the notebook on other sparsities computes: products of patterns of zeros, timed by `bench.comparison` or
recorded, and what pruning by `sparsities` costs a model."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import partial
from itertools import takewhile
from math import ceil

import numpy as np
import torch
from torch import Tensor

from ... import records
from ...bench import comparison
from ...bench.comparison import DENSE, PIECES, Shape
from ...ops import clock
from ...ops.clock import dtype_for
from ...sparsities import blocks, magnitude
from ..measure.data import ratios, runs_here
from ..recorded import sourced

BLOCK_SIZES = (16, 32)
_CPU = (1024, 1024, 256)  # m, k, n of the products that a CPU times
# Without torch's warning that it has no tuned parameters for a block-sparse product of this shape and GPU.
_UNTUNED = partial(warnings.catch_warnings, action="ignore", category=UserWarning)


# ---- what products take ----


def timed_here(device: str, sparsity: float = 0.9, patterned: Iterable[str] = PIECES) -> list[dict]:
    """Rows of comparison.product_rows, with `where`, for these patterns here: 4096 cubed on a GPU, smaller on a CPU."""
    shape = Shape(dtype=dtype_for(device)) if device == "cuda" else Shape(*_CPU, torch.float32, "cpu", 0.6)
    with _UNTUNED():
        table = [row for pattern in patterned for row in comparison.product_rows(pattern, sparsity, shape)]
    where = f"yours, now, on {clock.device_name(torch.device(device))}"
    return [row | {"where": where} for row in table]


def recorded() -> list[dict]:
    """Products of the newest record of the comparison (records.newest), each with `where`, a kernel by the version that
    is taken; none where this checkout has none."""
    found = records.newest(records.load_all(), "comparison")
    return comparison.leading(row for row in sourced(found) if row["kind"] == comparison.KIND) if found else []


def products(rows: Iterable[dict]) -> list[dict]:
    """The rows of whole products: without conversions, and without the dense one."""
    return [row for row in rows if row["path"] != DENSE and not row["path"].startswith("part: ")]


def pays_after(conversion: float, sparse: float, dense: float) -> int | None:
    """The least number of products for which conversion and sparse products take no longer than dense ones, all in the
    same unit of time; None where sparse ones are not faster."""
    return ceil(conversion / (dense - sparse)) if sparse < dense else None


def begins(rows: Iterable[dict]) -> dict[str, tuple[float, float | None]]:
    """Return by pattern the measured density from which on down some method is faster than dense (the middle halves of
    the samples lie apart), and the next higher one, at which none is, or None. Patterns without any are left out."""
    rows = list(rows)
    dense = {(row["pattern"], row["density"]): row["samples"] for row in rows if row["path"] == DENSE}
    made: dict[str, tuple[float, float | None]] = {}
    for pattern in dict.fromkeys(row["pattern"] for row in rows):
        there = [row for row in products(rows) if row["pattern"] == pattern]
        since = 0.0
        for path in dict.fromkeys(row["path"] for row in there):
            mine = sorted((row for row in there if row["path"] == path), key=lambda row: row["density"])
            won = takewhile(lambda row: ratios(row["samples"], dense[pattern, row["density"]])[1] > 1, mine)
            since = max([since, *(row["density"] for row in won)])
        if since:
            made[pattern] = since, min((row["density"] for row in there if row["density"] > since), default=None)
    return made


# ---- what pruning costs a model ----


def retrained() -> list[dict]:
    """Rows of the newest record of pruning, each with `where`, and `before` and `after`: how many bits a byte more than
    the dense model of the same seed it needs, pruned and trained on. None where this checkout has no record."""
    found = [record for record in records.load_all() if record.name == "pruning"]
    rows = [row for record in found[-1:] for row in sourced(record) if row["kind"] == "pruning"]
    dense = {row["seed"]: row for row in rows if row["path"] == "dense"}
    more = lambda row, when: row[f"bits_{when}"] - dense[row["seed"]][f"bits_{when}"]
    pruned = [row for row in rows if row["path"] != "dense"]
    return [row | {when: more(row, when) for when in ("before", "after")} for row in pruned]


# ---- what a threshold does to a weight ----


@dataclass
class Weighed:
    """A weight whose products were timed here at some densities, so that a slider only looks times up. times:
    milliseconds with the inputs, by format, at each of `densities` (ascending; for blocks, of those that hold
    anything)."""

    weight: Tensor
    inputs: Tensor
    where: str
    densities: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0)
    times: dict[str, list[float]] = field(default_factory=dict)


FORMATS = ("dense", "CSR", "2:4", "blocks 16", "blocks 32")


@torch.no_grad()
def weigh(weight: Tensor, inputs: Tensor, seconds: float = 0.15) -> Weighed:
    """Time products of a weight [out, in] with inputs [tokens, in] in each format that this machine has, pruned by
    magnitude to several densities; in 16 bits on a GPU. seconds: of each density, on a CPU."""
    found = Weighed(weight.detach(), inputs, clock.device_name(weight.device))
    dtype = dtype_for("cuda") if weight.is_cuda else weight.dtype
    weight, x = weight.to(dtype), inputs.to(dtype).t().contiguous()
    for density in found.densities:
        pruned = torch.where(magnitude.magnitude_mask(weight, 1 - density), weight, 0)
        forms = {"dense": pruned, "CSR": pruned.to_sparse_csr()}
        for size in BLOCK_SIZES:
            kept = blocks.block_mask(weight, 1 - density, size)
            forms[f"blocks {size}"] = blocks.to_bsr(torch.where(kept, weight, 0), size)
        calls = {name: (lambda turn=0, form=form: form @ x) for name, form in forms.items()}
        with _UNTUNED():
            calls = {name: call for name, call in calls.items() if runs_here(call)}
            timed = clock.time_cuda(calls, rounds=10) if weight.is_cuda else clock.time_cpu(calls, seconds)
        for name, samples in timed.items():
            found.times.setdefault(name, []).append(clock.quartiles(samples)[0])
    return found


def view(weighed: Weighed, threshold: float) -> dict:
    """Return what is left of the weight above a threshold in magnitude.

    Returns {kept (bool [32, 32] at most: the corner that is drawn), density, by_row (densities of the rows,
    descending), violations (share of the groups of four with more than two), filled ({size: share of the blocks that
    hold anything}), error (of the product, relative), bytes and ms ({format: what it takes}; None where the format does
    not take this weight, or this machine not the format)}. Bytes are those of 16-bit values."""
    weight = weighed.weight
    kept = magnitude.threshold_mask(weight, threshold)
    pruned = torch.where(kept, weight, 0)
    count, (out, width) = int(kept.sum()), weight.shape
    filled = {size: 1 - blocks.empty_share(pruned, size) for size in BLOCK_SIZES}
    groups = kept.view(out, width // 4, 4).sum(-1) > 2
    lost = (weighed.inputs @ (weight - pruned).t()).norm() / (weighed.inputs @ weight.t()).norm()
    legal = not bool(groups.any())
    size_of = {
        "dense": 2 * weight.numel(),
        "CSR": (2 + 4) * count + 4 * (out + 1),
        "2:4": 2 * weight.numel() // 2 + weight.numel() // 8 if legal else None,
    }
    for size, share in filled.items():
        number = round(share * weight.numel() / size**2)
        size_of[f"blocks {size}"] = number * (2 * size**2 + 4) + 4 * (out // size + 1)
    shares = {"dense": 1.0, "CSR": count / weight.numel(), **{f"blocks {size}": s for size, s in filled.items()}}
    return {
        "kept": kept[:32, :32],
        "density": count / weight.numel(),
        "by_row": kept.double().mean(1).sort(descending=True).values.tolist(),
        "violations": float(groups.double().mean()),
        "filled": filled,
        "error": float(lost),
        "bytes": size_of,
        "ms": {name: _time(weighed, name, shares.get(name)) for name in FORMATS},
    }


def _time(weighed: Weighed, name: str, density: float | None) -> float | None:
    """Milliseconds at a density between those measured, along the line through the two, both axes logarithmic."""
    times, at = weighed.times.get(name), weighed.densities
    if times is None or density is None:
        return None
    return float(np.exp(np.interp(np.log(max(density, at[0])), np.log(at), np.log(times))))
