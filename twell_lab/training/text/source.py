"""The text a model trains on: bytes, with a checksum, and a held-out part made of whole files.

Unless it is given a tokenizer (twell_lab.training.text.tokenizer), its tokens are its bytes, so there is nothing to
train, ship or trust. The default text is the source of Python's own standard library (PSF licence), which is on every
machine that runs this; it differs by Python version, so its SHA-256 goes into every record. What a command line may
name beside a file and a folder (a dataset, a prepared text) is for twell_lab.training.text.load, which stands above
this file."""

from __future__ import annotations

import errno
import hashlib
import importlib
import json
import os
import platform
import stat
import sysconfig
from bisect import bisect_left
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from ...core.errors import InputError, RecordError, StackError, TextError
from ...core.files import write_atomically

# Not the library itself: what others installed into it, and its own tests (some broken on purpose).
_NOT_LIBRARY = {"site-packages", "dist-packages", "test", "tests", "idle_test", "testmock", "__pycache__"}

LARGEST = 2**30  # bytes; a text is held in memory as a whole, so a home folder given by mistake is refused
FORMAT = "twell-lab bytes"  # of the file that stands for the byte vocabulary; a BPE's is the tokenizers library's own


class Tokenizer:
    """What a model reads a text as: its bytes (Bytes), or the tokens of a BPE (twell_lab.training.text.tokenizer).

    Two are equal where their files are.

    name: for records. unit: what its tokens are called. vocabulary: how many token numbers there are. content: its
    file, JSON. sha256: hexadecimal digest of the content; None for bytes, which need none.
    """

    name: str
    vocabulary: int
    content: str
    sha256: str | None = None
    unit = "tokens"

    def encode(self, data: Tensor, starts: tuple[int, ...] = (0,)) -> Tensor:
        """The tokens of uint8 `data` [size]: integers [n] on the CPU. starts: where its files begin; no token crosses
        that."""
        raise NotImplementedError

    def decode(self, tokens: Tensor) -> bytes:
        """The bytes that integer `tokens` (any shape, read in order) stand for."""
        raise NotImplementedError

    @property
    def lengths(self) -> Tensor:
        """Bytes that each token stands for: int32 [vocabulary], on the CPU."""
        raise NotImplementedError

    def describe(self) -> dict:
        """What a record keeps: name, SHA-256 (but of bytes), size of the vocabulary."""
        fields = {"name": self.name, "sha256": self.sha256, "vocabulary": self.vocabulary}
        return {name: value for name, value in fields.items() if value is not None}

    def save(self, path: str | os.PathLike) -> Path:
        """Write its file, whole or not at all: tokenizer.load reads it. InputError where it can't be written."""
        try:
            write_atomically(path, self.content, make_folder=False)
        except RecordError as error:
            raise InputError(str(error)) from None
        return Path(path)

    def __eq__(self, other) -> bool:
        return isinstance(other, Tokenizer) and other.content == self.content

    def __hash__(self) -> int:
        return hash(self.content)


class Bytes(Tokenizer):
    """The 256 byte values: token number = byte value. It needs no training and no package."""

    name = unit = "bytes"
    vocabulary = 256
    content = json.dumps({"format": FORMAT}) + "\n"

    def encode(self, data: Tensor, starts: tuple[int, ...] = (0,)) -> Tensor:
        """The uint8 tensor itself, not a copy."""
        return data

    def decode(self, tokens: Tensor) -> bytes:
        return tokens.to(torch.uint8).cpu().numpy().tobytes()

    @property
    def lengths(self) -> Tensor:
        return torch.ones(256, dtype=torch.int32)


BYTES = Bytes()


