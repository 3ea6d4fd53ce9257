"""`twell-lab profile`, `plan`, `thresholds`, `predict` and `sparsify`: what fires in a model, what its layers should do
and could leave out, what that should take on a GPU, and a folder with the model and its plan, which tl.load and
tl.sparsify take by name. Imports torch only when one of them runs."""

from __future__ import annotations

import argparse
import math
import shutil
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..core import InputError, StackError, write_atomically
from .inputs import model_and_windows, placed
from .terminal import Answer

if TYPE_CHECKING:
    from torch import Tensor, nn

    from ..analysis.plan import Plan
    from ..analysis.profile import FiringProfile


_PICTURES = (".png", ".svg", ".pdf")
_NEEDS_KALEIDO = "--plot needs kaleido, with Chrome: pip install kaleido; --html needs neither"


def profile(options: argparse.Namespace) -> Answer:
    from ..analysis.predict import verdict
    from ..analysis.profile import FiringProfile, profile

    if options.plot is not None and options.plot.suffix not in _PICTURES:
        raise InputError(f"--plot is {str(options.plot)!r:.200}; accepted: a file that ends in {', '.join(_PICTURES)}")
    if options.plot is not None and find_spec("kaleido") is None:
        raise StackError(_NEEDS_KALEIDO)
    other = None if options.against is None else FiringProfile.load(options.against)  # refused before the work
    spell: Callable[[int], str] = str
    if options.model.is_file():
        if options.text is not None:
            raise InputError(
                f"{str(options.model)!r} is a file, so it is read as a saved profile, which needs no --text"
            )
        firing, read = FiringProfile.load(options.model), str(options.model)
    else:
        model, part, windows, spell = model_and_windows(options, options.windows)
        firing, read = profile(model, windows.split(32)), part.name
    compared = None if other is None else firing.compare(other)
    if options.out is not None:
        firing.save(options.out)
    _draw(firing, options.html, options.plot)
    said = verdict(firing)
    value = {
        "tokens": firing.tokens,
        "of": read,
        "layers": firing.table(),
        "by_position": firing.by_position(),
        "by_token": firing.by_token(),
        "verdict": said,
        "against": None if compared is None else {"layers": compared.rows, "verdict": compared.verdict},
    }
    lines = [str(firing), *_by_place(firing, spell), f"profile: {firing.tokens:,} tokens of {read}", said]
    lines += [] if compared is None else [f"\nbeside {options.against}", str(compared)]
    return Answer(value, "\n".join(lines))


def _draw(firing: FiringProfile, html: Path | None, picture: Path | None) -> None:
    """Write figures of a profile into a page that needs no network, and one of its layers as a picture."""
    from .. import plots

    if html is not None:
        busiest = max(range(len(firing.layers)), key=lambda i: firing.layers[i].density)
        figures = [plots.firing_by_layer(firing), plots.neuron_frequency(firing, busiest)]
        figures += [plots.firing_by_position(firing)] if firing.by_position() else []
        parts = [figure.to_html(full_html=False, include_plotlyjs=not i) for i, figure in enumerate(figures)]
        write_atomically(html, "\n".join(["<!DOCTYPE html><meta charset='utf-8'><title>Who fires</title>", *parts]))
    if picture is not None:
        try:
            write_atomically(picture, plots.firing_by_layer(firing).to_image(format=picture.suffix[1:]))
        except (ImportError, RuntimeError):  # which fill a screen
            raise StackError(_NEEDS_KALEIDO) from None


