"""A model of the reader's, be it of transformers or of this project: its tokens of a text, its logits, what swapped
layers should be worth on other GPUs, and what cutting costs beside training."""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from ... import records
from ...analysis import costs, predict
from ...analysis.profile import FiringProfile, profile
from ...core import folders
from ...core.errors import InputError
from ...layers.anatomy import feed_forwards
from ...layers.choice import DENSE
from ...layers.paths.cost import Firing
from ...models import published
from ...models.thresholds import LossChange, losses
from ...models.tiny import LanguageModel
from ...training.text.load import tokenizer_of
from ...training.text.source import spread_windows
from ..notebook import dtype_for
from ..sweep.data import checkpoints
from ..thresholds.data import Counted

CONTEXT = 512  # tokens of a window at most
CHEAP = 1.0  # percent of the loss that a cut may cost
WORTH = 1.1  # times as fast as dense: what a plan wants where it only predicts
_PROSE = re.compile(r"[A-Za-z ,.;:'\"()!?\n-]{120,}")


@dataclass(frozen=True, eq=False)
class Own:
    """A causal language model and its tokenizer.

    name: as it was asked for; of a folder, the folder's own. shipped: whether it is one of data/checkpoints. context:
    tokens of a window."""

    name: str
    shipped: bool
    model: nn.Module
    context: int
    encode: Callable[[str], Tensor]
    decode: Callable[[Tensor], str]

    @property
    def fires(self) -> bool:
        """Whether a layer of it has a ReLU, whose zeros can be skipped."""
        try:
            return bool(feed_forwards(self.model))
        except InputError:
            return False

    def __str__(self) -> str:
        weights = sum(each.numel() for each in self.model.parameters())
        dtype = str(next(self.model.parameters()).dtype).removeprefix("torch.")
        where = " (data/checkpoints)" if self.shipped else ""
        return f"{self.name}{where}: {type(self.model).__name__}, {weights:,} parameters, {dtype}"


def read(name: str | os.PathLike, device: str = "cpu") -> Own:
    """A model with its tokenizer, in the device's fastest dtype.

    name: one of data/checkpoints that is here ("sparse", "l1-free", "small"), or what `twell_lab.load` takes: a folder,
    or a name of the Hugging Face Hub. Raises what that does, and InputError for a folder without a tokenizer."""
    shipped = name in checkpoints()
    called = Path(name).name if os.path.isdir(name) else str(name)
    folder = folders.data_dir() / "checkpoints" / name if shipped else published.folder_of(name)
    model = published.load(folder, dtype=dtype_for(device), device=device)
    if isinstance(model, LanguageModel):
        own = tokenizer_of(folder, model.config.vocabulary)

        def encode(text: str) -> Tensor:
            return own.encode(torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)).long()

        def decode(tokens: Tensor) -> str:
            return own.decode(tokens).decode("utf-8", "replace")

        return Own(called, shipped, model, min(CONTEXT, model.config.context), encode, decode)
    theirs = published.tokenizer_of(Path(folder))
    context = getattr(model.config, "max_position_embeddings", None) or CONTEXT
    return Own(
        called,
        shipped,
        model,
        min(CONTEXT, context),
        lambda text: theirs(text, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0],
        theirs.decode,
    )


def never_sparse(mine: Own, device: str = "cpu") -> Own:
    """The reader's model; in the place of a shipped one its twin that was trained without L1, where that is here."""
    return read("l1-free", device) if mine.shipped and "l1-free" in checkpoints() else mine


# ---- what it reads and says ----


def some_text() -> str:
    """English prose that every Python brings: the paragraphs of its reference that are words and plain punctuation."""
    paragraphs = "\n".join(topics.values()).split("\n\n")
    return "\n\n".join(" ".join(each.split()) for each in paragraphs if _PROSE.fullmatch(each))


def windows(mine: Own, text: str, count: int = 24) -> tuple[Tensor, Tensor]:
    """Windows spread evenly over the text, in turn (to profile on, to measure on), int64 [n, context]. InputError for a
    text without two for each."""
    found = spread_windows(mine.encode(text), count, mine.context)[:, :-1]
    if len(found) < 4:
        raise InputError(
            f"the text has {len(mine.encode(text)):,} tokens; {4 * mine.context + 1:,} or more are accepted, four "
            f"windows of {mine.context}"
        )
    return found[::2], found[1::2]


@torch.no_grad()
def logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """The scores of each next token: [batch, tokens, vocabulary]."""
    given = model(tokens.to(next(model.parameters()).device))
    return getattr(given, "logits", given)


def go_on(mine: Own, model: nn.Module, prompt: str, tokens: int = 60) -> str:
    """What a model adds to a prompt, always the most likely token. model: `mine.model`, or a swapped copy."""
    said = mine.encode(prompt)[None]
    start = said.shape[1]
    for _ in range(tokens):
        best = logits(model, said[:, -mine.context :])[:, -1].argmax(-1)
        said = torch.cat([said, best[:, None].cpu()], 1)
    return mine.decode(said[0, start:])


# ---- on another GPU ----


