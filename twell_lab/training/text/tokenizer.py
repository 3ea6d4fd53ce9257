"""Tokenizers: what a model reads a text as, its bytes or the tokens of a byte-level BPE. Both decode any bytes exactly.

The BPE (Sennrich et al., arXiv 1508.07909, over bytes as in GPT-2) is trained and run by the `tokenizers` library, an
optional package. Tokens stand for different numbers of bytes, so losses are compared in bits a byte."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from ...core import InputError, TextError, optional, read_file
from ...models.tiny import alphabet, bytes_tokenizer

_LARGEST, _MOST = 2**28, 2**22  # bytes of a tokenizer's file, and token numbers; usual ones have up to a few million


class Tokenizer:
    """A reader of text as bytes, token number = byte value. Two are equal if their files are.

    name: for records. unit: what its tokens are called. vocabulary: how many token numbers there are, which are kept as
    `dtype`. content: what its file holds, JSON; sha256: of that, None for bytes. lengths: the bytes that each token
    stands for, int32 [vocabulary] on the CPU."""

    name = unit = "bytes"
    vocabulary = 256
    dtype: type = np.uint8
    content = bytes_tokenizer()
    sha256: str | None = None
    lengths = torch.ones(256, dtype=torch.int32, device="cpu")

    def encode(self, pieces: Iterable[bytes]) -> Tensor:
        """Return the tokens of a text: integers [n] on the CPU. No token reaches from one piece into the next."""
        return torch.from_numpy(np.frombuffer(bytearray().join(pieces), np.uint8))

    def decode(self, tokens: Tensor) -> bytes:
        """Return the bytes that integer `tokens` (any shape, read in order) stand for."""
        return tokens.to(torch.uint8).cpu().numpy().tobytes()

    def __eq__(self, other) -> bool:
        return isinstance(other, Tokenizer) and other.content == self.content

    def __hash__(self) -> int:
        return hash(self.content)


BYTES = Tokenizer()


class BPE(Tokenizer):
    """A byte-level BPE of the `tokenizers` library.

    content: its JSON, as tokenizer.json files hold it. StackError without the library, and TextError for JSON that the
    library does not take."""

    unit = "tokens"

    def __init__(self, content: str, name: str = "BPE") -> None:
        library = _library()
        try:
            self._tokenizer = library.Tokenizer.from_str(content)
        except BaseException as error:  # the library raises Exception, or PanicException, which is none
            if isinstance(error, (KeyboardInterrupt, SystemExit)):
                raise
            raise TextError(f"{name!r:.200} is no tokenizer of the tokenizers library: {error!s:.300}") from None
        self.name, self.content, self.sha256 = name, content, hashlib.sha256(content.encode()).hexdigest()
        own = self._tokenizer.get_vocab(with_added_tokens=False)
        added = self._tokenizer.get_added_tokens_decoder()
        self.vocabulary = max([*own.values(), *added], default=-1) + 1  # some files skip numbers
        if not 1 <= self.vocabulary <= _MOST:
            raise TextError(f"{name} has {self.vocabulary} token numbers; accepted: from 1 to {_MOST}")
        self.dtype = np.int16 if self.vocabulary <= 2**15 else np.int32
        byte_of = {character: byte for byte, character in enumerate(alphabet())}
        self._bytes = [b""] * self.vocabulary  # of each token, by its number
        for token, number in own.items():
            if byte_of.keys() >= {*token}:
                self._bytes[number] = bytes(byte_of[character] for character in token)
        for number, token in added.items():
            self._bytes[number] = token.content.encode()
        self._numbers = {piece: number for number, piece in enumerate(self._bytes)}
        self.lengths = torch.tensor([*map(len, self._bytes)], dtype=torch.int32)

    def encode(self, pieces: Iterable[bytes]) -> Tensor:
        """Return the tokens of a text: int16 [n] for a vocabulary of at most 32,768, else int32; on the CPU. No token
        reaches from one piece into the next. Each byte that is no UTF-8 becomes a token of its own. TextError for a
        tokenizer whose tokens do not stand for every byte."""
        pieces = [*pieces]
        parts = [part for piece in pieces for part in _parts(piece)]
        texts = [part for part in parts if isinstance(part, str)]
        encoded = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
        ids = (next(encoded).ids if isinstance(part, str) else self._of_bytes(part) for part in parts)
        tokens = torch.from_numpy(np.fromiter(chain.from_iterable(ids), self.dtype))
        if (read := self.lengths[tokens.long()].sum().item()) != (size := sum(map(len, pieces))):
            raise TextError(
                f"the tokens of {self.name} stand for {read} bytes of a text of {size}; accepted: a byte-level "
                "tokenizer without normalisation, which loses nothing"
            )
        return tokens

    def _of_bytes(self, broken: bytes) -> list[int]:
        return [number for byte in broken if (number := self._numbers.get(bytes([byte]))) is not None]

    def decode(self, tokens: Tensor) -> bytes:
        return b"".join([self._bytes[token] for token in tokens.flatten().tolist()])


def train(pieces: Iterable[bytes], vocabulary: int, name: str) -> BPE:
    """Return a byte-level BPE whose merges are learned on these pieces of a text of this name; the same ones give the
    same tokenizer. vocabulary: 256 bytes and the merges; fewer where a short text has no more pairs."""
    tokenizer = _library().ByteLevelBPETokenizer()
    strings = (part for piece in pieces for part in _parts(piece) if isinstance(part, str))
    tokenizer.train_from_iterator(strings, vocabulary, min_frequency=0, show_progress=False)
    trained = BPE(tokenizer.to_str())
    trained.name = f"BPE of {trained.vocabulary}, from {name}"
    return trained


def load(path: str | os.PathLike) -> Tokenizer:
    """Return the tokenizer that a tokenizer.json holds. TextError for any other file."""
    try:
        content = read_file(path, _LARGEST)
        fields = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise TextError(
            f"cannot read the tokenizer {os.fspath(path)!r}: {error}; accepted: bytes, bpe:4096, or its file"
        ) from None
    return BYTES if fields == json.loads(BYTES.content) else BPE(content.decode(), os.path.basename(path))


def named(tokenizer: str | os.PathLike | Tokenizer | None) -> Tokenizer | int:
    """Return the tokenizer that a command line or a config means (see source.load), or the vocabulary of one that
    is yet to be trained. InputError for a vocabulary that is no whole number from 256 to 2**20."""
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if tokenizer in (None, "bytes"):
        return BYTES
    if not isinstance(tokenizer, str) or not tokenizer.startswith("bpe:"):
        return load(tokenizer)
    if not (re.fullmatch("bpe:[0-9]{3,7}", tokenizer) and 256 <= int(tokenizer[4:]) <= 2**20):
        raise InputError(
            f"tokenizer is {tokenizer!r:.80}; accepted: bytes, bpe:4096 (a vocabulary from 256 to {2**20}), a path"
        )
    _library()
    return int(tokenizer[4:])


def tokenizer_of(folder: str | os.PathLike, vocabulary: int) -> Tokenizer:
    """Return the tokenizer that a model's folder holds, or else bytes. InputError where it does not go with a model of
    this vocabulary, which may be larger."""
    path = Path(folder) / "tokenizer.json"
    own = load(path) if path.is_file() else BYTES
    if own.vocabulary > vocabulary or own == BYTES and vocabulary != BYTES.vocabulary:
        read = f"the tokenizer in {str(path)!r}" if path.is_file() else f"bytes, as there is no {str(path)!r}"
        raise InputError(
            f"the model has a vocabulary of {vocabulary}, and {own.vocabulary} would be read: {read}; accepted: a "
            "model folder with the tokenizer that the model was trained with"
        )
    return own


def _parts(piece: bytes) -> Iterator[str | bytes]:
    """Yield what a piece is made of: str where it is UTF-8, bytes where it is not."""
    # Each byte that is no UTF-8 becomes a character from U+DC80 to U+DCFF, which the library would not take.
    for part in re.split("([\udc80-\udcff]+)", piece.decode("utf-8", "surrogateescape")):
        if part:
            yield part.encode("utf-8", "surrogateescape") if "\udc80" <= part[0] <= "\udcff" else part


def _library():
    return optional("tokenizers", "a BPE tokenizer")
