"""What the functions of this room refuse: one table, a line each; an InputError that says what is accepted."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn.utils import prune as torchs

from tests.sparsities import test_adapters
from twell_lab.core import InputError
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.sparsities import adapters, blocks, experts, few_neurons, magnitude, microtiles, padding
from twell_lab.sparsities import two_four as pattern
from twell_lab.sparsities.few_neurons import core_neurons
from twell_lab.sparsities.int8 import int8_linear
from twell_lab.sparsities.predictors import predict
from twell_lab.sparsities.quantised import fp8_linear, output_error, quantise
from twell_lab.sparsities.two_four_training import TwoFourLinear, two_four, two_four_dropout
from twell_lab.sparsities.weights import SparseLinear

ONE, NAN = torch.ones(16, 16), torch.full((16, 16), math.nan)
NO_WEIGHTS = [ONE[0], ONE.int(), ONE.to("meta"), NAN, [[1.0]]]
OF_WEIGHTS = {
    "magnitude_mask": lambda weight: magnitude.magnitude_mask(weight, 0.5),
    "threshold_mask": lambda weight: magnitude.threshold_mask(weight, 0.5),
    "two_four_mask": pattern.two_four_mask,
    "is_two_four": pattern.is_two_four,
    "block_mask": lambda weight: blocks.block_mask(weight, 0.5, 16),
    "quantise": quantise,
}
OF_SIZES = [blocks.to_bsr, blocks.empty_share, blocks.group_columns, lambda w, size: blocks.block_mask(w, 0.5, size)]
ROWS, E4M3 = quantise(ONE), quantise(ONE, torch.float8_e4m3fn)
TILES, REAL = microtiles.find_microtiles(ONE), torch.ones(2, 3, dtype=torch.bool)
X, PADDED = torch.ones(2, 3, 4), padding.remove_padding(torch.ones(2, 3, 4), REAL)[1]
CHOSEN = torch.zeros(16, 1).long()
hooked, pruned = nn.Linear(2, 2), torchs.l1_unstructured(nn.Linear(2, 2), "weight", 0.5)
hooked.register_forward_hook(lambda *_: None)

CALLS = {
    "sparsity": lambda: magnitude.magnitude_mask(ONE, 1),
    "not a number": lambda: magnitude.magnitude_mask(ONE, True),
    "threshold": lambda: magnitude.threshold_mask(ONE, -1),
    "few bits": lambda: quantise(ONE, torch.int32),
    "no groups of four": lambda: pattern.two_four_mask(torch.ones(2, 6)),
    "nor of rows": lambda: pattern.two_four_mask(torch.ones(6, 4), transposable=True),
    "2:4 of no layer": lambda: pattern.prune_two_four(nn.Conv1d(4, 4, 1)),
    "2:4 of NaN": lambda: two_four(NAN),
    "operand": lambda: TwoFourLinear(nn.Linear(8, 12), "output"),
    "widths": lambda: TwoFourLinear(nn.Linear(8, 10))(torch.ones(4, 8)),
    "dropout of 6": lambda: two_four_dropout(torch.zeros(3, 6)),
    "dropout of int": lambda: two_four_dropout(torch.zeros(4, dtype=torch.int64)),
    "nested": lambda: blocks.nested_mask(torch.ones(32, 34), 0.5),
    "no linear": lambda: SparseLinear.from_linear(nn.Conv1d(2, 2, 1)),
    "a subclass": lambda: SparseLinear.from_linear(nn.MultiheadAttention(4, 2).out_proj),
    "hooked": lambda: SparseLinear.from_linear(hooked),
    "pruned by torch": lambda: SparseLinear.from_linear(pruned),
    "on meta": lambda: SparseLinear.from_linear(nn.Linear(2, 2, device="meta")),
    "mask": lambda: SparseLinear.from_linear(nn.Linear(9, 6), torch.ones(9, 6) > 0),
    "gradient": lambda: SparseLinear.from_linear(nn.Linear(9, 6), gradient="ste"),
    "csr of all": lambda: SparseLinear.from_linear(nn.Linear(9, 6), gradient="dense", product="csr"),
    "other rows": lambda: int8_linear(ONE, E4M3),
    "other values": lambda: fp8_linear(ONE, ROWS),
    "columns of x": lambda: int8_linear(ONE[:, 1:], ROWS),
    "x of int": lambda: int8_linear(ONE.long(), ROWS),
    "x with a gradient": lambda: fp8_linear(ONE.clone().requires_grad_(), E4M3),
    "shapes": lambda: output_error(ONE, ONE[0]),
    "height": lambda: microtiles.find_microtiles(ONE, 0),
    "no matrix": lambda: microtiles.find_microtiles(ONE[0]),
    "b": lambda: microtiles.product(TILES, ONE[1:]),
    "b with a gradient": lambda: microtiles.product(TILES, ONE.clone().requires_grad_()),
    "no tiles": lambda: microtiles.product(ONE, ONE),
    "real": lambda: padding.remove_padding(X, REAL.long()),
    "real rows": lambda: padding.remove_padding(X, REAL[0]),
    "real elsewhere": lambda: padding.remove_padding(X, REAL.to("meta")),
    "x of no rows": lambda: padding.remove_padding([1], REAL),
    "too few rows": lambda: padding.add_padding(torch.ones(5, 4), PADDED),
    "no rows": lambda: padding.add_padding(torch.ones(6), PADDED),
    "experts": lambda: experts.ExpertsLayer(8, 16, 0),
    "top_k": lambda: experts.ExpertsLayer(8, 16, 4, 5),
    "activation": lambda: experts.ExpertsLayer(8, 16, activation="tanh"),
    "way": lambda: experts.Experts(16, 8, 3, way="dense")(ONE, CHOSEN, CHOSEN.float()),
    "hot": lambda: experts.routed_by_firing(ONE, ONE, ONE, ONE, 17, 1),
    "other shapes": lambda: experts.routed_by_firing(ONE, ONE, ONE, ONE[1:], 4, 1),
    "grain": lambda: experts.routed_by_firing(ONE, ONE, ONE, ONE, 4, 0),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_is_refused(name):
    with pytest.raises(InputError, match="accepted"):
        CALLS[name]()


@pytest.mark.parametrize("function", OF_WEIGHTS)
def test_what_is_no_weight(function):
    for weight in NO_WEIGHTS:
        with pytest.raises(InputError, match="accepted"):
            OF_WEIGHTS[function](weight)


@pytest.mark.parametrize("function", OF_SIZES)
def test_what_is_no_size_of_blocks(function):
    sizes = [(64, 64, size) for size in (8, 129, 16.0, True, (16,), (16, 0), None, (16, 48))]
    for *shape, size in (*sizes, (64, 60, 16), (60, 64, 16), (0, 64, 16)):
        with pytest.raises(InputError, match="from 16 to 128 that divides both"):
            function(torch.ones(shape), size)


def test_models_that_do_not_fit():
    made = lambda d_ff: LanguageModel(ModelConfig(50, 16, 2, 2, d_ff, 24)).eval()  # noqa: E731
    model, tokens = made(40), torch.arange(144).view(6, 24) % 50
    found, core = predict(model, [tokens], steps=1, rank=1), core_neurons(model, tokens[:1])
    broken = copy.deepcopy(model)
    nn.init.constant_(broken.embedding.weight, math.inf)
    tuned, merged = test_adapters.shira(test_adapters.tiny()), test_adapters.shira(test_adapters.tiny())
    merged.merge_adapter()
    for call in (
        lambda: predict(model, [tokens], recall=1.5),
        lambda: predict(model, [tokens], rank=0),
        lambda: predict(model, [tokens[:1, :3]]),
        lambda: predict(broken, [tokens]),
        lambda: predict(nn.Sequential(nn.Linear(4, 4)), [tokens]),
        lambda: core_neurons(model, tokens[:1], True),
        lambda: core_neurons(model, tokens),
        lambda: found.at(0),
        lambda: found.apply(made(48)),
        lambda: core.apply(made(48)),
        lambda: few_neurons.remove("a model"),
        lambda: adapters.switch(nn.Linear(2, 2), adapters.drawn(model)),
        lambda: adapters.switch(made(40).bfloat16(), adapters.drawn(model)),
        lambda: adapters.drawn(model, 1),
        lambda: adapters.of_peft(model),
        lambda: adapters.of_peft(tuned, "other"),
        lambda: adapters.of_peft(merged),
    ):
        with pytest.raises(InputError, match="accepted"):
            call()
