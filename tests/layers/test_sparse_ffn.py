"""Every path equals dense, on drawn layers; how a SparseFFN follows a plan, and what it shares with the dense module."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import twell_lab as tl
from tests.layers import drawn
from twell_lab.core import InputError, TwellError
from twell_lab.layers.choice import STEP, Candidate
from twell_lab.layers.paths import PATHS

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CHOICES = {"dense": tl.Choice("dense"), "twell": tl.Choice("twell"), "hot_cold": tl.Choice("hot_cold", 256)}


def plan_for(layer: drawn.Dense, *chosen: tuple[int, tl.Choice]) -> tl.LayerPlan:
    """A plan of these choices, by class of token counts; the neurons with odd numbers fire most."""
    d_ff, d_model = layer.up_proj.weight.shape
    counts = tuple(100 + n if n % 2 else 1 for n in range(d_ff))
    candidates = tuple(Candidate(n, c.path, c.hot, 0.0, None, True, "forced") for n, c in chosen)
    return tl.LayerPlan("", d_model, d_ff, hasattr(layer, "gate_proj"), 1000, counts, candidates)


@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    path=st.sampled_from([*CHOICES]),
    dtype=st.sampled_from(DTYPES),
    gated=st.booleans(),
    bias=st.booleans(),
    planned=st.booleans(),
    spoilt=st.sampled_from([None, float("nan"), float("inf")]),
    heavy=st.booleans(),
)
def test_every_path_equals_dense(data, path, dtype, gated, bias, planned, spoilt, heavy):
    d_model = data.draw(st.sampled_from([1, 7, 16, 40]))
    d_ff = data.draw(st.sampled_from([1, 31, 300, 700] if path != "hot_cold" else [300, 700]))
    tokens = data.draw(st.sampled_from([0, 1, 2, 9, 70]))
    dense = drawn.layer(d_model, d_ff, gated=gated, bias=bias, dtype=dtype, seed=data.draw(st.integers(0, 3)))
    x = drawn.rows(tokens, d_model, dtype=dtype)
    if heavy and tokens:
        x[tokens // 2] *= 30
    if spoilt is not None and tokens:
        x[-1, 0] = spoilt
    x = x.t().contiguous().t() if data.draw(st.booleans()) else x
    choice = CHOICES[path]
    plan = plan_for(dense, (1, choice)) if planned else choice
    sparse = tl.SparseFFN.from_module(copy.deepcopy(dense), plan=plan)
    with torch.no_grad():
        drawn.check_close(sparse(x), dense, x)


def test_wide_layers_have_no_limit():
    dense = drawn.layer(8, 70_000, dtype=torch.bfloat16, density=0.002)
    sparse = tl.SparseFFN(copy.deepcopy(dense), plan=tl.Choice("twell"), probed=False)
    x = drawn.rows(5, 8, dtype=torch.bfloat16)
    with torch.no_grad():
        drawn.check_close(sparse(x), dense, x)


@pytest.mark.parametrize("gated", (True, False))
@pytest.mark.parametrize("path", CHOICES)
@pytest.mark.parametrize("learning", ("dense", "twell", None))
def test_gradients_are_the_dense_ones(gated, path, learning):
    dense = drawn.layer(gated=gated)
    sparse = tl.SparseFFN.from_module(copy.deepcopy(dense), plan=CHOICES[path])
    sparse.learn(learning)
    x = drawn.rows(9)
    grads = []
    for layer in (dense, sparse):
        given_x = x.clone().requires_grad_()
        layer(given_x).square().sum().backward()
        grads.append([given_x.grad, *(p.grad for p in layer.parameters())])
    for wanted, grad in zip(*grads, strict=True):
        torch.testing.assert_close(grad, wanted, rtol=1e-4, atol=1e-5)


def test_a_plan_picks_by_the_number_of_tokens():
    dense = drawn.layer(d_ff=700)
    plan = plan_for(dense, (1, tl.Choice("twell")), (8, tl.Choice("dense")), (64, tl.Choice("hot_cold", 256)))
    sparse = tl.SparseFFN.from_module(dense, plan=plan)
    assert [sparse.choice(n).path for n in (1, 2, 8, 9, 99)] == ["twell", "dense", "dense", "hot_cold", "hot_cold"]
    assert sparse.runs(1) == "twell" and sparse.runs() == "hot_cold 256"


def test_a_state_that_is_loaded_is_computed_with():
    dense, other = drawn.layer(d_ff=700), drawn.layer(d_ff=700, seed=5)
    sparse = tl.SparseFFN.from_module(dense, plan=plan_for(dense, (1, tl.Choice("hot_cold", 256))))
    sparse.load_state_dict(other.state_dict())
    x = drawn.rows(5)
    with torch.no_grad():
        drawn.check_close(sparse(x), other, x)
    sparse.load_state_dict(drawn.layer(d_ff=700, seed=6).state_dict(), assign=True)
    with torch.no_grad():
        drawn.check_close(sparse(x), drawn.layer(d_ff=700, seed=6), x)
    assert sparse.runs().startswith("dense: ")


@pytest.mark.parametrize(
    "plan, says",
    (
        ("twell", "LayerPlan"),
        (tl.Choice("hot_cold", 512), "hot is 512 of 300"),
        (plan_for(drawn.layer(d_ff=700), (1, tl.Choice())), "the plan is for"),
        (tl.Choice("kept_inputs"), "thresholds on their inputs"),
    ),
)
def test_a_plan_that_does_not_fit_is_an_input_error(plan, says):
    with pytest.raises(InputError, match=says):
        tl.SparseFFN.from_module(drawn.layer(), plan=plan)


@pytest.mark.parametrize("path", PATHS.names())
def test_compiled_code_is_one_graph_and_right(path):
    dense = drawn.layer()
    try:
        sparse = tl.SparseFFN.from_module(copy.deepcopy(dense), plan=tl.Choice(path, STEP * PATHS[path].splits))
    except TwellError as error:  # as for weights of other shapes, or on a CPU
        pytest.skip(str(error))
    torch._dynamo.reset()
    compiled = torch.compile(sparse, fullgraph=True, backend="aot_eager")
    x = drawn.rows(5)
    with torch.no_grad():
        drawn.check_close(compiled(x), dense, x)
    given_x = x.clone().requires_grad_()
    compiled(given_x).sum().backward()
    wanted = x.clone().requires_grad_()
    dense(wanted).sum().backward()
    torch.testing.assert_close(given_x.grad, wanted.grad)


def test_a_projection_of_another_dtype_is_torchs_to_refuse():
    dense = drawn.layer(dtype=torch.bfloat16)
    sparse = tl.SparseFFN.from_module(dense, plan=tl.Choice("twell"))
    dense.up_proj.bias.data = dense.up_proj.bias.data.float()
    with torch.no_grad():
        with pytest.raises(RuntimeError, match="dtype"):
            sparse(drawn.rows(3, dtype=torch.bfloat16))
        dense.up_proj.bias.data = dense.up_proj.bias.data.bfloat16()
        drawn.check_close(sparse(drawn.rows(3, dtype=torch.bfloat16)), dense, drawn.rows(3, dtype=torch.bfloat16))


def test_terms_of_a_layer_that_was_adapted_after_the_swap():
    dense = drawn.layer()
    model = nn.Sequential(tl.SparseFFN.from_module(dense, plan=tl.Choice("twell")))
    model[0].down_proj = nn.Sequential(dense.down_proj, nn.Tanh())
    x = drawn.rows(5)
    with tl.layer_terms(model) as terms:
        y = model(x)
    torch.testing.assert_close(y, dense(x))
    assert len(terms) == 1 and terms[0].nnz > 0
