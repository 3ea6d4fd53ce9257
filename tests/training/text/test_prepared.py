"""Texts prepared on disk: the same bytes and tokens as in memory, a cut between documents, typed errors for what is
damaged."""

import dataclasses
import hashlib
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
from twell_lab.core import LOCK, InputError, TextError
from twell_lab.training.config import TrainConfig
from twell_lab.training.loop import train
from twell_lab.training.text import source, tokenizer
from twell_lab.training.text.source import BYTES

FILES = ["tokenizer.json", "tokens.bin", "twell-lab-text.json"]


@pytest.fixture
def folder(tmp_path):
    folder = tmp_path / "poems"
    folder.mkdir()
    for number in range(20):
        line = f"Poem {number}: the straße is long, and the poem is not.\n"
        (folder / f"{number:02}.txt").write_text(line * (3 + number % 4))
    return folder


def bytes_of(text) -> bytes:
    return text.tokenizer.decode(text.tokens)


@pytest.mark.parametrize("tokenizer", [None, "bpe:300"])
def test_what_is_kept_is_the_text(folder, tmp_path, tokenizer):
    if tokenizer is not None:
        pytest.importorskip("tokenizers")
    whole = source.load(folder)
    text = source.prepare(folder, tmp_path / "out", tokenizer=tokenizer)
    assert bytes_of(text) == (raw := whole.tokens.numpy().tobytes())
    assert text.describe() == source.load(whole, tokenizer=text.tokenizer).describe()
    assert torch.equal(text.tokens, source.load(whole, tokenizer=text.tokenizer).tokens)
    maps = Path("/proc/self/maps")
    assert not maps.exists() or str(tmp_path / "out" / "tokens.bin") in maps.read_text()  # mapped, not read
    training, validation = text.split()
    assert training.size + validation.size == whole.size and whole.size / 20 <= validation.size <= whole.size / 5
    assert (bytes_of(training), bytes_of(validation)) == (raw[: training.size], raw[training.size :])
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == FILES
    assert str(tmp_path) not in (tmp_path / "out" / source.MANIFEST).read_text()


@given(st.lists(st.binary(min_size=6, max_size=40), min_size=1, max_size=30), st.integers(1, 40))
def test_any_documents_in_batches_of_any_size(tmp_path_factory, documents, batch):
    documents = [each.replace(b"\0", b" ") for each in documents]
    folder, out = (tmp_path_factory.mktemp(name) for name in ("text", "prepared"))
    for number, document in enumerate(documents):
        (folder / f"{number:02}").write_bytes(document)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(source, "BATCH", batch)
        text = source.prepare(folder, out)
    assert bytes_of(text) == (raw := b"".join(documents)) and text.sha256 == hashlib.sha256(raw).hexdigest()
    assert text.cut[0] == text.cut[1] and len(raw) / 20 - 1 <= len(raw) - text.cut[0] <= len(raw) / 5 + 1


@pytest.mark.parametrize("sample", [1, 1000, 10**9])
def test_a_bpe_learns_nothing_from_what_is_held_out(folder, tmp_path, monkeypatch, sample):
    pytest.importorskip("tokenizers")
    learned, real = [], tokenizer.train
    monkeypatch.setattr(source, "SAMPLE", sample)
    monkeypatch.setattr(source, "BATCH", 2)
    monkeypatch.setattr(tokenizer, "train", lambda some, *how: learned.append(some) or real(some, *how))
    text = source.prepare(folder, tmp_path / "out", tokenizer="bpe:300")
    raw = source.load(folder).tokens.numpy().tobytes()
    (some,) = learned
    some = b"".join(some)
    assert len(some) <= text.cut[0] and some == raw[: len(some)] and bytes_of(text) == raw


def test_long_files_come_in_pieces_that_the_encoder_would_make_itself(tmp_path, monkeypatch):
    pytest.importorskip("tokenizers")
    monkeypatch.setattr(source, "PIECE", 1024)
    lines = b"".join(b"line %d of a long file, caf\xc3\xa9\n" % number for number in range(600))
    (tmp_path / "long.txt").write_bytes(lines + b"x" * 5000 + b"\xe2\x82\xac" * 1500)
    text = source.prepare(tmp_path / "long.txt", tmp_path / "out", tokenizer="bpe:300")
    whole = source.load(tmp_path / "long.txt", tokenizer=text.tokenizer)
    assert torch.equal(text.tokens, whole.tokens) and text.sha256 == whole.sha256
    (tmp_path / "binary").write_bytes(b"a" * 5000 + b"\0")
    with pytest.raises(TextError, match="binary.* holds no text"):
        source.prepare(tmp_path / "binary", tmp_path / "none")


