"""The commands on a folder of transformers: profile, plan and thresholds read it with its own tokenizer."""

import json
import shutil

import pytest
import safetensors.torch
import torch

import twell_lab as tl
from twell_lab.app import cli
from twell_lab.models.tiny import LanguageModel, ModelConfig

pytest.importorskip("transformers")


def said(folder, **entries):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | entries))


@pytest.fixture
def folder(tmp_path):
    """A Llama of transformers with a tokenizer of bytes, which no model of ours is: its norms have another epsilon."""
    torch.manual_seed(0)
    ours = LanguageModel(ModelConfig(vocabulary=256, d_model=16, layers=2, heads=2, d_ff=40, context=64))
    folder = ours.save_pretrained(tmp_path / "llama")
    said(folder, rms_norm_eps=2e-5)
    return folder


def test_profile_and_plan_take_a_folder_of_transformers(folder, tmp_path, capsys):
    text = tmp_path / "text"
    text.write_text("What fires, fires often. " * 300)
    assert cli.main(["profile", str(folder), "--text", str(text), "--windows", "8", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = found["layers"]
    assert [row["layer"] for row in rows] == ["model.layers.0.mlp", "model.layers.1.mlp"]
    model = tl.load(folder)
    ids = torch.tensor([*text.read_bytes()][: 8 * 9 * 64])  # so much of it is read
    whole = (len(ids) - 1) // 64
    windows = torch.stack([ids[64 * (i * whole // 8) :][:64] for i in range(8)])
    expected = tl.profile(model, [windows])
    assert [row["mean_nnz"] for row in rows] == [layer.mean_nnz for layer in expected.layers]
    assert found["by_position"] == expected.by_position() and found["by_token"] == expected.by_token()
    assert cli.main(["profile", str(folder), "--text", str(text), "--windows", "8"]) == 0
    assert "most fire, times the mean: '" in capsys.readouterr().out  # tokens are spelled
    out = tmp_path / "plan.json"
    asked = ["plan", str(folder), "--text", str(text), "--windows", "2", "--tokens", "1", "--out", str(out)]
    assert cli.main([*asked, "--device", "cpu"]) == 0
    tl.sparsify(tl.load(folder), out)
    text.write_text("too short")
    assert cli.main(["profile", str(folder), "--text", str(text)]) != 0
    assert "has 9 tokens; windows of 64 need at least 65" in capsys.readouterr().err


def test_the_context_is_the_models_whatever_its_configuration_calls_it(folder, tmp_path, capsys):
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=256, n_positions=32, n_embd=16, n_layer=1, n_head=2, bos_token_id=0, eos_token_id=0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(activation_function="relu", **sizes))
    model.save_pretrained(tmp_path / "gpt2")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder / file, tmp_path / "gpt2" / file)
    text = tmp_path / "text"
    text.write_text("What fires, fires often. " * 300)
    for command in ("profile", "thresholds"):
        assert cli.main([command, str(tmp_path / "gpt2"), "--text", str(text), "--windows", "4", "--json"]) == 0
        found = json.loads(capsys.readouterr().out)
        assert (found["tokens"] if command == "profile" else found["loss"]["tokens"]) == 4 * (
            32 - (command != "profile")
        )
    assert cli.main(["thresholds", str(tmp_path / "gpt2"), "--text", str(text), "--windows", "1"]) == 2
    assert "--windows is 1; two or more windows are accepted" in capsys.readouterr().err


def test_a_silu_model_of_transformers_gets_thresholds(folder, tmp_path, capsys):
    said(folder, hidden_act="silu")
    text, out = tmp_path / "text", tmp_path / "thresholds.json"
    text.write_text("What is small counts little. " * 300)
    assert cli.main(["profile", str(folder), "--text", str(text)]) == 2
    assert "SiLU" in (told := capsys.readouterr().err) and "twell_lab.thresholds" in told
    asked = ["thresholds", str(folder), "--text", str(text), "--windows", "3", "--out", str(out), "--json"]
    assert cli.main(asked) == 0
    found = json.loads(capsys.readouterr().out)
    assert [row["activation density"] for row in found["thresholds"]] == pytest.approx([0.5, 0.5], abs=0.01)
    assert found["loss"]["bits_per_byte"] is None and found["loss"]["tokens"] == 3 * 63
    assert found["model"] == str(folder) and found["text"] == "text" and found["tokens"] == 3 * 64
    assert (found["method"], found["sparsity"], found["greedy"]) == ("cats", 0.5, False)
    tl.Thresholds.load(out).apply(tl.load(folder))


def test_a_prepared_text_is_read_as_its_text(folder, tmp_path, capsys):
    """Whatever tokens it was prepared as."""
    text = tmp_path / "texts"
    text.mkdir()
    for number in range(40):
        (text / f"{number}.txt").write_text("What fires, fires often; and what is silent stays silent. " * 40)
    rows = {}
    for tokens in ("bytes", "bpe:300"):
        out = tmp_path / tokens.replace(":", "-")
        assert cli.main(["prepare", str(text), "--out", str(out), "--tokenizer", tokens]) == 0
        capsys.readouterr()
        assert cli.main(["profile", str(folder), "--text", str(out), "--windows", "1", "--json"]) == 0
        rows[tokens] = json.loads(capsys.readouterr().out)["layers"]
    assert all(0 < row["mean_nnz"] < 40 for each in rows.values() for row in each)
    assert [row["tokens"] for row in rows["bytes"]] == [row["tokens"] for row in rows["bpe:300"]]


def test_a_tokenizer_of_another_model_is_told(folder, capsys):
    weights = safetensors.torch.load_file(folder / "model.safetensors")
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        weights[name] = weights[name][:100].clone()
    safetensors.torch.save_file(weights, folder / "model.safetensors", {"format": "pt"})
    said(folder, vocab_size=100)
    assert cli.main(["profile", str(folder), "--windows", "2"]) != 0
    assert "made token 1" in (told := capsys.readouterr().err) and "the model has 100 of them" in told
