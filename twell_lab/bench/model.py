"""A whole model of transformers: a Llama of the paper's 2B shape with random weights, dense, as planned for eager
calls, and as planned for CUDA graphs.

The gates' biases are set so that each layer fires as sparsely as asked for. Every function returns rows of kind "model"
(see twell_lab.records), with the time of the device and of plain calls (rows.clock_gpu). `gpu_ms`, beside the times of
plain calls, is the time of the same call as a CUDA graph: events around a call that waits for the host hold the waiting
too. Before any clock starts, logits are compared with those of the model in float32.
"""

from __future__ import annotations

import copy
import functools
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from ..analysis import planner
from ..analysis.costs import measure_rates
from ..analysis.plan import Plan
from ..analysis.profile import profile
from ..analysis.room import SHARE
from ..core.errors import StackError
from ..layers.anatomy import feed_forwards
from ..layers.choice import STEP, one_of_each
from ..layers.sparse_ffn import SparseFFN
from ..models.swap import sparsify
from ..ops import measure
from . import rows
from .rows import COMPILED, DENSE
from .training import thresholds

CLASSES = (1, 16, 256, 2048, 131072)  # of token counts, for which the model is planned
PLANS = PLANNED, FOR_GRAPHS = "planned", "planned for graphs"
SLACK = 1e-3  # of the logits' norm: beside it, twice the dense model's error is allowed
_CHECKED = 4  # sequences of a batch whose logits are compared


@dataclass(frozen=True)
class Shape:
    """Sizes of the model, and of what it is run on. The defaults are the paper's 2B shape."""

    layers: int = 38
    d_model: int = 2048
    d_ff: int = 5632
    heads: int = 32
    vocabulary: int = 32768
    context: int = 2048
    sequences: int = 64
    cached: int = 512  # tokens of each sequence, the new one among them, in a step of decoding
    least: float = 2.0  # mean nnz of the first layer
    most: float = 109.0  # and of the last one
    mean: float = 29.0  # over all layers
    device: str = "cuda"

    @property
    def nnzs(self) -> list[float]:
        """The mean nnz of each layer: it rises from the least to the most with a power of the depth. The power that
        gives the mean over all layers is found by halving an interval."""
        low, high = 0.01, 100.0
        for _ in range(60):
            power = (low + high) / 2
            found = [
                self.least + (self.most - self.least) * (i / max(1, self.layers - 1)) ** power
                for i in range(self.layers)
            ]
            low, high = (power, high) if sum(found) > self.mean * self.layers else (low, power)
        return found


LLAMA = Shape()


