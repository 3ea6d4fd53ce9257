"""What the notebook on other sparsities computes: patterns of zeros in weights, what they cost a model, what they gain.

Weights are pruned by `twell_lab.sparsities`; times are those of `twell_lab.bench.comparison`, measured here or
recorded."""

from __future__ import annotations

import copy
import warnings
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import takewhile
from math import ceil, exp, log

import torch
from torch import Tensor

from ... import core, records
from ...bench import comparison
from ...bench.comparison import BLOCKS, DENSE, PIECES, SCATTERED, TALL, TWO_FOUR, WIDE, Shape
from ...core import InputError
from ...models.thresholds import losses
from ...models.tiny import LanguageModel
from ...ops import clock
from ...ops.clock import dtype_for
from ...sparsities import blocks, magnitude, prune, quantised, two_four
from ...sparsities.weights import SparseLinear
from ...training.text import source
from ..measure.data import ratios, runs_here
from ..recorded import sourced

BLOCK_SIZES = (16, 32)
SEEN = 64  # rows and columns of a pattern that are drawn: whole blocks
DRAWN = (SCATTERED, TWO_FOUR, BLOCKS, TALL, WIDE)
_CPU = (1024, 1024, 256)  # m, k, n of the products that a CPU times


# ---- patterns, and what products of them take ----


def patterns(sparsity: float = 0.5) -> dict[str, Tensor]:
    """A small matrix in each pattern, bool [SEEN, SEEN]: what is not zero. "2:4" is always half zeros."""
    made = {}
    for name in DRAWN:
        share = 0.5 if name == TWO_FOUR else sparsity
        made[name] = comparison.patterned(name, SEEN, SEEN, share, dtype=torch.float32, device="cpu") != 0
    return made


def timed_here(device: str, sparsity: float = 0.9, patterned: Iterable[str] = PIECES) -> list[dict]:
    """Rows of comparison.product_rows for these patterns on this machine: 4096 x 4096 x 4096 on a GPU, a smaller
    product on a CPU. Each says `where`."""
    shape = Shape(dtype=dtype_for(device)) if device == "cuda" else Shape(*_CPU, torch.float32, "cpu", 0.6)
    with _torch_untuned():
        table = [row for pattern in patterned for row in comparison.product_rows(pattern, sparsity, shape)]
    where = f"yours, now, on {clock.device_name(torch.device(device))}"
    return [row | {"where": where} for row in table]


@contextmanager
def _torch_untuned() -> Iterator[None]:
    """Without torch's warning that it has no tuned parameters for a block-sparse product of this shape and GPU."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "bsr_dense_addmm uses non-optimal", UserWarning)
        yield


def recorded() -> list[dict]:
    """Products of the newest record of the comparison (records.newest), each with `where`, a kernel by the version that
    is taken; none where this checkout has none."""
    found = records.newest(records.load_all(), "comparison")
    return comparison.leading(row for row in sourced(found) if row["kind"] == comparison.KIND) if found else []


def products(rows: Iterable[dict]) -> list[dict]:
    """The rows of whole products: without conversions, and without the dense one."""
    return [row for row in rows if row["path"] != DENSE and not row["path"].startswith("part: ")]


def conversions(rows: Iterable[dict]) -> list[dict]:
    """{path, pattern, ms (of the product), conversion_ms, dense_ms, calls}: how many products of one matrix it takes
    until a faster method has made up for its conversion; None where it is not faster."""
    rows = list(rows)
    takes = {
        (row["path"].removeprefix("part: ").removesuffix(", conversion"), row["pattern"]): row["ms"]
        for row in rows
        if row["path"].startswith("part: ")
    }
    made = []
    for row in products(rows):
        spent = takes[row["path"], row["pattern"]]
        calls = pays_after(spent, row["ms"], row["dense_ms"])
        said = {key: row[key] for key in ("path", "pattern", "ms", "dense_ms")}
        made.append({**said, "conversion_ms": spent, "calls": calls})
    return made


def pays_after(conversion: float, sparse: float, dense: float) -> int | None:
    """The least number of products for which conversion and sparse products take no longer than dense ones, all in the
    same unit of time; None where sparse ones are not faster."""
    return ceil(conversion / (dense - sparse)) if sparse < dense else None


def paid(rows: Iterable[dict]) -> str:
    """After how many products faster methods have made up for their conversions, and how many never do, in words: of
    the bars that figures.beside_dense draws of these rows."""
    calls = [row["calls"] for row in conversions(rows)]
    counts = sorted(each for each in calls if each is not None)
    said = f"{counts[0]:,} to {counts[-1]:,} products; " if counts else ""
    return f"{said}never: {len(calls) - len(counts)}/{len(calls)} bars"


def begins(rows: Iterable[dict]) -> dict[str, tuple[float, float | None]]:
    """From which measured density on down some method is faster than dense, by pattern, and the next higher density
    that was measured, at which none is; None if there is none. Patterns without such a method are left out.

    Faster means that the middle halves of the samples lie apart."""
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


def begins_sentence(rows: Sequence[dict]) -> str:
    """At which measured shares of zeros a first method of each pattern wins, and where none does yet, in a sentence.
    Of 2:4, which has one share, each method's times as fast as dense, slowest first."""
    grouped: dict[str, list[str]] = {}
    for pattern, (since, above) in begins(rows).items():
        at = _zeros(since) + (f", not {_zeros(above)}" if above else "")
        ways = [row for row in products(rows) if row["pattern"] == pattern == TWO_FOUR]
        told = [f"{_way(row['path'])} {row['x_dense']:.2f}x" for row in sorted(ways, key=lambda row: row["x_dense"])]
        grouped.setdefault(at, []).append(pattern + (f" ({', '.join(told)})" if told else ""))
    said = "; ".join(f"at {at}: {', '.join(names)}" for at, names in grouped.items())
    return f"Faster, by zeros, {rows[0]['where']}: {said or 'nowhere'}."


