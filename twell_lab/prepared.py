"""A text of any length, prepared once: a folder with all of its tokens in one file, which training maps into memory.

    twell-lab prepare "hf:HuggingFaceFW/fineweb-edu?subset=sample-10BT" --tokenizer bpe:32768 --out texts/edu
    twell-lab train --config 0.5B --text texts/edu --out build/edu

A Text is held in memory as a whole. Here documents are read one after the other, long files in pieces, encoded and written, so
that the disk alone sets a limit, and every process of a run maps the same file. In the folder: `tokens.bin`, the numbers one
after the other, little-endian; `tokenizer.json`; and `twell-lab-text.json`, the manifest, written last: without it, the folder
is no text. It holds the SHA-256 of both files and of itself. A preparation that was killed is cleared away by the next one.
"""

from __future__ import annotations

import hashlib
import math
import os
import reprlib
import stat
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
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
from .lock import NAME as LOCK
from .lock import Lock
from .seal import seal, sha256, to_disk, unseal
from .tokenizer import BPE, BYTES, Bytes, check_trainable, cut_after
from .tokenizer import CHUNK as PIECE
from .tokenizer import load as load_tokenizer
from .tokenizer import train as train_tokenizer

if TYPE_CHECKING:
    from .datasets import Documents

MANIFEST, TOKENS, TOKENIZER = "twell-lab-text.json", "tokens.bin", "tokenizer.json"
FORMAT = 1
HELD_OUT = 64 * 2**20  # bytes for validation; a tenth of a shorter text
SAMPLE = 100_000_000  # bytes from the beginning that a BPE is trained on, but for a fifth that may come to be held out
CHUNK = 16 * 2**20  # bytes that are encoded at a time
_NAMES = {f"{name}{part}" for name in (TOKENS, TOKENIZER, MANIFEST) for part in ("", ".part")}  # in the folder at some time
CHECKED = 2**30  # bytes of tokens that are read when a text is opened, to see that they are those that were written
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
    files: the SHA-256 of each file, None in a text from before they were noted.
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
    files: dict | None = None

    @property
    def vocabulary(self) -> int:
        """How many token numbers there are: the model's vocabulary."""
        return self.tokenizer.vocabulary

    @cached_property
    def tokens(self) -> Tensor:
        """All tokens [count], uint8, int16 or int32, mapped from the file: what is not read takes no memory."""
        return torch.from_file(str(self.folder / TOKENS), shared=False, size=self.count, dtype=_KINDS[self.dtype])

    def check(self) -> None:
        """Read all tokens, however many, and raise TextError where they are not those that were written."""
        if self.files is not None:
            _same(self.folder / TOKENS, self.files)

    def split(self) -> tuple[Part, Part]:
        """The training and the validation part, cut between two documents or pieces when the text was prepared."""
        bytes_, tokens = self.cut
        return (Part(f"{self.name}, training part", bytes_, self.tokens[:tokens], self.tokenizer),
                Part(f"{self.name}, validation part", self.size - bytes_, self.tokens[tokens:], self.tokenizer))

    def read_as(self, tokenizer: Bytes | BPE | str) -> PreparedText:
        """Itself, if that is the tokenizer it was prepared with, or what was asked for then; InputError otherwise."""
        wanted = BYTES if tokenizer == "bytes" else tokenizer
        if wanted not in (self.tokenizer, self.asked):
            raise InputError(f"{getattr(wanted, 'name', wanted)!r} is not the tokenizer that the text {self.name!r} was prepared with, "
                             f"{self.asked or self.tokenizer.name!r}; accepted: that one, or a text that is not prepared")
        return self

    def describe(self) -> dict:
        """As Text.describe."""
        return texts.described(self)


def is_prepared(path: str | os.PathLike) -> bool:
    """Whether `prepare` made this folder."""
    try:
        return (Path(path) / MANIFEST).is_file()
    except (OSError, ValueError):  # no path that could be
        return False


