"""The arena: this project's kernels beside what others published, on one card, by one judge.

`twell-lab record arena --rivals FOLDER` takes others' code from files FOLDER/NAME.py that you write: with the texts
`repository` and `commit`, which its rows say, and a function `layer(given)`. That gets a Layer, and returns a function
of x [tokens, d_model] that computes the layer's output, or None where the method is not for such a layer. It is called
once for each layer, before any clock starts: what it makes of the weights is not timed.

Every result is compared with float64 first. A rival that is wrong, raises or can't be captured as a CUDA graph is not
timed, and the record says why. A call goes through several layers, whose weights are more than an L2 cache holds; rows
give the time of one layer, of plain calls and in a CUDA graph. torch's dense layers cut nothing."""

from __future__ import annotations

import copy
import importlib.util
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.functional import linear, silu

from ..analysis import planner
from ..analysis.profile import profile
from ..core import InputError
from ..layers.choice import Choice, LayerPlan
from ..layers.lossy import zeroed
from ..layers.sparse_ffn import SparseFFN
from ..models.thresholds import thresholds
from ..ops import clock
from . import forward, rows

NEEDED = {"repository": str, "commit": str, "layer": Callable}  # of a rival's file; rows say the texts
OFF = 0.05  # of its norm: how far a row may be from float64; atomic sums in float16 made 0.033 of it


class Layer(NamedTuple):
    """One gated layer and its input. x: [tokens, d_model]; gate, up: [d_ff, d_model]; down: [d_model, d_ff], as
    torch.nn.Linear stores them. activation: "relu" or "silu". cut: None, or the magnitudes below which the values of x,
    and those of h = act(gate(x)) * up(x), count as zero. sparsity: the share of values below each of them."""

    x: Tensor
    gate: Tensor
    up: Tensor
    down: Tensor
    activation: str = "relu"
    cut: tuple[float, float] | None = None
    sparsity: float = 0.0

    def judge(self, y: Tensor) -> float:
        """Return how far y is from the float64 result, of its norm. WrongResult where a row is off by more than OFF."""
        exact = dense(*(part.double() if isinstance(part, Tensor) else part for part in self[:6]))
        if (y.shape, y.dtype) != (exact.shape, self.x.dtype):
            raise clock.WrongResult(f"the output is {y.dtype} {list(y.shape)}: it was not timed")
        off, size = (y.double() - exact).norm(dim=1), exact.norm(dim=1)
        rows.hold("a row", float((off / size.clamp(min=size.mean())).max()), OFF)
        return float(off.norm() / size.norm())


def dense(x, gate, up, down, activation: str, cut: tuple[float, float] | None = None) -> Tensor:
    """Compute a Layer by torch's operations."""
    first, second = cut or (0.0, 0.0)
    g = linear(x := zeroed(x, first), gate)
    return linear(zeroed((silu(g) if activation == "silu" else g.relu()) * linear(x, up), second), down)


@dataclass(frozen=True)
class Case(forward.Case):
    """So many `layers`, of different seeds; where `sparsity` is not 0, with a SiLU and thresholds (TEAL) that cut this
    share of inputs and hidden values."""

    sparsity: float = 0.0
    layers: int = 8

    @property
    def name(self) -> str:
        what = f"{self.sparsity:.0%} of inputs cut" if self.sparsity else f"{self.nnz:g} neurons fire"
        return f"{self.layers} layers, {self.tokens:,} x {self.d_model:,} x {self.d_ff:,}, {what}"

    def make(self) -> tuple[list[Layer], dict[str, list[SparseFFN]]]:
        """Return the layers, and by path what this project makes of them."""
        half = {"nnz": self.d_ff / 2, "kind": "uniform"} if self.sparsity else {}  # gates around zero
        drawn = [replace(self, seed=seed, **half).draw() for seed in range(self.layers)]
        layers = [Layer(x, m.gate_proj.weight, m.up_proj.weight, m.down_proj.weight) for m, (x, *_), _ in drawn]
        if self.sparsity:
            plans: dict[str, Choice | LayerPlan] = {"kept_inputs": Choice("kept_inputs")}
            for number, (module, (x, *_), _) in enumerate(drawn):
                module.act_fn = nn.SiLU()
                chosen = thresholds(module, [x], self.sparsity, method="teal")
                cut = torch.tensor([*chosen.layers[0].thresholds.values()], dtype=self.dtype).tolist()
                layers[number] = layers[number]._replace(activation="silu", cut=tuple(cut), sparsity=self.sparsity)
                chosen.apply(module)
        else:
            (one, _, (seen, others)), rates = drawn[0], {"rates": forward.rates_here(), "progress": False}
            plan = planner.plan(profile(one, [seen]), one, tokens=(self.tokens,), batches=[others], **rates)
            plans = {"twell": Choice("twell"), "planned": plan.layers[0]}
        made = {name: [SparseFFN(copy.deepcopy(m), plan=plan) for m, *_ in drawn] for name, plan in plans.items()}
        return layers, {f"twell-lab: {name}": modules for name, modules in made.items()}


