"""A text of any length, prepared once: a folder with all of its tokens in one file, which training maps into memory.

    twell-lab prepare "hf:HuggingFaceFW/fineweb-edu?subset=sample-10BT" --tokenizer bpe:32768 --out texts/edu
    twell-lab train --config 0.5B --text texts/edu --out build/edu

A Text is held in memory as a whole. Here documents are read one after the other, encoded and written, so that the disk alone
sets a limit, and every process of a run maps the same file. In the folder: `tokens.bin`, the numbers one after the other,
little-endian; `tokenizer.json`; and `twell-lab-text.json`, the manifest, written last: without it, the folder is no text.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from . import text as texts
from .errors import InputError, TextError
from .tokenizer import BPE, BYTES, Bytes
from .tokenizer import load as load_tokenizer
from .tokenizer import train as train_tokenizer

if TYPE_CHECKING:
    from .datasets import Documents

MANIFEST, TOKENS, TOKENIZER = "twell-lab-text.json", "tokens.bin", "tokenizer.json"
FORMAT = 1
HELD_OUT = 64 * 2**20  # bytes for validation; a tenth of a shorter text
SAMPLE = 100_000_000  # bytes from the beginning that a BPE is trained on, but for a fifth that may come to be held out
CHUNK = 16 * 2**20  # bytes that are encoded at a time
_KINDS = {"uint8": torch.uint8, "int16": torch.int16, "int32": torch.int32}


@dataclass(frozen=True, eq=False)
class Part:
    """The training or the validation part of a prepared text. tokens: integers [n] on the CPU, mapped from the file."""

    name: str
    size: int
    tokens: Tensor
    tokenizer: Bytes | BPE


@dataclass(frozen=True, eq=False)
class PreparedText:
    """A folder that `prepare` made, for everything that takes a Text to train on or to profile with.

    name, sha256, size, source: of the text's bytes, as Text has them. cut: bytes and tokens of the training part, which comes
    first. asked: the tokenizer as it was asked for, "bytes", "bpe:4096" or None. folder: where the tokens are; never in a record.
    """

    folder: Path
    name: str
    sha256: str
    size: int
    dtype: str
    count: int
    cut: tuple[int, int]
    tokenizer: Bytes | BPE
    source: dict | None = None
    asked: str | None = None

    @property
    def vocabulary(self) -> int:
        """How many token numbers there are: the model's vocabulary."""
        return self.tokenizer.vocabulary

    @cached_property
    def tokens(self) -> Tensor:
        """All tokens [count], uint8, int16 or int32, mapped from the file: what is not read takes no memory."""
        return torch.from_file(str(self.folder / TOKENS), shared=False, size=self.count, dtype=_KINDS[self.dtype])

    def split(self) -> tuple[Part, Part]:
        """The training and the validation part, cut between two documents when the text was prepared."""
        bytes_, tokens = self.cut
        return (Part(f"{self.name}, training part", bytes_, self.tokens[:tokens], self.tokenizer),
                Part(f"{self.name}, validation part", self.size - bytes_, self.tokens[tokens:], self.tokenizer))

    def read_as(self, tokenizer: Bytes | BPE | str) -> PreparedText:
        """Itself, if that is the tokenizer it was prepared with, or what was asked for then; InputError otherwise."""
        if tokenizer not in (self.tokenizer, self.asked):
            raise InputError(f"tokenizer is {getattr(tokenizer, 'name', tokenizer)!r} for a text that was prepared with "
                             f"{self.asked or self.tokenizer.name!r}; accepted: that one, or none")
        return self

    def describe(self) -> dict:
        """As Text.describe."""
        return texts.described(self)


def is_prepared(path: str | os.PathLike) -> bool:
    """Whether `prepare` made this folder."""
    return (Path(path) / MANIFEST).is_file()


def load(folder: str | os.PathLike) -> PreparedText:
    """The text that `prepare` left in a folder. TextError where the manifest or the tokens are damaged or cut short."""
    folder = Path(folder)
    try:
        fields = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        if fields["format"] != FORMAT:
            raise TextError(f"{str(folder)!r} is a text of format {fields['format']!r}; accepted: {FORMAT}")
        made = PreparedText(folder.absolute(), fields["name"], fields["sha256"], int(fields["size"]), fields["dtype"], int(fields["count"]),
                            (int(fields["cut"]["bytes"]), int(fields["cut"]["tokens"])), load_tokenizer(folder / TOKENIZER),
                            fields["source"], fields["asked"])
        held, wanted = (folder / TOKENS).stat().st_size, made.count * _KINDS[made.dtype].itemsize
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise TextError(f"cannot read the prepared text {str(folder)!r}: {type(error).__name__}: {error}") from None
    if held != wanted or not 0 < made.cut[1] < made.count:
        raise TextError(f"{str(folder / TOKENS)!r} has {held} bytes; accepted: {wanted}, as its manifest says: prepare the text again")
    return made


