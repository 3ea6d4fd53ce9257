"""The workshop "your own model": one of transformers or of this project, its tokens of a text, and its logits."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from pydoc_data.topics import topics

import torch
from torch import Tensor, nn

from ..core import InputError
from ..layers.find import feed_forwards
from ..models import published
from ..models.tiny import LanguageModel
from ..ops.clock import dtype_for
from ..training.text.source import spread_windows
from ..training.text.tokenizer import tokenizer_of
from .sweep import CHECKPOINTS, folder

CONTEXT = 512  # tokens of a window at most
_PROSE = re.compile(r"[A-Za-z ,.;:'\"()!?\n-]{120,}")


@dataclass(frozen=True, eq=False)
class Own:
    """A causal language model and its tokenizer. name: as asked for; of a folder, its own. shipped: whether it is one
    of data/checkpoints. context: tokens of a window."""

    name: str
    shipped: bool
    model: nn.Module
    context: int
    encode: Callable[[str], Tensor]
    decode: Callable[[Tensor], str]

    @property
    def fires(self) -> bool:
        """Return whether a layer of it has a ReLU, whose zeros can be skipped."""
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
    """A model with its tokenizer, in the device's fastest dtype. name: one of data/checkpoints, or what
    `twell_lab.load` takes, a folder or a name of the Hugging Face Hub. Raises what that does, and InputError for a
    folder without a tokenizer."""
    shipped = name in CHECKPOINTS
    called = Path(name).name if os.path.isdir(name) else str(name)
    place = folder(name) if shipped else published.folder_of(name)
    model = published.load(place, dtype=dtype_for(device), device=device)
    if isinstance(model, LanguageModel):
        own, context = tokenizer_of(place, model.config.vocabulary), model.config.context
        encode = lambda text: own.encode([text.encode()]).long()
        decode = lambda tokens: own.decode(tokens).decode("utf-8", "replace")
    else:
        theirs = published.tokenizer_of(Path(place))
        context = getattr(model.config, "max_position_embeddings", None) or CONTEXT
        encode = lambda text: theirs(text, add_special_tokens=False, return_tensors="pt", verbose=False).input_ids[0]
        decode = theirs.decode
    return Own(called, shipped, model, min(CONTEXT, context), encode, decode)


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
    """Return what a model adds to a prompt, always the most likely token. model: `mine.model`, or a swapped copy."""
    said = mine.encode(prompt)[None]
    start = said.shape[1]
    for _ in range(tokens):
        best = logits(model, said[:, -mine.context :])[:, -1].argmax(-1)
        said = torch.cat([said, best[:, None].cpu()], 1)
    return mine.decode(said[0, start:])
