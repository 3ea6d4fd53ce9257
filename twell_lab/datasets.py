"""A Hugging Face dataset as a text: streamed from its beginning, as much of it as is asked for.

Needs the `datasets` library, which the extra "text" installs, and for a name on the Hub a network. The paper
(arXiv 2603.23198) trains on a deduplicated fineweb-edu; FINEWEB_EDU names the original's sample of 10 billion tokens,
from which `most_bytes` are read. Nothing is kept on disk but what the library itself caches.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from itertools import chain
from urllib.parse import parse_qsl

import torch

from .errors import InputError, StackError, TextError
from .text import LARGEST, Text, digest

FINEWEB_EDU = "hf:HuggingFaceFW/fineweb-edu?subset=sample-10BT"
MOST_BYTES = 100_000_000  # unless said otherwise: a few minutes of a good connection
SEPARATOR = b"\n\n"  # after each document, whose end a model would not see otherwise


def from_hub(name: str | os.PathLike, *, subset: str | None = None, split: str = "train", column: str = "text",
             most_bytes: int = MOST_BYTES, revision: str | None = None) -> Text:
    """The first `most_bytes` bytes of a dataset, its documents in their order, an empty line after each.

    name: "owner/name" on the Hub, or a folder of .jsonl, .parquet, .csv or .txt files. subset: a configuration of the
    dataset ("sample-10BT"). column: the one that holds the documents; empty ones are left out. revision: a branch, tag
    or commit of the dataset. The last document is cut where the bytes end.

    The text's `source` says dataset, subset, split, column, documents, and for the Hub the commit and licence where it
    gives them; for a folder no more of its path than its name. The SHA-256 is of the bytes that were read.

    Raises TextError naming the dataset and what was tried, for one that is not there or not to be reached, lacks the
    subset, split or column, or holds no text; InputError for a size outside 1 to 1 GiB; StackError without `datasets`.
    """
    if isinstance(most_bytes, bool) or not isinstance(most_bytes, int) or not 1 <= most_bytes <= LARGEST:
        raise InputError(f"most_bytes is {most_bytes!r}; accepted: a whole number from 1 to {LARGEST}")
    library = _library()
    name = os.fspath(name)
    local = os.path.isdir(name)
    said = {"subset": subset, "split": split, "column": column, "revision": revision}
    tried = f"the dataset {name!r} ({', '.join(f'{key} {value!r}' for key, value in said.items() if value)})"
    try:
        rows = iter(library.load_dataset(name, subset, split=split, revision=revision, streaming=True))
        first = next(rows, {})
    except Exception as error:  # the library, the Hub's client and the network each raise their own kinds
        raise TextError(f"cannot open {tried}: {type(error).__name__}: {_line(error)}; accepted: a folder that is here, or a "
                        f"dataset of the Hub, which needs a network") from error
    if column not in first:
        raise TextError(f"{tried} has no column {column!r}; accepted: {', '.join(map(repr, first)) or 'none, it is empty'}")
    pieces: list[bytes] = []
    starts: list[int] = []
    size = 0
    try:
        for document in _documents(chain([first], rows), column, tried):
            starts.append(size)
            pieces.append((document + SEPARATOR)[: most_bytes - size])
            size += len(pieces[-1])
            if size == most_bytes:
                break
    except TextError:
        raise
    except Exception as error:
        raise TextError(f"{tried} broke off after {size} bytes: {type(error).__name__}: {_line(error)}; "
                        f"accepted: at most that many, or another try") from error
    if not pieces:
        raise TextError(f"{tried} holds no text: every document in {column!r} is empty")
    data = torch.frombuffer(bytearray(b"".join(pieces)), dtype=torch.uint8)
    shown = os.path.basename(os.path.abspath(name)) if local else name
    about = {} if local else _about(name, revision)
    source = {"dataset": shown, "subset": subset, "split": split, "column": column, "documents": len(pieces), **about}
    title = ", ".join(part for part in (shown, subset, split) if part)
    return Text(f"{title}, first {size:,} bytes", digest(data), data, tuple(starts), source=source)


def from_spec(spec: str) -> Text:
    """`from_hub` of "hf:owner/name?subset=sample-10BT&split=train&column=text&bytes=100e6&revision=main".

    All after the name may be left out. InputError for a part of another name, or bytes that are no whole number.
    """
    name, _, rest = spec.removeprefix("hf:").partition("?")
    accepted = ("subset", "split", "column", "bytes", "revision")
    parts = dict(parse_qsl(rest, keep_blank_values=True))
    wrong = [part for part in parts if part not in accepted] or [part for part in rest.split("&") if part and "=" not in part]
    if wrong or not name:
        raise InputError(f"{spec!r} has {wrong or 'no name'}; accepted: hf:owner/name, then ? and {', '.join(accepted)}, "
                         f"each with = and a value, & between them")
    if "bytes" in parts:
        said = parts.pop("bytes")
        try:
            parts["most_bytes"] = int(said) if said.isascii() and said.isdigit() else _whole(float(said))
        except (ValueError, OverflowError):
            raise InputError(f"bytes is {said!r} in {spec!r}; accepted: a whole number, such as 100e6") from None
    return from_hub(name, **parts)


def _whole(value: float) -> int:
    if value != int(value):
        raise ValueError(value)
    return int(value)


def _line(error: Exception) -> str:
    """The Hub's client explains itself over several lines."""
    return " ".join(str(error).split())


def _documents(rows: Iterable[dict], column: str, tried: str) -> Iterator[bytes]:
    for row in rows:
        document = row[column]
        if document is not None and not isinstance(document, str):
            raise TextError(f"{tried} holds a {type(document).__name__} in {column!r}; accepted: text")
        if document:
            yield document.encode("utf-8", "surrogatepass")


def _about(name: str, revision: str | None) -> dict:
    """Commit and licence of a dataset of the Hub; None for what it does not say."""
    try:
        from huggingface_hub import HfApi

        info = HfApi().dataset_info(name, revision=revision)
        licence = (info.card_data or {}).get("license")
        return {"revision": info.sha, "licence": licence}
    except Exception:  # noqa: BLE001  the text is here already: what is missing is missing
        return {"revision": revision, "licence": None}


def _library():
    """The datasets library, imported late: other texts need none."""
    try:
        import datasets
    except ImportError:
        raise StackError("a Hugging Face dataset needs the datasets library: pip install 'twell-lab[text]'") from None
    return datasets
