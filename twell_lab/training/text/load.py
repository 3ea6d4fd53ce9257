"""`load_any` reads every kind of text that can be named: a file or folder, a dataset, or a text prepared on disk."""

from __future__ import annotations

import os
from pathlib import Path

from ...core import InputError
from . import datasets, fields, prepared
from .prepared import PreparedText
from .source import Text, load
from .tokenizer import BYTES, Tokenizer, named, train
from .tokenizer import load as load_tokenizer


def load_any(
    spec: str | os.PathLike | Text | PreparedText | None, *, tokenizer: str | os.PathLike | Tokenizer | None = None
) -> Text | PreparedText:
    """Return the text that a command line or a config names, with the tokenizer to read it through.

    Args:
        spec: None (Python's standard library), a path of a file or folder, or of one that `prepare` made,
            "hf:owner/name?subset=...&split=...&bytes=..." (a Hugging Face dataset, see datasets.parse), or a text.
        tokenizer: None (that of the text, or bytes), "bytes", "bpe:4096" (a BPE of that vocabulary, trained on the
            training part of the text), a path of a tokenizer's JSON, or a tokenizer.

    TextError for what can't be read, StackError for an optional package that is missing, and InputError for a wrong
    vocabulary, and another tokenizer than the one that a text was prepared with."""
    if isinstance(spec, (Text, PreparedText)):
        text = spec
    elif spec is not None and prepared.is_prepared(spec):
        text = prepared.load(spec)
    elif isinstance(spec, str) and spec.startswith("hf:"):
        text = datasets.from_spec(spec)
    else:
        text = fields.read(spec) or load(spec)
    if tokenizer is None:
        return text
    wanted = named(tokenizer)
    if isinstance(text, PreparedText):
        if wanted not in (text.tokenizer, text.vocabulary):
            raise InputError(
                f"tokenizer is {getattr(tokenizer, 'name', tokenizer)!r}, and the text {text.name!r} was prepared with "
                f"another of {text.vocabulary}; accepted: that one, or a text that is not prepared"
            )
        return text
    return text.read_as(train(text.split()[0], wanted) if isinstance(wanted, int) else wanted)


def tokenizer_of(folder: str | os.PathLike, vocabulary: int) -> Tokenizer:
    """Return the tokenizer that a model's folder holds, or else bytes. InputError where it does not go with a model of
    this vocabulary, which may be larger than that of a BPE."""
    own = Path(folder) / "tokenizer.json"
    found = load_tokenizer(own) if own.is_file() else BYTES
    if found.vocabulary > vocabulary or found == BYTES and vocabulary != BYTES.vocabulary:
        read = f"the tokenizer in {str(own)!r}" if own.is_file() else f"bytes, as there is no {str(own)!r}"
        raise InputError(
            f"the model has a vocabulary of {vocabulary}, and {found.vocabulary} would be read: {read}; accepted: a "
            "model folder with the tokenizer that the model was trained with"
        )
    return found
