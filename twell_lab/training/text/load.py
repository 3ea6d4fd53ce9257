"""`load_any` reads every kind of text that can be named: a file or folder, a dataset, or a text prepared on disk."""

from __future__ import annotations

import os
from pathlib import Path

from ...core import InputError
from . import prepared
from .prepared import PreparedText
from .source import Text, load
from .tokenizer import BYTES, Tokenizer, named, train
from .tokenizer import load as load_tokenizer


def load_any(
    spec: str | os.PathLike | Text | PreparedText | None, *, tokenizer: str | os.PathLike | Tokenizer | None = None
) -> Text | PreparedText:
    """Return the text that a command line or a config names, with the tokenizer to read it through.

    Args:
        spec: as for source.load, a folder that `prepare` made, or a text.
        tokenizer: None (that of the text, or bytes), "bytes", "bpe:4096" (a BPE of that vocabulary, trained on the
            training part of the text), a path of a tokenizer's JSON, or a tokenizer.

    TextError for what can't be read, StackError for an optional package that is missing, and InputError for a wrong
    vocabulary, and another tokenizer than the one that a text was prepared with."""
    if isinstance(spec, (Text, PreparedText)):
        text = spec
    else:
        text = prepared.load(spec) if spec is not None and prepared.is_prepared(spec) else load(spec)
    if tokenizer is None:
        return text
    wanted = named(tokenizer)
    if isinstance(text, Text):
        return text.read_as(train(text.split()[0], wanted) if isinstance(wanted, int) else wanted)
    if wanted not in (text.tokenizer, text.vocabulary):
        raise InputError(
            f"tokenizer is {getattr(tokenizer, 'name', tokenizer)!r}, and the text {text.name!r} was prepared with "
            f"another of {text.vocabulary}; accepted: that one, or a text that is not prepared"
        )
    return text


def tokenizer_of(folder: str | os.PathLike, vocabulary: int) -> Tokenizer:
    """Return the tokenizer that a model's folder holds, or else bytes. InputError where it does not go with a model of
    this vocabulary, which may be larger than that of a BPE."""
    path = Path(folder) / "tokenizer.json"
    own = load_tokenizer(path) if path.is_file() else BYTES
    if own.vocabulary > vocabulary or own == BYTES and vocabulary != BYTES.vocabulary:
        read = f"the tokenizer in {str(path)!r}" if path.is_file() else f"bytes, as there is no {str(path)!r}"
        raise InputError(
            f"the model has a vocabulary of {vocabulary}, and {own.vocabulary} would be read: {read}; accepted: a "
            "model folder with the tokenizer that the model was trained with"
        )
    return own
