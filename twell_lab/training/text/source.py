"""The text a model trains on: its bytes or tokens, with a checksum, and a held-out part; in memory, or prepared.

The default text is the source of Python's own standard library (PSF licence), which differs by Python version: its
SHA-256 goes into every record. The paper (arXiv 2603.23198) trains on a deduplicated fineweb-edu;
"hf:HuggingFaceFW/fineweb-edu?subset=sample-10BT" is a sample of the original.

A text of any length is prepared once: it is read and encoded piece after piece into a folder, with `tokens.bin`, the
token numbers, called `tokens.bin.part` until all is written; `tokenizer.json`; and `twell-lab-text.json`, the manifest.
Training maps the tokens into memory."""

from __future__ import annotations

import csv
import hashlib
import io
import json
import os
import platform
import sysconfig
import warnings
from array import array
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from pathlib import Path
from typing import IO
from urllib.parse import parse_qsl

import numpy
import torch
from torch import Tensor
from tqdm import tqdm

from ...core import LOCK, InputError, TextError, TwellError, locked_folder, optional
from . import tokenizer as tokenizers
from .tokenizer import BYTES, Tokenizer

_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "testmock", "__pycache__"}

LARGEST = 2**30  # bytes of a text, which is held in memory as a whole; a home folder given by mistake is refused
MOST_BYTES = 100_000_000  # of a dataset, unless said otherwise: a few minutes of a good connection
TRAINING, HELD_OUT = 0.9, 64 * 2**20  # share of a text's bytes; what is held out for validation is no more than this
SAMPLE = 100_000_000  # bytes at its beginning; a BPE is trained on the first four fifths of them
PIECE, BATCH = 2**16, 256  # bytes of a piece, about, each of which a BPE encodes apart; pieces encoded at a time

_PARTS = ("subset", "split", "column", "bytes", "revision")  # that the name of a dataset may have

MANIFEST, TOKENS, TOKENIZER = "twell-lab-text.json", "tokens.bin", "tokenizer.json"
UNFINISHED, FORMAT = f"{TOKENS}.part", 1


@dataclass(frozen=True, eq=False)
class Text:
    """A text as a model reads it, in memory or mapped from a file.

    name: for a record; never a path of this machine. sha256, hexadecimal: of the bytes of the whole text, also in a
    part of one; size: how many bytes there are. tokens: integers [n] on the CPU; uint8 [size], the bytes themselves,
    unless `tokenizer` is another. starts: the bytes at which files begin, ascending. cut: bytes and tokens of the
    training part, which comes first; None in a part."""

    name: str
    sha256: str
    size: int
    tokens: Tensor
    tokenizer: Tokenizer = BYTES
    starts: Sequence[int] = (0,)
    cut: tuple[int, int] | None = None

    def describe(self) -> dict:
        """Return what a record keeps: name, SHA-256, size, and the tokenizer unless it is bytes."""
        fields = {"name": self.name, "sha256": self.sha256, "size": self.size}
        own = {name: getattr(self.tokenizer, name) for name in ("name", "sha256", "vocabulary")}
        return fields if self.tokenizer == BYTES else {**fields, "tokenizer": own}

    def split(self, fraction: float = TRAINING) -> tuple[Text, Text]:
        """Return a training text and the rest, for validation: a tenth, or 64 MiB of a long text. fraction: another
        share for training, of bytes.

        The cut falls between two files, so that no validation window continues a file seen in training; unless that
        would make the validation part less than half or more than twice its share (a single file, or one much larger
        than the others). TextError where either part would be empty."""
        cut = self.cut if fraction == TRAINING else None
        size, count = cut or (_end(self.starts, self.size, (1 - fraction) * self.size),) * 2
        if not 0 < count < len(self.tokens):
            raise TextError(f"{self.name} has {self.size} bytes; splitting needs at least 2")
        first, rest = f"{self.name}, training part", f"{self.name}, validation part"
        starts = [start for start in self.starts if start < size]
        return (
            replace(self, name=first, size=size, tokens=self.tokens[:count], starts=starts, cut=None),
            replace(self, name=rest, size=self.size - size, tokens=self.tokens[count:], starts=(0,), cut=None),
        )


