"""Compiled layers on a GPU: one operator, with the bits and the counts of a plain call, also in captured graphs."""

import copy

import pytest
import torch

from tests.gpu.test_plans import drawn
from twell_lab.core import InputError
from twell_lab.layers.choice import Choice
from twell_lab.models.swap import sparsify

pytestmark = pytest.mark.gpu
CHOICES = [Choice("twell"), Choice("hot_cold", 256)]


@pytest.fixture(autouse=True)
def nothing_compiled():
    torch._dynamo.reset()
    with torch.no_grad():
        yield
    torch._dynamo.reset()


@pytest.mark.parametrize("tokens", [1, 300, 2100])
@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_the_bits_and_the_counts_of_a_plain_call(choice, tokens):
    layer, inputs, _ = drawn(tokens=tokens)
    sparse = sparsify(copy.deepcopy(layer).eval(), choice, memory=1e9)
    twin = copy.deepcopy(sparse)
    compiled = torch.compile(sparse, fullgraph=True)
    for x in inputs[:3]:
        assert torch.equal(compiled(x), twin(x))
    sparse.up.weight.mul_(2)
    assert torch.equal(compiled(inputs[0]), sparse(inputs[0]))
    seen, expected = (each.status()["classes"][0]["rows"] for each in (sparse, twin))
    assert seen == (None if expected is None else expected // 3 * 5)


@pytest.mark.parametrize("choice", CHOICES, ids=str)
def test_in_the_graphs_that_torch_captures(choice):
    layer, inputs, _ = drawn(tokens=64)
    sparse = sparsify(copy.deepcopy(layer).eval(), choice, memory=1e9)
    expected = [sparse(x) for x in inputs[:2]]
    compiled = torch.compile(lambda x: sparse(sparse(x)) * 2, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        for x, y in zip(inputs, expected):
            assert torch.equal(compiled(x).clone(), sparse(y) * 2)


def test_a_weight_that_is_not_finite_is_refused_once_the_answer_is_there():
    layer, inputs, _ = drawn(tokens=16)
    sparse = sparsify(copy.deepcopy(layer).eval(), "twell")
    compiled = torch.compile(sparse, fullgraph=True)
    compiled(inputs[0])
    sparse.down.weight[3, 7] = torch.inf
    with pytest.raises(InputError, match="down has 1 values that are not finite"):
        for _ in range(3):
            compiled(inputs[0])
            torch.cuda.synchronize()
