"""`twell-lab sample` and `twell-lab export`: text from a saved model, and a model of ours as transformers reads it.
Imports torch only when one of them runs."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any, NamedTuple

from ..core import InputError
from .inputs import ours
from .page import said_fast
from .terminal import Answer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..analysis.profile import FiringProfile

_ROUNDS = 5  # texts of each model, in turn, where dense and sparse are compared; their medians count


class _Words(NamedTuple):
    """What stands between text and tokens. encode: text to ids [tokens]; decode: the text that tokens say after a
    prompt's; unit: what a token is called."""

    encode: Callable[[str], Tensor]
    decode: Callable[[Tensor, Tensor], str]
    unit: str


def sample(options: argparse.Namespace) -> Answer:
    """Continue the prompt; with --sparse by the dense model and the swapped one in turn."""
    import torch

    from ..ops.clock import present_device

    device = present_device(options.device)
    model, words = _speaker(options.model)
    model = model.to(device).eval().requires_grad_(False)
    if not options.prompt:
        raise InputError("--prompt is empty; accepted: at least one character")
    prompt, seed = words.encode(options.prompt).long(), options.seed
    if seed is None and options.temperature:  # the answer names it, so that the text can be had again
        seed = torch.Generator().seed() % 2**32
    how = {"temperature": options.temperature, "top_k": options.top_k, "seed": seed}

    generate(model, prompt, 1, **how)  # torch sets things up in its first call
    said, speed = speak(model, prompt, options.tokens, how)
    value = {
        "prompt": options.prompt,
        "text": words.decode(prompt, said.cpu()),
        "tokens": said.tolist(),
        **how,
        "tokens_per_s": speed,
    }
    spoken = f"{len(said):,} {words.unit}" + (f" with seed {seed}" if options.temperature else "")
    lines = []
    if options.sparse:
        swapped, rows = planned(model, torch.cat([prompt, said.cpu()]).to(device))
        value |= in_turn(swapped, model, prompt, options.tokens, how) | {"layers": rows}
        lines += [f"{row['layer']}: {row['choice']}, {row['why']}" for row in rows]
        lines.append(f"sample: {spoken}; {said_fast(value)}")
    else:
        lines.append(f"sample: {spoken}, {speed:,.0f} a second")
    return Answer(value, "\n".join(lines), quoted=f"{options.prompt}{value['text']}\n\n")


def generate(
    model: Any, prompt: Tensor, tokens: int, *, temperature: float, seed: int | None, top_k: int | None = None
) -> Tensor:
    """Return what LanguageModel.generate says, or a model of transformers: that may end its text before it has said so
    many tokens. InputError, too, where those are more than it reads."""
    import torch

    from ..models.tiny import LanguageModel, check_generation

    if isinstance(model, LanguageModel):
        return model.generate(prompt, tokens, temperature=temperature, top_k=top_k, seed=seed)
    from transformers import GenerationConfig, LogitsProcessorList

    check_generation(prompt, tokens, temperature, top_k, seed, model.get_input_embeddings().weight.shape[0])
    longest = getattr(model.config, "max_position_embeddings", None)
    if longest and len(prompt) + tokens > longest:
        raise InputError(
            f"tokens is {tokens} after a prompt of {len(prompt)}; the model reads up to {longest} together"
        )
    ids, own = prompt[None].to(model.device), model.generation_config
    drawn = {"temperature": temperature, "top_k": top_k or 0, "top_p": 1.0} if temperature else {}
    ends = own.eos_token_id if isinstance(own.eos_token_id, list) else [own.eos_token_id]
    pad = ends[0] if own.pad_token_id is None else own.pad_token_id
    how = GenerationConfig(max_new_tokens=tokens, do_sample=temperature > 0, pad_token_id=pad, **drawn)
    with torch.random.fork_rng([ids.device] if ids.device.type == "cuda" else []):
        if seed is not None:
            torch.manual_seed(seed)
        said = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            generation_config=how,
            logits_processor=LogitsProcessorList([_defined]),
        )
    return said[0, len(prompt) :]


def _defined(ids: Tensor, scores: Tensor) -> Tensor:
    """The scores, as transformers asks before it takes a token."""
    if scores.isnan().any():
        raise InputError("the model's scores are not finite; accepted: a model whose weights are")
    return scores


