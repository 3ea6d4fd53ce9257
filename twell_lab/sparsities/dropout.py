"""Dropout as 2:4: of each four neighbouring activations two stay, drawn at random, doubled. An experiment.

    y = two_four_dropout(h)               # [..., d_ff], what enters the down projection in training
    rows = loss_effect(seeds=(0, 1))      # a small model with no dropout, Bernoulli dropout and this one
    print(verdict(rows))                  # computed from the rows: what it does to the loss, and whether it is faster

Dropout at one half already sets half of the activations to zero, in places that no hardware skips. In 2:4 places tensor
cores from sm_80 on skip them, and the first operand of y = h Wd^T, the one that may be 2:4, is h. The pattern is new in
each step, so h has to be compressed in each step too: `product_times` measures both.

What changes for training: every value is kept with probability 1/2, as by Bernoulli dropout (Srivastava et al., JMLR
2014), and doubled, so its mean is the value and its variance value^2. But two of four are kept always, so that two
neighbours are kept together with probability 1/6 instead of 1/4. For a sum over four terms s = w_i h_i the variance is

    4/3 sum s_i^2 - 1/3 (sum s_i)^2    instead of    sum s_i^2

zero where the four are equal, up to 4/3 as much where they cancel, and the same on average where their signs are
independent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

import torch
from torch import Tensor, nn

from ..core import InputError
from ..layers.find import feed_forwards
from ..ops import clock
from ..training.config import TrainConfig
from ..training.loop import initial_model
from ..training.objective import bits_per_byte, cross_entropy
from ..training.text import source
from ..training.text.load import load_any
from .checks import refusals, shown
from .semi_structured import tensor_kind, usual_backend
from .two_four_training import timed

_PAIRS = ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3))  # what may stay of four
NONE, BERNOULLI, TWO_FOUR = "none", "Bernoulli 1/2", "2:4"
KINDS = (NONE, BERNOULLI, TWO_FOUR)
DENSE, COMPRESS, PRODUCT, BOTH = "dense product", "compress", "2:4 product", "compress and 2:4 product"


def two_four_dropout(h: Tensor, *, training: bool = True, generator: torch.Generator | None = None) -> Tensor:
    """Keep two of each four neighbours in the last dimension, each of the six pairs equally likely, doubled; the others
    become +0. Not in training: h itself. Gradients go through what stays, doubled. InputError for a last dimension that
    is no multiple of 4, and for values that are not floating-point."""
    if not isinstance(h, Tensor) or not h.is_floating_point() or not h.dim() or h.shape[-1] % 4:
        raise InputError(f"h is {shown(h)}; floating-point values, a multiple of 4 in the last dimension, are accepted")
    if not training:
        return h
    kept = torch.zeros(6, 4, dtype=torch.bool)
    for number, pair in enumerate(_PAIRS):
        kept[number, list(pair)] = True
    pairs = torch.randint(6, (*h.shape[:-1], h.shape[-1] // 4), device=h.device, generator=generator)
    return torch.where(kept.to(h.device)[pairs].view(h.shape), 2 * h, 0)


class TwoFourDropout(nn.Module):
    """`two_four_dropout` in training, and nothing in evaluation: in the place of nn.Dropout(0.5)."""

    def forward(self, h: Tensor) -> Tensor:
        return two_four_dropout(h, training=self.training)


# ---- what it does to a small model


def loss_effect(config: TrainConfig | None = None, *, seeds: Iterable[int] = (0, 1)) -> list[dict]:
    """Train a small language model with each kind of dropout before the down projections, and measure it: with the same
    weights, windows and schedule for each kind.

    config: by default 300 steps of the model "1M", which take a minute on two cores, for each kind and seed; of its
    fields sizes, batch, steps, lr, warmup, text and device are read. Returns one row a training, JSON-able: kind, seed,
    steps, bits_per_byte on held-out text without dropout, and train_loss (mean of the last tenth of the steps, in nats,
    with dropout)."""
    config = config or TrainConfig(steps=300, warmup=30)
    return [_trained(replace(config, seed=seed), kind) for seed in seeds for kind in KINDS]


def _trained(config: TrainConfig, kind: str) -> dict:
    device = clock.present_device(config.device)
    text = load_any(config.text)
    seen, held_out = (part.tokens for part in text.split())
    model = initial_model(config, text.vocabulary).to(device).train()
    drop = {NONE: nn.Identity(), BERNOULLI: nn.Dropout(0.5), TWO_FOUR: TwoFourDropout()}[kind]
    downs = [layer.down for layer in feed_forwards(model)]
    hooks = [down.register_forward_pre_hook(lambda module, args: (drop(args[0]),)) for down in downs]
    optimizer = torch.optim.AdamW(model.parameters(), config.lr, (0.9, 0.95), weight_decay=config.weight_decay)
    warm = max(1, config.warmup)
    slope = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warm))
    draw, losses = torch.Generator().manual_seed(config.seed), []
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        torch.manual_seed(config.seed)
        for _ in range(config.steps):
            loss = cross_entropy(model, source.random_windows(seen, config.batch, config.context, draw).to(device))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            slope.step()
            losses.append(loss.detach())
    for hook in hooks:
        hook.remove()
    bits = bits_per_byte(model.eval(), source.spread_windows(held_out, 128, config.context).to(device))
    train_loss = float(torch.stack(losses[-max(1, config.steps // 10) :]).mean())
    facts = {"kind": kind, "seed": config.seed, "steps": config.steps}
    return facts | {"bits_per_byte": bits, "train_loss": train_loss}


# ---- whether its product is faster


@torch.no_grad()
def product_times(tokens: int, d_ff: int, d_model: int, *, backend: str | None = None) -> list[dict]:
    """Time y = h Wd^T with h [tokens, d_ff] dropped 2:4 as the first operand, in bfloat16 on a GPU, by device events.

    Returns the rows of `timed`, for the 2:4 product with error_over_dense: how far the result is from float64, over the
    dense product's distance. Drawing the pattern is in none of them. InputError and DeviceError as `tensor_kind`,
    DeviceError where the backend does not run it, and clock.WrongResult where the 2:4 product is more than twice as far
    from float64 as the dense one."""
    backend, device = backend or usual_backend(), torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind = tensor_kind((tokens, d_ff), torch.bfloat16, device, backend)
    draw = torch.Generator(device).manual_seed(0)
    drawn = lambda *sizes: torch.randn(*sizes, device=device, generator=draw).bfloat16()  # noqa: E731
    h = two_four_dropout(torch.relu(drawn(tokens, d_ff)), generator=draw)
    weight = drawn(d_model, d_ff) / d_ff**0.5
    with refusals(f"torch's {backend}"):
        sparse = kind.from_dense(h)
        results = {DENSE: h @ weight.t(), BOTH: sparse @ weight.t()}
    exact = h[:256].double() @ weight.double().t()
    off = {path: float((y[:256].double() - exact).norm()) for path, y in results.items()}
    ratio = off[BOTH] / max(off[DENSE], 1e-30)
    if not ratio <= 2:
        raise clock.WrongResult(f"the 2:4 product is {ratio:.3g} times as far from float64: nothing was timed")
    calls = {
        DENSE: lambda turn: h @ weight.t(),
        COMPRESS: lambda turn: kind.from_dense(h),
        PRODUCT: lambda turn: sparse @ weight.t(),
        BOTH: lambda turn: kind.from_dense(h) @ weight.t(),
    }
    facts = {path: {"error_over_dense": ratio} for path in (PRODUCT, BOTH)}
    return timed(calls, facts, tokens=tokens, d_ff=d_ff, d_model=d_model, backend=backend)


def verdict(losses: list[dict], times: list[dict] | None = None) -> dict:
    """Return what the rows say.

    losses: of `loss_effect`, for two seeds or more, else InputError. times: of `product_times`. The result has
    loss_change: bits a byte, of 2:4 minus Bernoulli dropout, the mean over seeds; loss_spread: 1.96 standard errors of
    it; loss_differs: whether the change is larger than its spread. With `times` also product_x and with_compress_x (how
    many times as fast as dense), and pays: whether it is faster with compression, and no worse in loss."""
    by = {(row["kind"], row["seed"]): row["bits_per_byte"] for row in losses}
    seeds = sorted({seed for _, seed in by if all((kind, seed) in by for kind in (BERNOULLI, TWO_FOUR))})
    if len(seeds) < 2:
        raise InputError(f"there are both kinds of dropout for the seeds {seeds}; two seeds or more are accepted")
    changes = torch.tensor([by[TWO_FOUR, seed] - by[BERNOULLI, seed] for seed in seeds], dtype=torch.float64)
    change, spread = float(changes.mean()), float(1.96 * changes.std() / len(seeds) ** 0.5)
    result = {"loss_change": change, "loss_spread": spread, "loss_differs": abs(change) > spread}
    if times:
        ms = {row["path"]: row["ms"] for row in times}
        result |= {"product_x": ms[DENSE] / ms[PRODUCT], "with_compress_x": ms[DENSE] / ms[BOTH]}
        result["pays"] = result["with_compress_x"] > 1 and not (result["loss_differs"] and change > 0)
    return result