def _way(path: str) -> str:
    """Return what tells a way to call cuSPARSELt from the others: of "2:4 (torch: cuSPARSELt, searched)" the last word;
    and "directly" where it is called at once, past torch."""
    last = path.removesuffix(")").rpartition(": ")[2].rpartition(", ")[2]
    return "directly" if last == "called at once" else last


def _zeros(density: float) -> str:
    """The share of zeros as text: whole percents as far as these say enough."""
    return f"{1 - density:.0%}" if density > 0.005 else f"{1 - density:.1%}"


# ---- what pruning costs a model ----


@dataclass(frozen=True)
class Study:
    """A small trained model and text that it has not seen.

    windows: int64 [windows, context]. inputs: what enters the up projection of the layer that is looked at, [tokens,
    d_model]; weight: of that projection, [d_ff, d_model]; both float32."""

    name: str
    model: LanguageModel
    windows: Tensor
    inputs: Tensor
    weight: Tensor


def study(name: str = "small", windows: int = 48, layer: int = 2) -> Study:
    """One of data/checkpoints on held-out Python source. layer: whose up projection is looked at."""
    model = LanguageModel.load(core.data_dir() / "checkpoints" / name)
    text = source.standard_library().split()[1].data
    tokens = source.spread_windows(text, windows, min(128, model.config.context))[:, :-1].long()
    seen: list[Tensor] = []
    module = model.layers[layer].mlp.up_proj
    hook = module.register_forward_pre_hook(lambda _, given: seen.append(given[0].detach().flatten(0, -2)))
    try:
        with torch.no_grad():
            model(tokens)
    finally:
        hook.remove()
    return Study(name, model, tokens, torch.cat(seen)[:1024], module.weight.detach())


def methods() -> dict[str, Callable[[Tensor, float], Tensor]]:
    """Ways to choose what is pruned, by name: from a weight [out, in] and a sparsity to what is kept, bool."""
    ways: dict[str, Callable[[Tensor, float], Tensor]] = {"smallest weights": magnitude.magnitude_mask}
    for size in BLOCK_SIZES:
        ways[f"blocks {size} x {size}"] = lambda w, sparsity, size=size: blocks.block_mask(w, sparsity, size)
    ways["whole rows"] = _rows
    ways["at random"] = _at_random
    return ways


def _rows(weight: Tensor, sparsity: float) -> Tensor:
    keep = magnitude.largest(weight.norm(dim=1), magnitude.kept_of(len(weight), sparsity))
    return keep[:, None].expand(weight.shape)


def _at_random(weight: Tensor, sparsity: float) -> Tensor:
    generator = torch.Generator().manual_seed(0)
    order = torch.rand(weight.shape, generator=generator)
    return magnitude.largest(order, magnitude.kept_of(weight.numel(), sparsity))


