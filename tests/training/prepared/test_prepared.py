"""Texts prepared on disk: the same bytes and tokens as in memory, a cut between documents, typed errors for what is
damaged."""

import dataclasses
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.training.train.harming import full_at, killed_at
from tests.training.train.small_runs import broken_off
from twell_lab.app import cli
from twell_lab.core import InputError, TextError
from twell_lab.training.config import TrainConfig
from twell_lab.training.loop import train
from twell_lab.training.text import load, prepared, source
from twell_lab.training.text.source import BYTES

FILES = ["tokenizer.json", "tokens.bin", "twell-lab-text.json"]


@pytest.fixture
def folder(tmp_path):
    """Twenty files of one line and more."""
    made = tmp_path / "poems"
    made.mkdir()
    for number in range(20):
        (made / f"{number:02}.txt").write_text(
            f"Poem {number}: the straße is long, and the poem is not.\n" * (3 + number % 4)
        )
    return made


def bytes_of(made) -> bytes:
    return made.tokenizer.decode(made.tokens)


@pytest.mark.parametrize("tokenizer", [None, "bytes", "bpe:300"])
def test_what_is_kept_is_the_text(folder, tmp_path, tokenizer):
    if tokenizer == "bpe:300":
        pytest.importorskip("tokenizers")
    whole = source.read(folder)
    made = prepared.prepare(folder, tmp_path / "out", tokenizer=tokenizer)
    assert bytes_of(made) == whole.data.numpy().tobytes()
    assert (made.sha256, made.size, made.name) == (whole.sha256, whole.size, whole.name)
    assert made.describe() == whole.read_as(made.tokenizer).describe()
    assert torch.equal(made.tokens, whole.read_as(made.tokenizer).tokens)
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path / "out" / "tokens.bin") in maps.read_text()  # mapped, not read
    training, validation = made.split()
    assert training.size in whole.starts and training.size + validation.size == whole.size
    assert abs(validation.size - whole.size / 10) < 400
    raw = whole.data.numpy().tobytes()
    for part, own in ((training, raw[: training.size]), (validation, raw[training.size :])):
        assert made.tokenizer.decode(part.tokens) == own
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES
    assert str(tmp_path) not in (tmp_path / "out" / prepared.MANIFEST).read_text()


@given(st.lists(st.binary(min_size=1, max_size=40), min_size=2, max_size=30), st.integers(1, 200))
def test_any_documents_in_chunks_of_any_size(tmp_path_factory, documents, chunk):
    documents = [each.replace(b"\0", b" ") for each in documents]
    raw, starts = b"".join(documents), [sum(map(len, documents[:i])) for i in range(len(documents))]
    whole = source.of_pieces("some", documents)
    folder = tmp_path_factory.mktemp("prepared")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(prepared, "CHUNK", chunk)
        try:
            made = prepared.prepare(whole, folder)
        except TextError as error:
            assert "no cut between two of them holds out" in str(error) and not prepared.is_prepared(folder)
            return
    assert bytes_of(made) == raw and made.cut[0] == made.cut[1] and made.cut[0] in starts[1:]
    assert json.loads((folder / prepared.MANIFEST).read_text())["pieces"] == len(documents)


@pytest.mark.parametrize("sample", [1, 1000, 10**9])
def test_a_bpe_learns_nothing_from_what_is_held_out(folder, tmp_path, monkeypatch, sample):
    pytest.importorskip("tokenizers")
    learned, real = [], prepared.train_tokenizer
    monkeypatch.setattr(prepared, "SAMPLE", sample)
    monkeypatch.setattr(prepared, "train_tokenizer", lambda some, size: learned.append(some) or real(some, size))
    made = prepared.prepare(folder, tmp_path / "out", tokenizer="bpe:300")
    raw = source.read(folder).data.numpy().tobytes()
    (some,) = learned
    assert some.size <= made.cut[0] and some.data.numpy().tobytes() == raw[: some.size]
    assert bytes_of(made) == raw


