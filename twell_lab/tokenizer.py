"""What a model reads a text as: its bytes, or the tokens of a trained byte-level BPE.

Both take any bytes and give them back exactly. A vocabulary of 256 byte values needs no training and no package;
the BPE (Sennrich et al., arXiv 1508.07909, over bytes as in GPT-2) is trained and run by the `tokenizers` library,
which the extra "text" installs. Tokens stand for different numbers of bytes, so losses are compared in bits a byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from .errors import InputError, StackError, TextError
from .files import read

if TYPE_CHECKING:
    from .text import Text

FORMAT = "twell-lab bytes"  # of the file that stands for the byte vocabulary; a BPE's is the tokenizers library's own
CHUNK = 2**16  # bytes: a long file is encoded in pieces of about this size, cut at ends of lines
_LARGEST = 2**28  # bytes of a tokenizer's file; those in use have some millions
_MOST = 2**22  # token numbers; those in use have up to a million
_BATCH = 256  # pieces handed to the library at a time


class Bytes:
    """The 256 byte values: token number = byte value. Everything else here mirrors `BPE`."""

    name = "bytes"
    unit = "bytes"
    vocabulary = 256

    def encode(self, data: Tensor, starts: tuple[int, ...] = (0,)) -> Tensor:
        """The uint8 tensor itself, not a copy."""
        return data

    def decode(self, tokens: Tensor) -> bytes:
        return tokens.to(torch.uint8).cpu().numpy().tobytes()

    @property
    def lengths(self) -> Tensor:
        """Bytes that each token stands for: int32 [256], all 1."""
        return torch.ones(256, dtype=torch.int32)

    def describe(self) -> dict:
        return {"name": self.name, "vocabulary": self.vocabulary}

    def save(self, path: str | os.PathLike) -> Path:
        return _write(path, json.dumps({"format": FORMAT}) + "\n")

    def __eq__(self, other) -> bool:
        return isinstance(other, Bytes)

    def __hash__(self) -> int:
        return hash(Bytes)


BYTES = Bytes()


class BPE:
    """A byte-level BPE of the `tokenizers` library.

    content: its JSON, as `train` makes it and tokenizer.json files hold it (GPT-2's, for one). name: for records.
    Raises StackError without the library, TextError for JSON that it does not take.
    """

    unit = "tokens"

    def __init__(self, content: str, name: str = "BPE") -> None:
        try:
            self._tokenizer = _library().Tokenizer.from_str(content)
        except BaseException as error:  # the library raises bare Exceptions, and panics, which are none
            if isinstance(error, StackError) or not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise TextError(f"{name!r:.200} is no tokenizer that the tokenizers library takes: {str(error):.300}") from None
        self.name, self.content = name, content
        self.sha256 = hashlib.sha256(content.encode()).hexdigest()
        numbers = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocabulary = max(numbers, default=-1) + 1  # not how many there are: some files skip numbers
        if not 1 <= self.vocabulary <= _MOST:
            raise TextError(f"{name} has {self.vocabulary} token numbers; accepted: from 1 to {_MOST}")

    def encode(self, data: Tensor, starts: tuple[int, ...] = (0,)) -> Tensor:
        """The tokens of uint8 `data` [size]: int16 for a vocabulary of at most 32,768, else int32; on the CPU.

        starts: where its files begin. No token reaches from one file into the next, nor over the end of the line
        that ends a piece of about 64 KiB of a long file. Bytes that are no UTF-8 become a token each. Raises TextError
        for a tokenizer that does not give every byte back.
        """
        kind = np.int16 if self.vocabulary <= 2**15 else np.int32
        raw = data.cpu().numpy().tobytes()
        found = [np.empty(0, kind)]
        for batch in _batches(_pieces(raw, starts)):
            texts = [piece for piece in batch if isinstance(piece, str)]
            encoded = iter(self._tokenizer.encode_batch(texts, add_special_tokens=False))
            for piece in batch:
                tokens = next(encoded).ids if isinstance(piece, str) else [self._of_bytes[byte] for byte in piece]
                found.append(np.array(tokens, kind))
        tokens = torch.from_numpy(np.concatenate(found))
        stands_for = self.lengths[tokens.long()].sum().item() if len(tokens) else 0
        if stands_for != len(raw):
            raise TextError(f"the tokens of {self.name} stand for {stands_for} bytes of a text of {len(raw)}; accepted: "
                            f"a byte-level tokenizer without normalisation, which loses nothing")
        return tokens

    def decode(self, tokens: Tensor) -> bytes:
        """The bytes that integer `tokens` (any shape, read in order) stand for."""
        return b"".join([self._pieces[token] for token in tokens.flatten().tolist()])

    @cached_property
    def lengths(self) -> Tensor:
        """Bytes that each token stands for: int32 [vocabulary]."""
        return torch.tensor([len(piece) for piece in self._pieces], dtype=torch.int32)

    def describe(self) -> dict:
        """What a record keeps: name, SHA-256 of the JSON, size of the vocabulary."""
        return {"name": self.name, "sha256": self.sha256, "vocabulary": self.vocabulary}

    def save(self, path: str | os.PathLike) -> Path:
        """Write the JSON: `load` reads it, and so does transformers. InputError where it can't be written."""
        return _write(path, self.content)

    @cached_property
    def _pieces(self) -> list[bytes]:
        """The bytes of each token, by its number; nothing for numbers that no token has."""
        values = {character: byte for byte, character in _alphabet().items()}
        pieces = [b""] * self.vocabulary
        for token, number in self._tokenizer.get_vocab(with_added_tokens=False).items():
            if all(character in values for character in token):
                pieces[number] = bytes(values[character] for character in token)
        for number, added in self._tokenizer.get_added_tokens_decoder().items():
            pieces[number] = added.content.encode()
        return pieces

    @cached_property
    def _of_bytes(self) -> list[int]:
        """The number of the token of each single byte."""
        numbers = {piece: number for number, piece in enumerate(self._pieces) if len(piece) == 1}
        missing = [byte for byte in range(256) if bytes([byte]) not in numbers]
        if missing:
            raise TextError(f"{self.name} has no token for {len(missing)} of the 256 bytes, {missing[0]} the first; "
                            f"accepted: a byte-level tokenizer that has them all")
        return [numbers[bytes([byte])] for byte in range(256)]

    def __eq__(self, other) -> bool:
        return isinstance(other, BPE) and other.content == self.content

    def __hash__(self) -> int:
        return hash(self.sha256)

    def __reduce__(self):
        return BPE, (self.content, self.name)


def train(text: Text, vocabulary: int = 4096, name: str | None = None) -> BPE:
    """A byte-level BPE whose merges are learned on `text`; the same text gives the same tokenizer.

    vocabulary: 256 bytes and vocabulary - 256 merges; fewer where a short text has no more pairs to merge.
    Give it the training part alone (Text.split), so that nothing is learned from what is held out. Raises InputError
    for a vocabulary outside 256 to 2**20, and StackError without the tokenizers library.
    """
    library = check_trainable(vocabulary)
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(vocab_size=vocabulary, show_progress=False, special_tokens=[],
                                          initial_alphabet=sorted(_alphabet().values()))
    pieces = _pieces(text.data.cpu().numpy().tobytes(), text.starts)
    tokenizer.train_from_iterator((piece for piece in pieces if isinstance(piece, str)), trainer)
    made = BPE(tokenizer.to_str())
    made.name = name or f"BPE of {made.vocabulary}, from {text.name}"
    return made


def check_trainable(vocabulary: int):
    """The tokenizers library, with which `train` can make a BPE of that vocabulary; its errors."""
    if isinstance(vocabulary, bool) or not isinstance(vocabulary, int) or not 256 <= vocabulary <= 2**20:
        raise InputError(f"vocabulary is {vocabulary!r}; accepted: a whole number from 256 to {2**20}")
    return _library()


def load(path: str | os.PathLike) -> Bytes | BPE:
    """The tokenizer that `save` wrote, or a tokenizer.json of the tokenizers library. TextError where it is none."""
    path = Path(path)
    try:
        content = read(path, _LARGEST).decode("utf-8")
        fields = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise TextError(f"cannot read the tokenizer {str(path)!r}: {error}; accepted: bytes, bpe:4096, or its file") from None
    if isinstance(fields, dict) and fields.get("format") == FORMAT:
        return BYTES
    return BPE(content, path.name)


def _pieces(raw: bytes, starts: tuple[int, ...]) -> Iterator[str | bytes]:
    """The files of `raw` one after the other, in pieces: str where they are UTF-8, bytes where they are not."""
    for begin, end in zip(starts, (*starts[1:], len(raw)), strict=True):
        while begin < end:
            cut = cut_after(raw, begin, end)
            # Each byte that is no UTF-8 becomes one character of its own, which the library would not take.
            text = raw[begin:cut].decode("utf-8", "surrogateescape")
            for part in re.split("([\udc80-\udcff]+)", text):
                if part:
                    broken = "\udc80" <= part[0] <= "\udcff"
                    yield part.encode("utf-8", "surrogateescape") if broken else part
            begin = cut


def cut_after(raw: bytes, begin: int, end: int) -> int:
    """Where the piece that begins at `begin` ends: CHUNK bytes and the rest of that line, if it is no longer than CHUNK again."""
    cut = min(begin + CHUNK, end)
    if cut < end:
        line = raw.find(b"\n", cut, min(cut + CHUNK, end)) + 1
        cut = line or cut
        while not line and cut < end and raw[cut] & 0xC0 == 0x80 and cut < begin + CHUNK + 3:
            cut += 1  # not inside a character
    return cut


def _batches(pieces: Iterator) -> Iterator[list]:
    batch = []
    for piece in pieces:
        batch.append(piece)
        if len(batch) == _BATCH:
            yield batch
            batch = []
    if batch:
        yield batch


def _alphabet() -> dict[int, str]:
    """How byte-level tokenizers since GPT-2 write a byte: the printable ones of Latin-1 as themselves, the others,
    in order, as the characters from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = (byte for byte in range(256) if byte not in printable)
    return {byte: chr(byte) for byte in printable} | {byte: chr(0x100 + at) for at, byte in enumerate(others)}


def _write(path: str | os.PathLike, content: str) -> Path:
    path = Path(path)
    part = path.with_name(path.name + ".part")
    try:
        part.write_text(content, encoding="utf-8")
        part.replace(path)
    except OSError as error:
        raise InputError(f"cannot save the tokenizer as {str(path)!r}: {error}") from None
    return path


def _library():
    """The tokenizers library, imported late: bytes need none."""
    try:
        import tokenizers
    except ImportError:
        raise StackError("a BPE tokenizer needs the tokenizers library: pip install 'twell-lab[text]'") from None
    return tokenizers
