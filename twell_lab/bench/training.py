"""The record `training`: forward and backward of a gated layer, L1 on, on each path beside torch's, and whole steps of
a model; and `host-time`: what plain calls cost the host. Outputs and gradients are compared with float64 before any
clock starts: the norm of the error may be at most twice that of torch's dense layer."""

from __future__ import annotations

import copy
import functools
from collections import Counter
from collections.abc import Callable, Sequence
from functools import partial
from statistics import fmean

import torch
from torch import Tensor, nn
from torch.nn.functional import linear

from ..analysis import switching
from ..analysis.profile import profile
from ..layers.choice import Choice
from ..layers.find import feed_forwards
from ..layers.sparse_ffn import SparseFFN
from ..layers.terms import DENSE as LEARNS_DENSE
from ..layers.terms import SPARSE, LayerTerm, layer_terms, light_and_heavy
from ..models.swap import sparsify
from ..models.tiny import LanguageModel, ModelConfig
from ..ops import clock as clocks
from ..ops import train
from . import forward, rows
from .drawn import fire
from .forward import COUNTS, HEAVY_CASES, TOKENS, Case
from .rows import COMPILED, DENSE

L1 = 2e-5  # the penalty is on in every step; its size changes no time
NAMES = ("y", "dx", "dgate", "dup", "ddown")
MOST = 20  # steps in a burst: a step launches some thirty kernels
Reader = Callable[[Tensor], Tensor]  # from token ids [sequences, length] to logits


# ---- one step of one layer ----


def dense_layer(x: Tensor, gate: Tensor, up: Tensor, down: Tensor) -> tuple[Tensor, Tensor]:
    """Return (y, l1) by torch's own operations; l1 is the mean over tokens of sum |h|."""
    h = torch.relu(linear(x, gate)) * linear(x, up)
    return linear(h, down), h.abs().sum(dtype=torch.float32) / len(x)


def our_layer(path: str):
    """Return the same layer through twell_lab.ops.train."""

    def layer(x, gate, up, down):
        y, l1, _ = train.train_ffn(x, gate, up, down, path=path)
        return y, l1.mean()

    return layer


@functools.cache
def _compiled(path: str):
    """The dense layer ("torch") or a path, compiled once for all workloads of a shape."""
    return torch.compile(dense_layer if path == "torch" else our_layer(path), fullgraph=True, dynamic=False)


def step_of(layer, weights: Sequence[Tensor], inputs: list[Tensor], grads: list[Tensor]) -> rows.Call:
    """Return a call of one forward and backward pass: turn -> [y, dx, gradients of the weights]."""
    l1 = torch.full((), L1, device=inputs[0].device)

    def call(x: Tensor, dy: Tensor) -> list[Tensor]:
        y, norm = layer(x, *weights)
        return [y, *torch.autograd.grad([y, norm], [x, *weights], [dy, l1])]

    return rows.over(lambda given: call(*given), [*zip(inputs, grads)])


def exact(weights: Sequence[Tensor], x: Tensor, dy: Tensor, l1: float = L1) -> list[Tensor]:
    """Return y and the gradients of x and of the weights, in float64. Which neurons fire is taken from the gate as
    torch rounds it: another order of summing changes that only where a value is nearly zero. TOKENS tokens are computed
    at a time, since float64 needs four times the memory."""
    gate, up, down = wide = [w.detach().double().requires_grad_() for w in weights]
    keep, ys, dxs = linear(x, weights[0]) > 0, [], []
    for part, some, grad in zip(*(t.split(TOKENS) for t in (x, keep, dy)), strict=True):
        part = part.detach().double().requires_grad_()
        h = torch.where(some, linear(part, gate), 0.0) * linear(part, up)
        y = linear(h, down)
        torch.autograd.backward([y, l1 / len(x) * h.abs().sum()], [grad.double(), None])
        ys.append(y.detach())
        dxs.append(part.grad)
    return [torch.cat(ys), torch.cat(dxs), *(w.grad for w in wide)]


def checked(calls: rows.Calls, weights: Sequence[Tensor], x: Tensor, dy: Tensor, l1: float = L1) -> dict[str, float]:
    """Return for each call of a step but the dense one the largest ratio, for y and all gradients, of the norm of its
    error to twice that of torch's dense layer. Raises WrongResult for a ratio above 1."""
    right, dense, ratios = exact(weights, x.detach(), dy, l1), calls[DENSE](0), dict[str, float]()
    for path in [path for path in calls if path != DENSE]:
        for name, a, b, e in zip(NAMES, calls[path](0), dense, right, strict=True):
            with torch.no_grad():
                ratio = (a.double() - e).norm() / (2 * (b.double() - e).norm() + 1e-12 * e.norm())
            ratios[path] = max(ratios.get(path, 0.0), rows.hold(f"{path}: {name}", float(ratio)))
    return ratios


