"""Time a server of many requests: transformers' engine of continuous batching, behind `generate_batch` and
`transformers serve`, with a drawn Llama, dense and planned. Requests arrive as a Poisson process."""

from __future__ import annotations

import functools
import time
from typing import Any

import torch

from ..core import StackError
from ..ops.clock import WrongResult, quartiles
from . import decoding, rows
from .decoding import DENSE

REQUESTS, PROMPT, NEW = 32, 128, 64  # of a round; tokens of a prompt, and of an answer
RATES = (4.0, 16.0)  # requests a second, on average
ROUNDS = 3
BLOCKS, TOKENS = 64, 1024  # of the engine: blocks of 256 keys and values, and tokens that a step takes at most


def serve(manager: Any, prompts: list[list[int]], arrivals: list[float], new: int) -> tuple[list[float], list]:
    """Hand in each prompt when its time has come, in seconds from now; return, in the order of the prompts, the seconds
    from arrival to the whole answer, and the answers. StackError where the engine stopped."""
    begin, numbers, ended = time.perf_counter(), dict[str, int](), dict[int, tuple[float, list[int]]]()
    while len(ended) < len(prompts):
        while len(numbers) < len(prompts) and arrivals[len(numbers)] <= time.perf_counter() - begin:
            numbers[manager.add_request(prompts[len(numbers)], max_new_tokens=new)] = len(numbers)
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
            how = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
            kept = {"continuous_batching_config": engine, "persistent_manager": True}  # the engine stays for all rounds
            with model.continuous_batching_context_manager(how, **kept) as manager:
                seconds, answers = serve(manager, prompts, arrivals, NEW)
            if rehearsal:
                first[name] = [tokens[0] for tokens in answers]
                continue
            ends = [arrival + wait for arrival, wait in zip(arrivals, seconds)]
            samples[name].append(1e3 * max(ends) / (REQUESTS * NEW))
            waits[name] += seconds
    for model in models.values():
        model.destroy_cached_continuous_batching_manager()
    facts = {}
    for name in models:
        same = sum(one == two for one, two in zip(first[name], first[DENSE])) / REQUESTS
        if same < 0.5:
            raise WrongResult(f"{name}: {same:.0%} of the answers begin as the dense model's: nothing is said of them")
        p50, p99 = torch.tensor(waits[name]).quantile(torch.tensor([0.5, 0.99])).tolist()
        facts[name] = {"tokens_per_s": 1e3 / quartiles(samples[name])[0], "p50_s": p50, "p99_s": p99, "same": same}
    sizes = {"requests": REQUESTS, "prompt": PROMPT, "new": NEW, "rate": rate}
    workload = f"drawn {size} Llama, {rate:g} requests a second"
    return rows.table(rows.about("serving", next(model.parameters()), workload, **sizes), samples, facts, base=DENSE)


def sections(left_out: dict | None = None, size: Any = "2B") -> rows.Sections:
    """Return the steps of the record, one for each rate."""
    models = functools.cache(lambda: decoding.models(size))
    name = size if isinstance(size, str) else "small"
    return {"serving": rows.steps(lambda rate: serving_rows(models(), name, rate), RATES)}
