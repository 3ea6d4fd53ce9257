"""Time whole generations: transformers' own `generate`, with a cache that grows and with one of a fixed size, beside
`tl.generate`; each with a dense drawn Llama of the paper's 2B shape, and with it planned."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..analysis.planner import plan
from ..analysis.profile import profile
from ..models.generate import forget, generate
from ..models.swap import sparsify
from ..models.tiny import ModelConfig
from ..ops import clock
from . import drawn, rows

DENSE, PLANNED = "dense", "planned"
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
    workload = f"drawn {shape.model if isinstance(shape.model, str) else 'small'} Llama, batch {batch}"
    sizes = {"batch": batch, "prompt": shape.prompt, "new": shape.new}
    shared = rows.about("decoding", next(model.parameters()), workload, **sizes)
    return rows.table(shared, samples, facts, base=f"{way}, {DENSE}")


def _walls(call: Callable[[int], object], rounds: int) -> list[float]:
    return clock.time_bursts({"": call}, rows.drain, rounds=rounds, count=1, warm=0)[""][1]


def models(shape: Shape) -> dict[str, Any]:
    """Return the dense model, and the one that a plan for captured steps of these batches swapped."""
    sizes = drawn.sizes_of(shape.model)
    dense = drawn.fired(sizes, shape.device, shape.dtype)
    tokens = torch.randint(0, sizes.vocabulary, (8, min(512, sizes.context)), device=shape.device)
    planned = copy.deepcopy(dense)
    calls = "captured" if shape.device == "cuda" else "eager"
    how = dict(tokens=shape.batches, calls=calls, batches=tokens[4:].split(2), progress=False)
    sparsify(planned, plan(profile(planned, tokens[:4].split(2)), planned, **how))
    return {DENSE: dense, PLANNED: planned}


def sections(left_out: dict | None = None, shape: Shape | None = None) -> rows.Sections:
    """Return the steps of the record: the smallest batch by all ways, then the others, way by way."""
    shape = shape or Shape()
    both = functools.cache(lambda: models(shape))
    first, *others = shape.batches

    def steps(ways: Iterable[str], *batches: int) -> list[Callable[[], list[dict]]]:
        return [functools.partial(decoding_rows, both, shape, way, batch) for way in ways for batch in batches]

    return {f"batch {first}": steps(WAYS, first)} | {way: steps([way], *others) for way in WAYS}