def planned(fired: Tensor, gate: Tensor) -> str:
    """Return the path that `switching` chooses for a layer in which so many neurons fire at each token: what "planned"
    means in these rows. fired: [tokens]; gate: [d_ff, d_model]."""
    d_ff, d_model = gate.shape
    nnz = fired.float().mean()
    spent = switching.cost(LayerTerm("", nnz, nnz, None, *light_and_heavy(fired, d_ff)), gate)
    limit = switching.break_even(forward.rates_here(), d_model, d_ff, True)
    return SPARSE if spent < limit else LEARNS_DENSE


def step_rows(case: Case) -> list[dict]:
    """Return the rows of a training step of a case's layer on every path."""
    if case.graphs:  # these cases have many shapes, and a function is compiled for eight at most
        torch._dynamo.reset()
    layer, inputs, _ = case.draw()
    drawn = layer.gate_proj, layer.up_proj, layer.down_proj
    weights = [part.weight.detach().requires_grad_() for part in drawn]
    inputs = [x.detach().requires_grad_() for x in inputs]
    generator = torch.Generator(inputs[0].device).manual_seed(7)
    grads = [torch.randn(x.shape, generator=generator, device=x.device).to(x.dtype) for x in inputs]
    shared = rows.describe("training", inputs, weights[0], case.name) | {"gated": True}
    with torch.no_grad():
        path = planned((linear(inputs[0], weights[0]) > 0).sum(1), weights[0])
    layers = {
        DENSE: dense_layer,
        COMPILED: _compiled("torch"),
        **{f"forced {each}": our_layer(each) for each in train.PATHS},
        "planned": our_layer(path),
        "planned compiled": _compiled(path),
    }
    calls = {name: step_of(layer, weights, inputs, grads) for name, layer in layers.items()}
    facts: dict[str, dict] = {}
    for name, error in checked(calls, weights, inputs[0], grads[0]).items():
        facts[name] = {"error_over_allowed": error} | ({"choice": path} if name.startswith("planned") else {})
    how = {"tokens": case.tokens, "graphs": case.graphs, "rounds": 20 if case.tokens <= TOKENS else 8, "most": MOST}
    return rows.measured(shared, calls, facts, **how)


# ---- whole steps ----


def model_rows(config: ModelConfig, nnz: float, batch: int, name: str, left_out: dict[str, str]) -> list[dict]:
    """Return rows of whole training steps of a model on `batch` windows, in which about `nnz` neurons fire at a token:
    all layers dense, each as the trainer would choose, and all sparse. name: of the workload, after "whole step"."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    device = clocks.present_device(None)
    with device:
        dense = LanguageModel(config).to(torch.bfloat16)
        ids = torch.randint(0, config.vocabulary, (3, batch, config.context))
    fire(dense, lambda: dense(ids[0, :2]), [nnz] * config.layers)
    fired = fmean(layer.mean_nnz for layer in profile(dense.eval(), [ids[0, :2]]).layers)
    dense.train()
    twin, sparse = sparsify(copy.deepcopy(dense), "twell"), sparsify(copy.deepcopy(dense), "twell")
    choice = switch_layers(twin, twin, ids[0])
    by_layer = copy.deepcopy(twin)  # compiled as the trainer compiles layers that may change their path
    for layer in by_layer.layers:
        layer.compile(dynamic=False)
    compiled = partial(torch.compile, dynamic=False)
    ways = {
        COMPILED: (dense, compiled(dense)),
        "planned compiled": (twin, compiled(twin)),
        "planned, compiled by layer": (by_layer, by_layer),
        "forced twell compiled": (sparse, compiled(sparse)),
        DENSE: (dense, dense),
        "planned": (twin, twin),
    }
    calls, facts = whole_steps(ways, ids, choice, left_out)
    sizes = {"tokens": ids[0].numel(), **rows.sizes_of(config), "context": config.context, "nnz": round(fired, 2)}
    sizes["parameters"] = sum(weight.numel() for weight in dense.parameters())
    shared = rows.about("training", next(dense.parameters()), f"whole step, {name}", **sizes)
    return rows.measured(shared, calls, facts, tokens=ids[0].numel(), rounds=10)


def switch_layers(model: nn.Module, read: Reader, ids: Tensor) -> str:
    """Have each sparse layer take the path that the trainer would choose for it; returns how many take which. read:
    runs the model on token ids [sequences, length]."""
    with layer_terms(model) as terms:
        read(ids)
    switching.Switch(model).see(terms)
    return counted(Counter(layer.module.learning or SPARSE for layer in feed_forwards(model)))


def counted(taken: Counter[str]) -> str:
    """Return how many layers take which path, as rows say it."""
    return ", ".join(f"{count} {path}" for path, count in sorted(taken.items()))


def whole_steps(
    ways: dict[str, tuple[nn.Module, Reader]], ids: Tensor, choice: str, left_out: dict[str, str]
) -> tuple[rows.Calls, dict[str, dict]]:
    """Return calls of one step of each model on token ids [inputs, sequences, length], turn -> its loss, and what their
    rows say: the loss with L1, backward, and AdamW with a learning rate of zero, so that every step is the same.

    ways: models, and what reads ids and gives logits by them. choice: what rows of planned models say. left_out: takes
    what can't be compiled, and why. Raises WrongResult where losses differ."""

    def entry(path: str) -> rows.Entry:
        model, read = ways[path]
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.0, fused=ids.is_cuda)

        def step(turn: int) -> Tensor:
            windows = ids[turn % len(ids)]
            with layer_terms(model) as terms:
                logits = read(windows)
            loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1).float(), windows[:, 1:].flatten())
            loss = loss + L1 * sum(term.l1 for term in terms) / len(terms)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            return loss.detach()

        said = {"loss": round(float(step(0)), 4)}
        return step, said | ({"choice": choice} if path.startswith("planned") else {})

    must = [path for path in ways if "compiled" not in path]
    calls, facts = rows.admit({path: partial(entry, path) for path in ways}, left_out, "training, ", must)
    for path, said in facts.items():
        rows.hold(f"training: the loss of {path}", abs(said["loss"] / facts[DENSE]["loss"] - 1), 0.02)
    return calls, facts


