"""A text of any length, prepared once: a folder with all of its tokens in one file, which training maps into memory;
and `load_any`, which reads texts of every kind.

Documents are read, encoded and written one after the other, long files in pieces, so that only the disk limits the
length. In the folder are `tokens.bin`, the token numbers one after the other, little-endian; `tokenizer.json`; and
`twell-lab-text.json`, the manifest. Until all of it is written the tokens are called `tokens.bin.part`, and the next
preparation begins anew."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterable, Iterator
from itertools import accumulate, chain
from pathlib import Path

import numpy
import torch
from torch import Tensor

from ...core import LOCK, InputError, TextError, locked_folder
from . import source
from . import tokenizer as tokenizers
from .source import Text
from .tokenizer import Tokenizer

MANIFEST, TOKENS, TOKENIZER = "twell-lab-text.json", "tokens.bin", "tokenizer.json"
UNFINISHED = f"{TOKENS}.part"
FORMAT = 1
HELD_OUT = 64 * 2**20  # bytes for validation; a tenth of a shorter text
SAMPLE = 100_000_000  # bytes at the beginning of the text; a BPE is trained on the first four fifths of them
CHUNK = 16 * 2**20  # bytes that are encoded at a time


def load_any(spec: str | os.PathLike | Text | None, *, tokenizer: str | os.PathLike | Tokenizer | None = None) -> Text:
    """Return the text that a command line or a config names, read through a tokenizer.

    spec: as for source.stream, a folder that `prepare` made, or a text. tokenizer: None (that of the text, or bytes),
    "bytes", "bpe:4096" (a BPE of that vocabulary, trained on the training part of the text), a path of a tokenizer's
    JSON, or a tokenizer. TextError for what can't be read, StackError for an optional package that is missing, and
    InputError for a wrong vocabulary, and another tokenizer than the one that a text was prepared with."""
    if isinstance(spec, Text):
        text = spec
    else:
        text = load(spec) if spec is not None and is_prepared(spec) else source.load(spec)
    wanted = text.tokenizer if tokenizer is None else tokenizers.named(tokenizer)
    if wanted in (text.tokenizer, text.vocabulary):
        return text
    if text.cut is None:
        return text.encoded(wanted)
    raise InputError(
        f"tokenizer is {getattr(tokenizer, 'name', tokenizer)!r}, and the text {text.name!r} was prepared with "
        f"another of {text.vocabulary}; accepted: that one, or a text that is not prepared"
    )


def is_prepared(path: str | os.PathLike) -> bool:
    """Return whether `prepare` made this folder, and came to its end."""
    return os.path.isfile(Path(path, MANIFEST)) and not os.path.exists(Path(path, UNFINISHED))


def load(folder: str | os.PathLike) -> Text:
    """Return the text that `prepare` left in a folder. TextError where the manifest, the tokenizer or the tokens are
    missing or not those of one preparation."""
    folder = Path(folder)
    try:
        fields = json.loads((folder / MANIFEST).read_bytes())
        same = {name: fields[name] for name in ("name", "sha256", "size", "source")}
        tokenizer, cut = tokenizers.load(folder / TOKENIZER), (fields["cut"]["bytes"], fields["cut"]["tokens"])
        tokens = _mapped(folder / TOKENS, fields["dtype"])
        if (fields["format"], fields["tokenizer"], fields["count"]) != (FORMAT, tokenizer.sha256, len(tokens)):
            raise ValueError(f"{TOKENS}, {TOKENIZER} or the format is another than {MANIFEST} says")
        text = Text(tokens=tokens, tokenizer=tokenizer, cut=cut, **same)
        text.split()  # or the manifest is damaged
        return text
    except (OSError, ValueError, LookupError, TypeError, RecursionError) as error:
        raise TextError(f"cannot read the prepared text {str(folder)!r}: {error}; prepare it again") from None


def _mapped(path: Path, dtype: str) -> Tensor:
    return torch.from_numpy(numpy.memmap(path, dtype, mode="c"))


def prepare(
    spec: str | os.PathLike | None,
    out: str | os.PathLike,
    *,
    tokenizer: str | os.PathLike | Tokenizer | None = None,
    on_bytes: Callable[[int], object] = lambda size: None,
) -> Text:
    """Read a text, encode it, and keep it in the folder `out`. Its end becomes the validation part: 64 MiB, or a tenth
    of a shorter text. What a preparation that fails or is killed leaves is no text, and the next one writes over it.

    spec: as for source.stream: files may have any size, and a dataset is read to its end unless its "bytes" says how
    much. out: a new or empty folder. tokenizer: as for load_any; "bpe:4096" is trained on the first 80 MB, or four
    fifths of a shorter text. on_bytes: called time after time with the number of bytes that were encoded so far.

    TextError for a text that can't be read or is too short. InputError for an `out` that is not empty, can't be written
    or lies in the text's folder."""
    if spec is not None and is_prepared(spec):
        raise InputError(f"{spec!s:.200} is a prepared text already; accepted: the text it was made from")
    out, (name, files, origin), wanted = Path(out), source.stream(spec), tokenizers.named(tokenizer)
    source.check_apart(out, spec)
    try:
        with locked_folder(out, "preparation"):
            there = {path.name for path in out.iterdir()} - {LOCK}
            if there and not (UNFINISHED in there and there <= {UNFINISHED, TOKENIZER, MANIFEST}):
                raise InputError(f"out is {str(out)!r}, which holds {min(there)!r}; accepted: a new or empty folder")
            documents = filter(None, chain.from_iterable(files))
            fields, content = _encode(name, documents, out / UNFINISHED, wanted, on_bytes)
            (out / TOKENIZER).write_text(content, encoding="utf-8")
            (out / MANIFEST).write_text(json.dumps({**fields, "source": origin}, indent=1) + "\n", encoding="utf-8")
            os.replace(out / UNFINISHED, out / TOKENS)
    except OSError as error:
        raise InputError(f"cannot prepare a text in {str(out)!r}: {error}") from None
    return load(out)


