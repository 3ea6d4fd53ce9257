"""`twell-lab sample` and `twell-lab export`: text from a saved model, and the model as transformers reads it. Imports
torch only when one of them runs."""

from __future__ import annotations

import argparse
import copy
import time
from statistics import median
from typing import TYPE_CHECKING

from ..core.errors import InputError
from .options import number, path, positive, whole
from .terminal import Answer

if TYPE_CHECKING:
    from torch import Tensor

    from ..analysis.profile import FiringProfile
    from ..models.tiny import LanguageModel
    from ..training.text.source import Tokenizer

_ROUNDS = 5  # texts of each model, in turn, where dense and sparse are compared; their medians count


def add_sample_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="DIR", type=path, help="a folder that train --out or export wrote")
    parser.add_argument("--prompt", default="\n", metavar="TEXT", help="what the model continues [a new line]")
    parser.add_argument(
        "--tokens", type=positive, default=200, metavar="N", help="how many tokens to add [%(default)s]"
    )
    parser.add_argument(
        "--temperature",
        type=number,
        default=0.0,
        metavar="X",
        help="0 takes the most likely token; above, tokens are drawn, less likely ones too [%(default)g]",
    )
    parser.add_argument("--top-k", type=positive, metavar="N", help="draw from the N most likely tokens alone")
    parser.add_argument("--seed", type=whole, metavar="N", help="of the draw [another one each time]")
    parser.add_argument(
        "--sparse",
        action="store_true",
        help="plan the layers on this text, swap them, and compare text and speed with the dense model's",
    )
    parser.add_argument("--device", help="cpu, cuda, cuda:1 [a GPU where there is one]")


def add_export_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("model", metavar="DIR", type=path, help="a folder that twell-lab train --out wrote")
    parser.add_argument("--out", metavar="DIR", type=path, required=True, help="a folder without a model")


def sample(options: argparse.Namespace) -> Answer:
    """Continue the prompt; with --sparse by the dense model and the swapped one in turn."""
    import torch

    from ..ops.measure import present_device

    device = present_device(options.device)
    model, tokenizer = _load(options)
    model = model.to(device).eval().requires_grad_(False)
    if not options.prompt:
        raise InputError("--prompt is empty; accepted: at least one character")
    data = torch.frombuffer(bytearray(options.prompt.encode("utf-8", "surrogateescape")), dtype=torch.uint8)
    prompt, seed = tokenizer.encode(data).long(), options.seed
    if seed is None and options.temperature:  # the answer names it, so that the text can be had again
        seed = torch.Generator().seed() % 2**32
    how = {"temperature": options.temperature, "top_k": options.top_k, "seed": seed}

    model.generate(prompt, 1)  # torch sets things up in its first call
    said, speed = speak(model, prompt, options.tokens, how)
    value = {
        "prompt": options.prompt,
        "text": tokenizer.decode(said).decode("utf-8", "replace"),
        "tokens": said.tolist(),
        **how,
        "tokens_per_s": speed,
    }
    told = f"{options.tokens:,} {tokenizer.unit}" + (f" with seed {seed}" if options.temperature else "")
    lines = [options.prompt + value["text"], ""]
    if options.sparse:
        swapped, rows = planned(model, torch.cat([prompt, said.cpu()]).to(device))
        sparse, dense, same = in_turn(swapped, model, prompt, options.tokens, how)
        value |= {"tokens_per_s": sparse, "dense_tokens_per_s": dense, "same": same, "layers": rows}
        lines += [
            *(f"{row['layer']}: {row['choice']}, {row['why']}" for row in rows),
            f"sample: {told}, {sparse:,.0f} a second, and {dense:,.0f} with dense layers; "
            + ("the same text" if same else "not the same text: the last bits of sums decided between two tokens"),
        ]
    else:
        lines.append(f"sample: {told}, {speed:,.0f} a second")
    return Answer(value, "\n".join(lines))


def speak(model: LanguageModel, prompt: Tensor, tokens: int, how: dict) -> tuple[Tensor, float]:
    """What LanguageModel.generate says, and how many tokens a second that was."""
    start = time.perf_counter()
    said = model.generate(prompt, tokens, **how)
    return said, tokens / (time.perf_counter() - start)


def in_turn(
    sparse: LanguageModel, dense: LanguageModel, prompt: Tensor, tokens: int, how: dict, rounds: int = _ROUNDS
) -> tuple[float, float, bool]:
    """Let two models speak in turn. Returns the tokens a second of each, medians, and whether all they said is the
    same."""
    turns = [(speak(sparse, prompt, tokens, how), speak(dense, prompt, tokens, how)) for _ in range(rounds)]
    said = [each.tolist() for turn in turns for each, _ in turn]
    first, second = (median(speed for _, speed in side) for side in zip(*turns, strict=True))
    return first, second, all(each == said[0] for each in said)


def planned(
    model: LanguageModel, text: Tensor, firing: FiringProfile | None = None
) -> tuple[LanguageModel, list[dict]]:
    """A copy of the model with its layers swapped by a plan for one token at a time, and the rows of its report.

    They are timed on the text [tokens]; on the second half of it where they are profiled on the first, because
    `firing`, a profile on another text, is not given."""
    from ..analysis.planner import plan
    from ..analysis.profile import profile
    from ..models.report import report
    from ..models.swap import sparsify

    first, second = ([part[None] for part in half.split(model.config.context)] for half in text.chunk(2))
    firing, batches = (profile(model, first), second) if firing is None else (firing, [*first, *second])
    swapped = copy.deepcopy(model).eval().requires_grad_(False)
    sparsify(swapped, plan(firing, model, tokens=[1], batches=batches, progress=False))
    return swapped, report(swapped).rows


def export(options: argparse.Namespace) -> Answer:
    """Write the model as a LlamaForCausalLM with its tokenizer."""
    from ..training.text.source import BYTES

    model, tokenizer = _load(options)
    if (options.out / "model.safetensors").exists():
        raise InputError(f"--out is {str(options.out)!r}, which holds a model; accepted: a folder without one")
    model.save_pretrained(options.out, None if tokenizer == BYTES else tokenizer.content)
    names = sorted(each.name for each in options.out.iterdir())
    return Answer({"folder": str(options.out), "files": names}, f"export: a LlamaForCausalLM in {options.out}")


def _load(options: argparse.Namespace) -> tuple[LanguageModel, Tokenizer]:
    """The model in the folder, and the tokenizer that it was trained with."""
    from ..models.tiny import LanguageModel
    from ..training.text.load import tokenizer_of

    model = LanguageModel.load(options.model)
    return model, tokenizer_of(options.model, model.config.vocabulary)
