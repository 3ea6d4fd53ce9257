"""`load_any` reads every kind of text that can be named: a file or folder, a dataset, or a text prepared on disk."""

from __future__ import annotations

import os
from pathlib import Path

from ...core import InputError
from . import datasets, fields, prepared
from .prepared import PreparedText
from .source import BYTES, Text, Tokenizer, load
from .tokenizer import load as load_tokenizer
from .tokenizer import named, train


def load_any(
    spec: str | os.PathLike | Text | PreparedText | None, *, tokenizer: str | os.PathLike | Tokenizer | None = None
) -> Text | PreparedText:
    """Return the text that a command line or a config names, with the tokenizer to read it through.

    Args:
        spec: None (Python's standard library), a path of a file or folder, or of one that
            twell_lab.training.text.prepared made, "hf:owner/name?subset=...&split=...&bytes=..." (a Hugging Face
            dataset, see twell_lab.training.text.datasets), or a text.
        tokenizer: None (that of the text, or bytes), "bytes", "bpe:4096" (a BPE of that vocabulary, trained on the
            part of the text that `split` gives for training), a path of a tokenizer's JSON, or a tokenizer.

    Raises:
        TextError: for a text, dataset or tokenizer that can't be read.
        InputError: for a vocabulary that is not a whole number from 256 to 2**20, and for another tokenizer than the
            one that a text was prepared with.
        StackError: for an optional package that is missing.
    """
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
    """Return the tokenizer that a saved model's folder holds, or else bytes. InputError unless it has the
    vocabulary."""
    own = Path(folder) / "tokenizer.json"
    found = load_tokenizer(own) if own.is_file() else BYTES
    if found.vocabulary != vocabulary:
        read = f"the tokenizer in {str(own)!r}" if own.is_file() else f"bytes, as there is no {str(own)!r}"
        raise InputError(
            f"the model has a vocabulary of {vocabulary}, and {found.vocabulary} would be read: {read}; accepted: a "
            "model folder with the tokenizer that the model was trained with"
        )
    return found
