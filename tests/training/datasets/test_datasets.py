"""Datasets: the real loading code on small folders, in the documents' order, and a typed error for what is missing."""

import hashlib
import json
import sys
from types import SimpleNamespace
from urllib.parse import urlencode

import pytest

from twell_lab.core import InputError, StackError, TextError
from twell_lab.training.text import datasets as ours
from twell_lab.training.text import load

DOCUMENTS = ["First, Straße.", "second\nwith two lines\n", "", "third"]
JOINED = "First, Straße.\n\nsecond\nwith two lines\n\n\nthird\n\n".encode()


@pytest.fixture(scope="module")
def library():
    return pytest.importorskip("datasets", reason="the extra 'text' is not installed")


@pytest.fixture(params=["jsonl", "parquet"])
def folder(request, tmp_path, library):
    """A dataset of four documents, in two files."""
    made = tmp_path / "letters"
    made.mkdir()
    rows = [{"text": document, "number": at} for at, document in enumerate(DOCUMENTS)]
    for name, part in (("train-0", rows[:2]), ("train-1", rows[2:])):
        if request.param == "jsonl":
            (made / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in part))
        else:
            library.Dataset.from_list(part).to_parquet(made / f"{name}.parquet")
    return made


def from_hub(dataset, **parts):
    return ours.from_spec(f"hf:{dataset}?{urlencode(parts)}" if parts else f"hf:{dataset}")


def test_a_folder_is_its_documents_in_order(folder):
    read = from_hub(folder)
    assert read.data.numpy().tobytes() == JOINED and read.starts == (0, 17, 41)
    assert read.describe() == {
        "name": f"letters, train, first {len(JOINED)} bytes",
        "sha256": hashlib.sha256(JOINED).hexdigest(),
        "size": len(JOINED),
        "source": {"dataset": "letters", "subset": None, "split": "train", "column": "text", "documents": 3},
    }
    training, validation = read.split()
    assert training.size + validation.size == read.size and validation.source == read.source


def test_no_more_is_read_than_asked_for(folder):
    for size in (1, 10, 17, 20, 41):
        read = from_hub(folder, bytes=size)
        assert read.data.numpy().tobytes() == JOINED[:size] and read.size == size
        assert read.starts == tuple(start for start in (0, 17, 41) if start < size)


def test_a_command_line_names_a_dataset(folder):
    assert load.load_any(f"hf:{folder}").data.numpy().tobytes() == JOINED
    read = load.load_any(f"hf:{folder}?bytes=2e1&split=train&column=text")
    assert read.data.numpy().tobytes() == JOINED[:20] and str(folder) not in json.dumps(read.describe())


def test_what_the_parts_of_a_name_mean():
    usual = {"dataset": "a/b", "subset": None, "split": "train", "column": "text", "bytes": None, "revision": None}
    assert ours.parse("hf:a/b") == usual
    assert ours.parse("hf:a/b?subset=sample-10BT") == usual | {"subset": "sample-10BT"}
    assert ours.parse("hf:a/b?bytes=1e3&revision=v1") == usual | {"bytes": 1000, "revision": "v1"}


@pytest.mark.parametrize(
    "spec, words",
    [
        ("hf:", "owner/name"),
        ("hf:a/b?size=3", "size"),
        ("hf:a/b?split", "split"),
        ("hf:a/b?bytes=many", "many"),
        ("hf:a/b?bytes=1.5", "1.5"),
        ("hf:a/b?bytes=inf", "inf"),
        ("hf:a/b?bytes=", "bytes"),
        ("hf:a/b?bytes=0", "from 1 up"),
        ("hf:a/b?bytes=-1e3", "from 1 up"),
        ("hf:a/b?bytes=1e12", "twell-lab prepare"),
    ],
)
def test_wrong_names_are_refused(spec, words):
    with pytest.raises(InputError, match=words):
        ours.from_spec(spec)


def test_another_column_split_or_subset_is_named(folder):
    with pytest.raises(TextError, match="no column 'body'.*'text', 'number'"):
        from_hub(folder, column="body")
    with pytest.raises(TextError, match="holds a int in 'number'"):
        from_hub(folder, column="number")
    with pytest.raises(TextError, match="letters.*split 'test'"):
        from_hub(folder, split="test")
    with pytest.raises(TextError, match="letters.*subset 'small'"):
        from_hub(folder, subset="small")


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
    monkeypatch.setattr(
        "huggingface_hub.HfApi.dataset_info",
        lambda *args, **options: SimpleNamespace(sha="abc", card_data={"license": "odc-by"}),
    )
    read = from_hub("owner/name", subset="small", bytes=8)
    assert read.data.numpy().tobytes() == b"some\n\nmo" and read.name == "owner/name, small, train, first 8 bytes"
    assert read.source["licence"] == "odc-by" and read.source["revision"] == "abc"
    monkeypatch.setattr("huggingface_hub.HfApi.dataset_info", rows)
    assert from_hub("owner/name", bytes=8).source["licence"] is None


def test_without_the_library_it_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(StackError, match="pip install datasets"):
        from_hub(tmp_path)