class Readable:
    """What a model can be trained on: a Text, and one that was prepared (twell_lab.training.text.prepared). `size` is
    in bytes."""

    name: str
    sha256: str
    size: int
    tokenizer: Tokenizer
    source: dict | None

    @property
    def vocabulary(self) -> int:
        """How many token numbers there are: the model's vocabulary."""
        return self.tokenizer.vocabulary

    def describe(self) -> dict:
        """What a record keeps of a text: its name, SHA-256 and size in bytes, of a tokenizer its name, SHA-256 and
        vocabulary, of a dataset its source."""
        fields = {"name": self.name, "sha256": self.sha256, "size": self.size}
        if self.tokenizer != BYTES:
            fields["tokenizer"] = self.tokenizer.describe()
        return fields if self.source is None else {**fields, "source": self.source}


@dataclass(frozen=True, eq=False)
class Text(Readable):
    """A text as bytes, with where its files begin.

    name: what to call it in a record; never a path of this machine. sha256: hexadecimal digest of exactly the bytes in
    `data`. data: uint8 [size], on the CPU. starts: position in `data` of the first byte of each file, ascending; `(0,)`
    for a single file. tokenizer: what a model reads the text as; its bytes, unless given. See `read_as`. source: of a
    dataset: where it comes from, its licence where known (see twell_lab.training.text.datasets); JSON-able."""

    name: str
    sha256: str
    data: Tensor
    starts: tuple[int, ...] = (0,)
    tokenizer: Tokenizer = BYTES
    source: dict | None = None

    @property
    def size(self) -> int:  # type: ignore[override]  # a field of the others, here read off the data
        """Length in bytes."""
        return self.data.numel()

    @cached_property
    def tokens(self) -> Tensor:
        """The text as token numbers, encoded when first asked for and kept: uint8, int16 or int32, on the CPU.

        [size] and `data` itself for bytes. random_windows and spread_windows take it.
        """
        return self.tokenizer.encode(self.data, self.starts)

    @property
    def bytes_per_token(self) -> float:
        """Bytes that a token of this text stands for, on average: bits a token / bytes_per_token = bits a byte."""
        return self.size / max(len(self.tokens), 1)

    def read_as(self, tokenizer: Tokenizer) -> Text:
        """The same text, read through another tokenizer; its `split` parts are encoded apart."""
        return replace(self, tokenizer=tokenizer)

    def split(self, fraction: float = 0.9) -> tuple[Text, Text]:
        """Cut into a training text (about the first `fraction` of the bytes) and the rest, for validation.

        The cut falls between two files, so that no validation window continues a file seen in training. Where
        the nearest such place would make the validation part less than half or more than twice the share
        asked for (a single file, or one file much larger than the others), the cut falls at the end of a
        line instead, or failing that at the byte itself.

        Raises TextError for a fraction outside (0, 1), and where either part would be empty.
        """
        if not 0.0 < fraction < 1.0:
            raise TextError(f"fraction is {fraction!r}; accepted: a number between 0 and 1, both excluded")
        if self.size < 2:
            raise TextError(f"{self.name} has {self.size} bytes; splitting needs at least 2")
        cut = self._between_files(fraction) or self._inside_a_file(fraction)
        return self._part(0, cut, "training part"), self._part(cut, self.size, "validation part")

    def _between_files(self, fraction: float) -> int | None:
        wanted = fraction * self.size
        at = bisect_left(self.starts, wanted)
        around = [start for start in self.starts[max(at - 1, 0) : at + 1] if start > 0]
        share = self.size - wanted
        fitting = [start for start in around if share / 2 <= self.size - start <= share * 2]
        return min(fitting, key=lambda start: abs(start - wanted), default=None)

    def _inside_a_file(self, fraction: float) -> int:
        wanted = min(max(int(fraction * self.size), 1), self.size - 1)
        nearby = self.data[wanted - 1 : min(wanted + 4096, self.size - 1)].numpy().tobytes()
        end_of_line = nearby.find(b"\n")
        return wanted if end_of_line < 0 else wanted + end_of_line

    def _part(self, begin: int, end: int, which: str) -> Text:
        data = self.data[begin:end]
        inside = tuple(start - begin for start in self.starts if begin < start < end)
        return replace(self, name=f"{self.name}, {which}", sha256=digest(data), data=data, starts=(0, *inside))


