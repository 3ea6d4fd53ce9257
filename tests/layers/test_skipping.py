"""A linear layer that skips zero inputs is a linear layer."""

import copy

import pytest
import torch
from torch import nn
from torch.library import opcheck
from torch.nn.functional import dropout, linear, silu

from twell_lab.layers.lossy import zeroed
from twell_lab.layers.skipping import SkippingLinear, joining, skip, stop_skipping
from twell_lab.ops import kept_inputs


def layer(bias: bool = True) -> nn.Linear:
    torch.manual_seed(0)
    return nn.Linear(24, 16, bias=bias).to(torch.bfloat16).requires_grad_(False)


@pytest.mark.parametrize("bias", (True, False))
def test_it_computes_saves_and_stays_what_it_was(bias):
    module = layer(bias)
    before, state, weight = copy.deepcopy(module), copy.deepcopy(module.state_dict()), module.weight
    skip(module)
    assert type(module) is SkippingLinear and module.weight is weight
    assert weight.stride() == (1, 16)
    for shape in ((24,), (1, 24), (2, 1, 24), (0, 24), (5, 7, 24)):
        x = zeroed(torch.randn(shape).to(torch.bfloat16), 0.7)
        assert torch.equal(module(x), before(x))
    saved = module.state_dict()
    assert all(torch.equal(saved[name], state[name]) and saved[name].is_contiguous() for name in state)
    copy.deepcopy(module).load_state_dict(state)
    stop_skipping(module)
    assert type(module) is nn.Linear and weight.is_contiguous() and torch.equal(weight, before.weight)


def test_it_learns_and_goes_through_transforms():
    module, x = layer().float().requires_grad_(), torch.randn(3, 24)
    before = copy.deepcopy(module)
    skip(module)
    for one in (module, before):
        one(x).square().sum().backward()
    torch.testing.assert_close(module.weight.grad, before.weight.grad)
    torch.testing.assert_close(torch.vmap(module)(x), before(x))
    torch.testing.assert_close(torch.compile(module, backend="eager", fullgraph=True)(x), before(x))


def test_what_cannot_skip_is_left_as_it_is():
    tied = nn.Linear(8, 8)
    tied.weight = nn.Parameter(torch.zeros(16, 8)[:8])
    for module in (nn.Identity(), nn.Linear(7, 8), tied):
        kind = type(module)
        skip(module)
        assert type(module) is kind


@pytest.mark.parametrize("kind, threshold", ((None, 0.0), (None, 0.5), ("silu", 0.5)))
def test_the_operator_says_what_torch_says(kind, threshold):
    x = torch.randn(2, 1, 24)
    first, second = (torch.randn(16, 24).t().contiguous().t() for _ in range(2))
    biases = torch.randn(2, 16)
    given = (x, first, second if kind else None, biases[0], biases[1] if kind else None, threshold, kind)
    cut = zeroed(x, threshold)
    wanted = linear(cut, first, biases[0])
    wanted = silu(wanted) * linear(cut, second, biases[1]) if kind else wanted
    torch.testing.assert_close(torch.ops.twell_lab.kept_inputs(*given), wanted)
    opcheck(torch.ops.twell_lab.kept_inputs.default, given, test_utils=("test_schema", "test_faketensor"))
    assert kept_inputs.FEW <= kept_inputs.MOST_TOKENS


@pytest.mark.parametrize("tokens", (1, 2))
def test_projections_of_one_input_are_one_launch_in_compiled_code(tokens):
    """Queries, keys and values of one token are; what comes behind is not, nor what has their input behind a dropout."""
    weights = [torch.randn(24, n).t() for n in (16, 8, 8, 32, 8, 8)]
    biases, product = [torch.randn(16), None, torch.randn(8), None, None, None], torch.ops.twell_lab.kept_inputs

    def attention(x):
        of = lambda number, x: product(x, weights[number], None, biases[number], None, 0.0, None)  # noqa: E731
        q, k, v = (of(i, zeroed(x, 0.5)) for i in range(3))
        other, another = (of(i, dropout(x)) for i in (4, 5))
        return of(3, zeroed(torch.cat([q, v], -1), 0.5)), k, other, another

    def seen(graph):
        made(graph)
        launches.extend(str(node.target) for node in graph.nodes if "kept_inputs" in str(node.target))

    x, made, launches = torch.randn(1, tokens, 24), joining(), list[str]()
    assert made is joining()  # with another one torch.compile would compile anew
    with torch.no_grad():
        found = torch.compile(attention, fullgraph=True, options={"post_grad_custom_pre_pass": seen})(x)
        for y, wanted in zip(found[:2], attention(x)):
            torch.testing.assert_close(y, wanted, atol=1e-4, rtol=1e-4)
    joined = ["twell_lab.kept_inputs_each.default"] * (tokens == 1)
    assert sorted(launches) == ["twell_lab.kept_inputs.default"] * (3 if joined else 6) + joined
    given = x, weights[:3], biases[:3]
    opcheck(torch.ops.twell_lab.kept_inputs_each.default, given, test_utils=("test_schema", "test_faketensor"))