def pruned_losses(
    subject: Study, sparsities: Sequence[float] = (0.25, 0.5, 0.75, 0.9), ways: dict | None = None
) -> list[dict]:
    """The loss (nats a byte) on held-out text after pruning the feed-forward layers, without any training after it.

    Rows {method, sparsity (as it came out), loss, dense_loss, more (share of the dense loss)}, "2:4" at 0.5 too."""
    dense = _loss(subject.model, subject)
    cases = [
        (name, sparsity, lambda w, way=way, sparsity=sparsity: way(w, sparsity))
        for name, way in (methods() if ways is None else ways).items()
        for sparsity in sparsities
    ]
    if ways is None:
        cases.append((TWO_FOUR, 0.5, two_four.two_four_mask))
    made = []
    for name, _, mask in cases:
        model = prune.prune(
            copy.deepcopy(subject.model), mask=mask, only=lambda called, module: ".mlp." in f".{called}."
        )
        layers = [layer for layer in model.modules() if isinstance(layer, SparseLinear)]
        share = 1 - sum(layer.nnz for layer in layers) / sum(layer.mask.numel() for layer in layers)
        loss = _loss(prune.to_linears(model), subject)
        made.append({"method": name, "sparsity": share, "loss": loss, "dense_loss": dense, "more": loss / dense - 1})
    return made


@torch.no_grad()
def _loss(model: LanguageModel, subject: Study) -> float:
    return float(losses(model, subject.windows).mean())


def retrained() -> list[dict]:
    """Rows of the newest record of pruning, each with `where`, and `before` and `after`: how many bits a byte more than
    the dense model of the same seed it needs, pruned and trained on. None where this checkout has no record."""
    found = [record for record in records.load_all() if record.name == "pruning"]
    rows = [row for record in found[-1:] for row in sourced(record) if row["kind"] == "pruning"]
    dense = {row["seed"]: row for row in rows if row["path"] == "dense"}
    return [
        row
        | {
            "before": row["bits_before"] - dense[row["seed"]]["bits_before"],
            "after": row["bits_after"] - dense[row["seed"]]["bits_after"],
        }
        for row in rows
        if row["path"] != "dense"
    ]


# ---- fewer bits ----


