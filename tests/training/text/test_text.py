"""The text: what is read, in which order, with which checksum, and where it is cut."""

import hashlib
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twell_lab.core import TextError
from twell_lab.training.text import source


def write(folder, files):
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def content(of):
    return of.tokens.numpy().tobytes()


def test_a_folder_is_its_text_files_in_order_of_path(tmp_path):
    write(tmp_path, {"b.py": b"second\n", "a/z.txt": b"first\n", "B.md": b"before lower case\n"})
    write(tmp_path, {".git/config": b"hidden\n", ".env": b"hidden\n", "picture": b"\x89PNG\0\0", "empty": b""})
    read = source.load(tmp_path)
    assert content(read) == b"before lower case\nfirst\nsecond\n"
    # printf 'before lower case\nfirst\nsecond\n' | sha256sum
    assert read.sha256 == "06e1a0aa60824643307ae355c25c85dc146c44d11bfa8c2a81e1b37e0aabce7b"
    assert [*read.starts] == [0, 18, 24] and str(tmp_path) not in read.name


def test_links_to_files_are_followed_and_those_to_folders_are_not(tmp_path):
    folder = write(tmp_path / "folder", {"real.txt": b"real\n", "sub/more.txt": b"more\n"})
    for link, to in (("sub/up", folder), ("self", "self"), ("gone", "nowhere"), ("again.txt", "real.txt")):
        (folder / link).symlink_to(to)
    assert content(source.load(folder)) == b"real\nreal\nmore\n"  # again.txt, real.txt, sub/more.txt


def test_the_standard_library_is_there_without_its_tests():
    library = source.load(None)
    assert 5e6 < library.size < 30e6 and len(library.starts) > 300
    code = content(library)
    assert library.sha256 == hashlib.sha256(code).hexdigest() and b"class JSONDecodeError(ValueError)" in code
    assert b"Run the Python regression tests" not in code and b"class HttpServerThread" not in code


@pytest.mark.parametrize(
    "files, name, words",
    [
        ({}, "missing", "missing"),
        ({"empty": b""}, "empty", "empty"),
        ({"program": b"\x7fELF\0\0"}, "program", "binary"),
        ({}, "", "holds no text"),
        ({"a": b"", "b": b"\0"}, "", "holds no text"),
        ({}, "a\0b", "cannot read"),
        ({"a": b"12345", "b": b"1234567"}, "", "more than 10 bytes"),
    ],
)
def test_what_is_no_text_is_refused_by_name(tmp_path, monkeypatch, files, name, words):
    monkeypatch.setattr(source, "LARGEST", 10)
    write(tmp_path, files)
    with pytest.raises(TextError, match=words):
        source.load(f"{tmp_path}/{name}")


def test_a_pipe_is_refused_rather_than_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TextError, match="neither a file nor a folder"):
        source.load(tmp_path / "pipe")


@given(st.lists(st.integers(1, 400), min_size=2, max_size=30))
@settings(max_examples=100, deadline=None)
def test_splitting_loses_nothing_and_prefers_whole_files(sizes):
    starts = tuple(sum(sizes[:i]) for i in range(len(sizes)))
    tokens = torch.arange(sum(sizes)).remainder(251).to(torch.uint8)
    whole = source.Text("joined", "", len(tokens), tokens, starts=starts)
    training, validation = whole.split()
    assert torch.equal(torch.cat([training.tokens, validation.tokens]), tokens)
    assert training.size and validation.size
    assert [*training.starts] == [at for at in whole.starts if at < training.size]
    wanted, share = source.TRAINING * whole.size, (1 - source.TRAINING) * whole.size
    choices = [at for at in whole.starts[1:] if share / 2 <= whole.size - at <= share * 2]
    if choices:
        assert abs(training.size - wanted) == min(abs(at - wanted) for at in choices)
    else:
        assert abs(training.size - wanted) <= 1


def test_random_windows_are_pieces_of_the_text_and_reach_both_ends():
    windows = source.random_windows(torch.arange(40, dtype=torch.uint8), 2000, 8, torch.Generator().manual_seed(0))
    assert windows.shape == (2000, 9) and windows.dtype == torch.int64
    assert (windows.diff(dim=1) == 1).all() and windows.min() == 0 and windows.max() == 39


@given(st.integers(0, 280), st.integers(1, 20), st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_spread_windows_predict_no_byte_twice(more, count, context):
    size = context + 1 + more
    windows = source.spread_windows(torch.arange(size), count, context)
    assert windows.shape == (min(count, (size - 1) // context), context + 1)
    predicted = windows[:, 1:].flatten()
    assert len(predicted.unique()) == len(predicted)
    if count > 1:  # all over the text, not only its beginning
        assert windows[-1, -1] >= size * (1 - 1 / len(windows)) - context
    assert (windows.diff(dim=1) == 1).all() and windows.max() < size
