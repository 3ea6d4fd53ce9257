"""What a run begins with and reports to: a model that is there, TensorBoard and Weights & Biases."""

import dataclasses
import sys
from types import ModuleType

import pytest
import torch

import twell_lab as tl
from tests.training.train.small_runs import broken_off
from twell_lab.app import cli
from twell_lab.core import InputError, StackError
from twell_lab.models.tiny import LanguageModel
from twell_lab.training import checkpoint
from twell_lab.training.loop import train
from twell_lab.training.text.source import load

SIZES = {"d_model": 128, "layers": 4, "heads": 4, "d_ff": 512}  # the defaults: given to no model that is there


@pytest.fixture(scope="module")
def own(tiny, tmp_path_factory):
    folder = tmp_path_factory.mktemp("own")
    return train(tiny(), out=folder, progress=False), folder


@pytest.fixture(scope="module")
def llama(some_text, tmp_path_factory):
    """Makes the folder of a Llama of transformers with grouped heads, tied embeddings and a BPE of 300."""
    transformers = pytest.importorskip("transformers")
    tokenizer = load(some_text, tokenizer="bpe:300").tokenizer

    def make(act="relu", vocabulary=310, **changes):
        torch.manual_seed(0)
        sizes = dict(hidden_size=24, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4)
        sizes |= dict(num_key_value_heads=2, vocab_size=vocabulary, max_position_embeddings=32, hidden_act=act)
        model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes, tie_word_embeddings=True, **changes))
        folder = tmp_path_factory.mktemp("llama")
        model.save_pretrained(folder)
        (folder / "tokenizer.json").write_text(tokenizer.content, encoding="utf-8")
        return folder

    return make


def further(tiny, folder, **changes):
    return tiny(**{**SIZES, "from_": folder, **changes})


def test_a_model_of_ones_own_is_trained_further(tiny, own):
    before, folder = own
    result = train(further(tiny, folder, lr=1e-30), progress=False)
    assert result.validation_bits_per_byte == pytest.approx(before.validation_bits_per_byte, rel=1e-5)
    assert result.model.config == before.model.config and result.config.d_ff == 32 and result.config.layers == 2
    assert result.summary()["config"]["from_"] == folder.name
    for context in (0, -5, True):
        with pytest.raises(InputError, match=f"context is {context}; accepted: a whole number from 1"):
            further(tiny, folder, context=context)
    with_slash = dataclasses.replace(result, config=dataclasses.replace(result.config, from_=f"{folder}/"))
    assert with_slash.summary()["config"]["from_"] == folder.name


@pytest.mark.parametrize("kernels", ["off", "sparse"])
def test_a_llama_is_trained_further_saved_and_resumed_bit_for_bit(tiny, curve, llama, tmp_path, kernels):
    folder, out = llama(), tmp_path / "out"
    config = further(tiny, folder, kernels=kernels, dead_window=60, steps=12, lr=2e-2, warmup=2)
    whole = train(config, out=out, progress=False)
    assert whole.history[-1]["ce"] < whole.history[0]["ce"] and whole.text["tokenizer"]["vocabulary"] == 300
    saved, tokens = tl.load(out), torch.arange(20)[None]
    assert torch.equal(saved(tokens).logits, whole.model(tokens).logits) and saved.config.use_cache
    assert (out / "tokenizer.json").is_file()
    broken_off(config, tmp_path / "broken", 8)
    fields = checkpoint.load(tmp_path / "broken")["config"]
    assert (fields["d_ff"], fields["d_model"], fields["layers"], fields["gated"]) == (40, 24, 2, True)
    result = train(config, resume=tmp_path / "broken", progress=False)
    assert curve(result.history) == curve(whole.history)
    assert all(map(torch.equal, result.model.parameters(), whole.model.parameters()))


def test_a_relufied_model_can_be_trained_further(tiny, llama, tmp_path):
    """What a model with SiLU is told to do leads somewhere."""
    folder = llama("silu")
    with pytest.raises(InputError, match="SiLU.*twell_lab.relufy"):
        train(further(tiny, folder), progress=False)
    tl.relufy(tl.load(folder)).save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    assert train(further(tiny, tmp_path), progress=False).mean_nnz < 40


@pytest.mark.parametrize(
    "changes, words",
    [
        ({"d_ff": 64}, "d_ff is 64, and 32 in the model"),
        ({"layers": 3}, "layers is 3, and 2 in the model"),
        ({"gated": False}, "gated is False, and True in the model"),
        ({"context": 17}, "context is 17; accepted: at most 16"),
        ({"tokenizer": "bpe:300"}, "tokenizer is 'bpe:300' with from_"),
        ({"from_": 7}, "from_ is 7; accepted"),
        ({"from_": "nowhere"}, "no folder 'nowhere'"),
    ],
)
def test_what_does_not_fit_the_model_is_named(tiny, own, changes, words):
    with pytest.raises(InputError, match=words):
        train(further(tiny, own[1], **changes), progress=False)


def test_the_models_tokenizer_must_go_with_its_vocabulary(tiny, own, llama):
    with pytest.raises(InputError, match="a vocabulary of 290, and 300 would be read"):
        train(further(tiny, llama(vocabulary=290)), progress=False)


def test_the_command_trains_further_and_resumes(some_text, own, tmp_path, capsys):
    (tmp_path / "text.py").write_bytes(some_text.tokens.numpy().tobytes())
    line = ["train", "--text", str(tmp_path / "text.py"), "--from", str(own[1]), "--context=16", "--batch=4"]
    line += ["--steps=2", "--eval-windows=4", "--device=cpu", "--out", str(tmp_path / "out")]
    assert cli.main(line) == 0 and "of 32," in capsys.readouterr().out
    assert cli.main(["train", "--resume", str(tmp_path / "out"), "--steps", "3"]) == 0
    assert LanguageModel.load(tmp_path / "out").config.d_ff == 32
    assert cli.main([*line[:-1], str(own[1])]) == 2 and "holds a run" in capsys.readouterr().err


class Writer:
    def __init__(self, *where, **options):
        self.where, self.options, self.rows = where, options, []
        Writer.last = self

    def __enter__(self):
        return self

    def __exit__(self, *raised):
        self.closed = True

    def add_scalar(self, name, value, step):
        self.rows.append((step, name, value))

    def log(self, row, step):
        self.rows += [(step, name, value) for name, value in row.items()]


@pytest.mark.parametrize("kind, module", [("tensorboard", "torch.utils.tensorboard"), ("wandb", "wandb")])
def test_rows_go_to_the_writers_of_others(tiny, tmp_path, monkeypatch, kind, module):
    fake = ModuleType(module)
    fake.SummaryWriter = fake.init = Writer
    monkeypatch.setitem(sys.modules, module, fake)
    result = train(tiny(log=kind), out=tmp_path, progress=False)
    seen = Writer.last
    assert str(tmp_path) in str((*seen.where, *seen.options.values())) and seen.closed
    for row in result.history:
        told = {name: value for step, name, value in seen.rows if step == row["step"]}
        assert told["ce"] == row["ce"] and [told["nnz_layers/0"], told["nnz_layers/1"]] == row["nnz_layers"]
        assert "dead_layers" not in told and ("val_bits_per_byte" in told) == ("val_bits_per_byte" in row)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(StackError, match=f"log '{kind}' needs the {kind} library: pip install {kind}"):
        train(tiny(log=kind), out=tmp_path / "out", progress=False)
    assert not (tmp_path / "out").exists()
