"""profile and sparsify of models of this project and of transformers."""

import json
import re
import shutil
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

import twell_lab as tl
from tests.app.conftest import joined
from twell_lab.core import RecordError
from twell_lab.models.tiny import LanguageModel, ModelConfig

TRAIN = "--steps 2 --batch 2 --context 16 --d-model 16 --heads 2 --layers 1 --d-ff 32 --device cpu".split()
PLAN = "--windows 4 --tokens 4 --device cpu".split()


def write(folder, **entries):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.fixture
def trained(value, text, tmp_path):
    """The folder of a model that was trained on the text."""
    summary = value("train", "--text", text, *TRAIN, "--l1", "0.001", "--out", tmp_path / "trained")
    assert summary["config"]["l1"] == 0.001 and len(summary["density"]) == 1
    return tmp_path / "trained"


@pytest.fixture
def llama(tmp_path):
    """A Llama of transformers with a tokenizer of bytes, which no model of ours is: its norms have another epsilon."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    ours = LanguageModel(ModelConfig(vocabulary=256, d_model=16, layers=2, heads=2, d_ff=40, context=64))
    folder = ours.save_pretrained(tmp_path / "llama")
    write(folder, rms_norm_eps=2e-5)
    return folder


@pytest.fixture
def long_text(tmp_path):
    path = tmp_path / "long.txt"
    path.write_text("What fires, fires often. " * 300)
    return path


def test_a_profile_is_shown_saved_and_compared(ask, value, refused, trained, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    counts = Path("counts.json")  # a path is never folded
    asked = ["profile", trained, "--text", text]
    found = value(*asked, "--out", counts)
    assert [row["d_ff"] for row in found["layers"]] == [32] and counts.exists()
    assert found["by_position"][0]["first"] == 0 and found["against"] is None
    assert sum(row["count"] for row in found["by_token"]) == found["tokens"]
    beside = value(*asked, "--windows", "2", "--against", counts)
    assert beside["against"]["layers"][0]["other_density"] == found["layers"][0]["density"]
    shown = ask(*asked, "--against", counts).out
    assert joined(shown).endswith("a plan made from one serves the other.")
    assert max(map(len, shown.splitlines())) <= 80
    assert "text.txt' cannot be read: Expecting value" in refused(*asked, "--against", text)
    assert "no/such" in refused(*asked, "--against", "no/such.json")
    assert "tokens of text.txt, validation part" in ask(*asked, "--windows", "2").out
    (tmp_path / "other.txt").write_text(text.read_text()[1:])
    shown = ask("profile", trained, "--text", tmp_path / "other.txt", "--windows", "2", "--out", counts).out
    assert "tokens of other.txt\n" in shown and f"profile: saved {counts}" in joined(shown)


def test_a_profile_is_drawn_into_a_page_and_a_picture(ask, refused, model, text, tmp_path, monkeypatch):
    plotly = pytest.importorskip("plotly.graph_objects")
    page, picture = tmp_path / "who.html", tmp_path / "who.png"
    asked = ["profile", model, "--text", text, "--windows", "2"]
    ask(*asked, "--html", page)
    drawn = page.read_text(encoding="utf-8")
    assert drawn.count("Plotly.newPlot(") >= 2 and not re.search(r"<(script|link)[^>]*(src|href)=", drawn)
    monkeypatch.setitem(sys.modules, "kaleido", object())
    monkeypatch.setattr(plotly.Figure, "to_image", lambda figure, format: f"a {format}".encode())
    ask(*asked, "--plot", picture)
    assert picture.read_bytes() == b"a png"
    monkeypatch.setattr(plotly.Figure, "to_image", lambda figure, format: (_ for _ in ()).throw(RuntimeError("\nlong")))
    assert "--plot needs kaleido, with Chrome" in refused(*asked, "--plot", picture)
    monkeypatch.setitem(sys.modules, "kaleido", None)
    assert "--plot needs the kaleido library" in refused(*asked, "--plot", picture)
    assert "accepted: " in refused(*asked, "--plot", "x.gif")


def test_a_folder_of_transformers_is_read_with_its_own_tokenizer(value, refused, llama, long_text):
    found = value("profile", llama, "--text", long_text, "--windows", "8")
    ids = torch.tensor([*long_text.read_bytes()][: 8 * 9 * 64])  # so much of it is read
    whole = (len(ids) - 1) // 64
    windows = torch.stack([ids[64 * (i * whole // 8) :][:64] for i in range(8)])
    expected = tl.profile(tl.load(llama), [windows])
    assert [(row["layer"], row["mean_nnz"]) for row in found["layers"]] == [
        (f"model.layers.{i}.mlp", layer.mean_nnz) for i, layer in enumerate(expected.layers)
    ]
    assert found["by_position"] == expected.by_position() and found["by_token"] == expected.by_token()
    long_text.write_text("too short")
    assert "has 9 tokens; windows of 64 need at least 65" in refused("profile", llama, "--text", long_text)


def test_the_context_is_the_models_whatever_its_configuration_calls_it(value, llama, long_text, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=256, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    gpt2 = tmp_path / "gpt2"
    transformers.GPT2LMHeadModel(transformers.GPT2Config(activation_function="relu", **sizes)).save_pretrained(gpt2)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llama / file, gpt2 / file)
    asked = [gpt2, "--text", long_text, "--windows"]
    assert value("profile", *asked, "4")["tokens"] == 4 * 32


def test_a_prepared_text_is_read_as_its_text_whatever_tokens_it_was_prepared_as(value, ask, llama, tmp_path):
    pytest.importorskip("tokenizers")
    (tmp_path / "texts").mkdir()
    for number in range(40):
        said = "What fires, fires often; and what is silent stays silent. " * 40
        (tmp_path / "texts" / f"{number}.txt").write_text(said)
    tokens = []
    for tokenizer in ("bytes", "bpe:300"):
        out = tmp_path / tokenizer.replace(":", "-")
        ask("prepare", tmp_path / "texts", "--out", out, "--tokenizer", tokenizer)
        rows = value("profile", llama, "--text", out, "--windows", "1")["layers"]
        assert all(0 < row["mean_nnz"] < 40 for row in rows)
        tokens.append([row["tokens"] for row in rows])
    assert tokens[0] == tokens[1]


def test_a_tokenizer_of_another_model_is_told(refused, llama):
    weights = safetensors.torch.load_file(llama / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:100].clone()
    safetensors.torch.save_file(weights, llama / "model.safetensors", {"format": "pt"})
    write(llama, vocab_size=100)
    said = refused("profile", llama, "--windows", "2")
    assert "made token 1" in said and "the model has 100 of them" in said


def test_a_plan_is_made_as_asked(ask, value, refused, model, text):
    asked = ["sparsify", model, "--text", text, *PLAN]
    rows = value(*asked)["candidates"]
    assert {row["tokens"] for row in rows if row["chosen"]} == {4} and any(row["measured_us"] for row in rows)
    assert "calls is 'captured'" in refused(*asked, "--calls", "captured")
    shown = joined(ask(*asked, "--predict-only", "--dtype", "bfloat16").out)
    assert "nothing was timed" in shown and "x dense" in shown and "in Python" not in shown


@pytest.mark.parametrize("which", ["model", "llama"])
def test_the_folder_is_loaded_and_swapped_by_its_name(ask, value, request, text, tmp_path, monkeypatch, which):
    folder = request.getfixturevalue(which)
    monkeypatch.chdir(tmp_path)
    said = ask("sparsify", folder, "--text", text, *PLAN, "--out", "swapped").out
    kept, before = tl.load("swapped"), tl.load(folder)
    assert all(torch.equal(p, q) and p.dtype == q.dtype for p, q in zip(kept.parameters(), before.parameters()))
    (line,) = re.findall(r"in\s+Python:\n +(.*)", said)  # what it says can be run as it stands
    swapped = eval(line, {"tl": tl, "torch": torch})
    assert [row["state"] for row in tl.report(swapped).rows] == ["planned"] * 2
    rows = value("sparsify", folder, "--text", text, *PLAN, "--out", "again")
    assert rows["logits_off"] < 1e-5 and [row["state"] for row in rows["layers"]] == ["planned"] * 2
    assert value("profile", "swapped", "--text", text, "--windows", "2")["tokens"] > 0  # with its tokenizer


def test_what_cannot_be_planned_or_would_be_lost_is_refused(refused, model, llama, text, tmp_path):
    asked = ["--text", text, *PLAN, "--out"]
    assert "holds a model" in refused("sparsify", model, *asked, llama)
    write(llama, hidden_act="silu")
    said = refused("sparsify", llama, *asked, tmp_path / "new")
    assert "SiLU" in said and "relufy" in said and not (tmp_path / "new" / "config.json").exists()
    with pytest.raises(RecordError, match=r"plan\.json"):
        tl.sparsify(tl.load(model), str(model))