def speak(model: nn.Module, prompt: Tensor, tokens: int, how: dict) -> tuple[Tensor, float]:
    """Return what `generate` says, and how many tokens a second that was."""
    start = time.perf_counter()
    said = generate(model, prompt, tokens, **how)
    return said, len(said) / (time.perf_counter() - start)


def in_turn(sparse: nn.Module, dense: nn.Module, prompt: Tensor, tokens: int, how: dict, rounds: int = _ROUNDS) -> dict:
    """Let two models speak in turn; return {tokens_per_s, dense_tokens_per_s: medians, ratios: of each turn, same:
    whether all they said is the same}."""
    turns = [(speak(sparse, prompt, tokens, how), speak(dense, prompt, tokens, how)) for _ in range(rounds)]
    said = [text.tolist() for turn in turns for text, _ in turn]
    speeds = [[speed for _, speed in side] for side in zip(*turns, strict=True)]
    return {
        "tokens_per_s": median(speeds[0]),
        "dense_tokens_per_s": median(speeds[1]),
        "ratios": [a / b for a, b in zip(*speeds, strict=True)],
        "same": all(text == said[0] for text in said),
    }


def planned(model: nn.Module, text: Tensor, firing: FiringProfile | None = None) -> tuple[nn.Module, list[dict]]:
    """A copy of the model with its layers swapped by a plan for one token at a time, and the rows of its report.

    They are timed on the text [tokens]; on the second half of it where they are profiled on the first, because
    `firing`, a profile on another text, is not given."""
    from ..analysis.planner import plan
    from ..analysis.profile import profile
    from ..models.report import report
    from ..models.swap import sparsify

    context = getattr(model.config, "context", None) or getattr(model.config, "max_position_embeddings", len(text))
    first, second = ([part[None] for part in half.split(context)] for half in text.chunk(2))
    firing, batches = (profile(model, first), second) if firing is None else (firing, [*first, *second])
    swapped = copy.deepcopy(model).eval().requires_grad_(False)
    sparsify(swapped, plan(firing, model, tokens=[1], batches=batches, progress=False))
    return swapped, report(swapped).rows


def export(options: argparse.Namespace) -> Answer:
    """Write the model as a LlamaForCausalLM with its tokenizer."""
    from ..models.tiny import LanguageModel
    from ..training.text.load import tokenizer_of
    from ..training.text.source import BYTES

    model = LanguageModel.load(options.model)
    tokenizer = tokenizer_of(options.model, model.config.vocabulary)
    if (options.out / "model.safetensors").exists():
        raise InputError(f"--out is {str(options.out)!r}, which holds a model; accepted: a folder without one")
    model.save_pretrained(options.out, None if tokenizer == BYTES else tokenizer.content)
    names = sorted(each.name for each in options.out.iterdir())
    return Answer({"folder": str(options.out), "files": names}, f"export: a LlamaForCausalLM in {options.out}")


def _speaker(name: Path) -> tuple[nn.Module, _Words]:
    """Return the model of this name, and its words. One of ours that was exported is read without transformers."""
    import torch

    from ..models import published
    from ..training.text.load import tokenizer_of

    folder = published.folder_of(name)
    if (model := ours(folder)) is not None:
        own = tokenizer_of(folder, model.config.vocabulary)

        def encode(text: str) -> Tensor:
            return own.encode(torch.frombuffer(bytearray(text.encode("utf-8", "surrogateescape")), dtype=torch.uint8))

        return model, _Words(encode, lambda _, said: own.decode(said).decode("utf-8", "replace"), own.unit)
    tokenizer = published.tokenizer_of(folder)

    def encode_theirs(text: str) -> Tensor:
        if text != text.encode("utf-8", "ignore").decode():
            raise InputError(f"--prompt is {text!r:.80}, which is not UTF-8; accepted: text, by this model's tokenizer")
        return tokenizer(text, return_tensors="pt").input_ids[0]

    def decode(prompt: Tensor, said: Tensor) -> str:
        # Of a token by itself some tokenizers leave out the space before it.
        before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, [*prompt, *said]))
        return whole.removeprefix(before)

    return published.load(folder), _Words(encode_theirs, decode, "tokens")
