"""The examples of the README and of docs/library.md run, and the commands that they name exist."""

import re
import shlex
from pathlib import Path

import pytest

import twell_lab as tl
from twell_lab.app import cli

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
LIBRARY = (ROOT / "docs" / "library.md").read_text(encoding="utf-8")


def test_the_short_example_runs():
    (example,) = re.findall(r"```python\n(.*?)```", README, re.S)
    short = re.sub(r"steps=\d+", "steps=3, eval_windows=8", example)
    names = {}
    exec(compile(short, "README.md", "exec"), names)
    kinds = {type(module).__name__ for module in names["model"].modules()}
    assert short.count("steps=3") == 1 and "SparseFFN" not in kinds


def test_the_long_example_runs():
    example, *_ = re.findall(r"```python\n(.*?)```", LIBRARY, re.S)
    # The same calls, made short: fewer steps and held-out windows, a smaller layer to time.
    shortened = re.sub(r"steps=\d+", "steps=3, eval_windows=8", example).replace(
        "d_model=2048, d_ff=5632", "d_model=64, d_ff=256"
    )
    assert shortened.count("steps=3") == 1 and "d_ff=256" in shortened
    names = {}
    exec(compile(shortened, "README.md", "exec"), names)
    assert names["packed"].shape == (64, 5632) and names["run"].rows


@pytest.fixture
def own_model(tmp_path, monkeypatch):
    """A small model of transformers with its tokenizer, and a text, under the names that docs/library.md has for them."""
    transformers, tokenizers = pytest.importorskip("transformers"), pytest.importorskip("tokenizers")
    letters = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    spelled = tokenizers.Tokenizer(tokenizers.models.BPE(vocab={c: i for i, c in enumerate(letters)}, merges=[]))
    spelled.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    spelled.decoder = tokenizers.decoders.ByteLevel()
    sizes = dict(vocab_size=256, hidden_size=16, ffn_dim=40, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.OPTConfig(**sizes, word_embed_proj_dim=16, max_position_embeddings=512)
    transformers.OPTForCausalLM(config).save_pretrained(tmp_path / "build" / "my-model")
    made = transformers.PreTrainedTokenizerFast(tokenizer_object=spelled)
    made.save_pretrained(tmp_path / "build" / "my-model")
    (tmp_path / "my-text.txt").write_text("a text of some thousand letters, line after line\n" * 300)
    monkeypatch.chdir(tmp_path)


def test_the_example_of_a_model_of_ones_own_runs(own_model, capsys):
    _, example, decoding, *_ = re.findall(r"```python\n(.*?)```", LIBRARY, re.S)
    names = {"TextStreamer": pytest.importorskip("transformers").TextStreamer}
    exec(compile(example, "library.md", "exec"), names)
    assert "model.decoder.layers.0" in capsys.readouterr().out
    exec(compile(decoding.replace("max_new_tokens=100", "max_new_tokens=5"), "library.md", "exec"), names)
    assert names["said"].shape[1] == names["ids"].shape[1] + 5
    assert {row["state"] for row in tl.report(names["model"]).rows} == {"planned"}


def test_the_commands_for_a_model_of_ones_own_run(own_model, capsys):
    (lines,) = re.findall(r"```sh\n(twell-lab profile .*?)```", LIBRARY, re.S)
    short = {"profile": "--windows 2", "sparsify": "--windows 2 --tokens 1", "sample": "--tokens 5"}
    short |= {"bench": "--tokens 8 --batches 1 --seconds 0.05"}
    for line in lines.splitlines():
        _, *arguments = shlex.split(line)
        assert (
            cli.main([*arguments, *shlex.split(short[arguments[0]]), *(["--device", "cpu"] * ("profile" not in line))])
            == 0
        )
    shown = capsys.readouterr().out
    assert "tokens a second" in shown and "bench: " in shown