def load(folder: str | os.PathLike) -> PreparedText:
    """The text that `prepare` left in a folder. TextError where the manifest, the tokenizer or the tokens are not those of one
    preparation, or changed since. Of tokens of more than CHECKED bytes, here, their length alone is looked at, and
    PreparedText.check() reads them."""
    folder = Path(folder)
    try:
        fields = unseal((folder / MANIFEST).read_bytes())
        if (form := fields["format"]) != FORMAT:
            raise TextError(f"{str(folder)!r} is a prepared text of format {form!r}; accepted: {FORMAT}")
        _check_types(folder, fields)
        if (files := fields.get("files")) is not None:
            _same(folder / TOKENIZER, files)
        tokenizer = load_tokenizer(folder / TOKENIZER)
        made = PreparedText(folder.absolute(), fields["name"], fields["sha256"], fields["size"], fields["dtype"], fields["count"],
                            (fields["cut"]["bytes"], fields["cut"]["tokens"]), tokenizer, fields["source"], fields["asked"], files)
        held, wanted = (folder / TOKENS).stat().st_size, made.count * _KINDS[made.dtype].itemsize
        same = fields["tokenizer"] == tokenizer.describe().get("sha256")
    except TextError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise TextError(f"cannot read the prepared text {str(folder)!r}: {type(error).__name__}: {error}") from None
    if not same:
        raise TextError(f"{str(folder / TOKENIZER)!r} is not the tokenizer that the text was prepared with: prepare it again")
    if held != wanted or not 0 < made.cut[1] < made.count or not 0 < made.cut[0] < made.size:
        raise TextError(f"{str(folder / TOKENS)!r} has {held} bytes, and the manifest asks for {wanted}, cut at {made.cut} of {made.size} bytes "
                        f"and {made.count} tokens: prepare the text again")
    if held <= CHECKED:
        made.check()
    return made


def _check_types(folder: Path, fields: dict) -> None:
    """TextError naming a field of the manifest that is not what `prepare` writes there."""
    def some(value, *kinds) -> bool:
        return isinstance(value, kinds) and not isinstance(value, bool)

    cut, files = fields["cut"], fields.get("files")
    fits = {"name": some(fields["name"], str), "sha256": some(fields["sha256"], str), "size": some(fields["size"], int),
            "dtype": some(fields["dtype"], str) and fields["dtype"] in _KINDS, "count": some(fields["count"], int),
            "cut": some(cut, dict) and some(cut.get("bytes"), int) and some(cut.get("tokens"), int),
            "source": some(fields["source"], dict, type(None)), "asked": some(fields["asked"], str, type(None)),
            "files": files is None or some(files, dict) and {TOKENS, TOKENIZER} <= files.keys()}
    for name, fit in fits.items():
        if not fit:
            raise TextError(f"{name} in {str(folder / MANIFEST)!r} is {reprlib.repr(fields.get(name))}, which is nothing that was written "
                            "there: prepare the text again")


def _same(path: Path, files: dict) -> None:
    """TextError unless the file has the SHA-256 that was noted."""
    try:
        found = sha256(path)
    except OSError as error:
        raise TextError(f"cannot read {str(path)!r}: {error}") from None
    if found != files[path.name]:
        raise TextError(f"{str(path)!r} was altered after it was written: its SHA-256 is {found}, and {files[path.name]} is noted in "
                        f"{MANIFEST}: prepare the text again")