def _encode(name: str, documents: Iterable[bytes], path: Path, wanted: Tokenizer | int, on_bytes) -> tuple[dict, str]:
    """Write the tokens of documents, or of pieces of them, to `path`; return the manifest, without the source, and what
    the tokenizer's file holds."""
    if isinstance(wanted, int):
        first = next(_batches(documents, SAMPLE), [])
        sums = [*accumulate(map(len, first))]
        # Even if these are all documents, so many belong to the training part.
        some = [document for document, end in zip(first, sums, strict=True) if end <= 0.8 * sums[-1]] or first[:1]
        wanted = tokenizers.train(source.of_pieces(f"the beginning of {name}", some), wanted)
        documents = chain(first, documents)
    digest, size, count, tokens = hashlib.sha256(), 0, 0, torch.empty(0)
    with open(path, "wb") as file:
        for chunk in _batches(documents, CHUNK):
            raw, starts = bytearray().join(chunk), accumulate(map(len, chunk[:-1]), initial=0)
            tokens = wanted.encode(torch.frombuffer(raw, dtype=torch.uint8), tuple(starts))
            file.write(tokens.numpy().tobytes())
            digest.update(raw)
            count += len(tokens)
            on_bytes(size := size + len(raw))
    held_out = round(min(0.1, HELD_OUT / max(1, size)) * count)
    if not held_out:
        raise TextError(f"{name} has {size} bytes; a tenth of them is held out: give a longer text")
    kind = str(tokens.dtype).removeprefix("torch.")
    last = _mapped(path, kind)[-held_out:].long()
    cut = {"bytes": size - int(wanted.lengths[last].sum()), "tokens": count - held_out}
    fields = {"format": FORMAT, "name": name, "sha256": digest.hexdigest(), "size": size, "dtype": kind}
    return {**fields, "count": count, "tokenizer": wanted.sha256, "cut": cut}, wanted.content


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