def test_long_files_come_in_pieces_that_the_encoder_would_make_itself(tmp_path):
    pytest.importorskip("tokenizers")
    lines = b"".join(b"line %d of a long file, caf\xc3\xa9\n" % number for number in range(60_000))
    (tmp_path / "long.txt").write_bytes(lines + b"x" * 300_000 + b"\xe2\x82\xac" * 100_000)
    whole = source.read(tmp_path / "long.txt")
    made = prepared.prepare(tmp_path / "long.txt", tmp_path / "out", tokenizer="bpe:300")
    assert torch.equal(made.tokens, whole.read_as(made.tokenizer).tokens) and made.sha256 == whole.sha256
    same = prepared.prepare(whole, tmp_path / "same", tokenizer=made.tokenizer)
    assert torch.equal(same.tokens, made.tokens) and same.cut == made.cut
    (tmp_path / "binary").write_bytes(b"a" * 2**20 + b"\0")
    with pytest.raises(TextError, match="binary holds no text"):
        prepared.prepare(tmp_path / "binary", tmp_path / "none")


def test_a_folder_of_plain_files_as_a_dataset_is_files_not_lines(folder, tmp_path):
    pytest.importorskip("datasets")
    made = prepared.prepare(f"hf:{folder}", tmp_path / "out")
    assert made.source["documents"] == 20
    assert bytes_of(made) == b"".join(path.read_bytes() + b"\n\n" for path in sorted(folder.iterdir()))


def test_a_model_trains_on_it_and_goes_on(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(prepared, "HELD_OUT", 300)  # less than text.split would hold out
    prepared.prepare(folder, tmp_path / "text")
    sizes = dict(steps=8, batch=4, context=16, d_model=16, layers=2, heads=2, d_ff=32, warmup=2)
    rows = dict(log_every=2, eval_every=4, eval_windows=4, checkpoint_every=4)
    config = TrainConfig(text=tmp_path / "text", **sizes, **rows)
    whole = train(config, progress=False)

    broken_off(config, tmp_path / "out", 6)
    again = train(config, resume=tmp_path / "out", progress=False)
    assert [row["loss"] for row in again.history] == [row["loss"] for row in whole.history]
    assert whole.text["training_size"] + whole.text["validation_size"] == whole.text["size"]
    monkeypatch.undo()
    other = prepared.prepare(source.standard_library(), tmp_path / "other")
    with pytest.raises(InputError, match="the text's training_size is .*, and .* in the checkpoint"):
        train(dataclasses.replace(config, text=folder), resume=tmp_path / "out", progress=False)
    with pytest.raises(InputError, match="the text's sha256 is"):
        train(dataclasses.replace(config, text=other), resume=tmp_path / "out", progress=False)


def test_a_tokenizer_must_be_the_one_it_was_prepared_with(folder, tmp_path):
    pytest.importorskip("tokenizers")
    made = prepared.prepare(folder, tmp_path / "out", tokenizer="bpe:300")
    for same in (None, f"bpe:{made.vocabulary}", made.tokenizer, tmp_path / "out" / "tokenizer.json"):
        assert load.load_any(tmp_path / "out", tokenizer=same).tokenizer == made.tokenizer
    for other in ("bytes", "bpe:999", BYTES):
        with pytest.raises(InputError, match="the text 'poems' was prepared with another of"):
            load.load_any(tmp_path / "out", tokenizer=other)


# What is refused


def test_a_folder_in_use_and_a_text_that_is_prepared_are_refused(folder, tmp_path):
    prepared.prepare(folder, tmp_path / "out")
    with pytest.raises(InputError, match="out is .* which holds 'tokenizer.json'; accepted: a new folder"):
        prepared.prepare(folder, tmp_path / "out")
    for made in (tmp_path / "out", prepared.load(tmp_path / "out")):
        with pytest.raises(InputError, match="is a prepared text already"):
            prepared.prepare(made, tmp_path / "again")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "tokens.bin").write_bytes(b"of somebody else")
    with pytest.raises(InputError, match="which holds 'tokens.bin'; accepted"):
        prepared.prepare(folder, tmp_path / "mine")
    assert (tmp_path / "mine" / "tokens.bin").read_bytes() == b"of somebody else"
    with pytest.raises(InputError, match="cannot prepare a text in"):
        prepared.prepare(folder, tmp_path / "mine" / "tokens.bin" / "out")
    with pytest.raises(InputError, match="is inside of the text"):
        prepared.prepare(folder, folder / "out")


