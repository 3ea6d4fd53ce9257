"""A mixture of experts: three ways with one result, whoever gets which token; a layer's neurons routed by firing."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from twell_lab.sparsities.experts import WAYS, Experts, ExpertsLayer, routed_by_firing, takes_grouped


def asked_one_by_one(module, x, chosen, weights):
    """Token by token, in float64."""
    act = F.relu if isinstance(module.act_fn, torch.nn.ReLU) else F.silu
    gate_up, down, y = module.gate_up_proj.double(), module.down_proj.double(), torch.zeros(x.shape).double()
    for token, (experts, shares) in enumerate(zip(chosen.tolist(), weights.double())):
        for expert, share in zip(experts, shares):
            gate, up = (x[token].double() @ gate_up[expert].t()).chunk(2)
            y[token] += share * ((act(gate) * up) @ down[expert].t())
    return y


@st.composite
def cases(draw):
    """(experts, x, chosen, weights): evenly, to one expert, or to few of them."""
    number, top_k, tokens = draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.integers(0, 12))
    d_model, d_ff = draw(st.sampled_from([8, 16, 5])), draw(st.sampled_from([8, 24, 3]))
    dtype, seed = draw(st.sampled_from([torch.float32, torch.float64])), draw(st.integers(0, 2**20))
    torch.manual_seed(seed)
    module = Experts(d_model, d_ff, number, draw(st.sampled_from(["silu", "relu"])), dtype=dtype)
    most = draw(st.sampled_from([number, 1, number // 2 + 1]))  # of the experts, that get anything
    chosen = torch.rand(tokens, number).argsort(1)[:, : min(top_k, number)] % most
    return module, torch.randn(tokens, d_model, dtype=dtype), chosen, torch.rand(chosen.shape)


@torch.no_grad()
@settings(deadline=None, max_examples=60)
@given(cases(), st.sampled_from([None, torch.nan, torch.inf]))
def test_all_ways_give_what_the_experts_give_one_by_one(case, odd):
    module, x, chosen, weights = case
    wanted = asked_one_by_one(module, x, chosen, weights).to(x.dtype)
    if odd is not None and len(x):
        x = x.index_fill(0, torch.tensor([0]), odd)  # a token that is not finite spoils itself alone
    for module.way in WAYS:
        y = module(x, chosen, weights)
        assert y.dtype == x.dtype
        torch.testing.assert_close(y[odd is not None :], wanted[odd is not None :], rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("dtype, tokens", [(torch.bfloat16, 40), (torch.float16, 1), (torch.float32, 40)])
def test_layers_in_every_dtype_and_compiled(dtype, tokens):
    torch.manual_seed(0)
    layer = ExpertsLayer(32, 64, experts=8, top_k=2, dtype=dtype)
    x = torch.randn(2, tokens, 32).to(dtype)
    rows = x.view(-1, 32)
    exact, eps = asked_one_by_one(layer.experts, rows, *layer.route(rows)), torch.finfo(dtype).eps
    for layer.experts.way in WAYS:
        assert (layer(x).view(-1, 32).double() - exact).norm() <= 4 * eps * exact.norm()
    assert takes_grouped(rows, layer.experts.gate_up_proj) and layer(x[:, :0]).shape == (2, 0, 32)
    layer.experts.way = "grouped"
    if dtype == torch.bfloat16:
        torch._dynamo.reset()
        torch.testing.assert_close(torch.compile(layer, backend="eager")(x), layer(x), rtol=0.02, atol=0.02)


def test_gradients_are_those_of_the_loop():
    torch.manual_seed(0)
    layer = ExpertsLayer(16, 32, experts=4, top_k=2)
    x, gradients = torch.randn(10, 16, requires_grad=True), []
    for layer.experts.way in WAYS:
        y = layer(x)
        gradients.append(torch.autograd.grad((y * torch.linspace(-1, 1, 16)).sum(), [x, *layer.parameters()]))
    for other in gradients[1:]:
        for a, b in zip(gradients[0], other):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_it_is_the_block_of_transformers():
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = mixtral.MixtralConfig(
        hidden_size=16, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2, hidden_act="silu"
    )
    config._experts_implementation = "eager"
    block = mixtral.MixtralSparseMoeBlock(config).eval()
    torch.manual_seed(0)
    for parameter in block.parameters():
        parameter.normal_(std=0.3)
    layer, x = ExpertsLayer(16, 24, experts=4, top_k=2), torch.randn(2, 7, 16)
    if layer.state_dict().keys() != block.state_dict().keys():
        pytest.skip("this transformers keeps each expert as a module")
    layer.load_state_dict(block.state_dict())
    torch.testing.assert_close(layer(x), block(x))


@torch.no_grad()
def test_grouped_products_do_not_read_what_is_on_the_device(monkeypatch):
    """Nothing in the grouped way asks a tensor for a number, which is what waits."""
    layer, x = ExpertsLayer(32, 64, experts=8), torch.randn(20, 32)
    for name in ("item", "tolist", "__int__", "__bool__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("waits"))
    layer(x)


@torch.no_grad()
@settings(deadline=None, max_examples=30)
@given(st.integers(0, 12), st.integers(1, 13), st.integers(0, 9), st.integers(0, 2**20))
def test_every_grain_gives_the_dense_layer(hot, grain, tokens, seed):
    draw = torch.Generator().manual_seed(seed)
    whole = lambda *shape: torch.randint(-3, 4, shape, generator=draw).float()  # noqa: E731
    x, gate, up, down = whole(tokens, 6), whole(12, 6), whole(12, 6), whole(6, 12)
    routing = routed_by_firing(x, gate, up, down, hot, grain)
    fires = F.linear(x, gate).relu()
    assert torch.equal(routing.y, F.linear(fires * F.linear(x, up), down))
    groups = (fires[:, hot:] > 0).split(grain, 1) if hot < 12 else []
    done = hot * tokens + sum(int(group.any(1).sum()) * group.shape[1] for group in groups)
    assert routing.work == pytest.approx(done / (12 * tokens) if tokens else 0)