def few_bits(subject: Study) -> list[dict]:
    """The weight that is looked at in other forms: {form, bytes (of 16-bit values, unless it says else), error of its
    product with the study's inputs}: 16 bits, INT8, half of the weights gone by 2:4 and by magnitude."""
    weight, x = subject.weight, subject.inputs
    exact, rows = x @ weight.t(), quantised.quantise(weight)
    half = torch.where(magnitude.magnitude_mask(weight, 0.5), weight, 0)
    pairs = torch.where(two_four.two_four_mask(weight), weight, 0)
    forms = {
        "16 bits": (2 * weight.numel(), weight.bfloat16().float()),
        "INT8": (rows.nbytes, rows.dense()),
        "2:4": (weight.numel() + weight.numel() // 8, pairs),
        "half gone, CSR": (6 * int((half != 0).sum()) + 4 * (len(half) + 1), half),
    }
    return [
        {"form": name, "bytes": size, "error": quantised.output_error(x @ other.t(), exact)}
        for name, (size, other) in forms.items()
    ]


# ---- what a threshold does to a weight ----


@dataclass
class Weighed:
    """A weight whose products were timed here at some densities, so that a slider only looks times up.

    times: milliseconds of a product with the inputs, by format, at each of `densities` (of blocks that hold anything,
    for blocks); densities ascending. where: the machine."""

    weight: Tensor
    inputs: Tensor
    where: str
    densities: tuple[float, ...] = (0.01, 0.03, 0.1, 0.3, 1.0)
    times: dict[str, list[float]] = field(default_factory=dict)

    @cached_property
    def norm(self) -> Tensor:
        """That of the exact product, which no threshold changes."""
        return (self.inputs @ self.weight.t()).norm()


FORMATS = ("dense", "CSR", "2:4", "blocks 16", "blocks 32")


@torch.no_grad()
def weigh(weight: Tensor, inputs: Tensor, seconds: float = 0.15) -> Weighed:
    """Time products of a weight [out, in] with inputs [tokens, in] in each format that this machine has, for magnitude
    pruning at several densities: of 16-bit values on a GPU, of the weight's own on a CPU. seconds: of each density, on
    a CPU."""
    found = Weighed(weight.detach(), inputs, clock.device_name(weight.device))
    dtype = dtype_for("cuda") if weight.is_cuda else weight.dtype
    weight, x = weight.to(dtype), inputs.to(dtype).t().contiguous()
    for density in found.densities:
        kept = (
            magnitude.magnitude_mask(weight, min(1 - density, 0.9999)) if density < 1 else torch.ones_like(weight) > 0
        )
        pruned = torch.where(kept, weight, 0)
        forms = {"dense": pruned, "CSR": pruned.to_sparse_csr()}
        for size in BLOCK_SIZES:
            share = blocks.block_mask(weight, min(1 - density, 0.9999), size) if density < 1 else kept
            forms[f"blocks {size}"] = blocks.to_bsr(torch.where(share, weight, 0), size)
        calls = {name: (lambda turn=0, form=form: form @ x) for name, form in forms.items()}
        with _torch_untuned():
            calls = {name: call for name, call in calls.items() if runs_here(call)}
            timed = clock.time_cuda(calls, rounds=10) if weight.is_cuda else clock.time_cpu(calls, seconds)
        for name, samples in timed.items():
            found.times.setdefault(name, []).append(clock.quartiles(samples)[0])
    return found


def view(weighed: Weighed, threshold: float) -> dict:
    """Return what is left of the weight above a threshold in magnitude.

    Returns {threshold, kept (bool [32, 32] at most: the corner that is drawn), density, by_row (densities of the rows,
    descending), violations (share of the groups of four with more than two), filled ({size: share of the blocks that
    hold anything}), error (of the product, relative), bytes and ms ({format: what it takes}; None where the format does
    not take this weight, or this machine not the format)}. Bytes are those of 16-bit values."""
    weight = weighed.weight
    kept = magnitude.threshold_mask(weight, threshold)
    pruned = torch.where(kept, weight, 0)
    count, (out, width) = int(kept.sum()), weight.shape
    filled = {size: 1 - blocks.empty_share(pruned, size) for size in BLOCK_SIZES}
    groups = kept.view(out, width // 4, 4).sum(-1) > 2
    lost = (weighed.inputs @ (weight - pruned).t()).norm() / weighed.norm
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
        "threshold": threshold,
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
    density = min(max(density, at[0]), at[-1])
    right = max(1, bisect_left(at, density))
    share = (log(density) - log(at[right - 1])) / (log(at[right]) - log(at[right - 1]))
    return exp((1 - share) * log(times[right - 1]) + share * log(times[right]))


def sentence(seen: dict) -> str:
    """The view in a sentence: which format is smallest, which takes least time, and what it costs."""
    there = {name: size for name, size in seen["bytes"].items() if size is not None}
    small = min(there, key=there.__getitem__)
    quick = min((name for name, ms in seen["ms"].items() if ms is not None), key=lambda name: seen["ms"][name])
    return (
        f"{seen['density']:.1%} of the weights kept, the product off by {seen['error']:.1%}: fewest bytes as {small} "
        f"({there[small] / there['dense']:.0%} of dense), least time as {quick}"
    )


def threshold_for(weight: Tensor, sparsity: float) -> float:
    """The magnitude below which about this share of a weight lies."""
    if not 0 <= sparsity <= 1:
        raise InputError(f"sparsity is {sparsity!r:.80}; a share from 0 to 1 is accepted")
    return float(weight.abs().flatten().double().quantile(sparsity))


@torch.no_grad()
def unstructured_in_blocks(sparsities: Sequence[float], size: int = 32) -> list[dict]:
    """Return how many blocks of size x size hold nothing where zeros lie at random: {sparsity, empty (in a drawn
    matrix), expected}."""
    made = []
    for sparsity in sparsities:
        a = comparison.patterned(SCATTERED, 1024, 1024, sparsity, dtype=torch.float32, device="cpu")
        empty = blocks.empty_share(a, size)
        made.append({"sparsity": sparsity, "empty": empty, "expected": sparsity ** (size * size)})
    return made


def row_products(tokens: int, d_in: int, d_out: int, gpu: str = "H100 SXM") -> dict[str, float]:
    """Return how many times as fast as dense each product of a linear layer can be at most with a 2:4 weight: forward,
    and the two backward ones (`two_four.bound`), counted with the rates of this GPU."""
    from ...analysis.predict import rates_of

    return two_four.bound(tokens, d_in, d_out, rates_of(gpu))


def three_lines(lost: list[dict], weighed: Weighed, timed: Sequence[dict]) -> list[str]:
    """Return what the notebook found, in sentences made of its numbers: rows of `pruned_losses`, the weight of the
    widget, and the products of the map."""
    half = {row["method"]: row["more"] for row in lost if abs(row["sparsity"] - 0.5) < 0.02}
    told = [f"{name} {half[name]:+.0%}" for name in ("smallest weights", TWO_FOUR, BLOCKS) if name in half]
    won = [
        i
        for i, _ in takewhile(
            lambda each: each[1][0] < each[1][1], enumerate(zip(weighed.times["CSR"], weighed.times["dense"]))
        )
    ]
    here = "CSR of this weight is nowhere faster here."
    if won:
        above = weighed.densities[won[-1] + 1 : won[-1] + 2]
        here = f"Here CSR wins at {_zeros(weighed.densities[won[-1]])} zeros"
        here += f", not {_zeros(above[0])}." if above else "."
    return [f"Loss, half gone: {', '.join(told)}.", here, begins_sentence(timed)]
