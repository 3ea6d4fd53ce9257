"""A byte-level BPE, through which a model may read a text instead of byte by byte (source.Bytes).

Both encode any bytes and decode them exactly. The BPE (Sennrich et al., arXiv 1508.07909, over bytes as in GPT-2) is
trained and run by the `tokenizers` library, an optional package; bytes need none. Tokens stand for different numbers of
bytes, so losses are compared in bits a byte.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import re
from collections.abc import Iterable, Iterator
from functools import cached_property
from typing import IO

import numpy as np
import torch
from torch import Tensor

from ...core import InputError, TextError, read_file
from ...models.llama import bytes_tokenizer
from .source import BYTES, FORMAT, Text, Tokenizer, optional

CHUNK = 2**16  # bytes: a long file is encoded in pieces of about this size, cut at ends of lines
_LARGEST = 2**28  # bytes of a tokenizer's file; usual ones have a few million
_MOST = 2**22  # token numbers; usual tokenizers have up to a million
_BATCH = 2**23  # bytes handed to the library at a time


class BPE(Tokenizer):
    """A byte-level BPE of the `tokenizers` library.

    content: its JSON, as `train` makes it and tokenizer.json files hold it (such as GPT-2's). name: for records.
    Raises StackError without the library, and TextError for JSON that the library does not take.
    """

    def __init__(self, content: str, name: str = "BPE") -> None:
        library = _library()
        try:
            self._tokenizer = library.Tokenizer.from_str(content)
        except BaseException as error:  # the library raises Exception, or PanicException, which is none
            if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
                raise
            raise TextError(
                f"{name!r:.200} is no tokenizer that the tokenizers library takes: {str(error):.300}"
            ) from None
        self.name, self.content = name, content
        self.sha256 = hashlib.sha256(content.encode()).hexdigest()
        numbers = self._tokenizer.get_vocab(with_added_tokens=True).values()
        self.vocabulary = max(numbers, default=-1) + 1  # not len(numbers): some files skip numbers
        if not 1 <= self.vocabulary <= _MOST:
            raise TextError(f"{name} has {self.vocabulary} token numbers; accepted: from 1 to {_MOST}")

    def encode(self, data: Tensor, starts: tuple[int, ...] = (0,)) -> Tensor:
        """Return the tokens of uint8 `data` [size]: int16 for a vocabulary of at most 32,768, else int32; on the CPU.

        starts: where its files begin. No token reaches from one file into the next, nor from one piece of a long file
        into the next (see `pieces`). Each byte that is no UTF-8 becomes a token of its own. Raises TextError for a
        tokenizer whose tokens do not stand for every byte.
        """
        kind = np.int16 if self.vocabulary <= 2**15 else np.int32
        raw = data.cpu().numpy().tobytes()
        found = [np.empty(0, kind)]
        for batch in batches(_strings(raw, starts), _BATCH):
            texts = [piece for piece in batch if isinstance(piece, str)]
            encoded = iter(self._tokenizer.encode_batch_fast(texts, add_special_tokens=False))
            for piece in batch:
                tokens = next(encoded).ids if isinstance(piece, str) else [self._of_bytes[byte] for byte in piece]
                found.append(np.array(tokens, kind))
        tokens = torch.from_numpy(np.concatenate(found))
        stands_for = self.lengths[tokens.long()].sum().item()
        if stands_for != len(raw):
            raise TextError(
                f"the tokens of {self.name} stand for {stands_for} bytes of a text of {len(raw)}; "
                "accepted: a byte-level tokenizer without normalisation, which loses nothing"
            )
        return tokens

    def decode(self, tokens: Tensor) -> bytes:
        return b"".join([self._bytes[token] for token in tokens.flatten().tolist()])

    @cached_property
    def lengths(self) -> Tensor:
        return torch.tensor([len(piece) for piece in self._bytes], dtype=torch.int32)

    @cached_property
    def _bytes(self) -> list[bytes]:
        """The bytes of each token, by its number; nothing for numbers that no token has."""
        values = {character: byte for byte, character in _alphabet().items()}
        found = [b""] * self.vocabulary
        for token, number in self._tokenizer.get_vocab(with_added_tokens=False).items():
            if values.keys() >= {*token}:
                found[number] = bytes(values[character] for character in token)
        for number, added in self._tokenizer.get_added_tokens_decoder().items():
            found[number] = added.content.encode()
        return found

    @cached_property
    def _of_bytes(self) -> list[int]:
        """The number of the token of each single byte."""
        numbers = {piece: number for number, piece in enumerate(self._bytes)}
        missing = [byte for byte in range(256) if bytes([byte]) not in numbers]
        if missing:
            raise TextError(
                f"{self.name} has no token for {len(missing)} of the 256 bytes, {missing[0]} the first; "
                "accepted: a byte-level tokenizer that has them all"
            )
        return [numbers[bytes([byte])] for byte in range(256)]

    def __reduce__(self):
        return BPE, (self.content, self.name)


def train(text: Text, vocabulary: int) -> BPE:
    """Return a byte-level BPE whose merges are learned on `text`; the same text gives the same tokenizer.

    text: only the training part (Text.split), so that nothing is learned from what is held out.
    vocabulary: 256 bytes and vocabulary - 256 merges; fewer where a short text has no more pairs to merge.
    """
    library = _library()
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocabulary, show_progress=False, special_tokens=[], initial_alphabet=sorted(_alphabet().values())
    )
    strings = _strings(text.data.cpu().numpy().tobytes(), text.starts)
    tokenizer.train_from_iterator((piece for piece in strings if isinstance(piece, str)), trainer)
    made = BPE(tokenizer.to_str())
    made.name = f"BPE of {made.vocabulary}, from {text.name}"
    return made


def load(path: str | os.PathLike) -> Tokenizer:
    """Return the tokenizer in a file that `save` wrote, or in a tokenizer.json of the tokenizers library. TextError for
    any other file."""
    try:
        content = read_file(path, _LARGEST)
        fields = json.loads(content)
    except (OSError, ValueError, RecursionError) as error:
        raise TextError(
            f"cannot read the tokenizer {os.fspath(path)!r}: {getattr(error, 'strerror', None) or error}; "
            "accepted: bytes, bpe:4096, or its file"
        ) from None
    if isinstance(fields, dict) and fields.get("format") == FORMAT or fields == json.loads(bytes_tokenizer()):
        return BYTES
    return BPE(content.decode(), os.path.basename(path))


def named(tokenizer: str | os.PathLike | Tokenizer | None) -> Tokenizer | int:
    """Return the tokenizer that a command line or a config means, or the vocabulary of one that is yet to be trained.

    tokenizer: None or "bytes"; "bpe:4096", which gives 4096; a path of a tokenizer's JSON; or a tokenizer. Raises
    InputError for a vocabulary that is no whole number from 256 to 2**20, StackError for one without the tokenizers
    library, and TextError as `load`.
    """
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if tokenizer is None or tokenizer == "bytes":
        return BYTES
    if not isinstance(tokenizer, str) or not tokenizer.startswith("bpe:"):
        return load(tokenizer)
    size = tokenizer.removeprefix("bpe:")
    if not (size.isascii() and size.isdigit() and len(size) < 20 and 256 <= int(size) <= 2**20):
        raise InputError(
            f"tokenizer is {tokenizer!r:.80}; accepted: bytes, bpe:4096 (a vocabulary from 256 to {2**20}), a path"
        )
    _library()
    return int(size)


def pieces(file: IO[bytes]) -> Iterator[bytes]:
    """Yield the pieces in which a file is encoded, each apart from the others: CHUNK bytes, and the rest of the line or
    as many bytes more."""
    while piece := file.read(CHUNK):
        yield piece + file.readline(CHUNK)


def batches(parts: Iterable[str | bytes], size: int) -> Iterator[list]:
    """Yield the parts in lists: each has at least `size` characters or bytes in sum, and the last one what is left."""
    batch, length = [], 0
    for part in parts:
        batch.append(part)
        length += len(part)
        if length >= size:
            yield batch
            batch, length = [], 0
    if batch:
        yield batch


def _strings(raw: bytes, starts: tuple[int, ...]) -> Iterator[str | bytes]:
    """Yield the files of `raw` one after the other, in pieces: str where they are UTF-8, bytes where they are not."""
    for begin, end in zip(starts, (*starts[1:], len(raw)), strict=True):
        for piece in pieces(io.BytesIO(raw[begin:end])):
            # Each byte that is no UTF-8 becomes a character from U+DC80 to U+DCFF, which the library would not take.
            for part in re.split("([\udc80-\udcff]+)", piece.decode("utf-8", "surrogateescape")):
                if part:
                    broken = "\udc80" <= part[0] <= "\udcff"
                    yield part.encode("utf-8", "surrogateescape") if broken else part


def _alphabet() -> dict[int, str]:
    """Return the character by which byte-level tokenizers since GPT-2 write each byte: Latin-1's for the printable
    ones, and for the others, in order, the characters from U+0100 on."""
    alphabet = sorted(_library().pre_tokenizers.ByteLevel.alphabet())
    return dict(zip(sorted(range(256), key=lambda byte: (chr(byte) not in alphabet, byte)), alphabet, strict=True))


def _library():
    return optional("tokenizers", "a BPE tokenizer")
