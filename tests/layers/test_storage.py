"""A layer's own weights are rewritten once, in place, and nothing is held twice."""

import copy

import pytest
import torch

import twell_lab as tl
from tests.layers import drawn
from tests.layers.test_sparse_ffn import plan_for

TWELL, HOT = tl.Choice("twell"), tl.Choice("hot_cold", 256)


def test_down_gets_the_strides_of_its_transpose_and_back():
    dense = drawn.layer()
    down = dense.down_proj.weight
    values = down.detach().clone()
    sparse = tl.SparseFFN.from_module(dense, plan=TWELL)
    assert dense.down_proj.weight is down and down.stride() == (1, 16) and torch.equal(down, values)
    sparse.close()
    assert down.is_contiguous() and torch.equal(down, values)


@pytest.mark.parametrize("gated", (True, False))
def test_neurons_are_put_in_order_and_back(gated):
    dense = drawn.layer(d_ff=700, gated=gated)
    before = {k: v.clone() for k, v in dense.state_dict().items()}
    plan = plan_for(dense, (1, HOT))
    sparse = tl.SparseFFN.from_module(dense, plan=plan)
    order = plan.order(256)
    assert order[0] == 699  # it fires most
    state = sparse.state_dict()
    for name, value in before.items():
        wanted = value[:, order] if name == "down_proj.weight" else value if "down" in name else value[order]
        assert torch.equal(state[name], wanted) and state[name].is_contiguous()
    sparse.follow(TWELL)
    assert all(torch.equal(v, before[k]) for k, v in sparse.state_dict().items())
    sparse.follow(plan)
    sparse.close()
    assert all(torch.equal(v, before[k]) and v.is_contiguous() for k, v in dense.named_parameters())


def tie(dense):
    return {"tied": {id(dense.up_proj.weight)}}


def give_gradients(dense):
    dense.up_proj.weight.grad = torch.ones_like(dense.up_proj.weight)
    return {}


@pytest.mark.parametrize("how, says", ((tie, "tied"), (give_gradients, "gradients")))
def test_what_cannot_be_put_in_order_goes_without(how, says):
    dense = drawn.layer(d_ff=700)
    values = dense.up_proj.weight.detach().clone()
    more = how(dense)
    sparse = tl.SparseFFN(dense, plan=plan_for(dense, (1, HOT)), **more)
    assert torch.equal(dense.up_proj.weight, values) and says in sparse.why
    x = drawn.rows(5)
    with torch.no_grad():
        drawn.check_close(sparse(x), drawn.layer(d_ff=700), x)


def share_memory(dense):
    dense.share_memory()


def flatten(dense):
    flat = torch.cat([dense.down_proj.weight.detach().flatten(), torch.zeros(1)])
    dense.down_proj.weight.data = flat[:-1].view(dense.down_proj.weight.shape)


@pytest.mark.parametrize("how, says", ((share_memory, "processes share"), (flatten, "one memory")))
def test_what_cannot_be_turned_is_dense_with_a_reason(how, says):
    dense = drawn.layer()
    how(dense)
    at = dense.down_proj.weight.data_ptr()
    sparse = tl.SparseFFN.from_module(dense, plan=TWELL)
    assert dense.down_proj.weight.data_ptr() == at and says in sparse.runs()


def test_weights_made_in_inference_mode_are_rewritten_once():
    """A layer made by `.half()` inside inference mode copied its weights on every call."""
    with torch.inference_mode():
        dense = drawn.layer().bfloat16()
        sparse = tl.SparseFFN.from_module(dense, plan=TWELL)
        at = [p.data_ptr() for p in sparse.parameters()]
        x = drawn.rows(3, dtype=torch.bfloat16)
        sparse(x)
        assert sparse.runs() == "twell" and [p.data_ptr() for p in sparse.parameters()] == at


def test_gradients_that_came_after_are_put_back_in_order_too():
    dense = drawn.layer(d_ff=700)
    wanted = copy.deepcopy(dense)
    sparse = tl.SparseFFN.from_module(dense, plan=plan_for(dense, (1, HOT)))
    x = drawn.rows(5)
    sparse(x).square().sum().backward()
    sparse.close()
    wanted(x).square().sum().backward()
    for p, q in zip(dense.parameters(), wanted.parameters(), strict=True):
        assert torch.equal(p, q)
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=1e-5)