def _by_place(firing: FiringProfile, spell: Callable[[int], str]) -> list[str]:
    """Return how much fires at the positions of a sequence and at which tokens, a line each. spell: a token as text."""
    from ..plots import share

    rows = [row for row in firing.by_position() if not row["first"] & (row["first"] - 1)]  # 0 and the powers of two
    places = [f"{row['first']}{'' if row['last'] == row['first'] else ' on'}: {share(row['density'])}" for row in rows]
    lines = [f"firing at positions {', '.join(places)}" if places else "firing by position: not known"]
    tokens = [row for row in firing.by_token(least=8) if row["x_mean"] is not None]
    if many := min(5, len(tokens) // 2):
        said = [f"{spell(row['token'])} {row['x_mean']:.1f}x" for row in [*tokens[:many], *tokens[: -many - 1 : -1]]]
        most, least = ", ".join(said[:many]), ", ".join(said[many:])
        lines.append(f"tokens at which most fire, times the mean: {most}; least: {least}")
    return lines


def plan(options: argparse.Namespace) -> Answer:
    model, part, windows, _ = model_and_windows(options, 2 * options.windows)
    chosen = planned(options, model, windows)
    if options.out is not None:
        chosen.save(options.out)
    shown = "\n\n".join(map(str, chosen.layers)) if options.all else chosen
    return Answer(chosen.table(), f"{shown}\nplan: {how_planned(chosen, part.name, windows)}")


def planned(options: argparse.Namespace, model: nn.Module, windows: Tensor) -> Plan:
    """Return the plan that the options ask for. The model goes to their device and dtype."""
    from ..analysis.planner import plan
    from ..analysis.profile import profile

    model.to(*placed(options)).requires_grad_(False)
    # Every second window is profiled; the windows between them, other tokens of the same text, are for timing.
    return plan(
        profile(model, windows[::2].split(32)),
        model,
        tokens=options.tokens,
        measure=not options.predict_only,
        batches=windows[1::2].split(32) if len(windows) > 1 else None,
        calls=options.calls,
        paths=options.paths,
    )


def how_planned(plan: Plan, text: str, windows: Tensor) -> str:
    """Return from how many tokens of the text a plan was made, and what was timed."""
    timed = f"timed on inputs {plan.inputs}" if plan.inputs else "nothing was timed"
    return f"from {windows[::2].numel():,} tokens of {text}; {timed}"


def thresholds(options: argparse.Namespace) -> Answer:
    from ..models.thresholds import LOSSY
    from ..models.thresholds import thresholds as choose
    from ..models.tiny import LanguageModel

    if options.windows < 2:
        raise InputError(
            f"--windows is {options.windows}; two or more windows are accepted, for the loss to have an interval"
        )
    model, part, windows, _ = model_and_windows(options, 2 * options.windows)
    model.requires_grad_(False)
    # Every second window is calibrated on; the loss is measured on those between them.
    chosen = choose(model, windows[::2].split(32), options.sparsity, method=options.method)
    cost, bits, change = chosen.loss(model, windows[1::2]), None, ""
    if isinstance(model, LanguageModel):  # which predicts tokens whose bytes are known
        width = part.tokenizer.lengths[windows[1::2, 1:]].double().mean().item()
        bits = [nats / math.log(2) / width for nats in (cost.dense, cost.thresholded)]
        change = f"; {bits[0]:.4g} to {bits[1]:.4g} bits a byte"
    value = {"model": str(options.model), "text": part.name, "thresholds": chosen.table()}
    value |= {key: getattr(chosen, key) for key in ("method", "sparsity", "tokens", "spared")}
    how = f"of {part.name}, every second window was calibrated on, the others measured"
    said = f"{chosen}\nthresholds: {cost}{change}; {how}"
    if options.out is not None:
        chosen.save(options.out)
        line = f"tl.Thresholds.load({str(options.out)!r}).apply(tl.load({str(options.model)!r}))"
        said += f"\nthresholds: in Python:\n  {line}"
    return Answer(value | {"loss": vars(cost) | {"label": LOSSY, "bits_per_byte": bits}}, said)


def predict(options: argparse.Namespace) -> Answer:
    from .. import records
    from ..analysis import predict

    if options.gpu == "list":
        return Answer(names := [each["name"] for each in predict.datasheets()], "\n".join(names))
    sizes = options.nnz, options.d_model, options.d_ff
    rows = predict.predict(options.gpu, *sizes, gated=options.gated, tokens=options.tokens, kind=options.workload)
    columns = {"tokens": "tokens", "path": "path", "ms": "ms", "x_dense": "x dense"}
    columns |= {"read_mb": "MB of weights needed"}
    source = "from the vendor's figures and the shares that an H100 reaches"
    lines = [records.table(rows, columns), f"predict: {predict.rates_of(options.gpu).device}, {source}"]
    lines += [
        f"predict: {row['layers']} layers recorded on an {row['gpu']} would be predicted as {row['least']:.2f} to "
        f"{row['most']:.2f} times what they took, {row['median']:.2f} in the middle"
        for row in predict.errors()
    ]
    return Answer(rows, "\n".join(lines))


def sparsify(options: argparse.Namespace) -> Answer:
    """Plan the layers, or read a plan; swap them, compare the logits, and save the model and the plan."""
    import torch

    from ..analysis.plan import IN_FOLDER, Plan
    from ..models.relufy import relufy
    from ..models.swap import report, sparsify
    from ..ops.clock import present_device

    if (options.out / "config.json").exists():
        raise InputError(f"--out is {str(options.out)!r}, which holds a model; accepted: a folder without one")
    plan = None if options.plan is None else Plan.load(options.plan)  # refused before the work
    model, part, windows, _ = model_and_windows(options, 2 * options.windows)
    ids, changed = windows[1::2][:2], 0.0
    if options.relufy:
        model.to(present_device(options.device))
        before = _logits(model, ids)
        relufy(model)
        changed = _off(_logits(model, ids), before)
        del before
    if plan is None:
        plan = planned(options, model, windows)
        how = how_planned(plan, part.name, windows)
    else:
        device = present_device("cpu" if plan.device == "CPU" else "cuda")
        model.to(device, getattr(torch, plan.dtype)).requires_grad_(False)
        how = f"as {options.plan} says"
    dense = _logits(model, ids)
    sparsify(model, plan)
    off = _off(_logits(model, ids), dense)
    told = report(model)
    del model, dense
    _save(options)
    plan.save(options.out / IN_FOLDER)
    names = sorted(each.name for each in options.out.iterdir())
    where = "" if plan.device == "CPU" else ", device='cuda'"
    loaded = f"tl.load({str(options.out)!r}, dtype=torch.{plan.dtype}{where})"
    lines = [
        f"{told}\nsparsify: {how}",
        *([f"sparsify: its ReLUs change the logits by {changed:.2g} of their norm: train it"] * options.relufy),
        f"sparsify: the logits of {ids.numel():,} other tokens are off the dense {'ReLU ' * options.relufy}model's by "
        f"{off:.2g} of their norm",
        f"sparsify: the model and {IN_FOLDER} are in {options.out}; in Python:",
        f"  tl.sparsify({loaded}, {str(options.out)!r})",
    ]
    value = {"folder": str(options.out), "files": names, "logits_off": off, "layers": told.rows}
    return Answer({**value, "relufy_changed": changed}, "\n".join(lines))


def _logits(model: nn.Module, ids: Tensor) -> Tensor:
    """Of the model for these tokens [batch, tokens], in float64."""
    import torch

    from ..bench.causal import Causal

    with torch.no_grad():
        return Causal(model).reader()(ids.to(next(model.parameters()).device)).double()


def _off(logits: Tensor, exact: Tensor) -> float:
    """Return how far off logits are: the norm of the difference over that of the exact ones."""
    return float((logits - exact).norm() / exact.norm())


def _save(options: argparse.Namespace) -> None:
    """The model in its own dtype, and what it reads text with."""
    import safetensors

    from ..models import published
    from ..models.relufy import relufy
    from ..models.tiny import LanguageModel

    folder = published.folder_of(options.model)
    model: Any = published.load(folder)
    if options.relufy:
        relufy(model)
    try:
        if isinstance(model, LanguageModel):
            model.save(options.out)
            if (own := folder / "tokenizer.json").is_file():
                shutil.copyfile(own, options.out / own.name)
            return
        with published.quiet():
            model.save_pretrained(options.out)
        published.tokenizer_of(folder).save_pretrained(options.out)
    except safetensors.SafetensorError as error:
        raise InputError(f"the model cannot be written into {str(options.out)!r}: {error}") from error