def test_datasets_and_fields_are_prepared_too(tmp_path):
    pytest.importorskip("datasets")
    folder = tmp_path / "rows"
    folder.mkdir()
    rows = [{"text": f"document {number}"} for number in range(20)]
    (folder / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for number, spec in enumerate((f"hf:{folder}", f"{folder / 'a.jsonl'}?field=text")):
        text = source.prepare(spec, tmp_path / str(number))
        assert bytes_of(text) == b"".join(row["text"].encode() + b"\n\n" for row in rows)


def test_a_model_trains_on_it_and_goes_on(folder, tmp_path, monkeypatch):
    monkeypatch.setattr(source, "HELD_OUT", 300)  # less than text.split would hold out
    source.prepare(folder, tmp_path / "text")
    sizes = dict(steps=8, batch=4, context=16, d_model=16, layers=2, heads=2, d_ff=32, warmup=2)
    rows = dict(log_every=2, eval_every=4, eval_windows=4)
    config = TrainConfig(text=tmp_path / "text", **sizes, **rows)
    whole = train(config, progress=False)
    broken_off(config, tmp_path / "out", 6)
    again = train(config, resume=tmp_path / "out", progress=False)
    assert [row["loss"] for row in again.history] == [row["loss"] for row in whole.history]
    assert whole.text["training_size"] + whole.text["validation_size"] == whole.text["size"]
    monkeypatch.setattr(source, "HELD_OUT", 150)
    with pytest.raises(InputError, match="the text's training_size is .*, and .* in the checkpoint"):
        train(dataclasses.replace(config, text=folder), resume=tmp_path / "out", progress=False)


def test_a_tokenizer_must_be_the_one_it_was_prepared_with(folder, tmp_path):
    pytest.importorskip("tokenizers")
    text = source.prepare(folder, tmp_path / "out", tokenizer="bpe:300")
    for same in (None, f"bpe:{text.tokenizer.vocabulary}", text.tokenizer, tmp_path / "out" / "tokenizer.json"):
        assert source.load(tmp_path / "out", tokenizer=same).tokenizer == text.tokenizer
    for other in ("bytes", "bpe:999", BYTES):
        with pytest.raises(InputError, match="the text 'poems' was prepared with another of"):
            source.load(tmp_path / "out", tokenizer=other)


def test_a_folder_in_use_and_a_text_that_is_prepared_are_refused(folder, tmp_path):
    out, mine = tmp_path / "out", tmp_path / "mine"
    source.prepare(folder, out)
    mine.mkdir()
    (mine / "tokens.bin").write_bytes(b"of somebody else")
    for spec, into, words in (
        (folder, out, "out is .* which holds 'tokenizer.json'; accepted"),
        (out, tmp_path / "again", "is a prepared text already"),
        (folder, mine, "which holds 'tokens.bin'; accepted"),
        (folder, mine / "tokens.bin" / "out", "cannot be written"),
        (folder, folder / "out", "is inside of the text"),
    ):
        with pytest.raises(InputError, match=words):
            source.prepare(spec, into)
    assert (mine / "tokens.bin").read_bytes() == b"of somebody else"


def test_one_preparation_at_a_time_and_what_fails_is_in_nobodys_way(folder, tmp_path, monkeypatch):
    def second(*_):
        with pytest.raises(InputError, match="in use by another preparation; accepted: another"):
            source.prepare(folder, tmp_path / "out")
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(tokenizer.Tokenizer, "encode", second)
        source.prepare(folder, tmp_path / "out")
    assert not source.is_prepared(tmp_path / "out")
    assert source.prepare(folder, tmp_path / "out").size == source.load(folder).size


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("harmed_at", [killed_at, full_at])
def test_a_preparation_that_fails_anywhere_is_cleared_away_by_the_next(folder, tmp_path, harmed_at):
    raw, change, left, harmed = source.load(folder).tokens.numpy().tobytes(), 0, set(), True
    while harmed:
        change += 1
        out = tmp_path / str(change)
        harmed = harmed_at(change, lambda out=out: source.prepare(folder, out))
        left |= {path.name for path in out.iterdir()} if out.exists() else set()
        text = source.load_prepared(out) if source.is_prepared(out) else source.prepare(folder, out)
        assert bytes_of(text) == raw and {path.name for path in out.iterdir()} - {LOCK} == {*FILES}
    assert change > 4 and (harmed_at is full_at or {"tokens.bin.part", "twell-lab-text.json"} <= left)


@pytest.mark.parametrize(
    "damage", ["short", "long", "no tokens", "no tokenizer", "no json", "a list", "another format", "another tokenizer"]
)
def test_what_is_damaged_is_named(folder, tmp_path, damage):
    out = tmp_path / "out"
    source.prepare(folder, out)
    tokens, manifest = out / "tokens.bin", out / source.MANIFEST
    fields = json.loads(manifest.read_text())
    if damage in ("short", "long"):
        tokens.write_bytes(tokens.read_bytes()[:-1] if damage == "short" else tokens.read_bytes() + b"a")
    elif damage.startswith("no t"):
        (tokens if damage == "no tokens" else out / "tokenizer.json").unlink()
    else:
        changed = {"another format": {"format": 2}, "another tokenizer": {"tokenizer": "0" * 64}}.get(damage, {})
        manifest.write_text({"no json": "{", "a list": "[]"}.get(damage) or json.dumps(fields | changed))
    with pytest.raises(TextError, match=str(out)):
        source.load(out)


def test_the_command(folder, tmp_path, capsys):
    assert cli.main(["prepare", str(folder), "--out", str(tmp_path / "out")]) == 0
    assert "prepare: " in (said := capsys.readouterr().out) and "of poems as" in said and "held out" in said
    assert cli.main(["prepare", str(folder), "--out", str(tmp_path / "json"), "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)
    assert fields["training_tokens"] + fields["validation_tokens"] == fields["size"]
    assert cli.main(["prepare", str(tmp_path / "nowhere"), "--out", str(tmp_path / "none")]) == 2
    assert "cannot read the text" in capsys.readouterr().err and not (tmp_path / "none").exists()
