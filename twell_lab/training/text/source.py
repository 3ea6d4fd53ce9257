"""The text a model trains on: its bytes or tokens, with a checksum, and a held-out part; in memory, or prepared.

The default text is the source of Python's own standard library (PSF licence), which differs by Python version: its
SHA-256 goes into every record. The paper (arXiv 2603.23198) trains on a deduplicated fineweb-edu;
"hf:HuggingFaceFW/fineweb-edu?subset=sample-10BT" is a sample of the original.

A text of any length is prepared once: documents are read, encoded and written one after the other, long files in
pieces, into a folder with `tokens.bin`, the token numbers one after the other; `tokenizer.json`; and
`twell-lab-text.json`, the manifest. Until all of it is written the tokens are called `tokens.bin.part`. Training maps
them into memory."""

from __future__ import annotations

import csv
import hashlib
import json
import os
import platform
import sysconfig
import warnings
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, replace
from itertools import accumulate, chain, islice
from pathlib import Path
from urllib.parse import parse_qsl

import numpy
import torch
from torch import Tensor
from tqdm import tqdm

from ...core import LOCK, InputError, TextError, TwellError, locked_folder, optional
from . import tokenizer as tokenizers
from .tokenizer import BYTES, Tokenizer, pieces

# Folders that are no part of the library: installed packages, and its own tests, some of them broken on purpose.
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "testmock", "__pycache__"}

LARGEST = 2**30  # bytes of a text, which is held in memory as a whole; a home folder given by mistake is refused
MOST_BYTES = 100_000_000  # of a dataset, unless said otherwise: a few minutes of a good connection
TRAINING = 0.9  # of a text's bytes; the rest is held out for validation
HELD_OUT = 64 * 2**20  # bytes of a prepared text for validation; a tenth of a shorter one
SAMPLE = 100_000_000  # bytes at its beginning; a BPE is trained on the first four fifths of them
CHUNK = 16 * 2**20  # bytes of it that are encoded at a time

MANIFEST, TOKENS, TOKENIZER = "twell-lab-text.json", "tokens.bin", "tokenizer.json"
UNFINISHED, FORMAT = f"{TOKENS}.part", 1


@dataclass(frozen=True, eq=False)
class Text:
    """A text as a model reads it, in memory or mapped from a file.

    name: for a record; never a path of this machine. sha256, hexadecimal: of the bytes of the whole text, also in a
    part of one; size: how many bytes there are. tokens: integers [n] on the CPU; uint8 [size], the bytes themselves,
    unless `tokenizer` is another. starts: of bytes, where files begin, ascending. cut: bytes and tokens of the training
    part, which comes first; None where `split` finds it."""

    name: str
    sha256: str
    size: int
    tokens: Tensor
    tokenizer: Tokenizer = BYTES
    starts: tuple[int, ...] = (0,)
    cut: tuple[int, int] | None = None

    def describe(self) -> dict:
        """Return what a record keeps: name, SHA-256, size, and the tokenizer unless it is bytes."""
        fields = {"name": self.name, "sha256": self.sha256, "size": self.size}
        return fields if self.tokenizer == BYTES else {**fields, "tokenizer": self.tokenizer.describe()}

    def split(self, fraction: float = TRAINING) -> tuple[Text, Text]:
        """Return a training text and the rest, for validation: as `cut` says, or about this fraction of the bytes.

        The cut falls between two files, so that no validation window continues a file seen in training. Where that
        would make the validation part less than half or more than twice its share (a single file, or one much larger
        than the others), the cut falls at the end of a line instead, or where no line ends nearby, at exactly that
        share. TextError where either part would be empty."""
        size, count = self.cut or (self._end(fraction),) * 2
        inside = tuple(start for start in self.starts if start < count)
        beyond = (0, *(start - count for start in self.starts if start > count))
        first = replace(self, size=size, tokens=self.tokens[:count], starts=inside, cut=None)
        rest = replace(self, size=self.size - size, tokens=self.tokens[count:], starts=beyond, cut=None)
        return replace(first, name=f"{self.name}, training part"), replace(rest, name=f"{self.name}, validation part")

    def _end(self, fraction: float) -> int:
        if self.size < 2:
            raise TextError(f"{self.name} has {self.size} bytes; splitting needs at least 2")
        wanted, share = fraction * self.size, (1 - fraction) * self.size
        fitting = [start for start in self.starts if start and share / 2 <= self.size - start <= share * 2]
        first = min(max(int(wanted), 1), self.size - 1)
        nearby = self.tokens[first - 1 : min(first + 4096, self.size - 1)].numpy().tobytes()
        return min(fitting, key=lambda start: abs(start - wanted), default=first + max(nearby.find(b"\n"), 0))


