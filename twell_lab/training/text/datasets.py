"""A Hugging Face dataset as a text: streamed from its beginning, as much of it as is asked for.

Needs the `datasets` library, which the extra "text" installs, and a network for a dataset of the Hub. The paper (arXiv
2603.23198) trains on a deduplicated fineweb-edu; FINEWEB_EDU names a sample of 10 billion tokens of the original.
Nothing is kept on disk here but what the library itself caches; twell_lab.training.text.prepared encodes a whole
dataset and keeps it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from urllib.parse import parse_qsl

from ...core import InputError, TextError
from .source import LARGEST, Text, extra, of_pieces

FINEWEB_EDU = "hf:HuggingFaceFW/fineweb-edu?subset=sample-10BT"
MOST_BYTES = 100_000_000  # unless said otherwise: a few minutes of a good connection
SEPARATOR = b"\n\n"  # after each document: shows the model where one ends


def from_hub(
    name: str | os.PathLike,
    *,
    subset: str | None = None,
    split: str = "train",
    column: str = "text",
    most_bytes: int = MOST_BYTES,
    revision: str | None = None,
) -> Text:
    """The first `most_bytes` bytes of a dataset, its documents in their order, an empty line after each.

    The last document is cut where the bytes end. The text's `source` says the dataset (of a folder only its name),
    subset, split, column and number of documents, and for a dataset of the Hub the commit and licence where the Hub
    gives them. The SHA-256 is of the bytes that were read.

    Args:
        name: "owner/name" on the Hub, or a folder of .jsonl, .parquet, .csv or .txt files.
        subset: a configuration of the dataset ("sample-10BT").
        split: which part of the dataset.
        column: the one that holds the documents; empty documents are left out.
        most_bytes: 1 to 1 GiB.
        revision: a branch, tag or commit of the dataset.

    Raises:
        TextError: naming what was asked for, where the dataset is not there or cannot be reached, lacks the subset,
            split or column, or holds no text.
        InputError: for `most_bytes` outside these limits.
        StackError: without the `datasets` library.
    """
    if isinstance(most_bytes, bool) or not isinstance(most_bytes, int) or not 1 <= most_bytes <= LARGEST:
        raise InputError(
            f"most_bytes is {most_bytes!r}; accepted: a whole number from 1 to {LARGEST}; more is for twell-lab prepare"
        )
    documents = Documents(name, subset=subset, split=split, column=column, revision=revision, most_bytes=most_bytes)
    pieces = list(documents)
    return of_pieces(f"{documents.name}, first {sum(map(len, pieces)):,} bytes", pieces, documents.source(len(pieces)))


class Documents:
    """The documents of a dataset in their order, streamed: iterating gives the bytes of each and an empty line.

    The arguments and errors are those of `from_hub`, except that most_bytes has no limit.

    Attributes:
        name: dataset, subset and split, for records.
        folder: the dataset's folder; None for a dataset of the Hub.
    """

    def __init__(
        self,
        dataset: str | os.PathLike,
        *,
        subset: str | None = None,
        split: str = "train",
        column: str = "text",
        revision: str | None = None,
        most_bytes: int = sys.maxsize,
    ) -> None:
        self.library = extra("datasets", "a Hugging Face dataset")
        self.dataset, self.most_bytes = os.fspath(dataset), most_bytes
        self.folder = self.dataset if os.path.isdir(self.dataset) else None
        self.said = {"subset": subset, "split": split, "column": column, "revision": revision}
        said = ", ".join(f"{key} {value!r}" for key, value in self.said.items() if value)
        self.tried = f"the dataset {self.dataset!r} ({said})"
        self.shown = os.path.basename(os.path.abspath(self.dataset)) if self.folder else self.dataset
        self.name = ", ".join(part for part in (self.shown, subset, split) if part)

    def __iter__(self) -> Iterator[bytes]:
        subset, split, column, revision = self.said.values()
        try:
            # Text files are read as one document each, not as one a line.
            whole = {"sample_by": "document"} if self.folder and _only_txt(self.folder) else {}
            rows = iter(
                self.library.load_dataset(self.dataset, subset, split=split, revision=revision, streaming=True, **whole)
            )
            first = next(rows, {})
        except Exception as error:  # the library, the Hub's client and the network each raise their own kinds
            raise TextError(
                f"cannot open {self.tried}: {_said(error)}; accepted: a folder that is here, or a dataset "
                "of the Hub, which needs a network"
            ) from error
        if column not in first:
            raise TextError(
                f"{self.tried} has no column {column!r}; accepted: {', '.join(map(repr, first)) or 'none, it is empty'}"
            )
        size = 0
        try:
            for document in (row[column] for row in chain([first], rows)):
                if document is not None and not isinstance(document, str):
                    raise TextError(f"{self.tried} holds a {type(document).__name__} in {column!r}; accepted: text")
                if document:
                    piece = (document.encode("utf-8", "surrogatepass") + SEPARATOR)[: self.most_bytes - size]
                    size += len(piece)
                    yield piece
                if size >= self.most_bytes:
                    return
        except TextError:
            raise
        except Exception as error:
            raise TextError(
                f"{self.tried} broke off after {size} bytes: {_said(error)}; accepted: at most that many, "
                "or another try"
            ) from error
        if not size:
            raise TextError(f"{self.tried} holds no text: every document in {column!r} is empty")

    def source(self, documents: int) -> dict:
        """Where the text comes from, for a record: dataset, subset, split, column, the number of documents, and for a
        dataset of the Hub its commit and licence."""
        about = {} if self.folder else _about(self.dataset, self.said["revision"])
        said = {key: self.said[key] for key in ("subset", "split", "column")}
        return {"dataset": self.shown, **said, "documents": documents, **about}


def from_spec(spec: str) -> Text:
    """The text that "hf:owner/name?..." names on a command line (see `parse`), by `from_hub`."""
    parts = parse(spec)
    return from_hub(parts.pop("dataset"), **parts)


def parse(spec: str) -> dict:
    """The arguments of Documents in "hf:owner/name?subset=sample-10BT&split=train&column=text&bytes=1e8&revision=main".

    What is left out after the name is left out of the dict, too. InputError for a part of another name, or bytes that
    are no whole number from 1 up.
    """
    name, _, rest = spec.removeprefix("hf:").partition("?")
    accepted = ("subset", "split", "column", "bytes", "revision")
    parts = dict(parse_qsl(rest, keep_blank_values=True))
    bare = [part for part in rest.split("&") if part and "=" not in part]
    wrong = [part for part in parts if part not in accepted] or bare
    if wrong or not name:
        raise InputError(
            f"{spec!r} has {wrong or 'no name'}; accepted: hf:owner/name, then ? and {', '.join(accepted)}"
            ", each with = and a value, & between them"
        )
    if "bytes" not in parts:
        return {"dataset": name, **parts}
    said = parts.pop("bytes")
    with suppress(ValueError, OverflowError):
        size = int(said) if said.isascii() and said.isdigit() else float(said)
        if 1 <= size == int(size):
            return {"dataset": name, "most_bytes": int(size), **parts}
    raise InputError(f"bytes is {said!r} in {spec!r}; accepted: a whole number from 1 up, such as 100e6")


def _only_txt(folder: str) -> bool:
    names = [name for _, _, files in os.walk(folder) for name in files if name[0] != "."]
    return bool(names) and all(name.endswith(".txt") for name in names)


def _said(error: Exception) -> str:
    """The kind of an error and its message, in one line: messages of the Hub's client have several."""
    return f"{type(error).__name__}: {' '.join(str(error).split())}"


def _about(name: str, revision: str | None) -> dict:
    """Commit and licence of a dataset of the Hub; None for what the Hub does not say."""
    try:
        from huggingface_hub import HfApi

        info = HfApi().dataset_info(name, revision=revision)
        licence = (info.card_data or {}).get("license")
        return {"revision": info.sha, "licence": licence}
    except Exception:  # noqa: BLE001  the text itself was read: its commit and licence may be missing
        return {"revision": revision, "licence": None}
