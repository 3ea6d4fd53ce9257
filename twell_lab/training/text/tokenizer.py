"""A byte-level BPE, through which a model may read a text instead of byte by byte (source.Bytes).

Both encode any bytes and decode them exactly. The BPE (Sennrich et al., arXiv 1508.07909, over bytes as in GPT-2) is
trained and run by the `tokenizers` library, which the extra "text" installs; bytes need no package. Tokens stand for
different numbers of bytes, so losses are compared in bits a byte.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator
from functools import cached_property

import numpy as np
import torch
from torch import Tensor

from ...core import InputError, TextError, read_file
from ...models.llama import bytes_tokenizer
from .source import BYTES, FORMAT, Text, Tokenizer, extra

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
        """The tokens of uint8 `data` [size]: int16 for a vocabulary of at most 32,768, else int32; on the CPU.

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
        numbers = {piece: number for number, piece in enumerate(self._bytes) if len(piece) == 1}
        missing = [byte for byte in range(256) if bytes([byte]) not in numbers]
        if missing:
            raise TextError(
                f"{self.name} has no token for {len(missing)} of the 256 bytes, {missing[0]} the first; "
                "accepted: a byte-level tokenizer that has them all"
            )
        return [numbers[bytes([byte])] for byte in range(256)]

    def __reduce__(self):
        return BPE, (self.content, self.name)


def train(text: Text, vocabulary: int = 4096) -> BPE:
    """A byte-level BPE whose merges are learned on `text`; the same text gives the same tokenizer.

    text: only the training part (Text.split), so that nothing is learned from what is held out.
    vocabulary: 256 bytes and vocabulary - 256 merges; fewer where a short text has no more pairs to merge.
    Raises InputError for a vocabulary outside 256 to 2**20, and StackError without the tokenizers library.
    """
    library = check_trainable(vocabulary)
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


def check_trainable(vocabulary: int):
    """Raise the errors that `train` raises for this vocabulary; otherwise return the tokenizers library."""
    if isinstance(vocabulary, bool) or not isinstance(vocabulary, int) or not 256 <= vocabulary <= 2**20:
        raise InputError(f"vocabulary is {vocabulary!r}; accepted: a whole number from 256 to {2**20}")
    return _library()


def load(path: str | os.PathLike) -> Tokenizer:
    """The tokenizer in a file that `save` wrote, or in a tokenizer.json of the tokenizers library. TextError for any
    other file."""
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
    """The tokenizer that a command line or a config means, or the vocabulary of one that is yet to be trained.

    tokenizer: None or "bytes"; "bpe:4096", which gives 4096; a path of a tokenizer's JSON; or a tokenizer. Raises
    InputError where no number follows on "bpe:", and as `load`.
    """
    if isinstance(tokenizer, Tokenizer):
        return tokenizer
    if tokenizer is None or tokenizer == "bytes":
        return BYTES
    if not isinstance(tokenizer, str) or not tokenizer.startswith("bpe:"):
        return load(tokenizer)
    size = tokenizer.removeprefix("bpe:")
    if not (size.isascii() and size.isdigit() and len(size) < 20):
        raise InputError(f"tokenizer is {tokenizer!r:.80}; accepted: bytes, bpe:<size of the vocabulary>, or a path")
    return int(size)


def pieces(blocks: Iterable[bytes]) -> Iterator[bytes]:
    """The pieces in which a file is encoded, each apart from the others: CHUNK bytes, and the rest of the line unless
    that is longer than CHUNK again. blocks: the file's bytes, in blocks of any size."""
    blocks, held, more = iter(blocks), b"", True
    while more or held:
        while more and len(held) < 4 * CHUNK:
            block = next(blocks, b"")
            held, more = held + block, bool(block)
        begin = 0
        # Of fewer bytes than this the last piece may not be whole yet.
        while begin < len(held) and (not more or len(held) - begin > 2 * CHUNK + 4):
            cut = _cut_after(held, begin)
            yield held[begin:cut]
            begin = cut
        held = held[begin:]


def _cut_after(raw: bytes, begin: int) -> int:
    """Where the piece of `raw` that begins at `begin` ends."""
    cut = min(begin + CHUNK, len(raw))
    if line := raw.find(b"\n", cut, cut + CHUNK) + 1:
        return line
    while cut < len(raw) and raw[cut] & 0xC0 == 0x80 and cut < begin + CHUNK + 3:
        cut += 1  # not inside a character
    return cut


def batches(parts: Iterable[str | bytes], size: int) -> Iterator[list]:
    """The parts in lists: each list has at least `size` characters or bytes in sum, and the last one what is left."""
    batch, held = [], 0
    for part in parts:
        batch.append(part)
        held += len(part)
        if held >= size:
            yield batch
            batch, held = [], 0
    if batch:
        yield batch


def _strings(raw: bytes, starts: tuple[int, ...]) -> Iterator[str | bytes]:
    """The files of `raw` one after the other, in pieces: as str where they are UTF-8, as bytes where they are not."""
    for begin, end in zip(starts, (*starts[1:], len(raw)), strict=True):
        for piece in pieces([raw[begin:end]]):
            # Each byte that is no UTF-8 becomes a character from U+DC80 to U+DCFF, which the library would not take.
            for part in re.split("([\udc80-\udcff]+)", piece.decode("utf-8", "surrogateescape")):
                if part:
                    broken = "\udc80" <= part[0] <= "\udcff"
                    yield part.encode("utf-8", "surrogateescape") if broken else part


def _alphabet() -> dict[int, str]:
    """The character by which byte-level tokenizers since GPT-2 write each byte: Latin-1's for the printable ones, and
    for the others, in order, the characters from U+0100 on."""
    alphabet = sorted(_library().pre_tokenizers.ByteLevel.alphabet())
    return dict(zip(sorted(range(256), key=lambda byte: (chr(byte) not in alphabet, byte)), alphabet, strict=True))


def _library():
    return extra("tokenizers", "a BPE tokenizer")