def _end(starts: Sequence[int], size: int, held_out: float) -> int:
    """Return at which of `size` bytes the validation part begins, which should have about so many."""
    fitting = [start for start in starts if start and held_out / 2 <= size - start <= held_out * 2]
    return min(fitting, key=lambda start: abs(size - held_out - start), default=size - max(1, round(held_out)))


def load(
    spec: str | os.PathLike | Text | None = None, *, tokenizer: str | os.PathLike | Tokenizer | None = None
) -> Text:
    """Return the text that a command line or a config names, read through a tokenizer.

    spec: as for `stream`, of which at most 1 GiB is held in memory; a folder that `prepare` made; or a text. tokenizer:
    None (that of the text, or bytes), "bytes", "bpe:4096" (a BPE of that vocabulary, trained on four fifths of the text
    or of its first 100 MB), a path of a tokenizer's JSON, or a tokenizer. TextError for what can't be read, holds no
    text or is too long, StackError for an optional package that is missing, and InputError for a wrong vocabulary,
    another tokenizer than the one that a text was encoded by, and a dataset of which more than 1 GiB is asked for."""
    wanted = None if tokenizer is None else tokenizers.named(tokenizer)
    if spec is None or not isinstance(spec, Text) and not is_prepared(spec):
        return _encode(*stream(spec, MOST_BYTES), wanted or BYTES, most=LARGEST)
    text = spec if isinstance(spec, Text) else load_prepared(spec)
    if wanted in (None, text.tokenizer, text.tokenizer.vocabulary):
        return text
    if text.tokenizer != BYTES:
        raise InputError(
            f"tokenizer is {getattr(tokenizer, 'name', tokenizer)!r}, and the text {text.name!r} was prepared with "
            f"another of {text.tokenizer.vocabulary}; accepted: that one, or a text that is not prepared"
        )
    ends = [*text.starts[1:], text.size]
    files = (pieces(io.BytesIO(text.tokens[begin:end].numpy())) for begin, end in zip(text.starts, ends))
    return _encode(text.name, files, wanted, most=LARGEST)


def standard_library() -> Text:
    """Return the source of this Python's standard library, without tests and installed packages (about 10 MB)."""
    return load()


def _encode(name: str, files: Iterable[Iterable[bytes]], wanted: Tokenizer | int, path=None, most=None) -> Text:
    """Read and encode a text, of which each file comes in pieces. wanted: a tokenizer, or the vocabulary of a BPE to
    train. path: the tokens are written there. most: bytes, more of which are refused."""
    starts, size, digest = array("q"), 0, hashlib.sha256()

    def pieces() -> Iterator[bytes]:
        nonlocal size
        for file in files:
            begin = size
            for piece in file:
                digest.update(piece)
                if (size := size + len(piece)) > (most or size):
                    made = "accepted: at most that, or what twell-lab prepare makes of it"
                    raise TextError(f"the text {name!r} has more than {most} bytes; {made}")
                yield piece
            if size > begin:
                starts.append(begin)

    stream: Iterator[bytes] = pieces()
    if isinstance(wanted, int):
        first = list[bytes]()
        while size < SAMPLE and (more := [*islice(stream, BATCH)]):
            first += more
        ends = [*accumulate(map(len, first))]
        # Even if this is the whole text, so much belongs to its training part.
        some = [piece for piece, end in zip(first, ends) if end <= 0.8 * ends[-1]] or first[:1]
        wanted, stream = tokenizers.train(some, wanted, name), chain(first, stream)
    bar = tqdm(unit="B", unit_scale=True, leave=False, disable=None)
    with open(path, "wb") if path else nullcontext(io.BytesIO()) as file, bar:
        while batch := [*islice(stream, BATCH)]:
            file.write(wanted.encode(batch).numpy().tobytes())
            bar.update(sum(map(len, batch)))
    if not size:
        raise TextError(f"{name!r} holds no text: it is empty, binary (holds a NUL byte) or hidden")
    whole = numpy.memmap(path, wanted.dtype, "c") if path else numpy.frombuffer(file.getbuffer(), wanted.dtype)
    held_out = size - _end(starts, size, min((1 - TRAINING) * size, HELD_OUT))
    sizes = wanted.lengths.numpy()[whole[-held_out:]][::-1].cumsum()  # of the last token, the last two, ...
    count = int(numpy.searchsorted(sizes, held_out, side="right"))
    cut = size - int(sizes[count - 1]) if count else size, len(whole) - count
    return Text(name, digest.hexdigest(), size, torch.from_numpy(whole), wanted, starts, cut)


