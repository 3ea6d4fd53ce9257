"""What notebook 04 computes with the models that it trains: data in, data out, nothing drawn.

SMALL is the model of the notebooks that train: small enough for a two-core machine to train five of them
within a minute, wide enough (d_ff 512) to show who fires.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from ...analysis.profile import LayerProfile, activations
from ...core.errors import InputError
from ...formats.twell import fires
from ...training.config import TrainConfig, TrainResult
from ...training.objective import l1_penalty
from ...training.text.source import Text, load, spread_windows

SMALL = TrainConfig(
    steps=160,
    batch=8,
    context=64,
    d_model=96,
    layers=3,
    heads=3,
    d_ff=512,
    lr=1e-2,
    warmup=20,
    eval_every=40,
    eval_windows=64,
)


def some_text(size: int = 2_000_000, path=None) -> Text:
    """About the first `size` bytes of a text (None: Python's standard library source), in whole files."""
    if not isinstance(size, int) or size < 2:
        raise InputError(f"size is {size!r}; 2 bytes or more are accepted")
    whole = load(path)
    return whole if size >= whole.size else whole.split(size / whole.size)[0]


def held_out(text: Text, windows: int = 64, context: int = SMALL.context, device: str = "cpu") -> Tensor:
    """Windows of the part of a text that training never sees: int64 [at most windows, context]."""
    return spread_windows(text.split()[1].data, windows, context)[:, :-1].to(device)


# ---- runs, compared ----


def table(runs: dict[str, TrainResult]) -> str:
    """One line a run: its loss on held-out text, its firing neurons, its dead ones by layer."""
    lines = [f"{'run':<16}{'bits per byte':>15}{'mean nnz':>10}{'density':>10}{'dead by layer':>18}"]
    for name, run in runs.items():
        density = f"{run.mean_nnz / run.config.d_ff:.1%}"
        lines.append(
            f"{name:<16}{run.validation_bits_per_byte:>15.3f}{run.mean_nnz:>10.1f}{density:>10}"
            f"{', '.join(map(str, run.dead)):>18}"
        )
    return "\n".join(lines)


def verdicts(runs: dict[str, TrainResult], base: str, again: str) -> list[str]:
    """What these runs say of L1 and the loss, one sentence a run.

    again: the run that differs from `base` in its seed alone. A smaller change than between these two means nothing,
    and the sentence says so.
    """
    noise = abs(runs[again].validation_bits_per_byte - runs[base].validation_bits_per_byte)
    lines = [f"Another seed moves the loss by {noise:.3f} bits per byte: no smaller change means anything."]
    for name, run in runs.items():
        if name in (base, again):
            continue
        change = run.validation_bits_per_byte - runs[base].validation_bits_per_byte
        fewer = runs[base].mean_nnz / max(run.mean_nnz, 1e-9)
        if abs(change) <= noise:
            says = f"{change:+.3f} bits: within what the seed does"
        else:
            says = f"{change:+.3f} bits: {'worse' if change > 0 else 'better'} than {base}, in this short run"
        lines.append(f"{name}: {fewer:.1f}x fewer neurons fire; {says}.")
    return lines


# ---- the penalty, taken apart ----


def pull(hidden: list[Tensor], l1: float = 1.0) -> tuple[float, float]:
    """(smallest, largest) slope of the L1 term in |h| where h is not 0, in units of l1 / (layers * tokens).

    hidden: one tensor [..., d_ff] a layer. Only the slope in each h itself is measured, not how one layer's h changes
    the next layer's. |h| has the same slope everywhere, so both are 1.
    """
    leaves = [h.detach().requires_grad_() for h in hidden]
    with torch.enable_grad():
        slopes = torch.autograd.grad(l1 * l1_penalty(leaves), leaves)
    scale = len(hidden) * hidden[0][..., 0].numel() / l1
    felt = torch.cat([slope[h != 0].abs() for slope, h in zip(slopes, leaves, strict=True)]) * scale
    return felt.min().item(), felt.max().item()


# ---- who fires ----


def firing_share(counts: Tensor, share: float = 0.8) -> float:
    """The smallest part of the neurons that does `share` of the firing.

    counts: [d_ff], how often each fired.
    """
    if not 0 < share <= 1:
        raise InputError(f"share is {share!r}; above 0, up to 1 is accepted")
    most_first = counts.double().sort(descending=True).values
    total = most_first.sum()
    if total == 0:
        return 0.0
    # With a relative slack: rounding in a sum must not ask for one neuron more.
    enough = most_first.cumsum(0) >= share * total * (1 - 1e-12)
    return (int(enough.int().argmax()) + 1) / len(counts)


def dead_seen_in(fired: Tensor, parts: int = 6) -> list[tuple[int, int]]:
    """(tokens, neurons silent in all of them) for the first n tokens, then for twice as many, and so on.

    fired: bool [tokens, d_ff].
    """
    tokens = len(fired)
    sizes = sorted({max(1, tokens >> part) for part in range(parts)})
    return [(size, int((~fired[:size].any(0)).sum())) for size in sizes]


def nnz_by_position(model: nn.Module, windows: Tensor, layer: int = 0) -> Tensor:
    """Mean number of neurons firing at each position of a window: float64 [context]."""
    _, gate = activations(model, windows, layer)
    return fires(gate).sum(1).view(windows.shape).double().mean(0).cpu()


def first_token_sentence(curves: list[Tensor], names: list[str]) -> str:
    """A line for each layer: whether more neurons fire for a window's first token than in its later half."""
    lines = []
    for name, curve in zip(names, curves, strict=True):
        later = curve[len(curve) // 2 :].mean().item()
        ratio = curve[0].item() / later if later else math.inf
        word = "more than" if ratio > 1.05 else "fewer than" if ratio < 0.95 else "about as many as"
        wakes = f"{name}: the first token wakes {curve[0]:.1f} neurons"
        lines.append(f"{wakes}, {word} a later one ({later:.1f}).")
    return "\n".join(lines)


def skew_sentence(layer: LayerProfile, name: str) -> str:
    """How unevenly the neurons of one layer fire, in a sentence."""
    return (
        f"{name}: {layer.mean_nnz:.1f} of {layer.d_ff} neurons fire at a token; "
        f"{firing_share(layer.neuron_counts):.0%} of them do 80% of the firing, {layer.dead} never fire."
    )
