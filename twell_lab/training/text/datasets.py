"""A Hugging Face dataset as a text: streamed from its beginning, as much of it as is asked for.

Needs the `datasets` library, an optional package, and a network for a dataset of the Hub. The paper (arXiv 2603.23198)
trains on a deduplicated fineweb-edu; "hf:HuggingFaceFW/fineweb-edu?subset=sample-10BT" is a sample of 10 billion tokens
of the original. Nothing is kept on disk here but what the library itself caches; twell_lab.training.text.prepared
encodes a whole dataset and keeps it."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from urllib.parse import parse_qsl

from ...core import InputError, TextError
from .source import LARGEST, Text, of_pieces, optional

MOST_BYTES = 100_000_000  # unless said otherwise: a few minutes of a good connection
SEPARATOR = b"\n\n"  # after each document: shows the model where one ends
_PARTS = {"subset": "subset", "split": "split", "column": "column", "bytes": "most_bytes", "revision": "revision"}


@dataclass(frozen=True)
class Documents:
    """The documents of a dataset in their order, streamed: iterating gives the bytes of each and an empty line.

    Iterating raises StackError without the `datasets` library, and TextError, naming what was asked for, where the
    dataset is not there or cannot be reached, lacks the subset, split or column, or holds no text.

    Attributes:
        dataset: "owner/name" on the Hub, or a folder of .jsonl, .parquet, .csv or .txt files.
        subset: a configuration of the dataset ("sample-10BT").
        split: which part of the dataset.
        column: the one that holds the documents; empty documents are left out.
        revision: a branch, tag or commit of the dataset.
        most_bytes: the last document is cut where so many end.
    """

    dataset: str
    subset: str | None = None
    split: str = "train"
    column: str = "text"
    revision: str | None = None
    most_bytes: int = sys.maxsize

    @property
    def folder(self) -> str | None:
        """Return the dataset's folder; None for a dataset of the Hub."""
        return self.dataset if os.path.isdir(self.dataset) else None

    @property
    def name(self) -> str:
        """Return dataset, subset and split, for records; of a folder only its name."""
        return ", ".join(part for part in (self._shown, self.subset, self.split) if part)

    @property
    def _shown(self) -> str:
        return os.path.basename(os.path.abspath(self.dataset)) if self.folder else self.dataset

    def __iter__(self) -> Iterator[bytes]:
        library, size = optional("datasets", "a Hugging Face dataset"), 0
        tried = f"the dataset {self.dataset!r} (subset {self.subset!r}, split {self.split!r})"
        try:
            # Text files are read as one document each, not as one a line.
            whole = {"sample_by": "document"} if self.folder and _only_txt(self.folder) else {}
            rows = library.load_dataset(
                self.dataset, self.subset, split=self.split, revision=self.revision, streaming=True, **whole
            )
            rows = iter(rows)
            first = next(rows, {})
            if self.column not in first:
                columns = ", ".join(map(repr, first)) or "none, it is empty"
                raise TextError(f"{tried} has no column {self.column!r}; accepted: {columns}")
            for document in (row[self.column] for row in chain([first], rows)):
                if document is not None and not isinstance(document, str):
                    raise TextError(f"{tried} holds a {type(document).__name__} in {self.column!r}; accepted: text")
                if document:
                    piece = (document.encode("utf-8", "surrogatepass") + SEPARATOR)[: self.most_bytes - size]
                    size += len(piece)
                    yield piece
                if size >= self.most_bytes:
                    return
        except TextError:
            raise
        except Exception as error:  # the library, the Hub's client and the network each raise their own kinds
            raise TextError(
                f"cannot read {tried} beyond {size} bytes: {type(error).__name__}: {' '.join(str(error).split())}; "
                "accepted: a folder that is here, or a dataset of the Hub, which needs a network"
            ) from error
        if not size:
            raise TextError(f"{tried} holds no text: every document in {self.column!r} is empty")

    def source(self, documents: int) -> dict:
        """Return where the text comes from, for a record: dataset, subset, split, column, the number of documents, and
        for a dataset of the Hub its commit and licence, None for what the Hub does not say."""
        fields = {"dataset": self._shown, "subset": self.subset, "split": self.split, "column": self.column}
        fields["documents"] = documents
        if self.folder:
            return fields
        try:
            from huggingface_hub import HfApi

            info = HfApi().dataset_info(self.dataset, revision=self.revision)
            return {**fields, "revision": info.sha, "licence": (info.card_data or {}).get("license")}
        except Exception:  # noqa: BLE001  the text itself was read: its commit and licence may be missing
            return {**fields, "revision": self.revision, "licence": None}


def from_spec(spec: str) -> Text:
    """Return the text that "hf:owner/name?..." names on a command line (see `parse`): its first MOST_BYTES bytes,
    unless it says how many, its documents as files. InputError for more than memory is to hold."""
    documents = Documents(**{"most_bytes": MOST_BYTES, **parse(spec)})
    if documents.most_bytes > LARGEST:
        raise InputError(f"bytes is more than {LARGEST} in {spec!r}; more is for twell-lab prepare")
    pieces = list(documents)
    return of_pieces(f"{documents.name}, first {sum(map(len, pieces)):,} bytes", pieces, documents.source(len(pieces)))


def parse(spec: str) -> dict:
    """Return the fields of Documents in
    "hf:owner/name?subset=sample-10BT&split=train&column=text&bytes=1e8&revision=main", all but the name optional.

    InputError for a part of another name, or bytes that are no whole number from 1 up.
    """
    name, _, rest = spec.removeprefix("hf:").partition("?")
    try:
        parts = dict(parse_qsl(rest, keep_blank_values=True, strict_parsing=bool(rest)))
        fields: dict = {_PARTS[part]: value for part, value in parts.items()}
        if "bytes" in parts:
            fields["most_bytes"] = int(float(parts["bytes"]))
        if not name or fields.get("most_bytes", 1) < 1 or float(parts.get("bytes", 1)) % 1:
            raise ValueError
    except (ValueError, KeyError, OverflowError):
        raise InputError(
            f"{spec!r} names no text; accepted: hf:owner/name, then ? and {', '.join(_PARTS)}, each with = and a value "
            "(of bytes a whole number from 1 up, such as 100e6), & between them"
        ) from None
    return {"dataset": name, **fields}


def _only_txt(folder: str) -> bool:
    paths = [path for path in Path(folder).rglob("*") if path.is_file() and path.name[0] != "."]
    return bool(paths) and all(path.suffix == ".txt" for path in paths)