def load(
    spec: str | os.PathLike | Text | None = None, *, tokenizer: str | os.PathLike | Tokenizer | None = None
) -> Text:
    """Return the text that a command line or a config names, read through a tokenizer.

    spec: as for `stream`, of which at most 1 GiB is held in memory; a folder that `prepare` made; or a text. tokenizer:
    None (that of the text, or bytes), "bytes", "bpe:4096" (a BPE of that vocabulary, trained on the training part of
    the text), a path of a tokenizer's JSON, or a tokenizer. TextError for what can't be read, holds no text or is too
    long, StackError for an optional package that is missing, and InputError for a wrong vocabulary, another tokenizer
    than the one that a text was prepared with, and a dataset of which more than 1 GiB is asked for."""
    if isinstance(spec, Text):
        text = spec
    else:
        text = load_prepared(spec) if spec is not None and is_prepared(spec) else _read(spec)
    wanted = text.tokenizer if tokenizer is None else tokenizers.named(tokenizer)
    if wanted in (text.tokenizer, text.tokenizer.vocabulary):
        return text
    if text.cut is not None:
        raise InputError(
            f"tokenizer is {getattr(tokenizer, 'name', tokenizer)!r}, and the text {text.name!r} was prepared with "
            f"another of {text.tokenizer.vocabulary}; accepted: that one, or a text that is not prepared"
        )
    parts = text.split()
    own = tokenizers.train(parts[0], wanted) if isinstance(wanted, int) else wanted
    first, rest = (own.encode(part.tokens, part.starts) for part in parts)
    cut = parts[0].size, len(first)
    return replace(text, tokens=torch.cat([first, rest]), tokenizer=own, starts=(0,), cut=cut)