class Models:
    """The dense model, the planned ones, and a dense one in float32 to compare them with.

    Other windows of random tokens set the biases, fill the profile, and are timed for the plans. plans, seconds,
    planned: by path (PLANS), each plan, how long it took, and the model that follows it.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.dense = llama(shape)
        windows = torch.randint(0, shape.vocabulary, (8, shape.context), device=shape.device)
        fire(self.dense, windows[:2], shape.nnzs)
        firing = profile(self.dense, [windows[2:4]])
        self.nnzs = [layer.mean_nnz for layer in firing.layers]
        self._compile_all()
        self.plans: dict[str, Plan] = {}
        self.seconds: dict[str, float] = {}
        self.planned: dict[str, nn.Module] = {}
        for path in PLANS:
            for_graphs = path == FOR_GRAPHS and shape.device == "cuda"
            self.plans[path], self.seconds[path] = self._planned(firing, windows[4:8], for_graphs)
            self.planned[path] = sparsify(copy.deepcopy(self.dense), self.plans[path], memory=SHARE, reorder=True)
        self.exact = copy.deepcopy(self.dense).float()

    def _compile_all(self) -> None:
        """Compile the kernels, as happens once on a machine: that is no part of the time that a plan takes. There are
        decode kernels for each power of two of tokens."""
        if self.shape.device == "cuda":
            measure_rates(self.shape.device, torch.bfloat16)
        with torch.no_grad():
            for choice in one_of_each(self.shape.d_ff, STEP):
                layer = SparseFFN.from_module(feed_forwards(self.dense)[0].module, plan=choice)
                for tokens in sorted({*CLASSES, *(2**n for n in range(12))}):
                    layer(torch.zeros(tokens, self.shape.d_model, dtype=torch.bfloat16, device=self.shape.device))

    def _planned(self, firing, windows: Tensor, for_graphs: bool) -> tuple[Plan, float]:
        _drain(self.shape)
        start = time.perf_counter()
        # Next to no copies of weights: where hot/cold is taken, the layers' own neurons are put in its order.
        plan = planner.plan(
            firing,
            self.dense,
            tokens=CLASSES,
            batches=list(windows.split(2)),
            memory=SHARE,
            reorder=True,
            for_graphs=for_graphs,
        )
        _drain(self.shape)
        return plan, time.perf_counter() - start

    def shared(self, tokens: int, workload: str) -> dict:
        """What all rows of one comparison say."""
        shape = self.shape
        return {
            "kind": "model",
            "device": measure.device_name(torch.device(shape.device)),
            "dtype": "bfloat16",
            "tokens": tokens,
            "d_model": shape.d_model,
            "d_ff": shape.d_ff,
            "gated": True,
            "nnz": round(sum(self.nnzs) / len(self.nnzs), 2),
            "nnz_layers": [round(each, 1) for each in self.nnzs],
            "layers": shape.layers,
            "parameters": sum(each.numel() for each in self.dense.parameters()),
            "workload": f"Llama, {workload}",
        }

    def facts(self, tokens: int) -> dict[str, dict]:
        """What the rows of each path say of its weights, and of what each layer does with so many tokens."""
        found: dict[str, dict] = {DENSE: {"weight_bytes": weight_bytes(self.dense)}}
        for name, plan in self.plans.items():
            taken = Counter(layer.choice(tokens).path for layer in plan.layers)
            choice = ", ".join(f"{count} {path}" for path, count in sorted(taken.items()))
            found[name] = {"weight_bytes": weight_bytes(self.planned[name]), "choice": choice}
        return found | {f"{PLANNED} compiled": {"choice": found[PLANNED]["choice"]}}


def llama(shape: Shape) -> nn.Module:
    """A LlamaForCausalLM with ReLU and biases in its feed-forward layers, random weights, bfloat16.

    Raises:
        StackError: where transformers is missing.
    """
    try:
        from transformers import LlamaConfig, LlamaForCausalLM
    except ImportError:
        raise StackError(
            "this benchmark times a model of transformers, which is missing: pip install transformers"
        ) from None
    config = LlamaConfig(
        hidden_size=shape.d_model,
        intermediate_size=shape.d_ff,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.heads,
        vocab_size=shape.vocabulary,
        max_position_embeddings=shape.context + 1,
        hidden_act="relu",
        mlp_bias=True,
    )
    torch.manual_seed(0)
    with torch.device(shape.device):
        model = LlamaForCausalLM(config)
    # As trained models are: a token says more than the mean of the tokens before it. With transformers' own values that
    # mean, which is nearly the same for all tokens of a sequence, grows from layer to layer, and what fires in one
    # sequence says little of another.
    torch.nn.init.normal_(model.model.embed_tokens.weight)
    for layer in model.model.layers:
        for added in (layer.self_attn.o_proj, layer.mlp.down_proj):
            torch.nn.init.normal_(added.weight, std=config.initializer_range / (2 * shape.layers) ** 0.5)
    return model.to(torch.bfloat16).eval().requires_grad_(False)


@torch.no_grad()
def fire(model: nn.Module, tokens: Tensor, nnzs: list[float]) -> None:
    """Set the biases of each gate so that about so many of its neurons fire at a token, layer by layer."""

    def before(gate: nn.Linear, args: tuple, nnz: float, seed: int) -> None:
        products = (args[0].flatten(0, -2) @ gate.weight.t()).float()
        gate.bias.copy_(-thresholds(products, nnz, seed=seed))

    hooks = [
        found.gate.register_forward_pre_hook(functools.partial(before, nnz=nnz, seed=i))
        for i, (found, nnz) in enumerate(zip(feed_forwards(model), nnzs, strict=True))
    ]
    try:
        model(tokens, use_cache=False, logits_to_keep=1)
    finally:
        for hook in hooks:
            hook.remove()


def weight_bytes(model: nn.Module) -> int:
    """The bytes of a model's parameters and buffers, each piece of memory once; the copies that sparse layers hold are
    buffers."""
    storages = [each.untyped_storage() for each in (*model.parameters(), *model.buffers())]
    return sum({each.data_ptr(): each.nbytes() for each in storages}.values())


# ---- the tables ----


def plan_rows(models: Models) -> list[dict]:
    """How long `twell_lab.plan` took for the classes CLASSES, from a profile on."""
    shared = models.shared(max(CLASSES), f"plan of {len(CLASSES)} token classes")
    named = {PLANNED: "plan", FOR_GRAPHS: "plan for graphs"}
    return [
        rows.row(shared, named[path], [1e3 * seconds], classes=list(CLASSES))
        for path, seconds in models.seconds.items()
    ]


@torch.no_grad()
def prefill_rows(models: Models, sequences: int, *, compiled: bool = False, graphs: bool = False) -> list[dict]:
    """The model on `sequences` of `context` tokens each, which gives the logits of the last one: eager; with `graphs`
    also as a CUDA graph, and the model that is planned for these; or, compiled, the rows of the compiled models
    alone."""
    shape = models.shape
    ids = torch.randint(0, shape.vocabulary, (measure.ROTATED, sequences, shape.context), device=shape.device)

    def through(model: nn.Module, some: slice = slice(None)) -> Callable[[int], Tensor]:
        return lambda turn: model(ids[turn % len(ids)][some], use_cache=False, logits_to_keep=1).logits

    ways = {DENSE: models.dense, **(models.planned if graphs else {PLANNED: models.planned[PLANNED]})}
    if compiled:
        torch._dynamo.reset()
        whole = functools.partial(torch.compile, fullgraph=True, dynamic=False)
        ways = {DENSE: models.dense, COMPILED: whole(models.dense)}
        ways[f"{PLANNED} compiled"] = whole(models.planned[PLANNED])
    calls = {name: through(model) for name, model in ways.items()}
    facts = _check(calls, through(models.exact, slice(_CHECKED)), models.facts(sequences * shape.context))
    rounds = 3 if sequences > 1 else 10
    found = _rows(
        models, calls, sequences * shape.context, f"{sequences} x {shape.context:,} tokens", facts, rounds, graphs
    )
    return [row for row in found if "compiled" in row["path"]] if compiled else found


@torch.no_grad()
def decode_rows(models: Models, batch: int) -> list[dict]:
    """A step of decoding: the last of `cached` tokens of each of `batch` sequences, with the others in a static cache;
    eager, and the whole step as one CUDA graph."""
    shape = models.shape
    ids = torch.randint(0, shape.vocabulary, (batch, shape.cached - 1), device=shape.device)
    before = models.dense(ids, use_cache=True, logits_to_keep=1).past_key_values.layers
    some = slice(_CHECKED)
    steps = {
        name: _Step(model, ids[:, :1], [(layer.keys, layer.values) for layer in before])
        for name, model in {DENSE: models.dense, **models.planned}.items()
    }
    exact = _Step(
        models.exact, ids[some, :1], [(layer.keys[some].float(), layer.values[some].float()) for layer in before]
    )
    del before
    facts = _check(steps, exact, models.facts(batch))
    del exact
    found = _rows(models, steps, batch, f"decode step, batch {batch}", facts, 10, True)
    return [row | {"cached": shape.cached} for row in found]


class _Step:
    """A call of one step of decoding, on keys and values that lie where they are: each call writes its own into the
    last place again, and attends to all. The model takes it as its cache, too."""

    def __init__(self, model: nn.Module, ids: Tensor, filled: list[tuple[Tensor, Tensor]]) -> None:
        self.model, self.ids = model, ids
        self.kept = [tuple(pad(each, (0, 0, 0, 1)) for each in layer) for layer in filled]
        length = self.kept[0][0].shape[2]
        self.place = torch.tensor([length - 1], device=ids.device)
        self.mask = torch.ones(len(ids), 1, 1, length, dtype=torch.bool, device=ids.device)

    def __call__(self, turn: int) -> Tensor:
        return self.model(
            self.ids,
            attention_mask=self.mask,
            position_ids=self.place[None],
            past_key_values=self,
            use_cache=True,
        ).logits

    def update(self, keys: Tensor, values: Tensor, layer: int, *_, **__) -> tuple[Tensor, Tensor]:
        """What the attention of a layer calls: take its new keys and values, and give all."""
        for kept, new in zip(self.kept[layer], (keys, values)):
            kept.index_copy_(2, self.place, new)
        return self.kept[layer]


def _check(calls: dict, exact: Callable[[int], Tensor], facts: dict[str, dict]) -> dict[str, dict]:
    """Compare the logits of each call with float32: their error may be twice that of the dense model. Returns the facts
    with the ratio of error to what is allowed. Raises measure.WrongResult."""
    right = exact(0).double()
    found = {name: call(0)[: len(right)] for name, call in calls.items()}
    facts = {name: facts.get(name, {}) for name in calls}
    for name, logits in found.items():
        if name == DENSE:
            continue
        ratio = rows.error_over_allowed(logits, found[DENSE], right, SLACK * right.norm())
        if not ratio <= 1.0:
            raise measure.WrongResult(f"{name}: the logits are off by {ratio:.3g} times what is allowed")
        facts[name] = facts[name] | {"error_over_allowed": round(ratio, 4)}
    return facts


def _rows(
    models: Models, calls: dict, tokens: int, workload: str, facts: dict[str, dict], rounds: int, graphs: bool
) -> list[dict]:
    samples, bursts = rows.clock_gpu(calls, tokens, graphs=graphs, rounds=rounds)
    found = rows.table(models.shared(tokens, workload), samples, facts, bursts)
    alone = {row["path"].removesuffix(" (graph)"): row["ms"] for row in found if row["path"].endswith(" (graph)")}
    return [row | ({"gpu_ms": alone[row["path"]]} if row["path"] in alone else {}) for row in found]


def _drain(shape: Shape) -> None:
    if shape.device == "cuda":
        torch.cuda.synchronize()


def sections(shape: Shape = LLAMA) -> rows.Sections:
    """The steps of the record, as in bench.inference; the models are made when the first step needs them."""
    models = functools.cache(lambda: Models(shape))
    return {
        "plan": [lambda: plan_rows(models())],
        "one sequence": [lambda: prefill_rows(models(), 1, graphs=True)],
        "decode": [functools.partial(lambda batch: decode_rows(models(), batch), batch) for batch in (1, 16)],
        "many sequences": [lambda: prefill_rows(models(), shape.sequences)],
        "many sequences, compiled": [lambda: prefill_rows(models(), shape.sequences, compiled=True)],
        "one sequence, compiled": [lambda: prefill_rows(models(), 1, compiled=True)],
    }
