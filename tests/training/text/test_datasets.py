"""Datasets: the real loading code on small folders, in the documents' order, and a typed error for what is missing."""

import hashlib
import json
import sys
from urllib.parse import urlencode

import pytest

from twell_lab.core import InputError, StackError, TextError
from twell_lab.training.text.source import load

DOCUMENTS = ["First, Straße.", "second\nwith two lines\n", "", "third"]
JOINED = "First, Straße.\n\nsecond\nwith two lines\n\n\nthird\n\n".encode()


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip("datasets", reason="the extra 'text' is not installed")


@pytest.fixture(params=["jsonl", "parquet"])
def folder(request, tmp_path, library):
    folder = tmp_path / "letters"
    folder.mkdir()
    rows = [{"text": document, "number": at} for at, document in enumerate(DOCUMENTS)]
    for name, part in (("train-0", rows[:2]), ("train-1", rows[2:])):
        if request.param == "jsonl":
            (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        else:
            library.Dataset.from_list(part).to_parquet(folder / f"{name}.parquet")
    return folder


def from_hub(dataset, **parts):
    return load(f"hf:{dataset}?{urlencode(parts)}" if parts else f"hf:{dataset}")


def test_a_folder_is_its_documents_in_order(folder):
    read = from_hub(folder)
    assert read.tokens.numpy().tobytes() == JOINED and [*read.starts] == [0, 17, 41]
    assert read.describe() == {
        "name": "letters, train",
        "sha256": hashlib.sha256(JOINED).hexdigest(),
        "size": len(JOINED),
    }
    training, validation = read.split()
    assert training.size + validation.size == read.size


def test_no_more_is_read_than_asked_for(folder):
    for size in (1, 17, 20, 41):
        read = from_hub(folder, bytes=size)
        assert read.tokens.numpy().tobytes() == JOINED[:size]
        assert [*read.starts] == [start for start in (0, 17, 41) if start < size]


@pytest.mark.parametrize(
    "spec, words",
    [
        ("hf:", "owner/name"),
        ("hf:a/b?size=3", "size"),
        ("hf:a/b?bytes=many", "many"),
        ("hf:a/b?bytes=0", "from 1 up"),
        ("hf:a/b?bytes=1e12", "twell-lab prepare"),
    ],
)
def test_wrong_names_are_refused(spec, words):
    with pytest.raises(InputError, match=words):
        load(spec)


@pytest.mark.parametrize(
    "parts, words",
    [
        ({"column": "body"}, "no text in 'body'.*'text', 'number'"),
        ({"column": "number"}, "no text in 'number'"),
        ({"split": "test"}, "letters.*split 'test'"),
        ({"subset": "small"}, "letters.*subset 'small'"),
    ],
)
def test_another_column_split_or_subset_is_named(folder, parts, words):
    with pytest.raises(TextError, match=words):
        from_hub(folder, **parts)


def test_a_folder_without_text_is_refused(tmp_path, library):
    with pytest.raises(TextError, match="cannot read"):
        from_hub(tmp_path)
    (tmp_path / "a.jsonl").write_text('{"text": ""}\n{"text": null}\n')
    with pytest.raises(TextError, match="holds no text"):
        from_hub(tmp_path)


def test_a_network_that_is_not_there_is_named(monkeypatch, library):
    """The library's own refusal when it is told that there is none; what it raises after its retries is alike."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(library.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(TextError, match="HuggingFaceFW/fineweb-edu.*subset 'sample-10BT'.*needs a network"):
        from_hub("HuggingFaceFW/fineweb-edu", subset="sample-10BT")


def test_a_connection_that_breaks_says_how_far_it_came(monkeypatch, library):
    def rows(*args, **options):
        yield {"text": "some"}
        yield {"text": "more"}
        raise ConnectionError("gone")

    monkeypatch.setattr(library, "load_dataset", rows)
    with pytest.raises(TextError, match="owner/name.*beyond 12 bytes: ConnectionError: gone"):
        from_hub("owner/name")
    read = from_hub("owner/name", subset="small", bytes=8, revision="v1")
    assert (read.name, read.size) == ("owner/name, small, train, v1", 8)


def test_without_the_library_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(StackError, match="pip install datasets"):
        from_hub(tmp_path)
