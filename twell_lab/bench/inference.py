"""The inference tables: each path of a layer beside torch's dense layer, eager and compiled, in one run.

Every function returns rows (see twell_lab.records). Each result is checked before any clock starts: 64 rows of it
with float64, all of it with the dense layer. Times are device events with a cold L2 cache and rotated inputs, the paths
in turns (ops.clock.time_cuda), and the wall time of plain calls (rows.clock_gpu); for few tokens, and at each of
COUNTS, also those of CUDA-graph replays. The planner sees other tokens than those that are timed.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..analysis import costs, planner
from ..analysis.plan import Plan
from ..analysis.profile import profile
from ..cuda.launch import run
from ..formats.twell import TILE, WORDS
from ..layers.choice import LayerPlan, one_of_each
from ..layers.find import feed_forwards
from ..layers.sparse_ffn import SparseFFN
from ..models.swap import sparsify
from ..ops import clock as clocks
from ..ops.gate_pack import VERSIONS, gate_pack_sm80, gate_pack_sm90
from ..ops.pack import pack
from ..ops.reference import GatedFeedForward, PlainFeedForward
from . import rows
from .rows import COMPILED, DENSE, check, over

D_MODEL, D_FF, TOKENS = 2048, 5632, 16384
COUNTS = (1, 16, 64, 256, 2048, 16384, 131072)  # tokens at which calls are timed in every way
NNZ = 29
SHAPES = (
    (768, 3072, True),
    (1024, 4096, False),
    (2048, 8192, False),
    (3584, 18944, True),
    (4096, 14336, True),
    (5120, 13824, True),
)
HEAVY = (1, 8, 64, 512)  # rows of TOKENS in which many neurons fire
HEAVY_NNZ = 1500  # how many fire there
_DENSITY = 29 / 5632  # of the shapes' workload


# ---- one layer, every path ----


@functools.cache
def rates_here() -> costs.Rates:
    """The rates of this GPU, measured once."""
    return costs.measure_rates("cuda", torch.bfloat16)


def plan_for(layer: nn.Module, seen: list[Tensor]) -> Plan:
    """The plan of one layer, made from the inputs `seen`: profiled on the first, timed on the others."""
    tokens = seen[0].shape[0]
    return planner.plan(profile(layer, seen[:1]), layer, tokens=(tokens,), batches=seen[1:], rates=rates_here())


@torch.no_grad()
def compare(
    layer: nn.Module, inputs: list[Tensor], seen: list[Tensor], label: str, *, forced: bool = True, graphs: bool = False
) -> list[dict]:
    """Rows of `layer` on `inputs`: dense, and as planned on `seen`. forced: also every path on its own. graphs: also
    replays of CUDA graphs, which few tokens have anyway."""
    plan = plan_for(layer, seen)
    chosen = plan.layers[0].choice(inputs[0].shape[0])
    planned = sparsify(copy.deepcopy(layer), plan)
    torch._dynamo.reset()
    # Both compiled alike: a call of what was compiled with fullgraph=True takes the host longer (docs/calls.md).
    calls = {
        DENSE: layer,
        COMPILED: torch.compile(layer, dynamic=False),
        "planned": planned,
        "planned compiled": torch.compile(planned, dynamic=False),
    }
    if forced:  # each path, whatever the number of tokens: the planner's choice is compared with these
        for choice in one_of_each(layer.up_proj.weight.shape[0], chosen.hot or _usual_hot(layer)):
            only = LayerPlan.forced(plan.layers[0], choice)
            calls[f"forced {choice}"] = SparseFFN.from_module(copy.deepcopy(layer), plan=only)
    facts = {
        name: {"error_over_allowed": round(check(layer, call, inputs), 4)}
        for name, call in calls.items()
        if name != DENSE
    }
    for name in ("planned", "planned compiled"):
        facts[name]["choice"] = str(chosen)
    shared = _describe(layer, inputs, label)
    timed = {name: over(call, inputs) for name, call in calls.items()}
    samples, bursts = rows.clock_gpu(timed, inputs[0].shape[0], graphs=graphs)
    return [*rows.table(shared, samples, facts, bursts), *_candidate_rows(shared, plan)]


def _usual_hot(layer: nn.Module) -> int:
    return max(256, layer.up_proj.weight.shape[0] // 8 // 256 * 256)


def _candidate_rows(shared: dict, plan: Plan) -> list[dict]:
    """Return what the planner predicted and measured for each candidate, as rows of kind "plan"."""
    found = []
    for entry in plan.layers[0].table():
        if entry["measured_us"] is None:
            continue
        path = f"plan: {entry['path']} {entry['hot']}" if entry["hot"] else f"plan: {entry['path']}"
        found.append(
            {
                **shared,
                "kind": "plan",
                "path": path,
                "ms": entry["measured_us"] / 1e3,
                "predicted_ms": entry["predicted_us"] / 1e3,
                "chosen": bool(entry["chosen"]),
                "dense_ms": None,
                "x_dense": None,
            }
        )
    return found


def _describe(layer: nn.Module, inputs: list[Tensor], label: str) -> dict:
    pattern = getattr(layer, "gate_proj", layer.up_proj)
    return rows.describe("inference", inputs, pattern.weight, label) | {"gated": hasattr(layer, "gate_proj")}


# ---- the tables ----


def drawn(
    tokens: int,
    d_model: int,
    d_ff: int,
    nnz: float,
    kind: str = "lognormal",
    *,
    gated: bool = True,
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
):
    """(layer, inputs to time, inputs to plan on): a drawn workload (ops.clock.workload); plain if not gated."""
    layer, seen = clocks.workload(tokens, d_model, d_ff, nnz, kind, dtype, "cuda", seed=seed)
    generator = torch.Generator("cuda").manual_seed(seed + 1000)
    inputs = [torch.randn(x.shape, generator=generator, device="cuda").to(x.dtype) for x in seen]
    for x, like in zip(inputs, seen):
        x[:, 0] = like[0, 0]
    if not gated:
        plain = PlainFeedForward(8, 8).requires_grad_(False)
        plain.up_proj, plain.down_proj = layer.gate_proj, layer.down_proj
        layer = plain
    return layer.eval(), inputs, seen[:2]  # in training mode a swapped layer would copy `down`, not turn it


def table(tokens: int, nnzs, kind: str, *, forced: bool = True, graphs: bool = False) -> list[dict]:
    found = []
    for nnz in nnzs:
        made = drawn(tokens, D_MODEL, D_FF, nnz, kind)
        found += compare(*made, f"independent, {kind}", forced=forced, graphs=graphs)
    return found


def heavy_rows(heavy: int, firing: int) -> list[dict]:
    """A layer of nnz 29 on TOKENS tokens, in `heavy` of which `firing` neurons fire."""
    layer, inputs, seen = drawn(TOKENS, D_MODEL, D_FF, NNZ)
    label, facts = make_heavy(layer, [*inputs, *seen], heavy, firing)
    return [row | facts for row in compare(layer, inputs, seen, label)]


def make_heavy(layer: GatedFeedForward, inputs: list[Tensor], heavy: int, firing: int) -> tuple[str, dict]:
    """Make `firing` neurons, drawn at random, fire in `heavy` rows of each input, spread evenly. Returns the name of
    the workload, and what its rows say of it."""
    tokens, d_ff = len(inputs[0]), layer.gate_proj.weight.shape[0]
    neurons = torch.randperm(d_ff, generator=torch.Generator().manual_seed(heavy))[:firing]
    _fire_in(layer, inputs, torch.linspace(0, tokens - 1, heavy).long(), neurons)
    all_of_them = ", all neurons" if heavy and firing == d_ff else ""
    return f"heavy rows: {heavy}{all_of_them}", {"heavy_rows": heavy, "heavy_nnz": firing if heavy else None}


def overflow_rows() -> list[dict]:
    """A layer of nnz 60 as it is, with a tile of 40 positives in 20% of its rows, and with all rows beyond the pool."""
    found = []
    for label, share, many in (
        ("no overflow", 0.0, 0),
        ("20% of rows with a tile of 40", 0.2, 40),
        ("every row beyond the pool", 1.0, 128),
    ):
        layer, inputs, seen = drawn(TOKENS, D_MODEL, D_FF, 60)
        overflow(layer, [*inputs, *seen], share, many)
        found += compare(layer, inputs, seen, f"overflow: {label}")
    return found


def overflow(layer: GatedFeedForward, inputs: list[Tensor], share: float, many: int, tile: int = 3) -> None:
    """Make `many` neighbouring neurons of one tile fire in a `share` of the rows of each input, spread evenly."""
    tokens = torch.arange(len(inputs[0]))[:: round(1 / share)] if share else torch.arange(0)
    _fire_in(layer, inputs, tokens, torch.arange(len(layer.gate_proj.weight))[tile * 256 : tile * 256 + many])


def _fire_in(layer: GatedFeedForward, inputs: list[Tensor], tokens: Tensor, neurons: Tensor) -> None:
    """Make these neurons fire in these rows of each input, whatever else is there."""
    for x in inputs:
        x[:, 1] = 0
        x[tokens.to(x.device), 1] = 8.0
    layer.gate_proj.weight[neurons.to(layer.gate_proj.weight.device), 1] = 4.0


def decode_rows() -> list[dict]:
    """Few tokens at other counts and densities than those of COUNTS, and layers in a stack."""
    found = table(4, (NNZ,), "lognormal")
    for nnz in (8, 120):
        for tokens in (1, 16):
            found += table(tokens, (nnz,), "lognormal", forced=False)
    for tokens in (1, 4, 16, 64):
        found += stack_rows(tokens)
    return found


@torch.no_grad()
def stack_rows(tokens: int, nnz: float = 29, layers: int = 8) -> list[dict]:
    """One layer's share of a CUDA graph of `layers` layers, each with its own weights, as when a model decodes. There
    are so many layers that the L2 cache holds none of their weights when the next replay starts."""
    stack = [drawn(tokens, D_MODEL, D_FF, nnz, seed=seed) for seed in range(layers)]
    sparse = [SparseFFN.from_module(copy.deepcopy(layer)) for layer, _, _ in stack]
    for (layer, inputs, _), each in zip(stack, sparse):
        check(layer, each, inputs)
    gate = [functools.partial(linear, weight=layer.gate_proj.weight) for layer, _, _ in stack]
    ways = {DENSE: [layer for layer, _, _ in stack], "forced twell": sparse, "gate GEMM (torch)": gate}

    def through(calls):
        return lambda turn: [call(inputs[turn % len(inputs)]) for call, (_, inputs, _) in zip(calls, stack)]

    shared = _describe(stack[0][0], stack[0][1], "independent, lognormal")
    suffix = f" (graph of {layers} layers)"
    samples = clocks.time_cuda({name + suffix: clocks.graphed(through(calls)) for name, calls in ways.items()})
    return rows.table(shared, {name: [ms / layers for ms in values] for name, values in samples.items()})


def shape_rows(d_model: int, d_ff: int, gated: bool) -> list[dict]:
    found = []
    for tokens in (1, 64, 2048, TOKENS):
        made = drawn(tokens, d_model, d_ff, max(4.0, _DENSITY * d_ff), gated=gated)
        found += compare(*made, "independent, lognormal", forced=False)
        torch.cuda.empty_cache()
    return found


# ---- the gate GEMM alone, and layers that were trained ----


@torch.no_grad()
def gate_rows(tokens: int = TOKENS, nnzs=(8, 29, 60)) -> list[dict]:
    """The gate GEMM with packing, version by version, beside torch's GEMM and torch's GEMM followed by the packing
    kernel."""
    found = []
    for nnz in nnzs:
        layer, inputs, _ = drawn(tokens, D_MODEL, D_FF, nnz)
        gate = layer.gate_proj.weight
        calls = {
            "gate GEMM (torch)": lambda x: linear(x, gate),
            "gate GEMM (torch), then pack": lambda x: run(pack, linear(x, gate), TILE, WORDS),
        }
        calls |= {
            f"sm90 gate_pack v{v}": functools.partial(run, gate_pack_sm90, gate=gate, version=v) for v in VERSIONS
        }
        calls["sm80 gate_pack"] = functools.partial(run, gate_pack_sm80, gate=gate)
        want = run(pack, linear(inputs[0], gate), TILE, WORDS)
        for name, call in calls.items():
            if name != "gate GEMM (torch)":
                _same_counts(name, call(inputs[0]), want)
        samples = clocks.time_cuda({name: over(call, inputs) for name, call in calls.items()})
        shared = _describe(layer, inputs, "independent, lognormal") | {"kind": "gate"}
        for each in (rows.row(shared, path, values) for path, values in samples.items()):
            found.append(each | {"tflops": round(2e-9 * tokens * D_MODEL * D_FF / each["ms"], 1)})
    return found


def _same_counts(name: str, got, want: Tensor) -> None:
    """WrongResult unless nearly all counts are equal: with another order of summing a value may move across zero."""
    packed = got[0] if isinstance(got, tuple) else got
    off = (packed[..., 0].long() != want[..., 0].long()).double().mean().item()
    if off > 0.01:
        raise clocks.WrongResult(
            f"{name}: {off:.2%} of the counts differ from torch's GEMM and pack: nothing was timed"
        )


def trained_rows(l1s, steps: int = 1000) -> list[dict]:
    """Layers that are trained here with each L1 coefficient, each timed on its own inputs and planned on others."""
    found = []
    for layer, seen, label, facts in trained_layers(l1s, steps):
        found += [{**each, **facts} for each in compare(layer, seen[:3], seen[3:], label)]
    return found


def trained_layers(l1s, steps: int) -> Iterator[tuple[nn.Module, list[Tensor], str, dict]]:
    """The layers of four-layer models of d_model 2048, trained here with each L1 coefficient: (the layer in bf16, five
    inputs of TOKENS tokens of held-out text, the name of the workload, facts of its training)."""
    from ..training.config import TrainConfig
    from ..training.loop import train

    for l1 in l1s:
        config = TrainConfig(
            l1=l1,
            steps=steps,
            batch=16,
            context=512,
            d_model=D_MODEL,
            layers=4,
            heads=16,
            d_ff=D_FF,
            lr=5e-4,
            warmup=100,
            log_every=50,
            eval_every=steps,
            eval_windows=64,
        )
        # Autocast's cache would keep the first step's weights.
        with torch.autocast("cuda", torch.bfloat16, cache_enabled=False):
            result = train(config, progress=False)
        model = result.model.to(torch.bfloat16).requires_grad_(False)
        facts = {
            "l1": l1,
            "steps": steps,
            "validation_bits_per_byte": round(result.validation_bits_per_byte, 4),
            "nnz_curve": [[row["step"], round(row["nnz"], 1)] for row in result.history],
        }
        for i, seen in enumerate(_layer_inputs(model, config)):
            yield feed_forwards(model)[i].module, seen, f"trained, L1 {l1:g}, layer {i}", {"layer": i, **facts}


@torch.no_grad()
def _layer_inputs(model: nn.Module, config) -> list[list[Tensor]]:
    """For each feed-forward layer five inputs of TOKENS tokens of held-out text: three to time, two to plan on."""
    from ..training.text.source import load, spread_windows

    _, validation = load(config.text).split()
    windows = spread_windows(validation.data, 5 * TOKENS // config.context, config.context).to("cuda")[:, :-1]
    caught: list[list[Tensor]] = [[] for _ in feed_forwards(model)]
    hooks = [
        found.module.register_forward_pre_hook(
            lambda module, args, kept=kept: kept.append(args[0].reshape(-1, D_MODEL).contiguous())
        )
        for found, kept in zip(feed_forwards(model), caught)
    ]
    try:
        for batch in windows.split(TOKENS // config.context):
            model(batch)
    finally:
        for hook in hooks:
            hook.remove()
    return caught


OTHER_NNZ = (8, 60, 120, 300)
HEAVY_CASES = [(0, HEAVY_NNZ), *((heavy, firing) for firing in (HEAVY_NNZ, D_FF) for heavy in HEAVY)]

# Each section is a list of steps, and each step returns rows: a record that runs out of time leaves out the last ones.
SECTIONS: rows.Sections = {
    "tokens": [
        functools.partial(table, tokens, (NNZ,), "lognormal", forced=tokens <= TOKENS, graphs=True) for tokens in COUNTS
    ],
    "heavy rows": [functools.partial(heavy_rows, *each) for each in HEAVY_CASES],
    "16,384 tokens": [functools.partial(table, TOKENS, (nnz,), "lognormal") for nnz in OTHER_NNZ],
    "16,384 tokens, uniform": [
        functools.partial(table, TOKENS, (nnz,), "uniform", forced=False) for nnz in (NNZ, *OTHER_NNZ)
    ],
    "gate": [gate_rows, functools.partial(gate_rows, 131072, (NNZ,))],
    "131,072 tokens": [functools.partial(table, 131072, (nnz,), "lognormal", forced=False) for nnz in OTHER_NNZ],
    "overflow": [overflow_rows],
    "decode": [decode_rows],
    "shapes": [functools.partial(shape_rows, *shape) for shape in SHAPES],
    "trained": [functools.partial(trained_rows, (l1,)) for l1 in (2e-5, 1e-4)],
}
