"""What the notebooks train: the model, its text, and who fires in it. Nothing is drawn."""

from __future__ import annotations

from torch import Tensor

from ..training.config import TrainConfig
from ..training.text.source import Text, load, spread_windows

# Small enough for a two-core machine to train five of them within a minute, wide enough (d_ff 512) to show who fires.
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
    whole = load(path)
    return whole if size >= whole.size else whole.split(size / whole.size)[0]


def held_out(text: Text, windows: int = 64, context: int = SMALL.context, device: str = "cpu") -> Tensor:
    """Windows of the part of a text that training never sees: int64 [at most windows, context]."""
    return spread_windows(text.split()[1].tokens, windows, context)[:, :-1].to(device)


def firing_share(counts: Tensor, share: float = 0.8) -> float:
    """The smallest part of the neurons that does `share` of the firing. counts: [d_ff], how often each fired."""
    most_first = counts.double().sort(descending=True).values
    total = most_first.sum()
    if total == 0:
        return 0.0
    # With a relative slack: rounding in a sum must not ask for one neuron more.
    enough = most_first.cumsum(0) >= share * total * (1 - 1e-12)
    return (int(enough.int().argmax()) + 1) / len(counts)