def sections(left_out: dict) -> rows.Sections:
    """Return the steps of the record, as in bench.forward."""
    half_billion = ModelConfig(vocabulary=32768, d_model=2048, layers=8, heads=16, d_ff=5632, context=2048)
    return {
        "tokens": rows.steps(step_rows, [Case(tokens, graphs=True) for tokens in COUNTS]),
        "lognormal": rows.steps(step_rows, [Case(nnz=nnz) for nnz in (8, 60, 120)]),
        "heavy rows": rows.steps(step_rows, HEAVY_CASES),
        "whole step": [partial(model_rows, half_billion, 30, 8, "8 layers", left_out)],
        "uniform": rows.steps(step_rows, [Case(nnz=nnz, kind="uniform") for nnz in (8, 29, 60, 120)]),
    }


# ---- host time ----

HOST_TOKENS, ROUNDS = (1, 16, 256, 2048, 16384), 60


def host_rows(case: Case) -> list[dict]:
    """Return the time until a call returns (`ms`) and until its result is there (`wall_ms`) of a gated layer, dense and
    packed: a forward pass without gradients, and a forward and backward pass. The GPU is idle before each call: `ms` is
    what Python, torch, the allocator and the driver take, and where the two are nearly equal, a faster kernel gains
    nothing."""
    layer, inputs, _ = case.draw()
    shared = rows.describe("host", inputs, layer.gate_proj.weight, "forward") | {"gated": True}
    with torch.no_grad():  # its weights lie as it reads them
        sparse = SparseFFN.from_module(copy.deepcopy(layer), plan=Choice("twell"))
        rows.check(layer, sparse, inputs)
        made = _host_rows(shared, {name: rows.over(call, inputs) for name, call in ((DENSE, layer), ("twell", sparse))})
    layer.train().requires_grad_(True)
    inputs = [x.detach().requires_grad_() for x in inputs]
    given = [(x, torch.randn_like(x)) for x in inputs]

    def step(call: nn.Module, given: tuple[Tensor, Tensor]) -> list[Tensor]:
        y = call(given[0])
        return [y, *torch.autograd.grad(y, [given[0], *layer.parameters()], given[1])]

    learner = SparseFFN.from_module(layer)
    learner.learn("twell")
    steps = {name: rows.over(partial(step, call), given) for name, call in ((DENSE, layer), ("twell", learner))}
    weights = [projection.weight for projection in (layer.gate_proj, layer.up_proj, layer.down_proj)]
    checked(steps, weights, *given[0], l1=0.0)
    return made + _host_rows(shared | {"workload": "forward and backward"}, steps)


def _host_rows(shared: dict, calls: rows.Calls) -> list[dict]:
    bursts = clocks.time_bursts(calls, rows.drain, rounds=ROUNDS, count=1, warm=0)
    return rows.table(shared, {path: host for path, (host, _) in bursts.items()}, bursts=bursts)


def host_sections(left_out: dict | None = None) -> rows.Sections:
    """Return the steps of the record `host-time`."""
    return {"host": rows.steps(host_rows, map(Case, HOST_TOKENS))}