def gains(firing: FiringProfile, gpus: Sequence[str], tokens: Sequence[int]) -> list[dict]:
    """What all feed-forward layers of a profile should take on GPUs, each layer on its best path; predicted.

    Rows: gpu, tokens, dense_us, us, x_dense, launches (the percent of dense_us that they take), paths (how many
    layers take which)."""
    layers = [Firing.of(layer) for layer in firing.layers if layer.tokens]
    rows = []
    for gpu in gpus:
        rates = predict.rates_of(gpu)
        for count in tokens:
            took = [predict.by_choice(layer, rates, count) for layer in layers]
            best = [min(each, key=lambda choice, each=each: each[choice]) for each in took]
            dense = sum(each[DENSE] for each in took)
            us = sum(each[choice] for each, choice in zip(took, best, strict=True))
            itemsize = getattr(torch, rates.dtype).itemsize
            launches = sum(costs.predict(DENSE, layer, rates, count, itemsize)["launches"] for layer in layers)
            paths = Counter(choice.path for choice in best)
            rows.append(
                {
                    "gpu": rates.device,
                    "tokens": count,
                    "dense_us": dense,
                    "us": us,
                    "x_dense": dense / us,
                    "launches": 100 * launches / dense,
                    "paths": ", ".join(f"{many} {path}" for path, many in sorted(paths.items())),
                }
            )
    return rows


def gains_table(rows: list[dict]) -> str:
    """What `gains` returned, as lines of text."""
    columns = {"gpu": "GPU", "tokens": "tokens", "dense_us": "dense us", "launches": "launches, % of it", "us": "us"}
    return records.table(rows, columns | {"x_dense": "x dense", "paths": "layers"})


def off() -> str:
    """How far off such predictions are where layers were recorded, in a line for each GPU."""
    lines = [
        f"{row['gpu']}: for {row['layers']} recorded layers, predicted over measured time was {row['least']:.2f} to "
        f"{row['most']:.2f}, {row['median']:.2f} in the middle"
        for row in predict.errors()
    ]
    return "\n".join(lines) or "no recorded layer is here to compare a prediction with"


# ---- cut, or train ----


def cut(counted: Counted, sparsities: Sequence[float]) -> list[dict]:
    """What thresholds of these sparsities cost on the held-out windows of `course.thresholds.count`.

    Rows: sparsity, density (the share that is left of all layers), change, low, high (of the loss, in percent of what
    it was, with its 95% interval). Sparsities whose loss was measured before are looked up."""
    rows = []
    for sparsity in sparsities:
        chosen = counted.calibration.at(sparsity)
        cost = counted.losses.get(sparsity) or chosen.loss(counted.model, counted.windows)
        neurons = sum(layer.d_ff for layer in chosen.layers)
        left = sum(layer.density["activation"] * layer.d_ff for layer in chosen.layers) / neurons
        rows.append({"sparsity": sparsity, "density": left} | _percent(cost))
    return rows


def trained(text: str, device: str = "cpu") -> dict | None:
    """What training with L1 cost the shipped model "sparse" beside "l1-free", on a text that neither has read: density,
    change, low, high, as in the rows of `cut`, and `before`, the density without L1. None where they are not here."""
    if not {"sparse", "l1-free"} <= {*checkpoints()}:
        return None
    pair = [read(name, device) for name in ("l1-free", "sparse")]
    first, second = windows(pair[0], text)
    before, after = (_density(profile(each.model, [first])) for each in pair)
    alone, sparse = (losses(each.model, second) for each in pair)
    return {"density": after, "before": before} | _percent(LossChange.of(alone, sparse, second.shape[1] - 1))


def _density(firing: FiringProfile) -> float:
    return sum(layer.mean_nnz for layer in firing.layers) / sum(layer.d_ff for layer in firing.layers)


def _percent(cost: LossChange) -> dict:
    return {name: 100 * getattr(cost, name) / cost.dense for name in ("change", "low", "high")}


# ---- what to do ----


def decide(
    what: str, here: dict, predicted: list[dict], uncut: str, rows: list[dict], instead: dict | None
) -> list[str]:
    """What the numbers say, in three lines: here, on a GPU, and whether to cut or to train.

    Args:
        what: the model that was swapped.
        here: what was timed, and low, times, high: how many times as fast it then was, in the middle half of its turns.
        predicted: what `gains` returned.
        uncut: the model that was cut.
        rows: what `cut` returned; where `instead` is given, the last one for its density.
        instead: what `trained` returned.
    """
    span = f"{here['times']:.2f} times as fast (middle half {here['low']:.2f} to {here['high']:.2f})"
    if here["low"] > 1:
        todo = "swap the layers"
    else:
        todo = "stay dense" if here["high"] < 1 else "no difference that counts; stay dense"
    first = f"Here ({here['what']}), {what} with planned layers is {span}: {todo}."
    worth = []
    for count in dict.fromkeys(row["tokens"] for row in predicted):
        of = [row for row in predicted if row["tokens"] == count]
        best = max(of, key=lambda row: row["x_dense"])
        fast = sum(row["x_dense"] >= WORTH for row in of)
        tokens = f"with {count:,} token{'s' * (count > 1)}"
        worth.append(f"{tokens} on {fast} of {len(of)} GPUs (at best {best['x_dense']:.2f}, {best['gpu']})")
    second = f"Predicted, the layers are at least {WORTH:g} times as fast {', '.join(worth)}."
    cheap = [row for row in rows if row["high"] <= CHEAP]
    if cheap:
        least = min(row["density"] for row in cheap)
        third = f"A cut of {uncut} to {least:.1%} of the neurons costs at most {CHEAP:g}% of the loss"
    else:
        third = f"Each cut of {uncut} that was measured may cost more than {CHEAP:g}% of the loss"
    if instead:
        last = rows[-1]
        todo = (
            "train" if instead["high"] < last["low"] else "cut" if instead["low"] > last["high"] else "either will do"
        )
        third += (
            f"; at {last['density']:.1%} the cut costs {_span(last)}, where training with L1 cost the shipped model "
            f"{_span(instead)}: {todo}"
        )
    return [first, second, f"{third}."]


def _span(row: dict) -> str:
    return f"{row['low']:+.1f} to {row['high']:+.1f}%"
