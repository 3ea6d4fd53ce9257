"""Tokenizers: every byte comes back, whatever it was; the same text trains the same one; files are not crossed."""

import copy
import io
import itertools
import json
import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.train.small_runs import text_of
from twell_lab.core import InputError, StackError, TextError
from twell_lab.training.text import source, tokenizer
from twell_lab.training.text.source import BYTES, load
from twell_lab.training.text.tokenizer import BPE

WORDS = b"the quick brown fox jumps over the lazy dog\n"


def of(content):
    return text_of(content, name="made up")


def saved(tokenizer, folder):
    (folder / "tokenizer.json").write_text(tokenizer.content, encoding="utf-8")
    return folder / "tokenizer.json"


@pytest.fixture(scope="module")
def library_text():
    whole = source.standard_library()
    raw, ends = whole.tokens.numpy().tobytes(), (0, 1000, 70_000, 250_000, 300_000)
    return text_of(*(raw[begin:end] for begin, end in itertools.pairwise(ends)))


@pytest.fixture(scope="module")
def trained(library_text):
    pytest.importorskip("tokenizers", reason="the extra 'text' is not installed")
    return tokenizer.train([library_text.tokens.numpy().tobytes()], 600, "library")


def test_bytes_are_their_own_tokens(tmp_path):
    sample = of(bytes(range(256)))
    assert BYTES.decode(sample.tokens) == bytes(range(256)) and BYTES.lengths.tolist() == [1] * 256
    assert sample.describe() == {"name": "made up", "sha256": sample.sha256, "size": 256}
    assert tokenizer.load(saved(BYTES, tmp_path)) == BYTES


def test_a_trained_tokenizer_has_the_size_asked_for_and_shortens_the_text(trained, library_text):
    read = load(library_text, tokenizer=trained)
    assert trained.vocabulary == read.tokenizer.vocabulary == 600 and read.tokens.dtype == torch.int16
    assert 1.5 < read.size / len(read.tokens) < 4 and read.tokens.max() < 600 and read.tokens.min() >= 0
    assert trained.decode(read.tokens) == library_text.tokens.numpy().tobytes()
    assert trained.lengths[read.tokens.long()].sum() == library_text.size and trained.lengths.min() == 1
    assert read.describe()["tokenizer"] == {"name": trained.name, "sha256": trained.sha256, "vocabulary": 600}
    assert read.sha256 == library_text.sha256  # of the bytes; the tokenizer has its own


def test_a_tokenizer_comes_back_from_disk_and_from_a_copy(trained, library_text, tmp_path):
    tokens = load(library_text, tokenizer=trained).tokens
    loaded = tokenizer.load(saved(trained, tmp_path))
    assert loaded == trained and loaded.sha256 == trained.sha256
    for other in (loaded, copy.deepcopy(trained)):
        assert torch.equal(load(library_text, tokenizer=other).tokens, tokens)
    assert list(tmp_path.iterdir()) == [tmp_path / "tokenizer.json"]


_TEXTS = st.text(max_size=20).map(lambda some: some.encode("utf-8", "surrogatepass"))


@given(st.lists(st.one_of(st.binary(max_size=40), _TEXTS), max_size=6))
def test_any_bytes_come_back(trained, pieces):
    pieces = [piece for piece in pieces if piece] or [b"\xff"]
    tokens = trained.encode(pieces)
    assert trained.decode(tokens) == b"".join(pieces)
    alone = [trained.encode([piece]) for piece in pieces]
    assert torch.equal(tokens, torch.cat(alone))  # no token reaches into the next file


LONG = [b"", b"\x80", "ß".encode() * 500, WORDS * 40, b"x" * 900, b"a\r\n\0" * 300]
LONG += [b"\xf0\x9f\x98\x80" * 200 + b"\x80" * 200]


@pytest.mark.parametrize("content", LONG, ids=lambda content: str(content[:4]))
def test_long_files_are_cut_without_loss(trained, monkeypatch, content):
    monkeypatch.setattr(source, "PIECE", 64)
    pieces = [*source.pieces(io.BytesIO(content))]
    tokens = trained.encode(pieces)
    assert trained.decode(tokens) == content and tokens.dim() == 1 and all(len(piece) <= 2 * 64 for piece in pieces)


def test_load_takes_what_a_command_line_says(trained, tmp_path):
    (tmp_path / "some.txt").write_bytes(WORDS * 50)
    path = str(tmp_path / "some.txt")
    assert load(path).tokenizer == BYTES and load(path, tokenizer="bytes").size == len(WORDS) * 50
    whole = load(path, tokenizer="bpe:280")
    assert whole.tokenizer.vocabulary == 280
    file = saved(trained, tmp_path)
    for given_as in (file, str(file), trained):
        assert load(path, tokenizer=given_as).tokenizer == trained
    assert load(whole) is whole


@pytest.mark.parametrize("name", ["bpe:", "bpe:many", "bpe:255", "bpe:1048577", "nowhere.json"])
def test_wrong_tokenizers_are_refused_by_name(trained, name):
    with pytest.raises(TextError if "nowhere" in name else InputError, match=name):
        load(of(WORDS), tokenizer=name)


def test_files_that_hold_no_tokenizer_are_refused(trained, tmp_path):
    for content, words in ((b"{", "cannot read"), (b"{}", "no tokenizer"), (b"[" * 100_000, "read"), (b"\xff", "read")):
        (tmp_path / "tokenizer.json").write_bytes(content)
        with pytest.raises(TextError, match=words):
            tokenizer.load(tmp_path / "tokenizer.json")


def test_a_tokenizer_that_loses_something_is_refused(trained):
    fields = json.loads(trained.content)
    changes = {"normalizer": {"type": "Replace", "pattern": {"String": "zz"}, "content": "z"}}
    fewer = {token: number for token, number in fields["model"]["vocab"].items() if number != 5}
    for changed in (changes, {"model": {**fields["model"], "vocab": fewer, "merges": []}}):
        with pytest.raises(TextError, match="stand for"):
            BPE(json.dumps({**fields, **changed})).encode([b"pizza&\xc8\xc8"])


def test_without_the_library_bytes_still_work_and_a_bpe_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    assert load(of(WORDS), tokenizer="bytes").tokens.numel() == len(WORDS)
    for refused in (lambda: load(of(WORDS), tokenizer="bpe:300"), lambda: BPE("{}")):
        with pytest.raises(StackError, match="pip install tokenizers"):
            refused()
