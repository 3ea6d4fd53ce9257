"""sample: what it prints, what it refuses, and that the swapped model says the same."""

import json
import re
import textwrap

import pytest
import torch

import twell_lab as tl
from tests.models.speaking import decoders
from twell_lab.models.tiny import EDGE, LanguageModel, ModelConfig
from twell_lab.training.text.tokenizer import train


def test_a_sample_is_what_the_model_generates(ask, value, model):
    prompt = torch.tensor(list("žluť".encode()))
    said = tl.generate(LanguageModel.load(model), prompt, max_new_tokens=30)[len(prompt) :]
    asked = ("sample", model, "--prompt", "žluť", "--tokens", "30", "--device", "cpu")
    found = value(*asked)
    assert found["tokens"] == said.tolist() and found["text"] == bytes(said.tolist()).decode("utf-8", "replace")
    assert found["prompt"] == "žluť" and found["tokens_per_s"] > 0
    shown = ask(*asked)
    assert shown.out.startswith(textwrap.indent("žluť" + found["text"], "  ")) and shown.err == ""
    assert re.search(r"sample: 30 bytes, [\d,]+ a second\n$", shown.out)


def test_the_seed_of_a_draw_is_named_and_repeats_it(value, model):
    asked = ("sample", model, "--tokens", "30", "--temperature", "1.5", "--top-k", "50", "--device", "cpu")
    first, other = value(*asked), value(*asked)
    assert first["text"] != other["text"] and first["seed"] != other["seed"]
    assert value(*asked, "--seed", first["seed"])["text"] == first["text"]


def test_sparse_layers_are_planned_and_say_the_same(ask, value, model):
    asked = ("sample", model, "--tokens", "40", "--device", "cpu")
    found = value(*asked, "--sparse")
    assert found["same"] is True and found["dense_tokens_per_s"] > 0
    assert [(row["layer"], row["state"], row["tokens"]) for row in found["layers"]] == [
        (f"layers.{i}.mlp", "planned", 1) for i in range(2)
    ]
    assert found["tokens"] == value(*asked)["tokens"]
    shown = ask(*asked, "--sparse").out
    assert all(row["choice"] == "dense" for row in found["layers"]) == ("nothing to compare" in shown)


def test_a_model_of_a_bpe_speaks_its_tokens(ask, value, refused, tmp_path):
    pytest.importorskip("tokenizers")
    bpe = train([b"some text, some more text, and some more\n" * 20], 280, "text")
    folder = LanguageModel(ModelConfig(bpe.vocabulary, 16, 1, 2, 32, 16)).save(tmp_path / "model")
    assert "the tokenizer" in refused("sample", folder)
    (folder / "tokenizer.json").write_text(bpe.content)
    asked = ("--prompt", "some", "--tokens", "9")
    found = value("sample", folder, *asked)
    assert found["text"] == bpe.decode(torch.tensor(found["tokens"])).decode("utf-8", "replace")
    assert " 9 tokens, " in ask("sample", folder, *asked).out
    llama = tl.load(folder).save_pretrained(tmp_path / "llama", (folder / "tokenizer.json").read_text())
    assert value("sample", llama, *asked)["tokens"] == found["tokens"]


@pytest.mark.parametrize("name", ["model.safetensors", "config.json"])
def test_a_truncated_model_is_one_line(refused, model, name):
    whole = (model / name).read_bytes()
    for size in (0, 8, len(whole) // 2, len(whole) - 3):
        (model / name).write_bytes(whole[:size])
        refused("sample", model)


@pytest.mark.parametrize("prompt", ["a\udcff", ""])
def test_what_is_no_text_is_refused(refused, model, prompt):
    assert "accepted: UTF-8 of one character or more" in refused("sample", model, "--prompt", prompt)


@pytest.fixture
def opt(capsys, tmp_path):
    """An OPT, which is none of ours, with a tokenizer that spells bytes and puts a token of its own before a text."""
    processors = pytest.importorskip("tokenizers").processors
    before = processors.TemplateProcessing(single=[EDGE, "$A"], special_tokens=[(EDGE, 0)])
    marks = dict(bos_token_id=0, eos_token_id=None, pad_token_id=None)
    model = decoders.build("OPT", vocab_size=256, max_position_embeddings=64, num_hidden_layers=2, **marks)
    for part in (model, decoders.of_bytes(before, bos_token=EDGE)):
        part.save_pretrained(tmp_path / "opt")
    capsys.readouterr()  # their bars
    return tmp_path / "opt"


def test_a_model_of_transformers_says_what_its_own_generate_does(ask, value, capsys, opt):
    import transformers

    theirs = transformers.OPTForCausalLM.from_pretrained(opt)
    tokenizer = transformers.AutoTokenizer.from_pretrained(opt)
    ids = tokenizer("some text", return_tensors="pt").input_ids
    assert ids[0, 0] == 0  # as the tokenizer wants it
    said = theirs.eval().generate(ids, max_new_tokens=30, do_sample=False)[0]
    capsys.readouterr()
    asked = ("sample", opt, "--prompt", "some text", "--tokens", "30", "--device", "cpu")
    found = value(*asked)
    assert found["tokens"] == said[ids.shape[1] :].tolist() and len(found["tokens"]) == 30
    assert "some text" + found["text"] == tokenizer.decode(said, skip_special_tokens=True)
    sparse = ask(*asked, "--sparse").out
    assert "30 tokens; " in sparse and "tokens a second" in sparse
    layers = [line.split(":")[0] for line in sparse.splitlines() if line.startswith("model.decoder.layers")]
    assert layers == [f"model.decoder.layers.{number}" for number in range(2)]


def test_a_model_of_transformers_may_end_its_text(value, opt):
    asked = ("sample", opt, "--tokens", "20", "--device", "cpu")
    said = value(*asked)["tokens"]
    config = json.loads((opt / "generation_config.json").read_text())
    (opt / "generation_config.json").write_text(json.dumps(config | {"eos_token_id": said[4]}))
    ended = value(*asked)["tokens"]
    assert ended == said[: said.index(said[4]) + 1] and len(ended) < 20


def test_what_a_model_of_transformers_cannot_say_is_told(refused, opt):
    said = refused("sample", opt, "--tokens", "64", "--device", "cpu")
    assert "tokens is 64 after a prompt of 2; the model reads up to 64 together" in said
    (opt / "tokenizer.json").unlink()
    assert "no tokenizer that transformers can read" in refused("sample", opt)