# ---- reading ----


def stream(spec: str | os.PathLike | None, most: int | None = None) -> tuple[str, Iterable[Iterable[bytes]]]:
    """Return the text that a command line or a config names, before it is read: its name, and its files or documents in
    order, each in pieces.

    spec: None (Python's standard library), a file or folder, "FILE?field=NAME" (of a .jsonl or .csv file), or
    "hf:owner/name?subset=sample-10BT&split=train&column=text&bytes=1e8&revision=main", a dataset of the Hub, or with a
    folder's name one of its .jsonl, .parquet or .csv files; what follows the question mark may be left out. Of a
    dataset at most `most` bytes are read unless "bytes" says how many; the last document is cut there.

    The files of a folder come in the order of their relative paths, compared as bytes, with "/" between the parts:
    `find . -type f | LC_ALL=C sort | xargs cat | sha256sum` gives the text's digest. Left out are names that begin with
    a dot, binary files (they hold a NUL byte, which UTF-16 text does too) and links to folders. TextError for what
    can't be read, InputError for a part of another name and a wrong number of bytes."""
    if spec is None:
        folder, name = Path(sysconfig.get_path("stdlib")), f"Python {platform.python_version()} standard library"
        files = [path for path in _files(folder, _NOT_LIBRARY) if path.suffix == ".py"] if folder.is_dir() else []
        if not files:
            raise TextError(f"{name}: this Python came without its source; give a file or folder of your own")
        return name, map(_pieces_of, files)
    if isinstance(spec, str) and spec.startswith("hf:"):
        return _dataset(spec, most)
    path, asked, field = os.fspath(spec).partition("?field=")
    name = os.path.basename(os.path.abspath(path)) or "text"
    name = name if name.isprintable() else ascii(name)[1:-1]
    rows = path.lower().endswith((".jsonl", ".csv"))
    if asked:
        if not rows:
            raise TextError(f"{os.fspath(spec)!r:.200}: a field is picked from a .jsonl or .csv file alone")
        return f"{name}?field={field}", _documents(f"the text {path!r:.200}", _rows_of(path), field)
    try:
        Path(path).stat()  # says why there is nothing
        files = _files(Path(path)) if os.path.isdir(path) else [Path(path)]
    except (OSError, ValueError) as error:  # not there, no permission, a loop of links, a NUL in the path
        raise TextError(f"cannot read the text {path!r}: {error}") from None
    if not (os.path.isdir(path) or os.path.isfile(path)):  # a pipe would be waited for, and a device need not end
        raise TextError(f"{path!r} is neither a file nor a folder; accepted: one of these")
    if rows and os.path.isfile(path):
        warnings.warn(f"{name} is read as plain text; {name}?field=text reads its field `text`", stacklevel=2)
    return name, map(_pieces_of, files)


def _files(folder: Path, skip: Collection[str] = ()) -> list[Path]:
    """Return the files below `folder`, ordered by the bytes of their relative paths. skip: folders left out."""
    paths, errors = list[Path](), list[OSError]()
    for here, folders, names in os.walk(folder, onerror=errors.append):
        folders[:] = [name for name in folders if name not in skip and name[0] != "."]
        paths += [path for name in names if name[0] != "." and (path := Path(here, name)).is_file()]
    for error in errors:
        raise error
    return sorted(paths, key=lambda path: os.fsencode(path.relative_to(folder).as_posix()))


def pieces(file: IO[bytes]) -> Iterator[bytes]:
    """Yield a file in pieces: PIECE bytes, and the rest of the line or as many bytes more."""
    while piece := file.read(PIECE):
        yield piece + file.readline(PIECE)


