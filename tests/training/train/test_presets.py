"""Named configurations: each makes a config, has about the size in its name, and the paper's shapes are the paper's."""

import json

import pytest
import torch

from twell_lab.core import InputError
from twell_lab.models import tiny
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.training import presets
from twell_lab.training.config import TrainConfig

ROWS = {row["name"]: row for row in presets.rows()}


@pytest.mark.parametrize("name", presets.NAMES)
def test_each_makes_a_config_whose_model_has_the_parameters_counted(name):
    config = TrainConfig(**presets.named(name))
    kind, _, size = (config.tokenizer or "bytes").partition(":")
    sizes = config.model({"bytes": 256, "bpe": int(size or 0)}[kind])
    assert sizes.vocabulary == ROWS[name]["vocabulary"]
    with torch.device("meta"):
        model = LanguageModel(sizes)
    assert sum(weight.numel() for weight in model.parameters()) == ROWS[name]["parameters"]
    assert ROWS[name]["tokens"] == config.steps * config.batch * config.context
    number, unit = float(name[:-1]), {"M": 1e6, "B": 1e9}[name[-1]]
    assert 0.9 < ROWS[name]["parameters"] / (number * unit) < 1.15


@pytest.mark.parametrize("gated", [True, False])
def test_the_count_is_that_of_a_real_model(gated):
    sizes = ModelConfig(vocabulary=70, d_model=12, layers=3, heads=3, d_ff=20, context=8, gated=gated)
    real = sum(weight.numel() for weight in LanguageModel(sizes).parameters())
    assert tiny.parameters(sizes) == real


@pytest.mark.parametrize("name, layers, billions", [("0.5B", 8, 10), ("1B", 18, 20), ("1.5B", 28, 30), ("2B", 38, 40)])
def test_the_papers_shapes_and_settings(name, layers, billions):
    fields = presets.named(name)
    sizes = dict(d_model=2048, d_ff=5632, layers=layers, heads=32, context=2048, batch=512)
    wanted = dict(**sizes, lr=1e-3, warmup=600, weight_decay=0.1, clip=1.0, l1=2e-5)
    assert {name: fields[name] for name in wanted} == wanted
    assert ROWS[name]["tokens_a_step"] == 2**20 and ROWS[name]["tokens"] == pytest.approx(billions * 1e9, rel=0.06)


@pytest.mark.parametrize("name", ["3B", "", None, "1m", []])
def test_an_unknown_name_lists_the_known_ones(name):
    with pytest.raises(InputError, match="1M, 5M.*2B"):
        presets.named(name)


def test_the_table_has_a_line_for_each_and_the_rows_are_json():
    table = presets.table()
    lines = table.splitlines()
    assert [line.split()[0] for line in lines[1:] if not line.startswith(" ")] == list(presets.NAMES)
    assert max(map(len, lines)) <= 80 and "545M" in table
    assert json.loads(json.dumps(presets.rows())) == presets.rows()