def prepare(spec: str | os.PathLike | texts.Text | None, out: str | os.PathLike, *, tokenizer: str | os.PathLike | Bytes | BPE | None = None,
            on_bytes: Callable[[int], None] | None = None) -> PreparedText:  # fmt: skip
    """Read a text, encode it, and keep it in the folder `out`.

    spec: as for text.load_any; of "hf:owner/name" everything is read unless "bytes" says how much, and held to no size. tokenizer:
    None or "bytes", "bpe:4096" (trained on the first 80 MB of at least 100 MB), a file, or a tokenizer. on_bytes: called with
    the bytes written so far. The last documents are the validation part: 64 MiB, a tenth of a shorter text.

    Raises TextError for a text that can't be read, or whose documents cannot be cut so; InputError for an `out` that is not
    empty; StackError for a package that the extra "text" would install.
    """
    out = Path(out)
    stream = _stream(spec)
    try:
        out.mkdir(parents=True, exist_ok=True)
        if any(path.name != TOKENS for path in out.iterdir()):  # tokens alone: a preparation that was broken off
            raise InputError(f"out is {str(out)!r}, which is not empty; accepted: a new folder")
    except OSError as error:
        raise InputError(f"cannot prepare a text in {str(out)!r}: {error}") from None
    documents = iter(stream)
    tokenizer = "bytes" if tokenizer is None else tokenizer
    asked = tokenizer if tokenizer == "bytes" or isinstance(tokenizer, str) and tokenizer.startswith("bpe:") else None
    if tokenizer == "bytes":
        tokenizer = BYTES
    elif asked is not None:
        vocabulary = texts.vocabulary_of(tokenizer)
        first = list(_first(documents, SAMPLE))
        tokenizer, documents = train_tokenizer(_sample(first, stream.name), vocabulary), chain(first, documents)
    elif not isinstance(tokenizer, (Bytes, BPE)):
        tokenizer = load_tokenizer(tokenizer)
    digest, ends, kind = hashlib.sha256(), [np.zeros((1, 2), np.int64)], None
    with open(out / TOKENS, "wb") as file:
        for chunk in _chunks(documents):
            raw = b"".join(chunk)
            digest.update(raw)
            starts = np.cumsum([0, *(len(each) for each in chunk)])
            data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            tokens = tokenizer.encode(data, tuple(starts[:-1].tolist()))
            kind = tokens.dtype
            tokens.numpy().tofile(file)
            # Where each document ends: no token reaches over it, so a sum of the tokens' lengths meets it.
            upto = tokenizer.lengths[tokens.long()].cumsum(0, dtype=torch.int64)
            places = torch.searchsorted(upto, torch.from_numpy(starts[1:])) + 1
            ends.append(ends[-1][-1] + np.stack([starts[1:], places.numpy()], 1))
            if on_bytes is not None:
                on_bytes(int(ends[-1][-1, 0]))
    ends = np.concatenate(ends)[1:]
    if not len(ends):
        raise TextError(f"{stream.name} holds no text")
    cut = _cut(ends, stream.name)
    tokenizer.save(out / TOKENIZER)
    size, count = ends[-1].tolist()
    fields = {"format": FORMAT, "name": stream.name, "sha256": digest.hexdigest(), "size": size, "dtype": str(kind).removeprefix("torch."),
              "count": count, "documents": len(ends), "cut": {"bytes": cut[0], "tokens": cut[1]}, "asked": asked, "source": stream.source(len(ends))}
    part = out / (MANIFEST + ".part")
    part.write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
    part.replace(out / MANIFEST)
    return load(out)


def _cut(ends: np.ndarray, name: str) -> tuple[int, int]:
    """Bytes and tokens before the validation part: the end of a document, nearest to where it should begin."""
    size = int(ends[-1, 0])
    wanted = size - min(HELD_OUT, size // 10)
    if len(ends) > 1:
        cut = min(ends[:-1].tolist(), key=lambda end: abs(end[0] - wanted))
        if size - cut[0] <= 4 * (size - wanted):
            return tuple(cut)
    raise TextError(f"{name} has {len(ends)} documents that cannot be cut so that about {size - wanted} of {size} bytes are held out; "
                    f"accepted: more and shorter documents")


def _first(documents: Iterator[bytes], size: int) -> Iterator[bytes]:
    """Documents until they have this many bytes."""
    while size > 0 and (document := next(documents, b"")):
        size -= len(document)
        yield document


def _sample(documents: list[bytes], name: str) -> texts.Text:
    """Four fifths of these, which are none that will be held out; the first in any case."""
    ends = np.cumsum([len(each) for each in documents])
    some = documents[: max(1, int((ends <= 0.8 * ends[-1]).sum()))] if documents else []
    if not some:
        raise TextError(f"{name} holds no text")
    data = torch.frombuffer(bytearray(b"".join(some)), dtype=torch.uint8)
    return texts.Text(f"the beginning of {name}", texts.digest(data), data, (0, *ends[: len(some) - 1].tolist()))


def _chunks(documents: Iterable[bytes]) -> Iterator[list[bytes]]:
    chunk, size = [], 0
    for document in documents:
        chunk.append(document)
        size += len(document)
        if size >= CHUNK:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


class _Whole:
    """The files of a Text, as documents."""

    def __init__(self, text: texts.Text) -> None:
        self.text, self.name = text, text.name

    def __iter__(self) -> Iterator[bytes]:
        for begin, end in zip(self.text.starts, (*self.text.starts[1:], self.text.size), strict=True):
            if end > begin:
                yield self.text.data[begin:end].numpy().tobytes()

    def source(self, documents: int) -> dict | None:
        return self.text.source


def _stream(spec) -> _Whole | Documents:
    """Something to iterate over, with `name` and `source`."""
    if isinstance(spec, str) and spec.startswith("hf:"):
        from .datasets import Documents, parse

        parts = parse(spec)
        return Documents(most_bytes=parts.pop("most_bytes", math.inf), **parts)
    if isinstance(spec, (str, os.PathLike)) and is_prepared(spec):
        raise InputError(f"{os.fspath(spec)!r} is a prepared text already; accepted: the text it was made from")
    return _Whole(spec if isinstance(spec, texts.Text) else texts.load(spec))
