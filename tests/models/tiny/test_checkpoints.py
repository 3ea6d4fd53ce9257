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
from twell_lab.analysis.profile import profile
from twell_lab.layers.choice import Choice
from twell_lab.models.swap import sparsify
from twell_lab.models.tiny import LanguageModel
from twell_lab.training import objective

FOLDER = core.data_dir() / "checkpoints"

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
NARROW = WINDOWS.flatten()[: 7 * 129].view(7, 129)


def source_windows() -> torch.Tensor:
    """Source code of this Python, [64, 129] bytes: much the same as the model was trained on, whichever version it is."""
    source = "".join(Path(module.__file__).read_text(encoding="utf-8") for module in (json, re, calendar, textwrap))
    return torch.tensor(list(source.encode())[: 64 * 129]).view(64, 129)


def loaded(name: str) -> LanguageModel:
    return LanguageModel.load(FOLDER / name).float().eval()


def made(name: str) -> dict:
    return json.loads((FOLDER / name / "made.json").read_text())


# The smaller pair and "small" are those that an installed package has. A thousand bytes of one author stand against a
# million of four; source code is judged apart, since these modules may be among the text of "small".
@pytest.mark.parametrize(
    "name, windows, firing, bits",
    [
        ("l1-free", WINDOWS, 0.2, 0.2),
        ("sparse", WINDOWS, 0.2, 0.2),
        ("l1-free-small", NARROW, 0.2, 0.2),
        ("sparse-small", NARROW, 0.2, 0.2),
        ("wide", WINDOWS, 0.3, 0.2),
        ("small", source_windows(), 0.3, None),
    ],
)
def test_it_is_as_large_fires_and_predicts_as_its_card_says(name, windows, firing, bits):
    model, card = loaded(name), made(name)
    assert (FOLDER / name / "model.safetensors").stat().st_size < 12_000_000
    assert sum(weight.numel() for weight in model.parameters()) == card["parameters"]
    nnz = [layer.mean_nnz for layer in profile(model, [windows[:, :-1]]).layers]
    assert sum(nnz) / len(nnz) == pytest.approx(card["mean_nnz"], rel=firing)
    found = objective.bits_per_byte(model, windows)
    assert found < 2.6 if bits is None else found == pytest.approx(card["validation_bits_per_byte"], rel=bits)
    order = torch.randperm(windows.numel(), generator=torch.Generator().manual_seed(0))
    assert objective.bits_per_byte(model, windows.flatten()[order].view_as(windows)) > 1.5 * found  # it knows the order


@pytest.mark.parametrize("pair, cost, zeros", [("{}", 1.02, 0.97), ("{}-small", 1.01, 0.94)])
def test_l1_makes_the_difference_and_costs_little(pair, cost, zeros):
    free, sparse = made(pair.format("l1-free")), made(pair.format("sparse"))
    assert sparse["validation_bits_per_byte"] <= cost * free["validation_bits_per_byte"]
    assert sparse["zeros"] >= zeros > free["zeros"] and sparse["mean_nnz"] < 0.25 * free["mean_nnz"]


@pytest.mark.parametrize("plan", ["twell", Choice("hot_cold", 256)], ids=str)
def test_the_wide_one_writes_the_same_text_on_every_path(plan):
    """Its layer a CPU computes faster without its silent neurons."""
    dense, prompt = loaded("wide"), torch.tensor(list(b"It was the last day of July. "))
    sparse = sparsify(copy.deepcopy(dense), plan)
    assert torch.equal(*(tl.generate(model, prompt, max_new_tokens=60) for model in (sparse, dense)))
