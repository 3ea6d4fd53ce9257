"""The commands that take a saved model: sample, profile and sparsify. Imports torch only when one of them runs."""

from __future__ import annotations

import copy
import shutil
import textwrap
import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Annotated, Any, Literal

import twell_lab as tl

from ..core import InputError, StackError, check_folder, check_target, optional, write_atomically
from .terminal import Answer, said_fast

if TYPE_CHECKING:
    from torch import Tensor, nn

Dtype = Literal["bfloat16", "float16", "float32"]
PATHS = "twell, hot_cold, two_four, blocks, or lossy: int8, fp8, twell_int8"
Model = Annotated[str, "a folder of twell-lab train's or of transformers', or a name on the Hub"]
Text = Annotated[str | None, "read whole, or what training held out of it [as much of Python's standard library]"]
Device = Annotated[str | None, "cpu, cuda, cuda:1 [a GPU where there is one]"]
OwnDtype = Annotated[Dtype | None, "[bfloat16 on a GPU, float16 on one older than sm_80, else float32]"]
_PICTURES = (".png", ".svg", ".pdf")


# ---- the model and the text that a command is given ----


def opened(name: str) -> tuple[Any, Any, bool]:
    """Return a model on the CPU, as `tl.load` gives it, its tokenizer, and whether it is one of this project's."""
    from ..models import published
    from ..models.tiny import LanguageModel
    from ..training.text.tokenizer import tokenizer_of

    model = tl.load(folder := published.folder_of(name))
    if isinstance(model, LanguageModel):
        return model, tokenizer_of(folder, model.config.vocabulary), True
    return model, published.tokenizer_of(folder), False


