"""profile, plan, thresholds, sparsify and export of models of this project and of transformers."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import safetensors.torch
import torch

import twell_lab as tl
from twell_lab.analysis import planner
from twell_lab.app import model_commands
from twell_lab.core import RecordError
from twell_lab.models.tiny import LanguageModel, ModelConfig

TRAIN = "--steps 2 --batch 2 --context 16 --d-model 16 --heads 2 --layers 1 --d-ff 32 --device cpu".split()
PLAN = "--windows 4 --tokens 4 --device cpu".split()


def joined(text: str) -> str:
    """The lines of a text that was folded as one."""
    return " ".join(text.split())


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


# ---- profile ----


def test_a_profile_is_shown_saved_and_compared(ask, value, refused, trained, text, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    counts = Path("counts.json")  # a path is never folded
    found = value("profile", trained, "--text", text, "--out", counts)
    assert [row["d_ff"] for row in found["layers"]] == [32] and counts.exists()
    assert found["by_position"][0]["first"] == 0 and found["against"] is None
    assert sum(row["count"] for row in found["by_token"]) == found["tokens"]
    assert {**value("profile", counts), "of": found["of"]} == found
    beside = value("profile", trained, "--text", text, "--windows", "2", "--against", counts)
    assert beside["against"]["layers"][0]["other_density"] == found["layers"][0]["density"]
    shown = ask("profile", counts, "--against", counts).out
    assert "firing at positions 0: " in shown and "tokens at which most fire" in shown
    assert joined(shown).endswith("a plan made from one serves the other.")
    assert max(map(len, shown.splitlines())) <= 80
    assert "needs no --text" in refused("profile", counts, "--text", text)
    assert "text.txt' cannot be read as JSON" in refused("profile", text)
    assert "no/such" in refused("profile", counts, "--against", "no/such.json")
    assert "tokens of text.txt, validation part" in ask("profile", trained, "--text", text, "--windows", "2").out
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
    monkeypatch.setattr(model_commands, "find_spec", lambda name: name)
    monkeypatch.setattr(plotly.Figure, "to_image", lambda figure, format: f"a {format}".encode())
    ask(*asked, "--plot", picture)
    assert picture.read_bytes() == b"a png"
    monkeypatch.setattr(plotly.Figure, "to_image", lambda figure, format: (_ for _ in ()).throw(RuntimeError("\nlong")))
    for spec in ("kaleido", None):  # without Chrome, and without kaleido
        monkeypatch.setattr(model_commands, "find_spec", lambda name, spec=spec: spec)
        assert "--plot needs kaleido" in refused(*asked, "--plot", picture)
    assert "accepted: " in refused(*asked, "--plot", "x.gif")


def test_a_folder_of_transformers_is_read_with_its_own_tokenizer(ask, value, refused, llama, long_text):
    found = value("profile", llama, "--text", long_text, "--windows", "8")
    ids = torch.tensor([*long_text.read_bytes()][: 8 * 9 * 64])  # so much of it is read
    whole = (len(ids) - 1) // 64
    windows = torch.stack([ids[64 * (i * whole // 8) :][:64] for i in range(8)])
    expected = tl.profile(tl.load(llama), [windows])
    assert [(row["layer"], row["mean_nnz"]) for row in found["layers"]] == [
        (f"model.layers.{i}.mlp", layer.mean_nnz) for i, layer in enumerate(expected.layers)
    ]
    assert found["by_position"] == expected.by_position() and found["by_token"] == expected.by_token()
    shown = ask("profile", llama, "--text", long_text, "--windows", "8").out
    assert "most fire, times the mean: '" in joined(shown)  # tokens are spelled
    long_text.write_text("too short")
    assert "has 9 tokens; windows of 64 need at least 65" in refused("profile", llama, "--text", long_text)


def test_the_context_is_the_models_whatever_its_configuration_calls_it(value, refused, llama, long_text, tmp_path):
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=256, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    gpt2 = tmp_path / "gpt2"
    transformers.GPT2LMHeadModel(transformers.GPT2Config(activation_function="relu", **sizes)).save_pretrained(gpt2)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(llama / file, gpt2 / file)
    asked = [gpt2, "--text", long_text, "--windows"]
    assert value("profile", *asked, "4")["tokens"] == 4 * 32
    assert value("thresholds", *asked, "4")["loss"]["tokens"] == 4 * 31
    assert "--windows is 1; two or more windows are accepted" in refused("thresholds", *asked, "1")


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


# ---- plan and thresholds ----


def test_a_plan_is_measured_saved_and_followed(ask, value, refused, model, text, tmp_path, monkeypatch):
    # Layers as small as these are predicted to be all launches, and on a busy machine the rates are measured wrong.
    monkeypatch.setattr(planner, "_REACH", math.inf)
    saved, asked = tmp_path / "plan.json", ["plan", model, "--text", text, *PLAN]
    rows = value(*asked, "--out", saved)
    assert {row["tokens"] for row in rows if row["chosen"]} == {4} and any(row["measured_us"] for row in rows)
    assert json.loads(saved.read_text())["inputs"] == "captured from the batches"
    loaded = LanguageModel.load(model)
    assert tl.sparsify(loaded, str(saved)) is loaded and {row["state"] for row in tl.report(loaded).rows} == {"planned"}
    assert "calls is 'captured'" in refused(*asked, "--calls", "captured")
    shown = joined(ask(*asked, "--predict-only", "--dtype", "bfloat16").out)
    assert "for CPU, bfloat16; predicted" in shown and "nothing was timed" in shown and "x dense" in shown
    assert "predicted us" in joined(ask(*asked, "--predict-only", "--all").out)


def test_thresholds_are_chosen_saved_and_applied_by_the_line_for_python(ask, value, refused, model, text, tmp_path):
    out, asked = tmp_path / "thresholds.json", ["thresholds", model, "--text", text, "--windows", "4"]
    found = value(*asked, "--sparsity", "0.8", "--out", out)
    row, loss, saved = found["thresholds"][0], found["loss"], tl.Thresholds.load(out)
    assert row["layer"] == "layers.0.mlp" and row["activation density"] == pytest.approx(0.2, abs=0.02)
    assert loss["windows"] == 4 and loss["low"] <= loss["change"] <= loss["high"] and "lossy" in loss["label"]
    assert loss["bits_per_byte"][0] == pytest.approx(loss["dense"] / math.log(2))  # its tokens are bytes
    assert saved.layers[0].thresholds == {"activation": row["activation threshold"]}
    shown = ask(*asked, "--method", "teal", "--out", out).out
    (line,) = re.findall(r"in\s+Python:\n +(.*)", shown)
    lossy = eval(line, {"tl": tl})
    assert isinstance(lossy, LanguageModel) and "lossy" in str(lossy)
    assert "teal, sparsity 0.5, from" in shown and "bits a byte" in shown
    assert "sparsity is 1.0" in refused(*asked, "--sparsity", "1")


def test_a_silu_model_of_transformers_gets_thresholds(value, refused, llama, long_text, tmp_path):
    write(llama, hidden_act="silu")
    said = refused("profile", llama, "--text", long_text)
    assert "SiLU" in said and "twell_lab.thresholds" in said
    out = tmp_path / "thresholds.json"
    found = value("thresholds", llama, "--text", long_text, "--windows", "3", "--out", out)
    assert [row["activation density"] for row in found["thresholds"]] == pytest.approx([0.5, 0.5], abs=0.01)
    assert found["loss"]["bits_per_byte"] is None and found["loss"]["tokens"] == 3 * 63
    assert (found["model"], found["text"], found["tokens"]) == (str(llama), "long.txt", 3 * 64)
    assert (found["method"], found["sparsity"]) == ("cats", 0.5)
    tl.Thresholds.load(out).apply(tl.load(llama))


# ---- sparsify ----


def silu(folder):
    write(folder, hidden_act="silu")
    return folder


@pytest.mark.parametrize("which", ["model", "llama"])
def test_the_folder_is_loaded_and_swapped_by_its_name(ask, value, request, text, tmp_path, monkeypatch, which):
    folder = request.getfixturevalue(which)
    monkeypatch.chdir(tmp_path)
    asked = ["sparsify", folder, "--text", text, *PLAN, "--out"]
    said = ask(*asked, "swapped").out
    kept, before = tl.load("swapped"), tl.load(folder)
    assert all(torch.equal(p, q) and p.dtype == q.dtype for p, q in zip(kept.parameters(), before.parameters()))
    (line,) = re.findall(r"in\s+Python:\n +(.*)", said)  # what it says can be run as it stands
    swapped = eval(line, {"tl": tl, "torch": torch})
    rows = value(*asked, "again", "--plan", "swapped")
    assert rows["logits_off"] < 1e-5 and [row["state"] for row in rows["layers"]] == ["planned"] * 2
    assert tl.report(swapped).rows == rows["layers"] and "plan.json" in rows["files"] and "ReLU" not in said
    assert (tmp_path / "again" / "plan.json").read_text() == (tmp_path / "swapped" / "plan.json").read_text()


def test_a_plan_that_is_given_is_followed(value, model, text, tmp_path):
    """Also one that takes another path than the dense one."""
    loaded = tl.load(model)
    plan = tl.plan(tl.profile(loaded, torch.arange(64).view(2, 32)), loaded, tokens=(4,), measure=False)
    content = json.loads(plan.save(tmp_path / "plan.json").read_text())
    for candidate in (candidate for layer in content["layers"] for candidate in layer["candidates"]):
        candidate["chosen"] = candidate["path"] == "twell"
    (tmp_path / "plan.json").write_text(json.dumps(content))
    out = tmp_path / "swapped"
    rows = value("sparsify", model, "--text", text, *PLAN, "--plan", tmp_path / "plan.json", "--out", out)
    assert [row["runs"] for row in rows["layers"]] == ["twell"] * 2 and 0 <= rows["logits_off"] < 1e-5
    assert [row["runs"] for row in tl.report(tl.sparsify(tl.load(out), str(out))).rows] == ["twell"] * 2


def test_a_silu_model_is_refused_or_becomes_a_relu_model(ask, refused, llama, text, tmp_path):
    folder, out = silu(llama), tmp_path / "swapped"
    asked = ["sparsify", folder, "--text", text, *PLAN, "--out", out]
    assert "relufy" in refused(*asked) and not (out / "config.json").exists()
    said = joined(ask(*asked, "--relufy").out)
    # What the ReLUs change is said beside what swapping does, which is nothing.
    (changed,) = re.findall(r"its ReLUs change the logits by (\S+) of their norm: train it", said)
    ids = torch.arange(64).view(2, 32) + 64
    with torch.no_grad():
        exact, found = (tl.load(name, dtype=torch.float32)(ids).logits.double() for name in (folder, out))
    assert float(changed) == pytest.approx(float((found - exact).norm() / exact.norm()), rel=0.5)
    assert "are off the dense ReLU model's by" in said and tl.load(folder).config.hidden_act == "silu"
    assert tl.load(out).config.hidden_act == "relu"
    tl.sparsify(tl.load(out, dtype=torch.float32), str(out))


def test_what_would_be_lost_or_does_not_fit_is_refused(ask, refused, model, llama, text, tmp_path):
    asked = ["--text", text, *PLAN, "--out"]
    assert "holds a model" in refused("sparsify", model, *asked, llama)
    assert "no-plan.json" in refused("sparsify", model, *asked, tmp_path / "new", "--plan", "no-plan.json")
    ask("sparsify", model, *asked, tmp_path / "swapped")
    said = refused("sparsify", llama, *asked, tmp_path / "new", "--plan", tmp_path / "swapped")
    assert "layers.0.mlp" in said and not (tmp_path / "new" / "config.json").exists()
    with pytest.raises(RecordError, match=r"plan\.json"):
        tl.sparsify(tl.load(model), str(model))
