"""`twell-lab sparsify`: a model and the plan of its layers in one folder, which tl.load and tl.sparsify take by name.
Imports torch only when it runs."""

from __future__ import annotations

import argparse
import shutil
from typing import TYPE_CHECKING, Any

from ..core import InputError
from .analysis_commands import how_planned, planned
from .inputs import model_and_windows
from .terminal import Answer

if TYPE_CHECKING:
    from torch import Tensor, nn


def sparsify(options: argparse.Namespace) -> Answer:
    """Plan the layers, or read a plan; swap them, compare the logits, and save the model and the plan."""
    import torch

    from ..analysis.plan import IN_FOLDER, Plan
    from ..models.relufy import relufy
    from ..models.report import report
    from ..models.swap import sparsify
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
