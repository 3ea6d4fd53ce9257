"""Time whole generations: transformers' own `generate`, with a cache that grows and with one of a fixed size, beside
`tl.generate`; each with a dense drawn Llama of the paper's 2B shape, and with it planned. And `tl.generate` alone with
a drawn Llama of an 8B shape that has SiLU layers, with and without thresholds on the inputs of all its projections."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

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


PROMPT, NEW = 128, 128  # tokens of a prompt, and tokens that are decoded
BATCHES = (1, 64, 16)  # what says most comes first, should the time not do for all
ROUNDS = 3


def _theirs(model: Any, ids: Tensor, new: int, **how: Any) -> Tensor:
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, **how)


WAYS: dict[str, Callable[[Any, Tensor, int], Tensor]] = {
    "tl.generate": lambda model, ids, new: generate(model, ids, max_new_tokens=new),
    "generate, static cache": functools.partial(_theirs, cache_implementation="static"),
    "generate": _theirs,
}


def decoding_rows(models: Callable[[], dict[str, Any]], size: str, way: str, batch: int) -> list[dict]:
    """Return a row for each model of one way to decode a batch: milliseconds a step, over whole generations; tokens a
    second; the time to the first token; the peak of memory beyond the weights; and the share of tokens that are those
    of the dense model's (of 16 bits, sequences part where two scores are nearly the same). size: what rows call it."""
    call, samples, facts, texts = WAYS[way], dict[str, list[float]](), dict[str, dict](), dict[str, Tensor]()
    for name, model in models().items():
        draw, device = torch.Generator().manual_seed(batch), next(model.parameters()).device
        ids = torch.randint(0, model.config.vocab_size, (batch, PROMPT), generator=draw).to(device)
        model.generation_config.eos_token_id = None  # a drawn model would end anywhere
        texts[name] = call(model, ids, NEW)[:, PROMPT:]  # compiles and captures
        same = float((texts[name] == texts[DENSE]).float().mean())
        if batch >= _SURE and same < 1 / NEW:
            raise clock.WrongResult(f"{way}, {name}, batch {batch}: not even the first tokens are the dense model's")
        path, generation = f"{way}, {name}", lambda turn: call(model, ids, NEW)
        first = _walls(lambda turn: call(model, ids, 1), ROUNDS + 1)[1:]
        whole = _walls(generation, ROUNDS)
        samples[path] = [ms / NEW for ms in whole]
        facts[path] = {
            "tokens_per_s": 1e3 * batch * NEW / sorted(whole)[len(whole) // 2],
            "first_ms": sorted(first)[len(first) // 2],
            "same": round(same, 4),
        }
        if device.type == "cuda":
            forget(model)  # or what it keeps would not count
            facts[path]["peak_bytes"] = clock.peak_bytes(generation)
    sizes = {"batch": batch, "prompt": PROMPT, "new": NEW}
    shared = rows.about("decoding", next(model.parameters()), f"drawn {size} Llama, batch {batch}", **sizes)
    return rows.table(shared, samples, facts, base=f"{way}, {DENSE}")


def _walls(call: Callable[[int], object], rounds: int) -> list[float]:
    return clock.time_bursts({"": call}, rows.drain, rounds=rounds, count=1, warm=0)[""][1]


def models(size: str | ModelConfig) -> dict[str, Any]:
    """Return the dense model, and the one that a plan for steps of BATCHES swapped, captured ones on a GPU."""
    bench = Bench(size, tokens=(), batches=BATCHES)
    plan = bench.planned(FOR_GRAPHS if torch.cuda.is_available() else PLANNED)
    return {DENSE: bench.dense.model, PLANNED: sparsify(copy.deepcopy(bench.dense.model), plan)}


def sections(left_out: dict | None = None, size: str | ModelConfig = "2B") -> rows.Sections:
    """Return the steps of the record: all batches by `tl.generate`, the first one by transformers' own ways too."""
    both = functools.cache(lambda: models(size))
    step = functools.partial(decoding_rows, both, size if isinstance(size, str) else "small")
    ours, static, plain = WAYS
    one, more = BATCHES[:1], BATCHES[1:]
    first = rows.steps(step, [ours, static], one)
    return {f"batch {one[0]}": first, ours: rows.steps(step, [ours], more), plain: rows.steps(step, [plain], one)}


# ---- thresholds ----


@torch.no_grad()
def thresholded(sizes: ModelConfig) -> Callable[[float], dict[str, Any]]:
    """Draw a Llama with SiLU layers, four heads of which share keys and values, and run it over drawn tokens. Returns a
    function that gives, for a sparsity, this model and a copy with thresholds (TEAL) on all projections' inputs, on
    kernels; WrongResult where these compute something else than the same thresholds without them."""
    device = clock.present_device(None)
    like = {"device": device, "dtype": clock.dtype_for(device)}
    shared = {"hidden_act": "silu", "mlp_bias": False, "num_key_value_heads": max(1, sizes.heads // 4)}
    dense = drawn.llama(sizes, **like, **shared)
    tokens = torch.randint(0, sizes.vocabulary, (4, min(512, sizes.context)), device=device)
    seen = calibrate(dense, tokens.split(2), method="teal", attention=True)

    @torch.no_grad()
    def both(sparsity: float) -> dict[str, Any]:
        cut = seen.at(sparsity).apply(copy.deepcopy(dense))
        model, layers = sparsify(copy.deepcopy(cut), "kept_inputs"), feed_forwards(cut)
        x = torch.randn(4, sizes.d_model, **like)  # as a norm's output is
        errors = workloads.layer_errors(layers, model, {layer.name: x for layer in layers}, 1)
        for name, projection in model.named_modules():
            if isinstance(projection, SkippingLinear):  # of attention
                errors.append(workloads.output_errors(projection(x[:1]), cut.get_submodule(name)(x[:1])))
        workloads.check_cut(errors, f"thresholds {sparsity:.0%}")
        return {DENSE: dense, f"thresholds {sparsity:.0%}": model}

    return both


def eight(left_out: dict | None = None, sizes: ModelConfig = EIGHT) -> rows.Sections:
    """Return the steps of the record of the 8B shape, one sequence: dense beside each sparsity."""
    models = functools.cache(lambda: thresholded(sizes))

    def step(sparsity: float) -> list[dict]:
        return decoding_rows(lambda: models()(sparsity), "8B SiLU", "tl.generate", 1)

    return {f"{cut:.0%}": rows.steps(step, [cut]) for cut in SPARSITIES}
