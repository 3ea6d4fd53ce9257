"""sample and export: what they print, what they refuse, and that the swapped model says the same."""

import json
import math
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import twell_lab as tl
from twell_lab.app import cli
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.training.text.source import of_pieces
from twell_lab.training.text.tokenizer import train

ROOT = Path(__file__).parents[3]


@pytest.fixture
def folder(tmp_path):
    torch.manual_seed(0)
    return LanguageModel(ModelConfig(d_model=16, layers=2, heads=2, d_ff=32, context=16)).save(tmp_path / "model")


def ask(capsys, *arguments, status=0):
    assert cli.main([*map(str, arguments)]) == status
    return capsys.readouterr()


def test_a_sample_is_what_the_model_generates(capsys, folder):
    prompt = torch.tensor(list("žluť".encode()))
    said = tl.generate(LanguageModel.load(folder), prompt, max_new_tokens=30)[len(prompt) :]
    asked = ("sample", folder, "--prompt", "žluť", "--tokens", "30", "--device", "cpu")
    found = json.loads(ask(capsys, *asked, "--json").out)
    assert found["tokens"] == said.tolist() and found["text"] == bytes(said.tolist()).decode("utf-8", "replace")
    assert found["prompt"] == "žluť" and found["tokens_per_s"] > 0
    shown = ask(capsys, *asked)
    assert shown.out.startswith("žluť" + found["text"]) and shown.err == ""
    assert re.search(r"sample: 30 bytes, [\d,]+ a second\n$", shown.out)


def test_the_seed_of_a_draw_is_named_and_repeats_it(capsys, folder):
    asked = ("sample", folder, "--tokens", "30", "--temperature", "1.5", "--top-k", "50", "--device", "cpu", "--json")
    first, other = (json.loads(ask(capsys, *asked).out) for _ in range(2))
    assert first["text"] != other["text"] and first["seed"] != other["seed"]
    assert json.loads(ask(capsys, *asked, "--seed", first["seed"]).out)["text"] == first["text"]


def test_sparse_layers_are_planned_and_say_the_same(capsys, folder):
    asked = ("sample", folder, "--tokens", "40", "--device", "cpu", "--sparse")
    found = json.loads(ask(capsys, *asked, "--json").out)
    assert found["same"] is True and found["dense_tokens_per_s"] > 0
    assert [(row["layer"], row["state"], row["tokens"]) for row in found["layers"]] == [
        (f"layers.{i}.mlp", "planned", 1) for i in range(2)
    ]
    assert found["tokens"] == json.loads(ask(capsys, *asked[:-1], "--json").out)["tokens"]
    shown = ask(capsys, *asked).out
    assert all(row["choice"] == "dense" for row in found["layers"]) == ("nothing to compare" in shown)


def test_a_model_of_a_bpe_speaks_its_tokens(capsys, tmp_path):
    bpe = train(of_pieces("text", [b"some text, some more text, and some more\n" * 20]), 280)
    folder = LanguageModel(ModelConfig(bpe.vocabulary, 16, 1, 2, 32, 16)).save(tmp_path / "model")
    assert "the tokenizer" in ask(capsys, "sample", folder, status=2).err
    bpe.save(folder / "tokenizer.json")
    found = json.loads(ask(capsys, "sample", folder, "--prompt", "some", "--tokens", "9", "--json").out)
    assert found["text"] == bpe.decode(torch.tensor(found["tokens"])).decode("utf-8", "replace")
    assert " 9 tokens, " in ask(capsys, "sample", folder, "--prompt", "some", "--tokens", "9").out
    made = json.loads(ask(capsys, "export", folder, "--out", tmp_path / "llama", "--json").out)
    assert made["files"] == ["config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"]
    again = json.loads(ask(capsys, "sample", tmp_path / "llama", "--prompt", "some", "--tokens", "9", "--json").out)
    assert again["tokens"] == found["tokens"]


