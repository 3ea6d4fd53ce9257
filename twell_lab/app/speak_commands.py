"""`twell-lab sample` and `twell-lab export`: text from a saved model, and a model of ours as transformers reads it.
Imports torch only when one of them runs."""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from ..core import InputError
from .inputs import opened
from .terminal import Answer, said_fast

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..analysis.profile import FiringProfile

_ROUNDS = 5  # texts of each model, in turn, where dense and sparse are compared; their medians count


def sample(options: argparse.Namespace) -> Answer:
    """Continue the prompt; with --sparse by the dense model and the swapped one in turn."""
    import torch

    from ..ops.clock import present_device

    device = present_device(options.device)
    model, encode, decode, unit = _speaker(options.model)
    model = model.to(device).eval().requires_grad_(False)
    if not options.prompt:
        raise InputError("--prompt is empty; accepted: at least one character")
    prompt, seed = encode(options.prompt).long(), options.seed
    if seed is None and options.temperature:  # the answer names it, so that the text can be had again
        seed = torch.Generator().seed() % 2**32
    how = {"temperature": options.temperature, "top_k": options.top_k, "seed": seed}

    speak(model, prompt, options.tokens if device.type == "cuda" else 1, how)  # what the first call sets up
    said, speed = speak(model, prompt, options.tokens, how)
    value = {"prompt": options.prompt, "text": decode(prompt, said), "tokens": said.tolist()}
    value |= {**how, "tokens_per_s": speed}
    fast, lines = f", {speed:,.0f} a second", []
    if options.sparse:
        swapped, rows = planned(model, torch.cat([prompt, said]).to(device))
        value |= in_turn(swapped, model, prompt, options.tokens, how) | {"layers": rows}
        lines = [f"{row['layer']}: {row['choice']}, {row['why']}" for row in rows]
        fast = f"; {said_fast(value)}"
    drawn = f" with seed {seed}" if options.temperature else ""
    lines.append(f"sample: {len(said):,} {unit}{drawn}{fast}")
    return Answer(value, "\n".join(lines), quoted=f"{options.prompt}{value['text']}\n\n")


def speak(model: nn.Module, prompt: Tensor, tokens: int, how: dict) -> tuple[Tensor, float]:
    """Return what `tl.generate` adds to a prompt, and how many tokens a second that was."""
    from ..models.generate import generate

    start = time.perf_counter()
    said = generate(model, prompt, max_new_tokens=tokens, **how)[len(prompt) :].cpu()
    return said, len(said) / (time.perf_counter() - start)


def in_turn(sparse: nn.Module, dense: nn.Module, prompt: Tensor, tokens: int, how: dict, rounds: int = _ROUNDS) -> dict:
    """Let two models speak in turn, once before it counts, since a GPU captures their steps then; return {tokens_per_s,
    dense_tokens_per_s: medians, ratios: of each turn, same: whether all they said is the same}."""
    turns = [(speak(sparse, prompt, tokens, how), speak(dense, prompt, tokens, how)) for _ in range(rounds + 1)][1:]
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
    from ..models.swap import report, sparsify

    context = getattr(model.config, "context", None) or getattr(model.config, "max_position_embeddings", len(text))
    first, second = ([part[None] for part in half.split(context)] for half in text.chunk(2))
    firing, batches = (profile(model, first), second) if firing is None else (firing, [*first, *second])
    swapped = copy.deepcopy(model).eval().requires_grad_(False)
    calls = "captured" if text.is_cuda else "eager"
    sparsify(swapped, plan(firing, model, tokens=[1], batches=batches, calls=calls, progress=False))
    return swapped, report(swapped).rows


def export(options: argparse.Namespace) -> Answer:
    """Write the model as a LlamaForCausalLM with its tokenizer."""
    from ..models.tiny import LanguageModel
    from ..training.text.tokenizer import BYTES, tokenizer_of

    model = LanguageModel.load(options.model)
    tokenizer = tokenizer_of(options.model, model.config.vocabulary)
    if (options.out / "model.safetensors").exists():
        raise InputError(f"--out is {str(options.out)!r}, which holds a model; accepted: a folder without one")
    model.save_pretrained(options.out, None if tokenizer == BYTES else tokenizer.content)
    names = sorted(each.name for each in options.out.iterdir())
    return Answer({"folder": str(options.out), "files": names}, f"export: a LlamaForCausalLM in {options.out}")


def _speaker(name: Path) -> tuple[nn.Module, Callable[[str], Tensor], Callable[[Tensor, Tensor], str], str]:
    """Return the model of this name; what turns text into ids [tokens]; what returns the text that ids say after those
    of a prompt; and what a token is called."""
    import torch

    from ..models import published
    from ..training.text.tokenizer import tokenizer_of

    folder, model, own = opened(name)
    tokenizer: Any = tokenizer_of(folder, model.config.vocabulary) if own else published.tokenizer_of(folder)

    def encode(text: str) -> Tensor:
        if own:
            return tokenizer.encode(torch.tensor([*text.encode("utf-8", "surrogateescape")], dtype=torch.uint8))
        if text != text.encode("utf-8", "ignore").decode():
            raise InputError(f"--prompt is {text!r:.80}, which is not UTF-8; accepted: text, by this model's tokenizer")
        return tokenizer(text, return_tensors="pt").input_ids[0]

    def decode(prompt: Tensor, said: Tensor) -> str:
        if own:
            return tokenizer.decode(said).decode("utf-8", "replace")
        # Of a token by itself some tokenizers leave out the space before it.
        before, whole = (tokenizer.decode(ids, skip_special_tokens=True) for ids in (prompt, [*prompt, *said]))
        return whole.removeprefix(before)

    return model, encode, decode, tokenizer.unit if own else "tokens"