def of_pieces(name: str, pieces: list[bytes], source: dict | None = None) -> Text:
    """The Text that begins a file with each of these pieces, of which none is empty."""
    content = bytearray().join(pieces)
    data = torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)
    return Text(name, digest(data), data, tuple(accumulate(map(len, pieces[:-1]), initial=0)), source=source)


def standard_library() -> Text:
    """The source of this Python's standard library, tests and installed packages left out (about 10 MB).

    Files are joined in the order of their relative paths, nothing between them. Raises TextError where this
    Python came without its source.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    name = f"Python {platform.python_version()} standard library"
    try:
        sources = [path for path in _files(folder, _NOT_LIBRARY) if path.name.endswith(".py")]
    except OSError:
        sources = []
    if not sources:
        raise TextError(f"{name}: this Python came without its source; give a file or folder of your own")
    return _join(name, sources)


def read(path: str | os.PathLike) -> Text:
    """The text of one file, or of every text file below a folder.

    In a folder, files are joined in the order of their relative paths (compared as bytes, "/" between the
    parts), nothing between them: for a folder of files alone, `find . -type f | LC_ALL=C sort | xargs cat |
    sha256sum` gives the same digest. Left out are names that begin with a dot, binary files (they hold a NUL
    byte, as UTF-16 does too) and links that lead nowhere. Links are followed; each real file is used once.

    Raises TextError for a path that is not there or can't be read, a binary file, a folder without text, an
    empty text, and a text of more than 1 GiB.
    """
    path = Path(path)
    files, name = files_of(path)
    text = _join(name, files)
    if not text.size:
        raise TextError(
            f"the folder {str(path)!r} holds no text: its files are empty, binary or hidden"
            if path.is_dir()
            else f"the text {str(path)!r} is empty or binary (holds a NUL byte); accepted: text"
        )
    return text


def files_of(path: Path) -> tuple[list[Path], str]:
    """The files that make up the text at a path, in their order, and what to call it: the last part of the path as
    records, pages and one-line messages can show it, UTF-8 whatever this system's encoding is, and what is neither that
    nor printable as escapes. TextError where it can't be read."""
    try:
        name = os.fsencode(os.path.basename(os.path.abspath(path))).decode("utf-8", "backslashreplace") or "text"
        files = _files(path, skip=frozenset()) if stat.S_ISDIR(path.stat().st_mode) else [path]
    except (OSError, ValueError) as error:  # not there, no permission, a loop of links, a NUL in the path
        raise TextError(f"cannot read the text {str(path)!r}: {error}") from None
    return files, name if name.isprintable() else repr(name)[1:-1]


def load(path: str | os.PathLike | None) -> Text:
    """`read(path)`, or the standard library's source for None."""
    return standard_library() if path is None else read(path)


def check_apart(folder: str | os.PathLike, text) -> None:
    """InputError where what is saved in `folder` would be part of the text, a folder too, which would change by that.

    text: what names it, as in a config; all but a path of a folder is apart from any.
    """
    if not isinstance(text, (str, os.PathLike)) or not os.path.isdir(text):
        return
    inner, outer = (Path(os.path.realpath(each)) for each in (folder, text))  # resolve() takes no loop of links
    if inner.is_relative_to(outer) and not any(part.startswith(".") for part in inner.relative_to(outer).parts):
        raise InputError(
            f"{str(folder)!r} is inside of the text {str(text)!r}, which what is saved there would change"
            "; accepted: a folder outside of it, or one whose name begins with a dot"
        )