def prepare(spec: str | os.PathLike | texts.Text | None, out: str | os.PathLike, *, tokenizer: str | os.PathLike | Bytes | BPE | None = None,
            on_bytes: Callable[[int], None] | None = None) -> PreparedText:  # fmt: skip
    """Read a text, encode it, and keep it in the folder `out`.

    spec: as for text.load_any; of "hf:owner/name" everything is read unless "bytes" says how much. Files may have any size.
    tokenizer: None or "bytes", "bpe:4096" (trained on the first 80 MB of at least 100 MB), a file, or a tokenizer. on_bytes:
    called with the bytes written so far. The end of the text is the validation part: 64 MiB, a tenth of a shorter text.

    Raises TextError for a text that can't be read, or is so short and in so few documents that none can be held out;
    InputError for an `out` that is not empty, can't be written or lies in the text's folder, and for a wrong vocabulary;
    StackError for a package that the extra "text" would install. What was begun is removed then.
    """
    from .checkpoint import check_apart  # whose TrainConfig takes texts of this kind

    out = Path(out)
    stream = _stream(spec)
    tokenizer = "bytes" if tokenizer is None else tokenizer
    asked = tokenizer if tokenizer == "bytes" or isinstance(tokenizer, str) and tokenizer.startswith("bpe:") else None
    if asked == "bytes":
        tokenizer = BYTES
    elif asked is not None:
        check_trainable(texts.vocabulary_of(asked))
    elif not isinstance(tokenizer, (Bytes, BPE)):
        tokenizer = load_tokenizer(tokenizer)
    check_apart(out, stream.folder)
    with _writing(out) as file:
        documents = iter(stream)
        if isinstance(tokenizer, str):
            first = list(_first(documents, SAMPLE))
            tokenizer = train_tokenizer(_sample(first, stream.name), texts.vocabulary_of(asked))
            documents = chain(first, documents)
        digest, kept, ends, kind = hashlib.sha256(), hashlib.sha256(), [np.zeros((1, 2), np.int64)], None
        for chunk in _chunks(documents):
            raw = b"".join(chunk)
            digest.update(raw)
            starts = np.cumsum([0, *(len(each) for each in chunk)])
            data = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
            tokens = tokenizer.encode(data, tuple(starts[:-1].tolist()))
            kind = tokens.dtype
            file.write(encoded := tokens.numpy().tobytes())
            kept.update(encoded)
            # Where each document ends: no token reaches over it, so a sum of the tokens' lengths meets it.
            upto = tokenizer.lengths[tokens.long()].cumsum(0, dtype=torch.int64)
            places = torch.searchsorted(upto, torch.from_numpy(starts[1:])) + 1
            ends.append(ends[-1][-1] + np.stack([starts[1:], places.numpy()], 1))
            if on_bytes is not None:
                on_bytes(int(ends[-1][-1, 0]))
        ends = np.concatenate(ends)[1:]
        if not len(ends):
            raise TextError(f"{stream.name} holds no text")
        cut, (size, count) = _cut(ends, stream.name), ends[-1].tolist()
        tokenizer.save(out / TOKENIZER)
        fields = {"format": FORMAT, "name": stream.name, "sha256": digest.hexdigest(), "size": size, "dtype": str(kind).removeprefix("torch."),
                  "count": count, "pieces": len(ends), "cut": {"bytes": cut[0], "tokens": cut[1]}, "asked": asked,
                  "tokenizer": tokenizer.describe().get("sha256"), "source": stream.source(len(ends)),
                  "files": {TOKENS: kept.hexdigest(), TOKENIZER: sha256(out / TOKENIZER)}}
        (out / f"{MANIFEST}.part").write_bytes(seal(fields))
    return load(out)


@contextmanager
def _writing(out: Path) -> Iterator:
    """The file of the tokens, under another name until all is well, as the manifest is; one process alone can have it. Nothing is
    left behind where something fails, nor of a preparation that was killed here."""
    parts = [out / f"{name}.part" for name in (TOKENS, MANIFEST)]
    lock, begun = Lock(out, "preparation"), False
    try:
        out.mkdir(parents=True, exist_ok=True)
        lock.take()
        found = sorted(path.name for path in out.iterdir() if path.name != LOCK)
        if any(part.name in found for part in parts) and MANIFEST not in found and {*found} <= _NAMES:  # one that was killed
            _clear(out)
        elif found:
            raise InputError(f"out is {str(out)!r}, which holds {found[0]!r}; accepted: a new folder, or this one once it is empty")
        with open(parts[0], "xb") as file:
            begun = True
            yield file
        for path in (*parts, out / TOKENIZER):
            to_disk(path)
        for path in parts:  # the manifest last
            path.replace(path.with_suffix(""))
        to_disk(out)
        lock.release()
    except BaseException as error:
        if begun:
            _clear(out)
        lock.release()
        with suppress(OSError):
            out.rmdir()
        if isinstance(error, OSError):
            raise InputError(f"cannot prepare a text in {str(out)!r}: {error}") from None
        raise