def _pieces_of(path: Path) -> Iterator[bytes]:
    """Yield a file in pieces; none of a binary one. TextError, with its name, where it can't be read."""
    try:
        with open(path, "rb") as file:
            if not any(b"\0" in piece for piece in pieces(file)):
                file.seek(0)
                yield from pieces(file)
    except OSError as error:
        raise TextError(f"cannot read the text {str(path)!r}: {error}") from None


def _dataset(spec: str, most: int | None) -> tuple[str, Iterable[Iterable[bytes]]]:
    dataset, _, rest = spec.removeprefix("hf:").partition("?")
    try:
        asked = dict(parse_qsl(rest, keep_blank_values=True, strict_parsing=bool(rest)))
        size = int(float(asked["bytes"])) if "bytes" in asked else most
        if not dataset or not asked.keys() <= {*_PARTS} or size is not None and size < 1:
            raise ValueError
    except (ValueError, OverflowError):
        raise InputError(
            f"{spec!r} names no text; accepted: hf:owner/name, then ? and {', '.join(_PARTS)}, each with = and a value "
            "(of bytes a number from 1 up, such as 100e6), & between them"
        ) from None
    if most is not None and size is not None and size > LARGEST:
        raise InputError(f"bytes is more than {LARGEST} in {spec!r}; more is for twell-lab prepare")
    subset, revision, split = asked.get("subset"), asked.get("revision"), asked.get("split", "train")

    def rows() -> Iterator[dict]:
        how = {"split": split, "revision": revision, "streaming": True}
        yield from optional("datasets", "a Hugging Face dataset").load_dataset(dataset, subset, **how)

    what = f"the dataset {dataset!r} (subset {subset!r}, split {split!r})"
    here = os.path.basename(os.path.abspath(dataset)) if os.path.isdir(dataset) else dataset  # records hold no path
    name = ", ".join(filter(None, (here, subset, split, revision)))
    return name, _documents(what, rows(), asked.get("column", "text"), size)


def _rows_of(path: str) -> Iterator[dict]:
    with open(path, encoding="utf-8", newline="") as file:
        lines = (json.loads(line) for line in file if line.strip())
        yield from csv.DictReader(file) if path.lower().endswith(".csv") else lines


def _documents(what: str, rows: Iterable[dict], column: str, most: int | None = None) -> Iterator[list[bytes]]:
    """Yield the text in a column of each row that has some, and an empty line, up to `most` bytes in all."""
    size = 0
    try:
        for row in rows:
            if column not in row or not isinstance(row[column], str | None):
                raise TextError(f"{what} has no text in {column!r}; accepted: one of {', '.join(map(repr, row))}")
            if row[column]:
                document = row[column].encode("utf-8", "surrogatepass") + b"\n\n"  # shows the model where it ends
                piece = document[: None if most is None else most - size]
                size += len(piece)
                yield [piece]
            if size == most:
                return
    except TwellError:
        raise
    except Exception as error:  # JSON, csv, the library, the Hub's client and the network each raise their own kinds
        raise TextError(
            f"cannot read {what} beyond {size} bytes: {type(error).__name__}: {' '.join(str(error).split())}; "
            "accepted: a file or folder that is here, or a dataset of the Hub, which needs a network"
        ) from error


# ---- prepared texts ----


def is_prepared(path: str | os.PathLike) -> bool:
    """Return whether `prepare` made this folder, and came to its end."""
    return os.path.isfile(Path(path, MANIFEST)) and not os.path.exists(Path(path, UNFINISHED))


def load_prepared(folder: str | os.PathLike) -> Text:
    """Return the text that `prepare` left in a folder. TextError where the manifest, the tokenizer or the tokens are
    missing or not those of one preparation."""
    folder = Path(folder)
    try:
        fields, tokenizer = json.loads((folder / MANIFEST).read_bytes()), tokenizers.load(folder / TOKENIZER)
        tokens = torch.from_numpy(numpy.memmap(folder / TOKENS, tokenizer.dtype, "c"))
        if (fields["format"], fields["tokenizer"], fields["count"]) != (FORMAT, tokenizer.sha256, len(tokens)):
            raise ValueError(f"{TOKENS}, {TOKENIZER} or the format is another than {MANIFEST} says")
        size, count = fields["cut"]
        text = Text(fields["name"], fields["sha256"], fields["size"], tokens, tokenizer, cut=(size, count))
        text.split()  # or the manifest is damaged
        return text
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise TextError(f"cannot read the prepared text {str(folder)!r}: {error}; prepare it again") from None