@torch.no_grad()
def case_rows(case: Case, rivals: dict[str, ModuleType], left_out: dict[str, str], seconds: float = 2.0) -> list[dict]:
    """Return the rows of a case: torch's dense layer, on a GPU also compiled in two ways, ours, and the rivals."""
    device = clock.present_device(None)
    layers, ours = case.make()
    ways: dict[str, Callable] = {rows.DENSE: dense}
    if device.type == "cuda":
        torch._dynamo.reset()
        ways[rows.COMPILED] = torch.compile(dense, dynamic=False)
        ways[forward.AUTOTUNED] = torch.compile(dense, dynamic=False, mode="max-autotune-no-cudagraphs")

    def entry(path: str) -> rows.Entry:
        if path in ways:
            runs = [lambda x, layer=layer: ways[path](x, *layer[1:5]) for layer in layers]
        else:
            runs = ours[path] if path in ours else [rivals[path].layer(layer) for layer in layers]
        if None in runs:
            raise InputError("it is not for such a layer")
        given = [layer._replace(cut=None) for layer in layers] if path in ways else layers
        error = max(layer.judge(run(layer.x)) for layer, run in zip(given, runs))
        call = lambda turn: [run(layer.x) for run, layer in zip(runs, layers)]
        if device.type == "cuda":
            with torch.cuda.stream(torch.cuda.current_stream()):  # a capture that fails leaves its own on
                clock.graphed(call, inputs=1)
        texts = {key: getattr(rivals[path], key) for key, kind in NEEDED.items() if path in rivals and kind is str}
        return call, {"error": error, **texts}

    entries = {path: partial(entry, path) for path in (*ways, *ours, *rivals)}
    calls, facts = rows.admit(entries, left_out, f"{case.name}, ", [rows.DENSE])
    samples, bursts = rows.clocked(calls, device, seconds, graphs=True, compiled=True)
    one = lambda values: [ms / len(layers) for ms in values]  # noqa: E731
    shared = rows.of_layer("arena", layers[0].x, case.d_ff, case.name) | {"layers": len(layers)}
    shared |= {"sparsity": case.sparsity} if case.sparsity else {"nnz": case.nnz}
    samples = {path: one(values) for path, values in samples.items()}
    return rows.table(shared, samples, facts, {path: (one(host), one(wall)) for path, (host, wall) in bursts.items()})


def rivals_in(folder: str | Path) -> dict[str, ModuleType]:
    """Run the files of a folder and return them by name. InputError for one that fails, or lacks one of NEEDED."""
    rivals = dict[str, ModuleType]()
    for file in sorted(Path(folder).glob("*.py")):
        spec = importlib.util.spec_from_file_location(f"twell_lab_rival_{file.stem}", file)
        assert spec is not None and spec.loader is not None
        module = rivals[file.stem] = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(module)
        except Exception as error:
            raise InputError(f"{str(file)!r:.200} raises {type(error).__name__}: {error}") from error
        for name, kind in NEEDED.items():
            fits = isinstance(getattr(module, name, None), kind)
            rows.need(fits, f"{str(file)!r:.200} has no {name}", f"a file that has {', '.join(NEEDED)}")
    rows.need(rivals, f"there is no file NAME.py in {str(folder)!r:.200}", "a folder with one or more")
    return rivals


CASES = [  # what says most comes first, should the time not do for all
    Case(1, sparsity=0.5, dtype=torch.float16),
    Case(1, sparsity=0.5, d_model=4096, d_ff=14336, layers=4, dtype=torch.float16),
    Case(1),
    Case(64),
    Case(16),
    Case(16384, layers=2),
]


def sections(left_out: dict, rivals: str | Path | None = None) -> rows.Sections:
    """Return the steps of the record. rivals: the folder of others' code."""
    others = {} if rivals is None else rivals_in(rivals)
    return {case.name: rows.steps(case_rows, [case], [others], [left_out]) for case in CASES}
