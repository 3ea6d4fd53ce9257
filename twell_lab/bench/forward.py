"""The forward pass of one layer, dense beside sparse: `ffn` and `layer` for anybody's sizes and layers, and the tables
of the record `inference`, whose lines are Cases. Results are checked before any clock starts (rows.compare)."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..analysis import costs, planner
from ..analysis.profile import profile
from ..cuda.launch import run
from ..formats.twell import TILE, WORDS
from ..layers.choice import LayerPlan, one_of_each
from ..layers.find import feed_forwards
from ..layers.sparse_ffn import SparseFFN
from ..models.swap import sparsify
from ..ops import clock, gate_pack
from ..ops.clock import workload
from ..ops.down import down
from ..ops.gated import gated
from ..ops.pack import pack
from ..records import Record
from . import rows
from .rows import COMPILED, need, over

AUTOTUNED = "dense max-autotune"  # the path of the dense layer whose kernels torch.compile picks by timing them
Rivals = dict[str, Callable[[Tensor], Tensor]]  # what is timed beside a dense layer, by path


# ---- a layer of any size, and anybody's own ----


def ffn(
    tokens: int = 16384,
    d_model: int = 2048,
    d_ff: int = 5632,
    nnz: float = 29,
    *,
    dtype: torch.dtype | None = None,
    device: str | torch.device | None = None,
    compiled: bool = False,
    seconds: float = 2.0,
) -> Record:
    """Time a gated layer of the given size on a drawn workload, dense beside sparse; returns a Record with a row for
    each path, times in milliseconds.

    Args:
        tokens, d_model, d_ff: the sizes of the input and of the layer.
        nnz: how many neurons fire at a token, on average, at lognormal rates (ops.clock.firing_rates).
        dtype: bfloat16, float16 or float32; by default that of ops.clock.dtype_for.
        device: by default a GPU where there is one.
        compiled: also time torch.compile of the dense layer.
        seconds: how long to measure on a CPU.

    InputError or DeviceError for a size, nnz, dtype or device that is not accepted; WrongResult where a result does not
    agree with float64: then nothing is timed."""
    rows.check_seconds(seconds)
    device = clock.present_device(device)
    dense, inputs = workload(tokens, d_model, d_ff, nnz, "lognormal", dtype or clock.dtype_for(device), device)
    return _beside_sparse(dense, inputs, "independent, lognormal", compiled, seconds)


def layer(
    module: nn.Module, x: Tensor, *, label: str = "trained", compiled: bool = False, seconds: float = 2.0
) -> Record:
    """Time a feed-forward module on real inputs x [tokens, d_model], dense beside its SparseFFN.

    label: what the rows call this workload. compiled, seconds, the Record and the errors: as for `ffn`."""
    rows.check_seconds(seconds)
    shape = list(x.shape) if isinstance(x, Tensor) else type(x).__name__
    rows_of_it = isinstance(x, Tensor) and x.dim() == 2 and len(x) > 0
    need(rows_of_it, f"x is {shape}", "a tensor [tokens, d_model] with at least one token")
    return _beside_sparse(module, [x], label, compiled, seconds)


@torch.no_grad()
def _beside_sparse(dense: nn.Module, inputs: list[Tensor], label: str, compiled: bool, seconds: float) -> Record:
    x = inputs[0]
    found = feed_forwards(dense)[0]
    kind, weight = type(dense).__name__, found.pattern.weight
    need(found.module is dense, f"{kind} holds a feed-forward layer, {found.name}", "that module")
    need(not isinstance(dense, SparseFFN), f"{kind} is no feed-forward layer as it was", "a dense one")
    fits = (x.dtype, x.device, x.shape[1]) == (weight.dtype, weight.device, weight.shape[1])
    takes = f"{weight.dtype} [tokens, {weight.shape[1]}] on {weight.device}"
    need(fits, f"x is {x.dtype} {list(x.shape)} on {x.device}", takes)
    # A copy, whose weights may lie as the sparse path reads them; the check compares the two on these inputs.
    sparse = SparseFFN(copy.deepcopy(found.module).eval(), probed=found.both)
    rivals: Rivals = {"twell": sparse}
    if compiled:
        torch._dynamo.reset()
        rivals[COMPILED] = torch.compile(dense)
    timed = rows.compare("ffn_forward", dense, rivals, inputs, label, seconds=seconds)
    return Record.new("ffn", "one feed-forward layer, dense beside sparse", timed)


# ---- versions of kernels ----

NEWEST = {"pack": 4, "down": 3, "gated": 4}  # version of each portable kernel


@torch.no_grad()
def kernel_versions(tokens: int = 16384, nnz: float = 29, *, dtype: torch.dtype = torch.bfloat16) -> list[dict]:
    """Return rows of kind "kernel": every version of every portable kernel on one workload, in 16 bits, on this GPU.
    The newest make a layer, which is compared with float64 first; the others are compared with them."""
    dense, inputs, _ = Case(tokens, nnz, dtype=dtype).draw()
    gate, up, down_t = dense.gate_proj.weight, dense.up_proj.weight, dense.down_proj.weight.t().contiguous()

    def packed(x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        return x, (pattern := linear(x, gate)), run(pack, pattern, TILE, WORDS)

    def launch(kernel: str, given: tuple[Tensor, Tensor, Tensor], version: int | None = None) -> Tensor:
        x, pattern, words = given
        if kernel == "pack":
            return run(pack, pattern, TILE, WORDS, version)
        rest = words, pattern, (None, None, None)  # what overflows is read from the gate
        if kernel == "down":
            return run(down, *rest, down_t, None, len(down_t), TILE, version)
        return run(gated, x, *rest, up, down_t, None, None, TILE, version)

    rows.check(dense, lambda x: launch("gated", packed(x)), inputs[:1])
    given = [packed(x) for x in inputs]
    versions = [(kernel, version) for kernel, newest in NEWEST.items() for version in range(1, newest + 1)]
    calls = {f"{kernel}_v{n}": over(partial(launch, kernel, version=n), given) for kernel, n in versions}
    for kernel in ("down", "gated"):  # pack leaves words past a count unwritten: the tests compare packed tensors
        best = launch(kernel, given[0]).float()
        for version in range(1, NEWEST[kernel]):
            off = (launch(kernel, given[0], version).float() - best).norm() / best.norm()
            rows.hold(f"{kernel}_v{version}", float(off), 0.01)
    shared = rows.describe("kernel", inputs, gate, "independent, lognormal") | {"nnz": nnz}
    return rows.measured(shared, calls, base=None)


@torch.no_grad()
def gate_rows(nnz: float) -> list[dict]:
    """Return rows of kind "gate": the gate GEMM with packing, version by version, beside torch's GEMM alone and with
    packing after it."""
    dense, inputs, _ = Case(nnz=nnz).draw()
    gate = dense.gate_proj.weight
    calls: Rivals = {"gate GEMM (torch), then pack": lambda x: run(pack, linear(x, gate), TILE, WORDS)}
    for version in gate_pack.VERSIONS:
        calls[f"sm90 gate_pack v{version}"] = partial(run, gate_pack.gate_pack_sm90, gate=gate, version=version)
    calls["sm80 gate_pack"] = partial(run, gate_pack.gate_pack_sm80, gate=gate)
    wanted = None
    for name, call in calls.items():
        packed = call(inputs[0])
        counts = (packed[0] if isinstance(packed, tuple) else packed)[..., 0].long()
        wanted = counts if wanted is None else wanted
        # Summed otherwise a value may cross zero.
        rows.hold(f"{name}: the share of counts", float((counts != wanted).double().mean()), 0.01)
    calls = {"gate GEMM (torch)": lambda x: linear(x, gate), **calls}
    shared = rows.describe("gate", inputs, gate, "independent, lognormal") | {"gated": True}
    return rows.measured(shared, {name: over(call, inputs) for name, call in calls.items()}, base=None)


# ---- the workloads of the tables of layers, in inference and in training ----

TOKENS, D_FF = 16384, 5632
COUNTS = (1, 16, 64, 256, 2048, 16384, 131072)  # tokens at which calls are timed in every way


@dataclass(frozen=True)
class Case:
    """A drawn gated layer (ops.clock.workload) with its inputs, on a GPU where there is one.

    label: the name of the workload; by default it says how the neurons fire. heavy: in how many rows of each input,
    spread evenly, more neurons fire than were drawn. fires: how many more, drawn at random. graphs: whether calls are
    timed as CUDA graphs, which few tokens are anyway. autotuned: whether AUTOTUNED is timed beside, in inference."""

    tokens: int = 16384
    nnz: float = 29
    kind: str = "lognormal"
    d_model: int = 2048
    d_ff: int = 5632
    label: str = ""
    heavy: int = 0
    fires: int = 0
    graphs: bool = False
    autotuned: bool = False
    dtype: torch.dtype = torch.bfloat16
    seed: int = 0

    @property
    def name(self) -> str:
        return self.label or f"independent, {self.kind}"

    def draw(self) -> tuple[nn.Module, list[Tensor], list[Tensor]]:
        """Return (layer, inputs to time, inputs to plan on)."""
        device = clock.present_device(None)
        sizes = self.tokens, self.d_model, self.d_ff
        layer, seen = workload(*sizes, self.nnz, self.kind, self.dtype, device, seed=self.seed)
        generator = torch.Generator(device).manual_seed(1000 + self.seed)
        inputs = [torch.randn(x.shape, generator=generator, device=device).to(self.dtype) for x in seen]
        for x, like in zip(inputs, seen):
            x[:, 0] = like[0, 0]
        if self.heavy:
            neurons = torch.randperm(self.d_ff, generator=torch.Generator().manual_seed(self.heavy))[: self.fires]
            tokens = torch.arange(self.heavy, device=device) * self.tokens // self.heavy
            for x in (*inputs, *seen):
                x[:, 1] = 0
                x[tokens, 1] = 8.0
            layer.gate_proj.weight[neurons.to(device), 1] = 4.0
        return layer.eval(), inputs, seen[:2]  # in training mode a swapped layer would copy `down`, not turn it


@functools.cache
def rates_here() -> costs.Rates:
    """Return the rates of the device of `Case.draw`, measured once."""
    return costs.measure_rates(clock.present_device(None), torch.bfloat16)


@torch.no_grad()
def inference_rows(case: Case) -> list[dict]:
    """Return rows of kind "inference": torch's layer and what was planned for it on other inputs, each eager and
    compiled; for up to TOKENS tokens also each path by itself, with which the planner's choice is compared."""
    layer, inputs, seen = case.draw()
    firing = profile(layer, seen[:1])
    plan = planner.plan(firing, layer, tokens=(case.tokens,), batches=seen[1:], rates=rates_here())
    chosen = plan.layers[0].choice(case.tokens)
    planned = sparsify(copy.deepcopy(layer), plan)
    torch._dynamo.reset()
    # All compiled alike: a call of what was compiled with fullgraph=True takes the host longer (docs/calls.md).
    compiled = partial(torch.compile, dynamic=False)
    rivals: Rivals = {COMPILED: compiled(layer), "planned": planned, "planned compiled": compiled(planned)}
    if case.autotuned:
        rivals[AUTOTUNED] = compiled(layer, mode="max-autotune-no-cudagraphs")
    hot = chosen.hot or max(256, case.d_ff // 8 // 256 * 256)
    for choice in one_of_each(case.d_ff, hot) if case.tokens <= TOKENS else ():
        only = LayerPlan.forced(plan.layers[0], choice)
        rivals[f"forced {choice}"] = SparseFFN.from_module(copy.deepcopy(layer), plan=only)
    facts = dict.fromkeys(("planned", "planned compiled"), {"choice": str(chosen)})
    return rows.compare("inference", layer, rivals, inputs, case.name, facts, graphs=case.graphs)


# ---- the tables ----

HEAVY_CASES = [
    Case(heavy=0, label="heavy rows: 0"),
    *(Case(heavy=heavy, fires=1500, label=f"heavy rows: {heavy}") for heavy in (1, 8, 64, 512)),
    *(Case(heavy=heavy, fires=D_FF, label=f"heavy rows: {heavy}, all neurons") for heavy in (1, 8, 64, 512)),
]


def sections(left_out: dict | None = None) -> rows.Sections:
    """Return the steps of the record. The most important come first: a record that runs out of time leaves out the
    last ones."""
    shapes = (768, 3072), (3584, 18944), (4096, 14336), (5120, 13824)  # d_model, d_ff
    layers = {
        "tokens": [Case(tokens, graphs=True) for tokens in COUNTS],
        "16,384 tokens": [Case(nnz=nnz) for nnz in (8, 60, 120, 300)],
        "heavy rows": HEAVY_CASES,
        "decode": [Case(4), *(Case(tokens, nnz) for nnz in (8, 120) for tokens in (1, 16))],
        "131,072 tokens": [Case(131072, nnz) for nnz in (8, 60, 120, 300)],
        "max-autotune": [  # the same as above, by another name
            Case(tokens, label="max-autotune", graphs=True, autotuned=True) for tokens in (1, 64, 2048, TOKENS)
        ],
        "shapes": [
            Case(tokens, max(4.0, 29 / D_FF * d_ff), d_model=d_model, d_ff=d_ff)
            for d_model, d_ff in shapes
            for tokens in (1, TOKENS)
        ],
    }
    steps = {name: rows.steps(inference_rows, cases) for name, cases in layers.items()}
    kernels = {"gate": rows.steps(gate_rows, (29, 8, 60)), "versions": [kernel_versions]}  # which take seconds
    return {"tokens": steps.pop("tokens"), **kernels, **steps}
