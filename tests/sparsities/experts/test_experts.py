"""A mixture of experts: three ways with one result, whoever gets which token; and what is refused."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

import twell_lab as tl
from twell_lab.analysis import predict
from twell_lab.core import InputError
from twell_lab.ops import clock
from twell_lab.sparsities.experts import WAYS, Experts, ExpertsLayer, routed_by_firing, takes_grouped


def asked_one_by_one(module, x, chosen, weights):
    """Token by token, in float64."""
    act = F.relu if isinstance(module.act_fn, torch.nn.ReLU) else F.silu
    gate_up, down, y = module.gate_up_proj.double(), module.down_proj.double(), torch.zeros(x.shape).double()
    for token, (experts, shares) in enumerate(zip(chosen.tolist(), weights.double())):
        for expert, share in zip(experts, shares):
            if 0 <= expert < len(down):
                gate, up = (x[token].double() @ gate_up[expert].t()).chunk(2)
                y[token] += share * ((act(gate) * up) @ down[expert].t())
    return y


@st.composite
def cases(draw):
    """(experts, x, chosen, weights): evenly, to one expert, to few of them, or to nobody."""
    number, top_k, tokens = draw(st.integers(1, 6)), draw(st.integers(1, 3)), draw(st.integers(0, 12))
    d_model, d_ff = draw(st.sampled_from([8, 16, 5])), draw(st.sampled_from([8, 24, 3]))
    dtype, seed = draw(st.sampled_from([torch.float32, torch.float64])), draw(st.integers(0, 2**20))
    torch.manual_seed(seed)
    module = Experts(d_model, d_ff, number, draw(st.sampled_from(["silu", "relu"])), dtype=dtype)
    kind, top_k = draw(st.sampled_from(["even", "one", "few", "nobody"])), min(top_k, number)
    chosen = torch.rand(tokens, number).argsort(1)[:, :top_k]
    if kind == "one":
        chosen = torch.full((tokens, 1), number - 1)
    if kind == "few":
        chosen = torch.where(chosen >= number // 2 + 1, -1, chosen)
    if kind == "nobody":
        chosen = torch.where(torch.rand(chosen.shape) < 0.5, chosen, torch.tensor([-1, number, 2**40])[seed % 3])
    return module, torch.randn(tokens, d_model, dtype=dtype), chosen, torch.rand(chosen.shape)


@torch.no_grad()
@settings(deadline=None, max_examples=60)
@given(cases())
def test_all_ways_give_what_the_experts_give_one_by_one(case):
    module, x, chosen, weights = case
    wanted = asked_one_by_one(module, x, chosen, weights).to(x.dtype)
    for module.way in WAYS:
        y = module(x, chosen, weights)
        assert y.dtype == x.dtype
        torch.testing.assert_close(y, wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 40])
def test_layers_in_every_dtype(dtype, tokens):
    torch.manual_seed(0)
    layer = ExpertsLayer(32, 64, experts=8, top_k=2, dtype=dtype)
    x = torch.randn(2, tokens, 32).to(dtype)
    rows = x.view(-1, 32)
    exact = asked_one_by_one(layer.experts, rows, *layer.route(rows))
    eps = torch.finfo(dtype).eps
    for layer.experts.way in WAYS:
        assert (layer(x).view(-1, 32).double() - exact).norm() <= 4 * eps * exact.norm()
    assert takes_grouped(rows, layer.experts.gate_up_proj)


def test_gradients_are_those_of_the_loop():
    torch.manual_seed(0)
    layer = ExpertsLayer(16, 32, experts=4, top_k=2)
    x, found = torch.randn(10, 16, requires_grad=True), []
    nobody = torch.tensor([-1, 4]).expand(10, 2).where(torch.arange(10)[:, None] < 3, layer.route(x)[0])
    for layer.experts.way in WAYS:
        y = layer(x) + layer.experts(x, nobody, layer.route(x)[1])
        found.append(torch.autograd.grad((y * torch.linspace(-1, 1, 16)).sum(), [x, *layer.parameters()]))
    for other in found[1:]:
        for a, b in zip(found[0], other):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)
    assert all(each.any() for each in found[0])


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_all_tokens_to_one_expert_and_one_token_to_all(way):
    torch.manual_seed(0)
    layer = ExpertsLayer(8, 16, experts=4, top_k=1, way=way)
    layer.gate.weight.zero_()
    layer.gate.weight[2] = 1
    x = torch.rand(9, 8)
    chosen, weights = layer.route(x)
    assert (chosen == 2).all() and (weights == 1).all()
    torch.testing.assert_close(layer(x), asked_one_by_one(layer.experts, x, chosen, weights).float())
    every = ExpertsLayer(8, 16, experts=4, top_k=4, way=way)
    assert every.route(x[:1])[0].sort().values.tolist() == [[0, 1, 2, 3]]
    torch.testing.assert_close(every(x[0]), asked_one_by_one(every.experts, x[:1], *every.route(x[:1])).float()[0])
    assert layer(x[:0]).shape == (0, 8)


@torch.no_grad()
@pytest.mark.parametrize("way", WAYS)
def test_a_token_that_is_not_finite_spoils_itself_alone(way):
    torch.manual_seed(0)
    module = Experts(8, 16, 3, way=way)
    x, chosen = torch.randn(6, 8), torch.tensor([[0, 1], [1, 2], [0, 2], [2, 1], [1, 0], [-1, 3]])
    whole = module(x, chosen, torch.ones(6, 2))
    x[1, 0], x[5, 0] = torch.nan, torch.inf
    y = module(x, chosen, torch.ones(6, 2))
    assert y[1].isnan().all() and not y[5].any()
    rest = [0, 2, 3, 4]
    torch.testing.assert_close(y[rest], whole[rest])


@torch.no_grad()
def test_it_is_the_block_of_transformers():
    mixtral = pytest.importorskip("transformers.models.mixtral.modeling_mixtral")
    config = mixtral.MixtralConfig(
        hidden_size=16, intermediate_size=24, num_local_experts=4, num_experts_per_tok=2, hidden_act="silu"
    )
    config._experts_implementation = "eager"
    block = mixtral.MixtralSparseMoeBlock(config).eval()
    torch.manual_seed(0)
    for each in block.parameters():
        each.normal_(std=0.3)
    layer = ExpertsLayer(16, 24, experts=4, top_k=2)
    if layer.state_dict().keys() != block.state_dict().keys():
        pytest.skip("this transformers keeps each expert as a module")
    layer.load_state_dict(block.state_dict())
    x = torch.randn(2, 7, 16)
    torch.testing.assert_close(layer(x), block(x))


@torch.no_grad()
def test_its_experts_can_be_swapped_one_by_one():
    torch.manual_seed(0)
    layer = ExpertsLayer(16, 64, experts=4, activation="relu")
    x = torch.randn(9, 16)
    wanted = layer(x)
    tl.sparsify(layer, "twell")
    assert [type(each).__name__ for each in layer.experts.children()].count("SparseFFN") == 4
    torch.testing.assert_close(layer(x), wanted, rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_grouped_products_do_not_read_what_is_on_the_device(monkeypatch):
    """Nothing in the grouped way asks a tensor for a number, which is what waits."""
    layer, x = ExpertsLayer(32, 64, experts=8), torch.randn(20, 32)
    for name in ("item", "tolist", "__int__", "__bool__", "nonzero"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_: pytest.fail("waits"))
    layer(x)


@pytest.mark.parametrize(
    "arguments, told",
    [
        ({"d_ff": 0}, "d_ff is 0"),
        ({"d_model": 8.0}, "d_model is 8.0"),
        ({"experts": 0}, "experts is 0"),
        ({"top_k": 5}, "top_k is 5; a whole number from 1 to 4"),
        ({"top_k": True}, "top_k is True"),
        ({"activation": "tanh"}, "activation is 'tanh'; accepted: silu, relu"),
        ({"way": "dense"}, "way is 'dense'; accepted: grouped, loop, padded"),
    ],
)
def test_layers_that_are_refused(arguments, told):
    with pytest.raises(InputError, match=told):
        ExpertsLayer(**{"d_model": 8, "d_ff": 16, "experts": 4, "top_k": 2, **arguments})


def test_calls_that_are_refused():
    module = Experts(8, 16, 3)
    x, chosen, weights = torch.ones(4, 8), torch.zeros(4, 1, dtype=torch.int64), torch.ones(4, 1)
    for arguments, told in (
        ((x[:, :7], chosen, weights), r"\[tokens, 8\] is accepted"),
        ((x.double(), chosen, weights), "x is torch.float64"),
        ((x, chosen[:3], weights[:3]), r"int64 \[4, top_k\] is accepted"),
        ((x, chosen.int(), weights), "chosen is torch.int32"),
        ((x, chosen[:, :0], weights[:, :0]), "chosen is"),
        ((x, chosen, weights.long()), r"floating-point \[4, 1\] is accepted"),
        ((x, chosen, weights[:, 0]), "weights is"),
    ):
        with pytest.raises(InputError, match=told):
            module(*arguments)
    module.way = "other"
    with pytest.raises(InputError, match="way is 'other'"):
        module(x, chosen, weights)
    with pytest.raises(InputError, match=r"\[..., 8\] is accepted"):
        ExpertsLayer(8, 16)(torch.ones(2, 7))


# Hot and cold


@torch.no_grad()
@settings(deadline=None, max_examples=30)
@given(st.integers(0, 12), st.integers(1, 13), st.integers(0, 9), st.integers(0, 2**20))
def test_every_grain_gives_the_dense_layer(hot, grain, tokens, seed):
    draw = torch.Generator().manual_seed(seed)
    whole = lambda *shape: torch.randint(-3, 4, shape, generator=draw).float()  # noqa: E731
    x, gate, up, down = whole(tokens, 6), whole(12, 6), whole(12, 6), whole(6, 12)
    made = routed_by_firing(x, gate, up, down, hot, grain)
    fires = F.linear(x, gate).relu()
    assert torch.equal(made.y, F.linear(fires * F.linear(x, up), down))
    groups = (fires[:, hot:] > 0).split(grain, 1) if hot < 12 else []
    assert made.routed.tolist() == [int(each.any(1).sum()) for each in groups]
    done = hot * tokens + sum(int(each.any(1).sum()) * each.shape[1] for each in groups)
    assert made.work == pytest.approx(done / (12 * tokens) if tokens else 0)


def test_a_finer_grain_is_never_more_work():
    torch.manual_seed(0)
    x, gate, up, down = torch.randn(64, 16), torch.randn(48, 16) - 0.2, torch.randn(48, 16), torch.randn(16, 48)
    works = [routed_by_firing(x, gate, up, down, 8, grain).work for grain in (1, 2, 4, 8, 40)]
    assert works == sorted(works) and works[0] < 0.7 < works[-1]


def test_groups_of_a_drawn_layer_move_more_than_they_spare():
    """What the file says of it, which is why no path does this exactly, and little is gained by one that is lossy."""
    rates = clock.firing_rates(5632, 29).sort(descending=True).values
    needed = 1 - (1 - rates).view(-1, 64).prod(1)  # of each group, by how many of the tokens
    assert round(float(needed.mean()), 2) == 0.17 and round(float(needed.sum())) == 15
    rows = 16384 * float(needed.sum())
    moved = 2 * 2 * rows * 2048 * 2  # x and results, written and read, in 16 bits
    assert round(moved / 1e9) == 4
    rates = predict.rates_of("H100 SXM")
    assert moved / rates.bandwidth > 2 * 2 * 16384 * 2048 * 5632 / rates.matmul


def test_what_cannot_be_routed_is_refused():
    x, gate, down = torch.ones(2, 6), torch.ones(12, 6), torch.ones(6, 12)
    for arguments, told in (
        ((x, gate, gate, down, 13, 1), "hot is 13"),
        ((x, gate, gate, down, 4, 0), "grain is 0"),
        ((x, gate, gate, gate, 4, 1), "are accepted"),
        ((x[:, :5], gate, gate, down, 4, 1), "are accepted"),
        ((x[0], gate, gate, down, 4, 1), "are accepted"),
    ):
        with pytest.raises(InputError, match=told):
            routed_by_firing(*arguments)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_way_is_compiled_on_a_cpu(dtype):
    torch.manual_seed(0)
    layer = ExpertsLayer(16, 24, 4, 2, dtype=dtype).requires_grad_(False)
    x = torch.randn(9, 16, dtype=dtype)
    torch._dynamo.reset()
    torch.testing.assert_close(torch.compile(layer)(x), layer(x), rtol=0.02, atol=0.02)
