"""The text: what is read, in which order, with which checksum, and where it is cut."""

import hashlib
import os

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from twell_lab.core import TextError
from twell_lab.training.text import source


def write(folder, **files):
    for name, content in files.items():
        path = folder / name.replace("__", "/").replace("_dot_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return folder


def content(of):
    return of.data.numpy().tobytes()


# Reading


def test_a_folder_is_its_files_in_order_of_path_and_nothing_else(tmp_path):
    write(tmp_path, b_dot_py=b"second\n", a__z_dot_txt=b"first\n", B_dot_md=b"before lower case\n")
    read = source.read(tmp_path)
    assert content(read) == b"before lower case\nfirst\nsecond\n"
    # printf 'before lower case\nfirst\nsecond\n' | sha256sum
    assert read.sha256 == "06e1a0aa60824643307ae355c25c85dc146c44d11bfa8c2a81e1b37e0aabce7b"
    assert read.size == 31 and read.starts == (0, 18, 24)
    assert read.data.dtype == torch.uint8 and read.data.dim() == 1


def test_a_file_is_its_bytes_and_names_carry_no_folder(tmp_path):
    write(tmp_path, poem_dot_txt="Straße\n".encode())
    read = source.read(str(tmp_path / "poem.txt"))
    assert content(read) == "Straße\n".encode()
    assert read.describe() == {"name": "poem.txt", "size": 8, "sha256": hashlib.sha256("Straße\n".encode()).hexdigest()}
    assert str(tmp_path) not in source.read(tmp_path).name


def test_hidden_binary_and_empty_files_of_a_folder_are_left_out(tmp_path):
    write(tmp_path, _dot_git__config=b"hidden\n", _dot_env=b"hidden\n", picture=b"\x89PNG\0\0", empty=b"")
    write(tmp_path, kept=b"kept\n", last=b"!")
    read = source.read(tmp_path)
    assert content(read) == b"kept\n!" and read.starts == (0, 5)


def test_links_to_files_are_followed_and_those_to_folders_are_not(tmp_path):
    folder = write(tmp_path / "folder", real_dot_txt=b"real\n", sub__more_dot_txt=b"more\n")
    (folder / "sub" / "up").symlink_to(folder)  # a circle of folders
    (folder / "self").symlink_to("self")  # a link to itself
    (folder / "gone").symlink_to("nowhere")
    (folder / "again.txt").symlink_to("real.txt")
    write(tmp_path / "elsewhere", far_dot_txt=b"far\n")
    (folder / "way").symlink_to(tmp_path / "elsewhere")
    assert content(source.read(folder)) == b"real\nreal\nmore\n"  # again.txt, real.txt, sub/more.txt


def test_the_standard_library_is_there_without_its_tests():
    library = source.standard_library()
    assert 5e6 < library.size < 30e6 and len(library.starts) > 300
    code = content(library)
    assert library.sha256 == hashlib.sha256(code).hexdigest()
    assert b"class JSONDecodeError(ValueError)" in code
    assert b"Run the Python regression tests" not in code and b"class HttpServerThread" not in code
    assert content(source.load(None)) == code


@pytest.mark.parametrize(
    "make, words",
    [
        (lambda folder: folder / "missing", "missing"),
        (lambda folder: write(folder, empty=b"") / "empty", "empty"),
        (lambda folder: write(folder, program=b"\x7fELF\0\0") / "program", "binary"),
        (lambda folder: folder, "holds no text"),
        (lambda folder: write(folder, a=b"", b=b"\0"), "holds no text"),
        (lambda folder: "a\0b", "cannot read"),
    ],
)
def test_what_is_no_text_is_refused_by_name(tmp_path, make, words):
    with pytest.raises(TextError, match=words):
        source.load(make(tmp_path))


def test_a_pipe_is_refused_rather_than_waited_for(tmp_path):
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TextError, match="neither a file nor a folder"):
        source.read(tmp_path / "pipe")


def test_a_folder_too_large_for_memory_is_refused_before_it_is_read(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "LARGEST", 10)
    write(tmp_path, a=b"12345", b=b"123456")
    with pytest.raises(TextError, match="more than 10 bytes"):
        source.read(tmp_path)


# Splitting


def joined(sizes):
    starts = [sum(sizes[:i]) for i in range(len(sizes))]
    data = torch.arange(sum(sizes)).remainder(251).to(torch.uint8)
    return source.Text("joined", "", data, tuple(starts))


@given(st.lists(st.integers(1, 400), min_size=2, max_size=30))
@settings(max_examples=100, deadline=None)
def test_splitting_loses_nothing_and_prefers_whole_files(sizes):
    whole, fraction = joined(sizes), source.TRAINING
    training, validation = whole.split()
    assert torch.equal(torch.cat([training.data, validation.data]), whole.data)
    assert training.size and validation.size
    assert training.sha256 == hashlib.sha256(content(training)).hexdigest()
    assert set(whole.starts) <= {*training.starts, *(training.size + at for at in validation.starts)}
    wanted, share = fraction * whole.size, (1 - fraction) * whole.size
    choices = [at for at in whole.starts[1:] if share / 2 <= whole.size - at <= share * 2]
    if choices:
        assert abs(training.size - wanted) == min(abs(at - wanted) for at in choices)
    else:  # byte 10, the end of a line, comes once in 251 bytes here, so the cut is at most that far away
        assert 0 <= training.size - int(wanted) <= 251 or training.size == 1


def test_a_single_file_is_cut_at_the_end_of_a_line(tmp_path):
    write(tmp_path, one=b"a line of text\n" * 100)
    training, validation = source.read(tmp_path / "one").split()
    assert content(validation).startswith(b"a line") and content(training).endswith(b"\n")
    assert 0 <= training.size - 1350 < 15


# Windows


def test_random_windows_are_pieces_of_the_text_and_reach_both_ends():
    data = torch.arange(40, dtype=torch.uint8)
    windows = source.random_windows(data, 2000, 8, torch.Generator().manual_seed(0))
    assert windows.shape == (2000, 9) and windows.dtype == torch.int64
    assert (windows.diff(dim=1) == 1).all()
    assert windows.min() == 0 and windows.max() == 39


@given(st.integers(2, 300), st.integers(1, 20), st.integers(1, 20))
@settings(max_examples=200, deadline=None)
def test_spread_windows_predict_no_byte_twice(size, count, context):
    if size < context + 1:
        return
    windows = source.spread_windows(torch.arange(size), count, context)
    assert windows.shape == (min(count, (size - 1) // context), context + 1)
    predicted = windows[:, 1:].flatten()
    assert len(predicted.unique()) == len(predicted)
    if count > 1:  # all over the text, not only its beginning
        assert windows[-1, -1] >= size * (1 - 1 / len(windows)) - context
    assert (windows.diff(dim=1) == 1).all() and windows.max() < size