def check_enough(training: Text, validation: Text, batch: int, context: int) -> None:
    """Raise TextError unless a batch fits into the training text and one window into the validation text.

    A window is `context` tokens and the one that follows them.
    """
    for part, needed, of_what in (
        (training, batch * context + 1, f"a batch of {batch} windows of {context}"),
        (validation, context + 1, f"one window of {context}"),
    ):
        if len(part.tokens) < needed:
            raise TextError(
                f"{part.name} has {len(part.tokens)} {part.tokenizer.unit}; {of_what} needs at least "
                f"{needed}: give a longer text, or lower batch or context"
            )


def random_windows(data: Tensor, count: int, context: int, generator: torch.Generator) -> Tensor:
    """`count` windows that begin anywhere in `data`: int64 [count, context + 1] on the device of `data`.

    data: bytes or tokens, any integer dtype [n].

    The positions come from `generator`, a CPU one, so that every device trains on the same windows.
    """
    starts = torch.randint(data.numel() - context, (count, 1), generator=generator)
    return _windows(data, starts, context)


def spread_windows(data: Tensor, count: int, context: int) -> Tensor:
    """At most `count` windows, evenly spread over `data`, no token predicted twice: int64 [n, context + 1]."""
    whole = (data.numel() - 1) // context
    count = min(count, whole)
    picked = torch.arange(count)[:, None] * whole // count
    return _windows(data, picked * context, context)


def _windows(data: Tensor, starts: Tensor, context: int) -> Tensor:
    positions = starts + torch.arange(context + 1)
    return data[positions.to(data.device)].long()


def _files(folder: Path, skip: Iterable[str]) -> list[Path]:
    """Every regular file below `folder` once, in the byte order of relative paths. OSError where it fails."""
    seen: set[tuple[int, int]] = set()  # (device, inode) of folders and files: ends loops, drops repeats

    def is_new(path: Path, kind) -> bool:
        try:
            info = path.stat()
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ENOTDIR, errno.ELOOP):  # a link to nowhere, or in a circle
                return False
            raise
        if not kind(info.st_mode) or (info.st_dev, info.st_ino) in seen:
            return False
        seen.add((info.st_dev, info.st_ino))
        return True

    def refuse(error: OSError) -> None:
        raise error

    found: list[Path] = []
    is_new(folder, stat.S_ISDIR)
    for here, folders, names in os.walk(folder, followlinks=True, onerror=refuse):
        wanted = [name for name in sorted(folders, key=os.fsencode) if name not in skip and name[0] != "."]
        folders[:] = [name for name in wanted if is_new(Path(here, name), stat.S_ISDIR)]
        found += [Path(here, name) for name in names if name[0] != "."]
    found.sort(key=lambda path: os.fsencode(path.relative_to(folder).as_posix()))
    return [path for path in found if is_new(path, stat.S_ISREG)]


def _join(name: str, paths: Iterable[Path]) -> Text:
    """The contents of the files that are text, joined. TextError names one that can't be read."""
    pieces, size = [], 0
    for path in paths:
        try:
            if not stat.S_ISREG(path.stat().st_mode):
                raise TextError(f"{str(path)!r} is neither a file nor a folder; accepted: one of these")
            if size + path.stat().st_size > LARGEST:
                raise TextError(
                    f"the text {name!r} has more than {LARGEST} bytes; accepted: at most that, or what "
                    "twell-lab prepare makes of it"
                )
            content = path.read_bytes()
        except OSError as error:
            raise TextError(f"cannot read the text {str(path)!r}: {error}") from None
        if content and b"\0" not in content:
            pieces.append(content)
            size += len(content)
    return of_pieces(name, pieces)


def digest(data: Tensor) -> str:
    """SHA-256 of uint8 `data` on the CPU, hexadecimal."""
    return hashlib.sha256(memoryview(data.numpy())).hexdigest()


def extra(package: str, what: str):
    """A package that the extra "text" installs, imported when it is first needed. StackError says what needs it."""
    try:
        return importlib.import_module(package)
    except ImportError:
        raise StackError(f"{what} needs the {package} library: pip install 'twell-lab[text]'") from None
