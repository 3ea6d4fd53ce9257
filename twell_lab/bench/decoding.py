"""Time whole generations: transformers' own `generate`, with a cache that grows and with one of a fixed size, beside
`tl.generate`; each with a dense drawn Llama of the paper's 2B shape, and with it planned. `tl.generate` alone with a
drawn Llama of an 8B shape that has SiLU layers, with and without thresholds on the inputs of all its projections. And a
server of many requests: transformers' engine of continuous batching, behind `generate_batch` and `transformers serve`,
with the 2B shape."""

from __future__ import annotations

import copy
import functools
import time
from collections.abc import Callable
from statistics import median_high
from typing import Any

import torch
from torch import Tensor

from ..core import StackError
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
FIRSTS = 15  # times to the first token, of which the host makes some twice as long as others


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
        first = median_high(_walls(lambda turn: call(model, ids, 1), FIRSTS + 1)[1:])
        samples[path] = [ms / NEW for ms in _walls(generation, ROUNDS)]
        rate = 1e3 * batch / median_high(samples[path])
        facts[path] = {"tokens_per_s": rate, "first_ms": first, "same": round(same, 4)}
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
    shared = {"hidden_act": "silu", "num_key_value_heads": max(1, sizes.heads // 4)}
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


# ---- a server ----

REQUESTS, ANSWER = 32, 64  # of a round; tokens of an answer
RATES = (4.0, 16.0)  # requests a second, on average: they arrive as a Poisson process
BLOCKS, TOKENS = 64, 1024  # of the engine: blocks of 256 keys and values, and tokens that a step takes at most


def serve(manager: Any, prompts: list[list[int]], arrivals: list[float]) -> tuple[list[float], list]:
    """Hand in each prompt when its time has come, in seconds from now; return, in the order of the prompts, the seconds
    from arrival to the whole answer, and the answers. StackError where the engine stopped."""
    begin, numbers, ended = time.perf_counter(), dict[str, int](), dict[int, tuple[float, list[int]]]()
    while len(ended) < len(prompts):
        while len(numbers) < len(prompts) and arrivals[len(numbers)] <= time.perf_counter() - begin:
            numbers[manager.add_request(prompts[len(numbers)], max_new_tokens=ANSWER)] = len(numbers)
        if (answer := manager.get_result(timeout=0.001)) is not None:
            number = numbers[answer.request_id]
            ended[number] = time.perf_counter() - begin - arrivals[number], answer.generated_tokens
        elif not manager.is_running():
            raise StackError("transformers' engine of continuous batching stopped")
    seconds, answers = zip(*(ended[number] for number in range(len(prompts))))
    return [*seconds], [*answers]


def serving_rows(models: dict[str, Any], size: str, rate: float) -> list[dict]:
    """Return a row for each model: `ms` a token of all answers together, from the first arrival to the last answer, and
    over all rounds the median and the 99th percentile of the seconds from a request's arrival to its whole answer.
    WrongResult where not even the first tokens of most answers are the dense model's."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    draw = torch.Generator().manual_seed(0)
    vocabulary = models[DENSE].config.vocab_size
    engine = ContinuousBatchingConfig(num_blocks=BLOCKS, max_batch_tokens=TOKENS)
    samples, waits, first = {name: [] for name in models}, {name: [] for name in models}, dict[str, list]()
    for rehearsal in (True, *[False] * ROUNDS):  # the rehearsal compiles and captures
        prompts = torch.randint(0, vocabulary, (REQUESTS, PROMPT), generator=draw).tolist()  # the engine keeps old ones
        gaps = torch.empty(REQUESTS).exponential_(rate, generator=draw)
        arrivals = (gaps.cumsum(0) - gaps[0]).tolist()
        for name, model in models.items():
            how = GenerationConfig(max_new_tokens=ANSWER, do_sample=False, eos_token_id=-1, pad_token_id=0)
            kept = {"continuous_batching_config": engine, "persistent_manager": True}  # the engine stays for all rounds
            with model.continuous_batching_context_manager(how, **kept) as manager:
                seconds, answers = serve(manager, prompts, arrivals)
            if rehearsal:
                first[name] = [tokens[0] for tokens in answers]
                continue
            ends = [arrival + wait for arrival, wait in zip(arrivals, seconds)]
            samples[name].append(1e3 * max(ends) / (REQUESTS * ANSWER))
            waits[name] += seconds
    for model in models.values():
        model.destroy_cached_continuous_batching_manager()
    facts = {}
    for name in models:
        same = sum(one == two for one, two in zip(first[name], first[DENSE])) / REQUESTS
        rows.hold(f"{name}: the share of answers that begin as the dense model's do not", 1 - same, 0.5)
        p50, p99 = torch.tensor(waits[name]).quantile(torch.tensor([0.5, 0.99])).tolist()
        speed = 1e3 / clock.quartiles(samples[name])[0]
        facts[name] = {"tokens_per_s": speed, "p50_s": p50, "p99_s": p99, "same": same}
    sizes = {"requests": REQUESTS, "prompt": PROMPT, "new": ANSWER, "rate": rate}
    workload = f"drawn {size} Llama, {rate:g} requests a second"
    return rows.table(rows.about("serving", next(model.parameters()), workload, **sizes), samples, facts, base=DENSE)


def serving(left_out: dict | None = None, size: Any = "2B") -> rows.Sections:
    """Return the steps of the record, one for each rate."""
    both = functools.cache(lambda: models(size))
    name = size if isinstance(size, str) else "small"
    return {"serving": rows.steps(lambda rate: serving_rows(both(), name, rate), RATES)}
