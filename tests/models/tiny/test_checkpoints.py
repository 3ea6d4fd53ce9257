"""The trained models of data/checkpoints: they load, fire as their card says, and predict text that they never saw."""

import calendar
import copy
import json
import re
import textwrap
from pathlib import Path

import pytest
import torch

import twell_lab as tl
from twell_lab import core
from twell_lab.layers.choice import Choice
from twell_lab.models.swap import densify, sparsify
from twell_lab.models.tiny import LanguageModel
from twell_lab.training import objective, sweep

FOLDER = core.data_dir() / "checkpoints"
NAMES = ("l1-free", "sparse")

# From "The Woman in White" (Wilkie Collins, 1860), one of the novels held out; lines end as in the text trained on.
PASSAGE = """It was the last day of July. The long hot summer was drawing to a close; and we, the weary pilgrims of the \
London pavement, were beginning to think of the cloud-shadows on the corn-fields, and the autumn breezes on the sea-shore.

For my own poor part, the fading summer left me out of health, out of spirits, and, if the truth must be told, out of \
money as well. During the past year I had not managed my professional resources as carefully as usual; and my \
extravagance now limited me to the prospect of spending the autumn economically between my mother's cottage at \
Hampstead and my own chambers in town.

The evening, I remember, was still and cloudy; the London air was at its heaviest; the distant hum of the \
street-traffic was at its faintest; the small pulse of the life within me, and the great heart of the city around me, \
seemed to be sinking in unison, languidly and more languidly, with the sinking sun. I roused myself from the book \
which I was dreaming over rather than reading, and left my chambers to meet the cool night air in the suburbs.\
""".replace("\n", "\r\n")
WINDOWS = torch.tensor(list(PASSAGE.encode())[:1026]).view(2, 513)


@pytest.fixture(scope="module")
def models():
    return {name: LanguageModel.load(FOLDER / name).eval() for name in NAMES}


@pytest.fixture(scope="module")
def made():
    return {name: json.loads((FOLDER / name / "made.json").read_text()) for name in NAMES}


@pytest.mark.parametrize("name", NAMES)
def test_it_is_small_enough_and_as_large_as_its_card_says(name, models, made):
    weights = FOLDER / name / "model.safetensors"
    assert weights.stat().st_size < 12_000_000
    assert sum(weight.numel() for weight in models[name].parameters()) == made[name]["parameters"] == 5_376_768


@pytest.mark.parametrize("name", NAMES)
def test_it_fires_as_stated_on_a_text_it_never_saw(name, models, made):
    found = sweep.who_fires(models[name], WINDOWS)
    nnz = [layer["nnz"] for layer in found["layers"]]
    stated = [layer["nnz"] for layer in made[name]["layers"]]
    # A thousand bytes of one author against a million of four: each layer within a half, their mean within a fifth.
    assert nnz == pytest.approx(stated, rel=0.5)
    assert sum(nnz) == pytest.approx(sum(stated), rel=0.2)


def test_the_sparse_one_is_sparse_and_costs_little(models, made):
    assert made["sparse"]["zeros"] >= 0.97
    assert made["sparse"]["validation_bits_per_byte"] <= 1.02 * made["l1-free"]["validation_bits_per_byte"]
    layers = sweep.who_fires(models["sparse"], WINDOWS)["layers"]
    assert sum(layer["nnz"] for layer in layers) / len(layers) < 0.03 * models["sparse"].config.d_ff


@pytest.mark.parametrize("name", NAMES)
def test_it_predicts_as_well_as_stated(name, models, made):
    bits = objective.bits_per_byte(models[name], WINDOWS)
    assert bits == pytest.approx(made[name]["validation_bits_per_byte"], rel=0.2)
    shuffled = WINDOWS.flatten()[torch.randperm(WINDOWS.numel(), generator=torch.Generator().manual_seed(0))].view_as(
        WINDOWS
    )
    assert objective.bits_per_byte(models[name], shuffled) > 2 * bits  # it is the order that it knows


