"""A Hugging Face dataset as a text: streamed from its beginning, as much of it as is asked for.

Needs the `datasets` library, an optional package, and a network for a dataset of the Hub. The paper (arXiv 2603.23198)
trains on a deduplicated fineweb-edu; "hf:HuggingFaceFW/fineweb-edu?subset=sample-10BT" is a sample of the original."""

from __future__ import annotations

import os
from collections.abc import Iterator
from urllib.parse import parse_qsl

from ...core import InputError, TextError
from .tokenizer import optional

SEPARATOR = b"\n\n"  # after each document: shows the model where one ends
_PARTS = {"subset": None, "split": "train", "column": "text", "bytes": None, "revision": None}


def parse(spec: str) -> dict:
    """Return the parts of "hf:owner/name?subset=sample-10BT&split=train&column=text&bytes=1e8&revision=main".

    dataset: "owner/name" on the Hub, or a folder of .jsonl, .parquet or .csv files; the others may be left out. column:
    holds the documents. bytes: after which the last document is cut. InputError for a part of another name, or bytes
    that are no whole number from 1 up."""
    name, _, rest = spec.removeprefix("hf:").partition("?")
    try:
        parts = dict(parse_qsl(rest, keep_blank_values=True, strict_parsing=bool(rest)))
        size = float(parts["bytes"]) if "bytes" in parts else None
        if not name or not parts.keys() <= _PARTS.keys() or size is not None and (size < 1 or size % 1):
            raise ValueError
        return {**_PARTS, **parts, "dataset": name, "bytes": None if size is None else int(size)}
    except (ValueError, OverflowError):
        raise InputError(
            f"{spec!r} names no text; accepted: hf:owner/name, then ? and {', '.join(_PARTS)}, each with = and a value "
            "(of bytes a whole number from 1 up, such as 100e6), & between them"
        ) from None


def documents(parts: dict) -> Iterator[bytes]:
    """Yield the documents of a dataset in their order, streamed: of each that is not empty its bytes and an empty
    line.

    parts: from `parse`. StackError without the library, and TextError, naming what was asked for, where the dataset is
    not there or cannot be reached, or lacks the subset, split or column."""
    library, size = optional("datasets", "a Hugging Face dataset"), 0
    dataset, subset, split, column = (parts[name] for name in ("dataset", "subset", "split", "column"))
    tried = f"the dataset {dataset!r} (subset {subset!r}, split {split!r})"
    try:
        for row in library.load_dataset(dataset, subset, split=split, revision=parts["revision"], streaming=True):
            if column not in row:
                raise TextError(f"{tried} has no column {column!r}; accepted: {', '.join(map(repr, row))}")
            document = row[column]
            if document is not None and not isinstance(document, str):
                raise TextError(f"{tried} holds a {type(document).__name__} in {column!r}; accepted: text")
            if document:
                left = None if parts["bytes"] is None else parts["bytes"] - size
                piece = (document.encode("utf-8", "surrogatepass") + SEPARATOR)[:left]
                size += len(piece)
                yield piece
            if size == parts["bytes"]:
                return
    except TextError:
        raise
    except Exception as error:  # the library, the Hub's client and the network each raise their own kinds
        raise TextError(
            f"cannot read {tried} beyond {size} bytes: {type(error).__name__}: {' '.join(str(error).split())}; "
            "accepted: a folder that is here, or a dataset of the Hub, which needs a network"
        ) from error


def name_of(parts: dict) -> str:
    """Return dataset, subset and split, for records; of a folder only its name."""
    return ", ".join(part for part in (shown(parts["dataset"]), parts["subset"], parts["split"]) if part)


def shown(dataset: str) -> str:
    """Return what records call a dataset: never a path of this machine."""
    return os.path.basename(os.path.abspath(dataset)) if os.path.isdir(dataset) else dataset