def test_an_exported_model_of_bytes_speaks_without_the_tokenizers_library(capsys, folder, tmp_path):
    ask(capsys, "export", folder, "--out", tmp_path / "llama")
    found = [json.loads(ask(capsys, "sample", each, "--json").out)["tokens"] for each in (folder, tmp_path / "llama")]
    assert found[0] == found[1]
    code = (
        "import sys; sys.modules.update(dict.fromkeys(['tokenizers', 'transformers'])); "
        "from twell_lab.app.cli import main; sys.exit(main(sys.argv[1:]))"
    )
    ran = subprocess.run(
        [sys.executable, "-c", code, "sample", tmp_path / "llama", "--json"],
        capture_output=True,
        text=True,
        timeout=120,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    assert ran.returncode == 0 and json.loads(ran.stdout)["tokens"] == found[0], ran.stderr


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_truncated_model_is_one_line(capsys, folder, tmp_path, name):
    whole = (folder / name).read_bytes()
    for size in {0, 8, len(whole) // 2, len(whole) - 1}:
        (folder / name).write_bytes(whole[:size])
        if whole[:size].strip() == whole.strip():  # the last line break of JSON says nothing
            continue
        for command in (["sample", folder], ["export", folder, "--out", tmp_path / "not"]):
            shown = ask(capsys, *command, status=2)
            assert shown.out == "" and shown.err.startswith("twell-lab: ") and shown.err.count("\n") == 1
    assert not (tmp_path / "not").exists()


def test_bytes_that_are_not_utf8_are_continued_by_bytes_and_refused_by_a_tokenizer(capsys, folder, theirs):
    found = json.loads(ask(capsys, "sample", folder, "--prompt", "a\udcff", "--tokens", "3", "--json").out)
    assert len(found["tokens"]) == 3
    told = ask(capsys, "sample", theirs, "--prompt", "a\udcff", status=2).err
    assert "not UTF-8" in told and told.count("\n") == 1


@pytest.mark.parametrize(
    "options",
    [
        ["--prompt", ""],
        ["--tokens", "3000000000"],
        ["--temperature", "nan"],
        ["--top-k", "0"],
        ["--device", "nonsense"],
    ],
)
def test_wrong_options_of_sample_are_named(capsys, folder, options):
    try:
        status = cli.main(["sample", str(folder), *options])
    except SystemExit as stopped:
        status = stopped.code
    shown = capsys.readouterr()
    assert status == 2 and shown.out == "" and options[0].lstrip("-").replace("-", "_") in shown.err.replace("-", "_")


def test_weights_that_are_not_finite_are_named(capsys, tmp_path):
    model = LanguageModel(ModelConfig(d_model=16, layers=1, heads=2, d_ff=32, context=16))
    model.head.weight.data[0, 0] = math.nan
    assert "not numbers" in ask(capsys, "sample", model.save(tmp_path / "model"), status=2).err


# Models of transformers


@pytest.fixture
def theirs(capsys, tmp_path):
    """An OPT, which is none of ours, with a tokenizer that spells bytes and puts a token of its own before a text."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    torch.manual_seed(0)
    letters = ["<s>", *sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())]
    spelled = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    spelled.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelled.decoder = tokenizers.decoders.ByteLevel()
    spelled.post_processor = tokenizers.processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    sizes = dict(vocab_size=257, hidden_size=16, ffn_dim=40, num_hidden_layers=2, num_attention_heads=2)
    marks = dict(bos_token_id=0, eos_token_id=None, pad_token_id=None)
    config = transformers.OPTConfig(**sizes, **marks, word_embed_proj_dim=16, max_position_embeddings=64, init_std=0.5)
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path / "opt")
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=spelled, bos_token="<s>")
    made.save_pretrained(tmp_path / "opt")
    capsys.readouterr()  # their bars
    return tmp_path / "opt"


def loaded(folder):
    import transformers

    model, tokenizer = (
        each.from_pretrained(folder) for each in (transformers.OPTForCausalLM, transformers.AutoTokenizer)
    )
    return model.eval(), tokenizer


def test_a_model_of_transformers_says_what_its_own_generate_does(capsys, theirs):
    model, tokenizer = loaded(theirs)
    ids = tokenizer("some text", return_tensors="pt").input_ids
    assert ids[0, 0] == 0  # as the tokenizer wants it
    said = model.generate(ids, max_new_tokens=30, do_sample=False)[0]
    capsys.readouterr()
    asked = ("sample", theirs, "--prompt", "some text", "--tokens", "30", "--device", "cpu")
    shown = ask(capsys, *asked, "--json")
    found = json.loads(shown.out)
    assert found["tokens"] == said[ids.shape[1] :].tolist() and len(found["tokens"]) == 30 and shown.err == ""
    assert "some text" + found["text"] == tokenizer.decode(said, skip_special_tokens=True)
    sparse = ask(capsys, *asked, "--sparse")
    assert "30 tokens; " in sparse.out and "tokens a second" in sparse.out
    assert [line.split(":")[0] for line in sparse.out.splitlines() if line.startswith("model.decoder.layers")] == [
        f"model.decoder.layers.{number}" for number in range(2)
    ]


def test_a_model_of_transformers_may_end_its_text(capsys, theirs):
    asked = ("sample", theirs, "--tokens", "20", "--device", "cpu", "--json")
    said = json.loads(ask(capsys, *asked).out)["tokens"]
    config = json.loads((theirs / "generation_config.json").read_text())
    (theirs / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": said[4]}))
    ended = json.loads(ask(capsys, *asked).out)["tokens"]
    assert ended == said[: said.index(said[4]) + 1] and len(ended) < 20


def test_what_a_model_of_transformers_cannot_say_is_told(capsys, theirs):
    told = ask(capsys, "sample", theirs, "--tokens", "64", "--device", "cpu", status=2)
    assert "tokens is 64 after a prompt of 2; the model reads up to 64 together" in told.err
    (theirs / "tokenizer.json").rename(theirs / "kept.json")
    assert "no tokenizer that transformers can read" in ask(capsys, "sample", theirs, status=2).err
    (theirs / "kept.json").rename(theirs / "tokenizer.json")
    model, _ = loaded(theirs)
    model.model.decoder.layers[0].fc2.weight.data[0, 0] = math.nan
    model.save_pretrained(theirs)
    capsys.readouterr()
    assert "scores are not numbers" in ask(capsys, "sample", theirs, "--device", "cpu", status=2).err


def test_a_model_is_exported_once_and_into_a_folder_without_one(capsys, theirs, folder, tmp_path):
    before = (folder / "model.safetensors").read_bytes()
    assert "holds a model" in ask(capsys, "export", folder, "--out", folder, status=2).err
    assert (folder / "model.safetensors").read_bytes() == before
    told = ask(capsys, "export", theirs, "--out", tmp_path / "new", status=2).err
    assert "holds a model of transformers ('opt'); accepted: a folder that LanguageModel.save" in told