def test_one_preparation_at_a_time_and_what_fails_is_in_nobodys_way(folder, tmp_path):
    def second(size):
        with pytest.raises(InputError, match="in use by another preparation; accepted: another"):
            prepared.prepare(folder, tmp_path / "out")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        prepared.prepare(folder, tmp_path / "out", on_bytes=second)
    assert not prepared.is_prepared(tmp_path / "out")

    def full(size):
        raise OSError(28, "No space left on device")

    with pytest.raises(InputError, match="cannot prepare a text in .*No space left"):
        prepared.prepare(folder, tmp_path / "out", on_bytes=full)
    assert prepared.prepare(folder, tmp_path / "out").size == source.read(folder).size


def whole_or_cleared(out, folder):
    """What another preparation finds there: a text, or nothing that is in its way."""
    if prepared.is_prepared(out):
        assert bytes_of(prepared.load(out)) == source.read(folder).data.numpy().tobytes()
        with pytest.raises(InputError, match="which holds"):
            prepared.prepare(folder, out)
    else:
        prepared.prepare(folder, out)
    assert sorted(path.name for path in out.iterdir()) == FILES


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("harmed_at", [killed_at, full_at])
def test_a_preparation_that_fails_anywhere_is_cleared_away_by_the_next(folder, tmp_path, harmed_at):
    change, left = 0, set()
    while True:
        change += 1
        out = tmp_path / str(change)
        harmed = harmed_at(change, lambda: prepared.prepare(folder, out))
        left |= {path.name for path in out.iterdir()} if out.exists() else set()
        whole_or_cleared(out, folder)
        if not harmed:
            break
    assert change > 4 and (harmed_at is full_at or {"tokens.bin.part", "twell-lab-text.json"} <= left)


@pytest.mark.parametrize("sizes", [[100], [10, 90], [1], [100_000, 6]])
def test_documents_of_which_none_can_be_held_out(tmp_path, sizes):
    (tmp_path / "some").mkdir()
    for number, size in enumerate(sizes):
        (tmp_path / "some" / str(number)).write_text("a" * size)
    with pytest.raises(
        TextError,
        match="some has .*, and no cut between two of them holds out about .* bytes .*; accepted: more and shorter ",
    ):
        prepared.prepare(tmp_path / "some", tmp_path / "out")
    assert not prepared.is_prepared(tmp_path / "out")


@pytest.mark.parametrize(
    "damage", ["short", "long", "no tokens", "no tokenizer", "no json", "a list", "another format", "another tokenizer"]
)
def test_what_is_damaged_is_named(folder, tmp_path, damage):
    out = tmp_path / "out"
    prepared.prepare(folder, out)
    tokens, manifest = out / "tokens.bin", out / prepared.MANIFEST
    fields = json.loads(manifest.read_text())
    if damage in ("short", "long"):
        tokens.write_bytes(tokens.read_bytes()[:-1] if damage == "short" else tokens.read_bytes() + b"a")
    elif damage == "another tokenizer":
        manifest.write_text(json.dumps({**fields, "tokenizer": "0" * 64}))
    elif damage.startswith("no t"):
        (tokens if damage == "no tokens" else out / "tokenizer.json").unlink()
    else:
        manifest.write_text(
            {"no json": "{", "a list": "[]", "another format": json.dumps({**fields, "format": 2})}[damage]
        )
    with pytest.raises(TextError, match=str(out)):
        load.load_any(out)


def test_the_command(folder, tmp_path, capsys):
    assert cli.main(["prepare", str(folder), "--out", str(tmp_path / "out")]) == 0
    assert "prepare: " in (said := capsys.readouterr().out) and "of poems as" in said and "held out" in said
    assert cli.main(["prepare", str(folder), "--out", str(tmp_path / "json"), "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["training_tokens"] + fields["validation_tokens"] == fields["size"]
    assert cli.main(["prepare", str(tmp_path / "nowhere"), "--out", str(tmp_path / "none")]) == 2
    assert "cannot read the text" in capsys.readouterr().err and not (tmp_path / "none").exists()