def _clear(out: Path) -> None:
    """Remove all that a preparation writes; what can't be removed stays."""
    for name in (MANIFEST, *sorted(_NAMES, key=lambda name: name.endswith(".part"))):  # last what tells that it was not finished
        with suppress(OSError):
            (out / name).unlink()


def _cut(ends: np.ndarray, name: str) -> tuple[int, int]:
    """Bytes and tokens before the validation part: the end of a document or piece, nearest to where it should begin."""
    size = int(ends[-1, 0])
    share = min(HELD_OUT, size // 10)
    if len(ends) > 1:
        cut = ends[:-1][np.abs(ends[:-1, 0] - (size - share)).argmin()].tolist()
        if share / 2 <= size - cut[0] <= 2 * share:
            return tuple(cut)
    itself = ", or the text itself, which memory can hold" if size <= texts.LARGEST else ""
    raise TextError(f"{name} has {size} bytes in {len(ends)} documents or pieces, none of which begins so that about {share} bytes are "
                    f"held out; accepted: more and shorter documents{itself}")


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


# ---- where documents come from: something to iterate over, with a name, a source for the record and, if local, a folder ----


def _stream(spec) -> _Whole | _Files | Documents:
    if isinstance(spec, PreparedText) or isinstance(spec, (str, os.PathLike)) and is_prepared(spec):
        raise InputError(f"{getattr(spec, 'folder', spec)!s} is a prepared text already; accepted: the text it was made from")
    if isinstance(spec, str) and spec.startswith("hf:"):
        from .datasets import Documents, parse

        parts = parse(spec)
        return Documents(most_bytes=parts.pop("most_bytes", math.inf), **parts)
    if isinstance(spec, (str, os.PathLike)):
        return _Files(Path(spec))
    return _Whole(spec if isinstance(spec, texts.Text) else texts.load(spec))


class _Whole:
    """A Text's files, long ones in pieces."""

    folder = None

    def __init__(self, text: texts.Text) -> None:
        self.text, self.name = text, text.name

    def __iter__(self) -> Iterator[bytes]:
        for begin, end in zip(self.text.starts, (*self.text.starts[1:], self.text.size), strict=True):
            raw = self.text.data[begin:end].numpy().tobytes()
            yield from _pieces(iter([raw]))

    def source(self, documents: int) -> dict | None:
        return self.text.source


class _Files:
    """What text.read joins, one file after the other and long ones in pieces: none is held in memory."""

    def __init__(self, path: Path) -> None:
        self.paths, self.name = texts.files_of(path)
        self.folder = path

    def __iter__(self) -> Iterator[bytes]:
        for path in self.paths:
            try:
                if not any(b"\0" in block for block in _blocks(path)):
                    yield from _pieces(_blocks(path))
            except OSError as error:
                raise TextError(f"cannot read the text {str(path)!r}: {error}") from None

    def source(self, documents: int) -> None:
        return None


def _blocks(path: Path, size: int = 2**20) -> Iterator[bytes]:
    if not stat.S_ISREG(path.stat().st_mode):
        raise TextError(f"{str(path)!r} is neither a file nor a folder; accepted: one of these")
    with open(path, "rb") as file:
        while block := file.read(size):
            yield block


def _pieces(blocks: Iterator[bytes]) -> Iterator[bytes]:
    """The bytes of these blocks in pieces, cut where an encoder would cut them itself (tokenizer.cut_after)."""
    held, more = b"", True
    while more or held:
        while more and len(held) < 4 * PIECE:
            block = next(blocks, b"")
            held, more = held + block, bool(block)
        begin = 0
        while begin < len(held) and (not more or len(held) - begin > 2 * PIECE + 4):
            cut = cut_after(held, begin, len(held))
            yield held[begin:cut]
            begin = cut
        held = held[begin:]
