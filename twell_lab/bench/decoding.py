"""Time whole generations: transformers' own `generate`, with a cache that grows and with one of a fixed size, beside
`tl.generate`; each with a dense drawn Llama of the paper's 2B shape, and with it planned. And `tl.generate` alone with
a drawn Llama of an 8B shape that has SiLU layers, with and without thresholds on the inputs of all its projections."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..layers.find import feed_forwards
from ..layers.skipping import SkippingLinear
from ..models.generate import forget, generate
from ..models.swap import sparsify
from ..models.thresholds import calibrate
from ..models.tiny import ModelConfig
from ..ops import clock
from . import drawn, rows, workloads
from .models import FOR_GRAPHS, PLANNED, Bench

DENSE = "dense"  # what rows call the model as it is
EIGHT = ModelConfig(vocabulary=128_256, d_model=4096, layers=32, heads=32, d_ff=14_336, context=2048)
SPARSITIES = (0.5, 0.65)  # of thresholds
_SURE = 8  # sequences from which not all can have parted at the first token by chance


class Shape(NamedTuple):
    """Say what is decoded: prompts of so many tokens, and so many new ones, for each batch; `rounds` times."""

    model: str | ModelConfig = "2B"
    prompt: int = 128
    new: int = 128
    batches: tuple[int, ...] = (1, 16, 64)
    rounds: int = 3
    device: str = "cuda"
    dtype: torch.dtype = torch.bfloat16


def _theirs(model: Any, ids: Tensor, new: int, **how: Any) -> Tensor:
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, **how)


WAYS: dict[str, Callable[[Any, Tensor, int], Tensor]] = {
    "tl.generate": lambda model, ids, new: generate(model, ids, max_new_tokens=new),
    "generate, static cache": functools.partial(_theirs, cache_implementation="static"),
    "generate": _theirs,
}


def decoding_rows(models: Callable[[], dict[str, Any]], shape: Shape, way: str, batch: int) -> list[dict]:
    """Return a row for each model of one way to decode a batch: milliseconds a step, over whole generations; tokens a
    second; the time to the first token; the peak of memory beyond the weights; and the share of tokens that are those
    of the dense model's (of 16 bits, sequences part where two scores are nearly the same)."""
    call, samples, facts, texts = WAYS[way], dict[str, list[float]](), dict[str, dict](), dict[str, Tensor]()
    for name, model in models().items():
        draw = torch.Generator().manual_seed(batch)
        ids = torch.randint(0, model.config.vocab_size, (batch, shape.prompt), generator=draw).to(shape.device)
        model.generation_config.eos_token_id = None  # a drawn model would end anywhere
        texts[name] = call(model, ids, shape.new)[:, shape.prompt :]  # compiles and captures
        same = float((texts[name] == texts[DENSE]).float().mean())
        if batch >= _SURE and same < 1 / shape.new:
            raise clock.WrongResult(f"{way}, {name}, batch {batch}: not even the first tokens are the dense model's")
        path, generation = f"{way}, {name}", lambda turn: call(model, ids, shape.new)
        first = _walls(lambda turn: call(model, ids, 1), shape.rounds + 1)[1:]
        whole = _walls(generation, shape.rounds)
        samples[path] = [ms / shape.new for ms in whole]
        facts[path] = {
            "tokens_per_s": 1e3 * batch * shape.new / sorted(whole)[len(whole) // 2],
            "first_ms": sorted(first)[len(first) // 2],
            "same": round(same, 4),
        }
        if shape.device != "cpu":
            forget(model)  # or what it keeps would not count
            facts[path]["peak_bytes"] = clock.peak_bytes(generation)
    size = shape.model if isinstance(shape.model, str) else "8B SiLU" if shape.model == EIGHT else "small"
    workload = f"drawn {size} Llama, batch {batch}"
    sizes = {"batch": batch, "prompt": shape.prompt, "new": shape.new}
    shared = rows.about("decoding", next(model.parameters()), workload, **sizes)
    return rows.table(shared, samples, facts, base=f"{way}, {DENSE}")


def _walls(call: Callable[[int], object], rounds: int) -> list[float]:
    return clock.time_bursts({"": call}, rows.drain, rounds=rounds, count=1, warm=0)[""][1]


def models(shape: Shape) -> dict[str, Any]:
    """Return the dense model, and the one that a plan for captured steps of these batches swapped."""
    on_gpu = shape.device == "cuda"
    bench = Bench(shape.model, tokens=(), batches=shape.batches, device=shape.device, dtype=shape.dtype)
    plan = bench.planned(FOR_GRAPHS if on_gpu else PLANNED)
    return {DENSE: bench.dense.model, PLANNED: sparsify(copy.deepcopy(bench.dense.model), plan)}


def sections(left_out: dict | None = None, shape: Shape | None = None) -> rows.Sections:
    """Return the steps of the record: the smallest batch by all ways, then the others, way by way."""
    shape = shape or Shape()
    both = functools.cache(lambda: models(shape))
    first, *others = shape.batches
    step = functools.partial(decoding_rows, both, shape)
    return {f"batch {first}": rows.steps(step, WAYS, [first])} | {way: rows.steps(step, [way], others) for way in WAYS}


# ---- thresholds ----


@torch.no_grad()
def thresholded(shape: Shape) -> Callable[[float], dict[str, Any]]:
    """Draw a Llama with SiLU layers, four heads of which share keys and values, and run it over drawn tokens. Returns a
    function that gives, for a sparsity, this model and a copy with thresholds (TEAL) on all projections' inputs, on
    kernels; WrongResult where these compute something else than the same thresholds without them."""
    sizes = drawn.sizes_of(shape.model)
    how = {"hidden_act": "silu", "mlp_bias": False, "num_key_value_heads": max(1, sizes.heads // 4)}
    dense = drawn.llama(sizes, shape.device, shape.dtype, **how)
    tokens = torch.randint(0, sizes.vocabulary, (4, min(512, sizes.context)), device=shape.device)
    seen = calibrate(dense, tokens.split(2), method="teal", attention=True)

    @torch.no_grad()
    def both(sparsity: float) -> dict[str, Any]:
        cut = seen.at(sparsity).apply(copy.deepcopy(dense))
        model, layers = sparsify(copy.deepcopy(cut), "kept_inputs"), feed_forwards(cut)
        x = torch.randn(4, sizes.d_model, device=shape.device, dtype=shape.dtype)  # as a norm's output is
        errors = workloads.layer_errors(layers, model, {layer.name: x for layer in layers}, 1)
        for name, projection in model.named_modules():
            if isinstance(projection, SkippingLinear):  # of attention
                errors.append(workloads.output_errors(projection(x[:1]), cut.get_submodule(name)(x[:1])))
        workloads.check_cut(errors, f"thresholds {sparsity:.0%}")
        return {DENSE: dense, f"thresholds {sparsity:.0%}": model}

    return both


def eight(left_out: dict | None = None, shape: Shape | None = None) -> rows.Sections:
    """Return the steps of the record of the 8B shape: dense beside each sparsity."""
    shape = shape or Shape(EIGHT, batches=(1,))
    models = functools.cache(lambda: thresholded(shape))

    def step(sparsity: float, batch: int) -> list[dict]:
        return decoding_rows(lambda: models()(sparsity), shape, "tl.generate", batch)

    return {f"{cut:.0%}": rows.steps(step, [cut], shape.batches) for cut in SPARSITIES}