def prepare(
    spec: str | os.PathLike | None, out: str | os.PathLike, *, tokenizer: str | os.PathLike | Tokenizer | None = None
) -> Text:
    """Read a text, encode it, and keep it in the folder `out`. What a preparation that fails or is killed leaves is no
    text, and the next one writes over it.

    spec: as for `stream`: files may have any size, and a dataset is read to its end unless its "bytes" says how much.
    out: a new or empty folder. tokenizer: as for load. On stderr, where that is a terminal, a bar says how much was
    read. TextError for a text that can't be read or is too short. InputError for an `out` that is not empty, can't be
    written or lies in the text's folder."""
    if spec is not None and is_prepared(spec):
        raise InputError(f"{spec!s:.200} is a prepared text already; accepted: the text it was made from")
    out, (name, files), wanted = Path(out), stream(spec), tokenizers.named(tokenizer)
    check_apart(out, spec)
    try:
        with locked_folder(out, "preparation"):
            there = {path.name for path in out.iterdir()} - {LOCK}
            if there and not (UNFINISHED in there and there <= {UNFINISHED, TOKENIZER, MANIFEST}):
                raise InputError(f"out is {str(out)!r}, which holds {min(there)!r}; accepted: a new or empty folder")
            text = _encode(name, files, wanted, out / UNFINISHED)
            text.split()  # or it is too short
            fields = {"format": FORMAT, "name": name, "sha256": text.sha256, "size": text.size, "cut": text.cut}
            fields |= {"count": len(text.tokens), "tokenizer": text.tokenizer.sha256}
            (out / TOKENIZER).write_text(text.tokenizer.content, encoding="utf-8")
            (out / MANIFEST).write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
            del text  # which Windows wants before it renames a file that is mapped into memory
            os.replace(out / UNFINISHED, out / TOKENS)
    except OSError as error:
        raise InputError(f"cannot prepare a text in {str(out)!r}: {error}") from None
    return load_prepared(out)


# ---- what a run checks, and the windows that it reads ----


def check_apart(folder: str | os.PathLike, text) -> None:
    """Raise InputError where `folder` lies inside of a text that is a folder. text: as in a config."""
    inside = isinstance(text, (str, os.PathLike)) and os.path.isdir(text)
    if inside and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(text)):
        raise InputError(
            f"{str(folder)!r} is inside of the text {str(text)!r}: what is saved there would change the text; "
            "accepted: a folder outside of it"
        )


def check_enough(training: Text, validation: Text, batch: int, context: int) -> None:
    """Raise TextError unless a batch of windows fits into the training text, and one into the validation text."""
    for part, windows in ((training, batch), (validation, 1)):
        if len(part.tokens) <= windows * context:
            raise TextError(
                f"{part.name} has {len(part.tokens)} {part.tokenizer.unit}; {windows} windows of {context} need at "
                f"least {windows * context + 1}: give a longer text, or lower batch or context"
            )


def random_windows(data: Tensor, count: int, context: int, generator: torch.Generator) -> Tensor:
    """Return `count` windows that begin anywhere in `data`, bytes or tokens [n]: int64 [count, context + 1] on its
    device. generator: of a CPU."""
    starts = torch.randint(data.numel() - context, (count,), generator=generator)
    return data.unfold(0, context + 1, 1)[starts].long()


def spread_windows(data: Tensor, count: int, context: int) -> Tensor:
    """Return at most `count` windows, evenly spread over `data`, no token predicted twice: int64 [n, context + 1]."""
    whole = (len(data) - 1) // context
    starts = torch.arange(min(count, whole)) * whole // min(count, whole or 1) * context
    return data[starts[:, None] + torch.arange(context + 1)].long()
