"""Time whole generations: transformers' own `generate`, with a cache that grows and with one of a fixed size, beside
`tl.generate`; each with a dense drawn Llama of the paper's 2B shape, and with it planned."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..analysis.planner import plan
from ..analysis.profile import profile
from ..models.generate import forget, generate
from ..models.swap import sparsify
from ..models.tiny import ModelConfig
from ..ops import clock
from . import drawn, rows

KIND = "decoding"
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


def small() -> Shape:
    """Return a shape that a CPU decodes within seconds."""
    sizes = ModelConfig(vocabulary=64, d_model=32, layers=2, heads=2, d_ff=96, context=64)
    return Shape(sizes, 8, 8, (1, 2), 1, "cpu", torch.float32)


def _theirs(model: Any, ids: Tensor, new: int, **how: Any) -> Tensor:
    mask = torch.ones_like(ids)
    return model.generate(ids, attention_mask=mask, max_new_tokens=new, min_new_tokens=new, do_sample=False, **how)


def _ours(model: nn.Module, ids: Tensor, new: int) -> Tensor:
    return generate(model, ids, max_new_tokens=new)


WAYS: dict[str, Callable[[Any, Tensor, int], Tensor]] = {
    "tl.generate": _ours,
    "generate, static cache": functools.partial(_theirs, cache_implementation="static"),
    "generate": _theirs,
}


def decoding_rows(models: Callable[[], dict[str, Any]], shape: Shape, way: str, batch: int) -> list[dict]:
    """Return a row for each model of one way to decode a batch: milliseconds a step, over whole generations; tokens a
    second; the time to the first token; the peak of memory beyond the weights; and the share of tokens that are those
    of the dense model's (of 16 bits, sequences part where two scores are nearly the same)."""
    call, lines, texts = WAYS[way], list[dict](), dict[str, Tensor]()
    for name, model in models().items():
        vocabulary = model.config.vocab_size
        ids = torch.randint(0, vocabulary, (batch, shape.prompt), generator=torch.Generator().manual_seed(batch))
        ids = ids.to(shape.device)
        model.generation_config.eos_token_id = None  # a drawn model would end anywhere
        texts[name] = call(model, ids, shape.new)[:, shape.prompt :]  # compiles and captures
        same = float((texts[name] == texts[DENSE]).float().mean())
        if batch >= _SURE and same < 1 / shape.new:
            raise clock.WrongResult(f"{way}, {name}, batch {batch}: not even the first tokens are the dense model's")
        first = [_seconds(lambda: call(model, ids, 1)) for _ in range(shape.rounds + 1)][1:]
        whole = [_seconds(lambda: call(model, ids, shape.new)) for _ in range(shape.rounds)]
        about = rows.about(
            KIND,
            next(model.parameters()),
            f"drawn {shape.model if isinstance(shape.model, str) else 'small'} Llama, batch {batch}",
            batch=batch,
            prompt=shape.prompt,
            new=shape.new,
        )
        facts = {
            "tokens_per_s": batch * shape.new / sorted(whole)[len(whole) // 2],
            "first_ms": 1e3 * sorted(first)[len(first) // 2],
            "same": round(same, 4),
        }
        if shape.device != "cpu":
            forget(model)  # or what it keeps would not count
            facts["peak_bytes"] = clock.peak_bytes(lambda _: call(model, ids, shape.new))
        dense = lines[0]["ms"] if lines else None
        lines.append(
            rows.row(about, f"{way}, {name}", [1e3 * seconds / shape.new for seconds in whole], dense, **facts)
        )
    return lines


def _seconds(call: Callable[[], object]) -> float:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


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


def sections(shape: Shape) -> rows.Sections:
    """Return the steps of the record: the smallest batch by all ways, then the others, way by way."""
    both = functools.cache(lambda: models(shape))
    first, *others = shape.batches

    def steps(ways: Iterable[str], *batches: int) -> list[Callable[[], list[dict]]]:
        return [functools.partial(decoding_rows, both, shape, way, batch) for way in ways for batch in batches]

    return {f"batch {first}": steps(WAYS, first)} | {way: steps([way], *others) for way in WAYS}