def test_the_sparse_layers_give_the_same_answer(models):
    dense = models["sparse"]
    with torch.no_grad():
        wanted = dense(WINDOWS[:, :-1])
        try:
            found = sparsify(dense, "twell")(WINDOWS[:, :-1])
        finally:
            densify(dense)
    torch.testing.assert_close(found, wanted, rtol=1e-3, atol=1e-3)


# ---- the smaller pair, which an installed package has in their place ----


@pytest.fixture(scope="module")
def pair():
    names = [f"{name}-small" for name in NAMES]
    return [
        (LanguageModel.load(FOLDER / name).eval(), json.loads((FOLDER / name / "made.json").read_text()))
        for name in names
    ]


def test_the_smaller_pair_fires_and_predicts_as_stated_and_l1_makes_the_difference(pair):
    windows = WINDOWS.flatten()[: 7 * 129].view(7, 129)
    for model, made in pair:
        nnz = [layer["nnz"] for layer in sweep.who_fires(model, windows)["layers"]]
        assert sum(nnz) / len(nnz) == pytest.approx(made["mean_nnz"], rel=0.2)
        assert objective.bits_per_byte(model, windows) == pytest.approx(made["validation_bits_per_byte"], rel=0.2)
    free, sparse = (made for _, made in pair)
    assert sparse["validation_bits_per_byte"] < 1.01 * free["validation_bits_per_byte"]
    assert sparse["mean_nnz"] < 0.25 * free["mean_nnz"] and free["zeros"] < 0.8
    assert free["config"] | {"l1": 0.001} == sparse["config"]


# ---- the wide one, whose layer a CPU computes faster without its silent neurons ----


@pytest.fixture(scope="module")
def wide():
    return LanguageModel.load(FOLDER / "wide").float().eval(), json.loads((FOLDER / "wide" / "made.json").read_text())


def test_the_wide_one_fires_and_predicts_as_stated(wide):
    model, made = wide
    (layer,) = sweep.who_fires(model, WINDOWS)["layers"]
    assert layer["nnz"] == pytest.approx(made["mean_nnz"], rel=0.3)
    assert objective.bits_per_byte(model, WINDOWS) == pytest.approx(made["validation_bits_per_byte"], rel=0.2)


@pytest.mark.parametrize("plan", ["twell", Choice("hot_cold", 256)], ids=str)
def test_the_wide_one_writes_the_same_text_on_every_path(wide, plan):
    dense, _ = wide
    prompt = torch.tensor(list(b"It was the last day of July. "))
    sparse = sparsify(copy.deepcopy(dense), plan)
    assert torch.equal(*(tl.generate(model, prompt, max_new_tokens=60) for model in (sparse, dense)))


# ---- the small one, which an installed package has too ----


@pytest.fixture(scope="module")
def small():
    return LanguageModel.load(FOLDER / "small").float().eval(), json.loads((FOLDER / "small" / "made.json").read_text())


def source_windows() -> torch.Tensor:
    """Source code of this Python, [64, 129] bytes: much the same as the model was trained on, whichever version it is."""
    source = "".join(Path(module.__file__).read_text(encoding="utf-8") for module in (json, re, calendar, textwrap))
    return torch.tensor(list(source.encode())[: 64 * 129]).view(64, 129)


def test_the_small_one_is_sparse_and_predicts_source_code(small):
    model, made = small
    windows = source_windows()
    nnz = [layer["nnz"] for layer in sweep.who_fires(model, windows)["layers"]]
    assert sum(nnz) / len(nnz) == pytest.approx(made["mean_nnz"], rel=0.3)
    assert sum(nnz) / len(nnz) < 0.06 * model.config.d_ff
    assert objective.bits_per_byte(model, windows) < 2.6  # 8 would be a guess; these modules may be among its text
