"""Named configurations: each makes a config, has about the size in its name, and the paper's shapes are the paper's.
And files of options."""

import json
import sys

import pytest
import torch

from twell_lab.app import cli
from twell_lab.core import InputError
from twell_lab.models.tiny import LanguageModel
from twell_lab.training import config
from twell_lab.training.config import TrainConfig


@pytest.mark.parametrize("name", config.NAMES)
def test_a_name_makes_a_config_whose_model_has_about_so_many_parameters(name):
    told = TrainConfig(**config.named(name))
    kind, _, size = (told.tokenizer or "bytes").partition(":")
    with torch.device("meta"):
        model = LanguageModel(told.model({"bytes": 256, "bpe": int(size or 0)}[kind]))
    number, unit = float(name[:-1]), {"M": 1e6, "B": 1e9}[name[-1]]
    assert 0.9 < sum(weight.numel() for weight in model.parameters()) / (number * unit) < 1.15


@pytest.mark.parametrize("name, layers, billions", [("0.5B", 8, 10), ("1B", 18, 20), ("1.5B", 28, 30), ("2B", 38, 40)])
def test_the_papers_shapes_and_settings(name, layers, billions):
    sizes = dict(d_model=2048, d_ff=5632, layers=layers, heads=32, context=2048, batch=512)
    wanted = dict(**sizes, lr=1e-3, warmup=600, weight_decay=0.1, clip=1.0, l1=2e-5, dtype="bfloat16", compile=True)
    fields = config.named(name)
    assert fields.items() >= wanted.items()
    assert fields["steps"] * 2**20 == pytest.approx(billions * 1e9, rel=0.06)


def test_the_command_refuses_another_name(capsys):
    assert cli.main(["train", "--config", "3M"]) == 2 and "accepted: 1M, 5M" in capsys.readouterr().err


JSON = '{"steps": 3, "d_model": 16, "l1": 1e-3, "tokenizer": null, "gated": false}'
YAML = "steps: 3\nd-model: 16\nl1: 1e-3  # a string, to YAML\ntokenizer: null\ngated: false\n"


@pytest.mark.parametrize("name, content", [("a.yaml", YAML), ("a.json", JSON), ("json.yaml", JSON)])
def test_a_file_holds_options(tmp_path, name, content):
    pytest.importorskip("yaml")
    (tmp_path / name).write_text(content)
    assert config.of(str(tmp_path / name)) == json.loads(JSON)


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("a.yaml", "stepps: 3", "'stepps' in .* is no option; accepted: .*steps"),
        ("a.yaml", "- steps", "holds a list; accepted"),
        ("a.yaml", "a: [", "cannot read the configuration"),
        ("a.yaml", "!!python/object/apply:os.getcwd []", "cannot read the configuration"),
        ("a.json", "{", "cannot read the configuration"),
        ("a.json", "\xff", "cannot read the configuration"),
    ],
)
def test_a_file_that_holds_something_else_is_named(tmp_path, name, content, words):
    pytest.importorskip("yaml")
    (tmp_path / name).write_bytes(content.encode("latin-1"))
    with pytest.raises(InputError, match=words):
        config.of(str(tmp_path / name))


def test_options_are_above_the_file(tmp_path, capsys, monkeypatch):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"steps": 2, "l1": 0.5, "context": 16, "eval-windows": 4, "d-ff": 32, "layers": 1}))
    assert cli.main(["train", "--config", str(path), "--l1", "0.25", "--device", "cpu", "--json"]) == 0
    fields = json.loads(capsys.readouterr().out)["config"]
    assert (fields["l1"], fields["steps"], fields["d_ff"]) == (0.25, 2, 32)
    path.write_text('{"steps": "many"}')
    assert cli.main(["train", "--config", str(path)]) == 2 and "steps is 'many'" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "yaml", None)
    path.rename(tmp_path / "run.yaml")
    assert cli.main(["train", "--config", str(tmp_path / "run.yaml")]) == 2
    assert "pip install pyyaml" in capsys.readouterr().err
