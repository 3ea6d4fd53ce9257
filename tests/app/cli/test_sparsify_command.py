"""twell-lab sparsify: what the folder holds gives in Python what the command compared, and what is refused."""

import json
import re

import pytest
import torch

import twell_lab as tl
from twell_lab.app import cli
from twell_lab.core import RecordError
from twell_lab.models.tiny import LanguageModel, ModelConfig

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
SMALL = ("--windows", "4", "--tokens", "4", "--device", "cpu")


def ours(folder):
    return LanguageModel(ModelConfig(d_model=16, layers=2, heads=2, d_ff=512, context=32)).save(folder)


def theirs(folder, act="relu"):
    sizes = dict(vocab_size=256, hidden_size=16, intermediate_size=512, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.LlamaConfig(**sizes, max_position_embeddings=32, hidden_act=act)
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    spelled = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    spelled.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    transformers.LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    transformers.PreTrainedTokenizerFast(tokenizer_object=spelled).save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def text(tmp_path, monkeypatch):
    torch.manual_seed(0)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text("".join(f"line {i} of a text that is read in windows\n" for i in range(80)))


def ask(capsys, *arguments, status=0):
    assert cli.main(["sparsify", *map(str, arguments), "--text", "text.txt", *SMALL]) == status
    return capsys.readouterr()


@pytest.mark.parametrize("make", [ours, theirs])
def test_the_folder_is_loaded_and_swapped_by_its_name(capsys, tmp_path, make):
    folder = make(tmp_path / "model")
    capsys.readouterr()  # transformers' bars
    said = ask(capsys, folder, "--out", "swapped")
    assert said.err == "" and "tl.sparsify(tl.load('swapped', dtype=torch.float32), 'swapped')" in said.out
    kept, before = tl.load("swapped"), tl.load(folder)
    assert all(torch.equal(p, q) and p.dtype == q.dtype for p, q in zip(kept.parameters(), before.parameters()))
    swapped = tl.sparsify(tl.load("swapped", dtype=torch.float32), "swapped")
    rows = json.loads(ask(capsys, folder, "--plan", "swapped", "--out", "again", "--json").out)
    assert rows["logits_off"] < 1e-5 and [row["state"] for row in rows["layers"]] == ["planned"] * 2
    assert tl.report(swapped).rows == rows["layers"]
    assert (
        "plan.json" in rows["files"]
        and (tmp_path / "again" / "plan.json").read_text() == (tmp_path / "swapped" / "plan.json").read_text()
    )


def test_a_plan_that_is_given_is_followed(capsys, tmp_path):
    """Also one that takes another path than the dense one."""
    folder = ours(tmp_path / "model")
    model = tl.load(folder)
    made = tl.plan(tl.profile(model, torch.arange(64).view(2, 32)), model, tokens=(4,), measure=False)
    content = json.loads(made.save(tmp_path / "plan.json").read_text())
    for layer in content["layers"]:
        for each in layer["candidates"]:
            each["chosen"] = each["path"] == "twell"
    (tmp_path / "plan.json").write_text(json.dumps(content))
    rows = json.loads(ask(capsys, folder, "--plan", "plan.json", "--out", "swapped", "--json").out)
    assert [row["runs"] for row in rows["layers"]] == ["twell"] * 2 and 0 <= rows["logits_off"] < 1e-5
    assert [row["runs"] for row in tl.report(tl.sparsify(tl.load("swapped"), "swapped")).rows] == ["twell"] * 2


def test_the_line_for_python_swaps_as_the_command_did(capsys, tmp_path):
    told = ask(capsys, ours(tmp_path / "model"), "--out", "swapped").out
    assert "ReLU" not in told
    (line,) = re.findall(r"in\s+Python:\n +(.*)", told)
    swapped = eval(line, {"tl": tl, "torch": torch})
    assert [row["state"] for row in tl.report(swapped).rows] == ["planned"] * 2


def test_a_silu_model_is_refused_or_becomes_a_relu_model(capsys, tmp_path):
    folder = theirs(tmp_path / "model", "silu")
    assert "relufy" in ask(capsys, folder, "--out", "swapped", status=2).err
    assert not (tmp_path / "swapped" / "config.json").exists()
    told = ask(capsys, folder, "--out", "swapped", "--relufy").out
    # What the ReLUs change is said beside what swapping does, which is nothing.
    (changed,) = re.findall(r"its ReLUs change the logits by (\S+) of their norm: train it", told)
    before, after = (tl.load(each, dtype=torch.float32) for each in (folder, "swapped"))
    ids = torch.arange(64).view(2, 32) + 64
    with torch.no_grad():
        exact, found = (model(ids).logits.double() for model in (before, after))
    assert float(changed) == pytest.approx(float((found - exact).norm() / exact.norm()), rel=0.5)
    assert "are off the dense ReLU model's by" in told
    assert json.loads((tmp_path / "swapped" / "config.json").read_text())["hidden_act"] == "relu"
    assert isinstance(tl.sparsify(tl.load("swapped", dtype=torch.float32), "swapped"), torch.nn.Module)
    assert tl.load(folder).config.hidden_act == "silu"


def test_what_would_be_lost_or_does_not_fit_is_refused(capsys, tmp_path):
    folder, other = ours(tmp_path / "model"), theirs(tmp_path / "other")
    assert "holds a model" in ask(capsys, folder, "--out", "other", status=2).err
    assert "no-plan.json" in ask(capsys, folder, "--out", "new", "--plan", "no-plan.json", status=2).err
    ask(capsys, folder, "--out", "swapped")
    said = ask(capsys, other, "--out", "new", "--plan", "swapped", status=2).err
    assert "twell-lab: " in said and "layers.0.mlp" in said and not (tmp_path / "new" / "config.json").exists()
    with pytest.raises(RecordError, match=r"plan\.json"):
        tl.sparsify(tl.load(folder), str(folder))