def _read(spec: str | os.PathLike | None) -> Text:
    name, files = stream(spec, MOST_BYTES)
    contents, size = [], 0
    for file in files:
        if content := b"".join(islice(file, LARGEST // tokenizers.CHUNK + 1)):
            contents.append(content)
        if (size := size + len(content)) > LARGEST:
            raise TextError(
                f"the text {name!r} has more than {LARGEST} bytes; accepted: at most that, or what twell-lab prepare "
                "makes of it"
            )
    if not contents:
        raise TextError(f"{os.fspath(spec or '')!r} holds no text: it is empty, binary (holds a NUL byte) or hidden")
    return of_pieces(f"{name}, first {size:,} bytes" if str(spec).startswith("hf:") else name, contents)


def standard_library() -> Text:
    """Return the source of this Python's standard library, without tests and installed packages (about 10 MB)."""
    return load()


def of_pieces(name: str, files: list[bytes]) -> Text:
    """Return the Text of these files, none of which is empty, as bytes."""
    content = bytearray().join(files)
    data = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    starts = tuple(accumulate(map(len, files[:-1]), initial=0))
    return Text(name, hashlib.sha256(content).hexdigest(), len(content), data, starts=starts)


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

    def refuse(error: OSError) -> None:
        raise error

    paths: list[Path] = []
    for here, folders, names in os.walk(folder, onerror=refuse):
        folders[:] = [name for name in folders if name not in skip and name[0] != "."]
        paths += [path for name in names if name[0] != "." and (path := Path(here, name)).is_file()]
    return sorted(paths, key=lambda path: os.fsencode(path.relative_to(folder).as_posix()))


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
        if (
            not dataset
            or asked.keys() - {"subset", "split", "column", "bytes", "revision"}
            or size is not None
            and size < 1
        ):
            raise ValueError
    except (ValueError, OverflowError):
        raise InputError(
            f"{spec!r} names no text; accepted: hf:owner/name, then ? and subset, split, column, bytes, revision, each "
            "with = and a value (of bytes a number from 1 up, such as 100e6), & between them"
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
        tokens = torch.from_numpy(numpy.memmap(folder / TOKENS, tokenizer.dtype, mode="c"))
        if (fields["format"], fields["tokenizer"], fields["count"]) != (FORMAT, tokenizer.sha256, len(tokens)):
            raise ValueError(f"{TOKENS}, {TOKENIZER} or the format is another than {MANIFEST} says")
        cut = fields["cut"]["bytes"], fields["cut"]["tokens"]
        text = Text(fields["name"], fields["sha256"], fields["size"], tokens, tokenizer, cut=cut)
        text.split()  # or the manifest is damaged
        return text
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise TextError(f"cannot read the prepared text {str(folder)!r}: {error}; prepare it again") from None


def prepare(
    spec: str | os.PathLike | None, out: str | os.PathLike, *, tokenizer: str | os.PathLike | Tokenizer | None = None
) -> Text:
    """Read a text, encode it, and keep it in the folder `out`. Its end becomes the validation part: 64 MiB, or a tenth
    of a shorter text. What a preparation that fails or is killed leaves is no text, and the next one writes over it.

    spec: as for `stream`: files may have any size, and a dataset is read to its end unless its "bytes" says how much.
    out: a new or empty folder. tokenizer: as for load; "bpe:4096" is trained on the first 80 MB, or four fifths of
    a shorter text. On stderr, where that is a terminal, a bar says how much was read.

    TextError for a text that can't be read or is too short. InputError for an `out` that is not empty, can't be written
    or lies in the text's folder."""
    if spec is not None and is_prepared(spec):
        raise InputError(f"{spec!s:.200} is a prepared text already; accepted: the text it was made from")
    out, (name, files), wanted = Path(out), stream(spec), tokenizers.named(tokenizer)
    check_apart(out, spec)
    try:
        with locked_folder(out, "preparation"):
            there = {path.name for path in out.iterdir()} - {LOCK}
            if there and not (UNFINISHED in there and there <= {UNFINISHED, TOKENIZER, MANIFEST}):
                raise InputError(f"out is {str(out)!r}, which holds {min(there)!r}; accepted: a new or empty folder")
            documents = filter(None, chain.from_iterable(files))
            fields, content = _encode(name, documents, out / UNFINISHED, wanted)
            (out / TOKENIZER).write_text(content, encoding="utf-8")
            (out / MANIFEST).write_text(json.dumps(fields, indent=1) + "\n", encoding="utf-8")
            os.replace(out / UNFINISHED, out / TOKENS)
    except OSError as error:
        raise InputError(f"cannot prepare a text in {str(out)!r}: {error}") from None
    return load_prepared(out)


def _encode(name: str, documents: Iterable[bytes], path: Path, wanted: Tokenizer | int) -> tuple[dict, str]:
    """Write the tokens of documents, or of pieces of them, to `path`; return the manifest, and what the tokenizer's
    file holds."""
    if isinstance(wanted, int):
        first = next(_batches(documents, SAMPLE), [])
        sums = [*accumulate(map(len, first))]
        # Even if these are all documents, so many belong to the training part.
        some = [document for document, end in zip(first, sums) if end <= 0.8 * sums[-1]] or first[:1]
        wanted = tokenizers.train(of_pieces(f"the beginning of {name}", some), wanted)
        documents = chain(first, documents)
    digest, size, count = hashlib.sha256(), 0, 0
    with open(path, "wb") as file, tqdm(unit="B", unit_scale=True, leave=False, disable=None) as bar:
        for chunk in _batches(documents, CHUNK):
            raw, starts = bytearray().join(chunk), accumulate(map(len, chunk[:-1]), initial=0)
            tokens = wanted.encode(torch.frombuffer(raw, dtype=torch.uint8), tuple(starts))
            file.write(tokens.numpy().tobytes())
            digest.update(raw)
            size, count = size + len(raw), count + len(tokens)
            bar.update(len(raw))
    held_out = round(min(0.1, HELD_OUT / max(1, size)) * count)
    if not held_out:
        raise TextError(f"{name} has {size} bytes; a tenth of them is held out: give a longer text")
    last = torch.from_numpy(numpy.memmap(path, wanted.dtype, mode="c")[-held_out:]).long()
    cut = {"bytes": size - int(wanted.lengths[last].sum()), "tokens": count - held_out}
    fields = {"format": FORMAT, "name": name, "sha256": digest.hexdigest(), "size": size, "count": count}
    return {**fields, "tokenizer": wanted.sha256, "cut": cut}, wanted.content


def _batches(documents: Iterable[bytes], size: int) -> Iterator[list[bytes]]:
    """Yield the documents in lists of at least `size` bytes each, and last what is left."""
    batch: list[bytes] = []
    length = 0
    for document in documents:
        batch.append(document)
        length += len(document)
        if length >= size:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


# ---- what a run checks, and the windows that it reads ----


def check_apart(folder: str | os.PathLike, text) -> None:
    """Raise InputError where `folder` lies inside of a text that is a folder, too: what is saved there would change the
    text. text: as in a config; whatever is not the path of a folder passes."""
    inside = isinstance(text, (str, os.PathLike)) and os.path.isdir(text)
    if inside and Path(os.path.realpath(folder)).is_relative_to(os.path.realpath(text)):
        raise InputError(
            f"{str(folder)!r} is inside of the text {str(text)!r}: what is saved there would change the text; "
            "accepted: a folder outside of it"
        )


def check_enough(training: Text, validation: Text, batch: int, context: int) -> None:
    """Raise TextError unless a batch of windows of `context` tokens, and the one that follows them, fits into the
    training text and one window into the validation text."""
    for part, windows in ((training, batch), (validation, 1)):
        if len(part.tokens) <= windows * context:
            raise TextError(
                f"{part.name} has {len(part.tokens)} {part.tokenizer.unit}; {windows} windows of {context} need at "
                f"least {windows * context + 1}: give a longer text, or lower batch or context"
            )


def random_windows(data: Tensor, count: int, context: int, generator: torch.Generator) -> Tensor:
    """Return `count` windows that begin anywhere in `data`, bytes or tokens [n]: int64 [count, context + 1] on its
    device. generator: draws the positions on the CPU, the same for every device."""
    starts = torch.randint(data.numel() - context, (count,), generator=generator)
    if data.is_cuda:
        starts = starts.pin_memory().to(data.device, non_blocking=True)  # which does not wait for the device
    return data.unfold(0, context + 1, 1)[starts].long()


def spread_windows(data: Tensor, count: int, context: int) -> Tensor:
    """Return at most `count` windows, evenly spread over `data`, no token predicted twice: int64 [n, context + 1]."""
    whole = (len(data) - 1) // context
    starts = torch.arange(min(count, whole)) * whole // min(count, whole or 1) * context
    return data[starts[:, None] + torch.arange(context + 1)].long()