def model_and_windows(name: str, text: str | None, count: int = 1, *, tokens: int = 0) -> tuple[Any, Any, Tensor]:
    """Return a model on the CPU, as tl.load gives it; the text, or its held-out part; and at most `count` windows of
    it, or as many as hold so many `tokens`, spread evenly: int64 [count, context].

    Only the held-out part is taken of the text that the model was trained on, of the default text and of a prepared
    text. A model of transformers reads the text with its own tokenizer, in windows of 512 tokens at most; ours with the
    one that training saved in its folder, or as bytes."""
    from ..training import checkpoint
    from ..training.text.source import is_prepared, load, spread_windows

    if count < 1:
        raise InputError(f"--windows is {count}; accepted: 1 or more")
    model, tokenizer, own = opened(name)
    whole = load(text, tokenizer=tokenizer if own else None)
    trained = own and Path(name, checkpoint.STATE).is_file()
    trained_on = checkpoint.load(name)["text"].get("sha256") if trained else None
    seen = text is None or is_prepared(text) or whole.sha256 == trained_on
    part = whole.split()[1] if seen else whole
    context = model.config.context if own else min(512, getattr(model.config, "max_position_embeddings", None) or 512)
    count = max(count, -(-tokens // context))
    ids, unit = part.tokens, part.tokenizer.unit if own else "tokens"
    if not own:  # a token is rarely longer than eight bytes; the beginning of a longer text does
        start = part.tokenizer.decode(part.tokens[: 8 * (count + 1) * context]).decode("utf-8", "replace")
        ids = tokenizer(start, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0]
    if len(ids) <= context:
        raise InputError(f"{part.name} has {len(ids)} {unit}; windows of {context} need at least {context + 1}")
    if not own and (largest := int(ids.max())) >= (known := model.get_input_embeddings().weight.shape[0]):
        raise InputError(f"the tokenizer of {name!r} made token {largest}; the model has {known} of them")
    return model, part, spread_windows(ids, count, context)[:, :-1]


def placed(device: str | None, dtype: str | None) -> tuple[Any, Any]:
    """Return the device and the dtype that options ask for."""
    import torch

    from ..ops.clock import dtype_for, present_device

    place = present_device(device)
    return place, getattr(torch, dtype) if dtype else dtype_for(place)


# ---- text from a model ----


def sample(
    model: Model,
    *,
    prompt: Annotated[str, "what the model continues [a new line]"] = "\n",
    tokens: Annotated[int, "how many to add, unless a model of transformers ends its text before"] = 200,
    temperature: Annotated[float, "0 takes the most likely token; above, tokens are drawn"] = 0.0,
    top_k: Annotated[int | None, "draw from the N most likely tokens alone"] = None,
    seed: Annotated[int | None, "of the draw [another one each time]"] = None,
    sparse: Annotated[bool, "plan the layers on this text, swap them, and compare with the dense model"] = False,
    device: Device = None,
) -> Answer:
    """Let a saved model continue a text, and time it."""
    import torch

    from ..ops.clock import present_device

    place = present_device(device)
    dense, tokenizer, own = opened(model)
    dense = dense.to(place).eval().requires_grad_(False)
    if not prompt or prompt != prompt.encode("utf-8", "ignore").decode():
        raise InputError(f"--prompt is {prompt!r:.80}; accepted: UTF-8 of one character or more")
    if own:
        ids = tokenizer.encode([prompt.encode()]).long()
        decode = lambda ids: tokenizer.decode(ids).decode("utf-8", "replace")
    else:
        ids = tokenizer(prompt, return_tensors="pt").input_ids[0]
        decode = lambda ids: tokenizer.decode(ids, skip_special_tokens=True)
    if seed is None and temperature:  # the answer names it, so that the text can be had again
        seed = torch.Generator().seed() % 2**32
    how = {"temperature": temperature, "top_k": top_k, "seed": seed}

    speak(dense, ids, tokens if place.type == "cuda" else 1, how)  # what the first call sets up
    said, speed = speak(dense, ids, tokens, how)
    # Together, since of a token by itself some tokenizers leave out the space before it.
    text = decode(torch.cat([ids, said])).removeprefix(decode(ids))
    value = {"prompt": prompt, "text": text, "tokens": said.tolist(), **how, "tokens_per_s": speed}
    fast, lines = f", {speed:,.0f} a second", [textwrap.indent(prompt + text, "  "), ""]
    if sparse:
        swapped, rows = planned(dense, torch.cat([ids, said]).to(place))
        value |= in_turn(swapped, dense, ids, tokens, how) | {"layers": rows}
        lines += [f"{row['layer']}: {row['choice']}, {row['why']}" for row in rows]
        fast = f"; {said_fast(value)}"
    drawn = f" with seed {seed}" if temperature else ""
    lines.append(f"sample: {len(said):,} {tokenizer.unit if own else 'tokens'}{drawn}{fast}")
    return Answer(value, "\n".join(lines))


def speak(model: nn.Module, prompt: Tensor, tokens: int, how: dict) -> tuple[Tensor, float]:
    """Return what `tl.generate` adds to a prompt, and how many tokens a second that was."""
    start = time.perf_counter()
    said = tl.generate(model, prompt, max_new_tokens=tokens, **how)[len(prompt) :].cpu()
    return said, len(said) / (time.perf_counter() - start)


def in_turn(sparse: nn.Module, dense: nn.Module, prompt: Tensor, tokens: int, how: dict, rounds: int = 5) -> dict:
    """Let two models speak in turn, once before it counts, since a GPU captures their steps then; return medians
    {tokens_per_s, dense_tokens_per_s}, ratios: of each turn, and same: whether all they said is the same."""
    turns = [(speak(sparse, prompt, tokens, how), speak(dense, prompt, tokens, how)) for _ in range(rounds + 1)][1:]
    said = [text.tolist() for turn in turns for text, _ in turn]
    fast, slow = ([speed for _, speed in side] for side in zip(*turns, strict=True))
    return {
        "tokens_per_s": median(fast),
        "dense_tokens_per_s": median(slow),
        "ratios": [a / b for a, b in zip(fast, slow, strict=True)],
        "same": all(text == said[0] for text in said),
    }


def planned(model: nn.Module, text: Tensor, firing: tl.FiringProfile | None = None) -> tuple[nn.Module, list[dict]]:
    """Return a copy of the model, swapped by a plan for one token at a time, and its report's rows. Layers are timed on
    the text [tokens]; without `firing` its first half is profiled, and they are timed on the second."""
    context = getattr(model.config, "context", None) or getattr(model.config, "max_position_embeddings", len(text))
    first, second = ([part[None] for part in half.split(context)] for half in text.chunk(2))
    firing, batches = (tl.profile(model, first), second) if firing is None else (firing, [*first, *second])
    swapped = copy.deepcopy(model).eval().requires_grad_(False)
    calls = "captured" if text.is_cuda else "eager"
    tl.sparsify(swapped, tl.plan(firing, model, tokens=[1], batches=batches, calls=calls, progress=False))
    return swapped, tl.report(swapped).rows


# ---- what fires, and what to do with it ----


def profile(
    model: Model,
    *,
    text: Text = None,
    windows: Annotated[int, "how many windows"] = 256,
    out: Annotated[Path | None, "save the counts here, as JSON"] = None,
    against: Annotated[Path | None, "compare with the profile that --out saved here"] = None,
    html: Annotated[Path | None, "draw it into a page that needs no network"] = None,
    plot: Annotated[Path | None, "draw its layers into a picture: .png, .svg or .pdf; needs kaleido"] = None,
) -> Answer:
    """Count which neurons of a saved model fire on a text."""
    from ..analysis.predict import verdict

    for place in filter(None, (out, html, plot)):  # before the work
        check_target(place)
    if plot is not None:
        if plot.suffix not in _PICTURES:
            raise InputError(f"--plot is {str(plot)!r:.200}; accepted: a file that ends in {', '.join(_PICTURES)}")
        optional("kaleido", "--plot")
    other = None if against is None else tl.FiringProfile.load(against)  # refused before the work
    loaded, part, read = model_and_windows(model, text, windows)
    firing = tl.profile(loaded, read.split(32))
    compared = None if other is None else firing.compare(other)
    if out is not None:
        firing.save(out)
    _draw(firing, html, plot)
    value = {
        "tokens": firing.tokens,
        "of": part.name,
        "layers": firing.table(),
        "by_position": firing.by_position(),
        "by_token": firing.by_token(),
        "verdict": verdict(firing),
        "against": compared and {"layers": compared.rows, "verdict": compared.verdict},
    }
    lines = [str(firing), f"profile: {firing.tokens:,} tokens of {part.name}", value["verdict"]]
    lines += [] if compared is None else [f"\nbeside {against}", str(compared)]
    lines += [f"profile: saved {place}" for place in filter(None, (out, html, plot))]
    return Answer(value, "\n".join(lines))


def _draw(firing: tl.FiringProfile, html: Path | None, picture: Path | None) -> None:
    """Write figures of a profile into a page that needs no network, and one of its layers as a picture."""
    if html is not None:
        busiest = max(range(len(firing.layers)), key=lambda i: firing.layers[i].density)
        figures = [tl.plots.firing_by_layer(firing), tl.plots.neuron_frequency(firing, busiest)]
        figures += [tl.plots.firing_by_position(firing)] if firing.by_position() else []
        parts = [figure.to_html(full_html=False, include_plotlyjs=not i) for i, figure in enumerate(figures)]
        write_atomically(html, "\n".join(["<!DOCTYPE html><meta charset='utf-8'><title>Who fires</title>", *parts]))
    if picture is not None:
        try:
            write_atomically(picture, tl.plots.firing_by_layer(firing).to_image(format=picture.suffix[1:]))
        except (ImportError, RuntimeError):  # which fill a screen
            raise StackError("--plot needs kaleido, with Chrome: pip install kaleido; --html needs neither") from None


def sparsify(
    model: Model,
    *,
    text: Text = None,
    windows: Annotated[int, "how many windows to profile, and how many others to time on"] = 256,
    out: Annotated[Path | None, "save the model and the plan here, in a folder without a model"] = None,
    tokens: Annotated[Sequence[int], "tokens at once to plan for"] = (1, 64, 2048, 16384),
    predict_only: Annotated[bool, "time none of the candidates"] = False,
    calls: Annotated[Literal["eager", "compiled", "captured"], "how the model will be called"] = "eager",
    paths: Annotated[Sequence[str] | None, f"what to weigh beside dense: {PATHS} [twell hot_cold]"] = None,
    device: Device = None,
    dtype: OwnDtype = None,
) -> Answer:
    """Choose a path for every layer of a saved model, swap the layers, and save the model with this plan beside it."""
    import torch

    from ..analysis.planner import IN_FOLDER
    from ..bench.workloads import Causal
    from ..models.published import folder_of
    from ..training.checkpoint import STATE

    if out is not None:
        check_folder(out)
        if (out / "config.json").exists():
            raise InputError(f"--out is {str(out)!r}, which holds a model; accepted: a folder without one")
    loaded, part, read = model_and_windows(model, text, 2 * windows)
    loaded.to(*placed(device, dtype)).requires_grad_(False)
    # Every second window is profiled; the windows between them, other tokens of the same text, are for timing.
    firing, others = tl.profile(loaded, read[::2].split(32)), read[1::2].split(32) if len(read) > 1 else None
    how: dict = {"tokens": tokens, "measure": not predict_only, "batches": others, "calls": calls, "paths": paths}
    chosen = tl.plan(firing, loaded, **how)

    ids = read[1::2][:2].to(next(loaded.parameters()).device)
    with torch.no_grad():
        dense = Causal(loaded).reader()(ids).double()
        off = float((Causal(tl.sparsify(loaded, chosen)).reader()(ids).double() - dense).norm() / dense.norm())
    told = tl.report(loaded)
    timed = f"timed on inputs {chosen.inputs}" if chosen.inputs else "nothing was timed"
    lines = [
        f"{told}\nsparsify: from {firing.tokens:,} tokens of {part.name}; {timed}",
        f"sparsify: the logits of {ids.numel():,} other tokens are off the dense model's by {off:.2g} of their norm",
    ]
    if out is not None:
        for file in folder_of(model).iterdir():
            if file.is_file() and file.name != STATE:
                shutil.copy(file, out)
        chosen.save(out / IN_FOLDER)
        where = "" if chosen.device == "CPU" else ", device='cuda'"
        line = f"tl.sparsify(tl.load({str(out)!r}, dtype=torch.{chosen.dtype}{where}), {str(out)!r})"
        lines.append(f"sparsify: the model and {IN_FOLDER} are in {out}; in Python:\n  {line}")
    return Answer({"logits_off": off, "layers": told.rows, "candidates": chosen.table()}, "\n".join(lines))
