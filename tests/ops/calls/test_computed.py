"""Whole calls as a GPU gets them, their kernels computed on the memory that they are given, beside torch's own layer."""

import random

import pytest
import torch
from torch.nn.functional import linear

from tests.ops.calls import computed
from tests.ops.calls.pretended import Pretended, pretend, pretending
from twell_lab import simulator
from twell_lab.core import InputError
from twell_lab.cuda.tape import Tape
from twell_lab.ops import checks, differentiable, dispatch, hopper_pack, inference, portable, train_dense, train_rows
from twell_lab.ops.activation import Activation

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
D_MODEL, D_FF = 64, 520


@pytest.fixture
def driver(monkeypatch):
    with pretending(monkeypatch) as made:
        made.compute = computed.compute
        yield made
        assert not made.failed, made.failed[0]


def drawn(tokens, gated, shift, biased=True, seed=0):
    """x and weights of a layer whose neurons fire the more the higher `shift` is."""
    torch.manual_seed(seed)
    new = lambda *shape: torch.randn(*shape)  # noqa: E731
    x, first, up, down = new(tokens, D_MODEL), new(D_FF, D_MODEL) / 8, new(D_FF, D_MODEL) / 8, new(D_MODEL, D_FF) / 8
    x[:, 0], first[:, 0] = 1.0, shift
    biases = [new(D_FF) / 8, new(D_FF) / 8, new(D_MODEL)] if biased else [None] * 3
    made = [x, first, up, down, *biases] if gated else [x, None, first, down, None, *biases[1:]]
    return [None if t is None else pretend(t.bfloat16()) for t in made]


def firing(made, rows, least, most):
    """So many rows of x for which at least `least` neurons of drawn layers fire, and at most `most` of a tile."""
    x = torch.randn(60 * rows, D_MODEL).bfloat16()
    x[:, 0] = 0.25
    gate, bias = (made[1], made[4]) if made[1] is not None else (made[2], made[5])
    fires = linear(x.float(), *plain([gate, bias])) > 0
    in_tiles = torch.stack([part.sum(1) for part in fires.split(256, 1)])
    return x[(fires.sum(1) >= least) & (in_tiles.amax(0) <= most)][:rows]


def plain(made):
    return [None if t is None else t.as_subclass(torch.Tensor).float() for t in made]


def layer(x, gate, up, down, gate_bias, up_bias, down_bias):
    first = torch.relu(linear(x, up if gate is None else gate, up_bias if gate is None else gate_bias))
    h = first if gate is None else first * linear(x, up, up_bias)
    return linear(h, down, down_bias), h.abs().sum(1), h


def tapes_of(call):
    """All tapes that a kept call has."""
    if isinstance(call, Tape):
        return [call]
    parts = call.values() if isinstance(call, dict) else vars(call).values() if hasattr(call, "__dict__") else ()
    own = (dict, Tape, dispatch.Call)
    return [tape for part in parts if isinstance(part, own) for tape in tapes_of(part)]


def close(found, wanted, within=0.02):
    found = found.as_subclass(torch.Tensor).float()
    assert (found - wanted).norm() <= within * wanted.norm(), float((found - wanted).norm() / wanted.norm())


@torch.no_grad()
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "tokens, shift", [(1, -1.0), (40, -1.0), (70, -2.0), (256, -1.0), (2047, -2.0), (2050, 0.3), (4300, -2.0)]
)
def test_packed_layers(driver, gated, tokens, shift):
    """Few neurons or so many that rows are lost to the pool; the portable kernels, one pass, and two."""
    made = drawn(tokens, gated, shift)
    stats, down_t = pretend(torch.zeros(4, dtype=torch.int64)), made[3].t().contiguous()
    for seed in range(3):  # recorded, and replayed twice, for an x that lies elsewhere
        made[0] = drawn(tokens, gated, shift, seed=seed)[0]
        close(inference.infer(*made, down_t=down_t, stats=stats), layer(*plain(made))[0])
    assert all(tape.recorded for call in dispatch.calls._kept.values() for tape in tapes_of(call))
    packs = "gate_pack_v3" in {seen.name for seen in driver.launches}
    assert packs == (tokens > 2047)
    if packs:
        assert stats[0] == 3 * tokens and (int(stats[3]) > 0) == (shift > 0)


@torch.no_grad()
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("heavy", [1, 5, computed.MOST_FEW + 1])
@pytest.mark.parametrize("tokens", [2049, 4300])
def test_heavy_rows_are_shared_where_they_are_few(driver, monkeypatch, tokens, heavy, gated):
    """Rows with more kept values than one warp should walk; too many of them become a dense product."""
    shared, real = [], computed.few
    monkeypatch.setattr(computed, "few", lambda *given: shared.append(real(*given)) or shared[-1])
    made = drawn(tokens, gated, -2.0)
    stats, down_t = pretend(torch.zeros(4, dtype=torch.int64)), made[3].t().contiguous()
    for seed in range(3):  # recorded, and replayed twice
        made[0] = drawn(tokens, gated, -2.0, seed=seed)[0]
        rows = torch.linspace(seed, tokens - 1, heavy).long()
        made[0].as_subclass(torch.Tensor)[rows] = firing(made, heavy, 140, 85)
        close(inference.infer(*made, down_t=down_t, stats=stats), layer(*plain(made))[0])
    assert stats[3] == 3 * heavy and shared == [heavy <= computed.MOST_FEW] * 6


ACTIVATIONS = [
    Activation("above", 0.8),
    Activation("silu", 0.5),
    Activation("gelu", 0.5),
    Activation("gelu_tanh", 0.5),
    Activation(both=True),
]


@torch.no_grad()
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens, tile", [(1, 256), (40, 256), (40, 128), (70, 256)])
@pytest.mark.parametrize("acts", ACTIVATIONS, ids=str)
def test_other_activations(driver, acts, tokens, tile, gated):
    """The decode kernels, and the portable ones where the geometry is another or tokens are many, with tiles that
    overflow in some of them; values of either sign are packed for few tokens, and in gated layers."""
    if acts.both and not gated:
        pytest.skip("two ReLUs are for gated layers")
    made = drawn(tokens, gated, -0.5)
    down_t = made[3].t().contiguous()
    for seed in range(3):  # recorded, and replayed twice
        made[0] = drawn(tokens, gated, -0.5, seed=seed)[0]
        with torch.no_grad():
            y = inference.infer(*made, down_t=down_t, acts=acts, tile=tile)
        x, gate, up, down, gate_bias, up_bias, down_bias = plain(made)
        first = linear(x, up if gate is None else gate, up_bias if gate is None else gate_bias).bfloat16()
        h = acts.applied(first).float()
        h = h if gate is None else h * acts.of_up(linear(x, up, up_bias))
        close(y, linear(h, down, down_bias))
    names = {seen.name for seen in driver.launches}
    if tokens <= 64 and tile == 256:
        assert names == {"decode_gate_v2", "decode_down"}
    elif acts.falls_back and (tokens > 64 or not gated):
        assert not names
    elif not acts.both and not acts.falls_back:
        assert names == {"listed_v2", "listed_heavy"}
    else:
        assert names == {"pack_v4", "gated_v4" if gated else "down_v3"}


@torch.no_grad()
@pytest.mark.parametrize("d_model", [64, 60])
def test_two_relus_on_rows_that_are_not_finite(driver, d_model):
    """A silent neuron spoils such a row only where up is not minus infinity too: not always in a layer of two."""
    seen = set()
    for seed in range(12):
        torch.manual_seed(seed)
        x, *weights = (torch.randn(*shape).bfloat16() for shape in ((3, d_model), *[(2, d_model)] * 2, (d_model, 2)))
        x[0, 3], x[1, 5] = torch.inf, torch.nan
        gate, up, down = weights
        dense = linear(torch.relu(linear(x, gate)) * torch.relu(linear(x, up)), down)
        made = [pretend(each) for each in (x, *weights)]
        y = inference.infer(*made, acts=Activation(both=True), tile=128).as_subclass(torch.Tensor)
        assert torch.equal(y.isnan(), dense.isnan())
        close(y[2:], dense[2:].float())
        seen.add(tuple(y.isnan().all(1).tolist()))
    assert seen == {(False, True, False), (True, True, False)}
    assert "gated_v4" in {launch.name for launch in driver.launches} or d_model == 60


@torch.no_grad()
@pytest.mark.parametrize("gated", [True, False])
def test_dense_layers(driver, gated):
    made = drawn(300, gated, 0.0)
    for seed in range(2):
        made[0] = drawn(300, gated, 0.0, seed=seed)[0]
        close(inference.infer(*made, path="dense"), layer(*plain(made))[0])
    assert [each.name for each in driver.launches] == ["gate_up"] * 2
    assert all(tape.recorded for call in dispatch.calls._kept.values() for tape in tapes_of(call))


@torch.no_grad()
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens, path, hot", [(70, "twell", 0), (514, "hot_cold", 256), (2050, "hot_cold", 256)])
def test_calls_seen_before_keep_the_shape_of_x(driver, gated, tokens, path, hot):
    """After torch's product, and with a hot part, for an x of two dimensions and of three: the same bits."""
    made = drawn(tokens, gated, -1.0)
    stats, down_t = pretend(torch.zeros(4, dtype=torch.int64)), made[3].t().contiguous()
    how = {"down_t": down_t, "stats": stats, "path": path, "hot": hot}
    for seed in range(3):
        x = drawn(tokens, gated, -1.0, seed=seed)[0]
        made[0] = x
        y = inference.infer(*made, **how)
        close(y, layer(*plain(made))[0])
        made[0] = pretend(x.as_subclass(torch.Tensor).view(2, tokens // 2, -1))
        again = inference.infer(*made, **how)
        assert again.shape == made[0].shape and torch.equal(again.flatten(0, 1), y)
    (call,) = dispatch.calls._kept.values()
    assert all(tape.recorded for tape in tapes_of(call))


def turned(down):
    """The same matrix in the storage of its transpose."""
    return down.t().contiguous().t()


@torch.no_grad()
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "tokens, path, hot",
    [(1, "twell", 0), (70, "twell", 0), (2050, "twell", 0), (300, "dense", 0), (300, "hot_cold", 256)],
)
def test_layers_whose_down_is_turned(driver, gated, tokens, path, hot):
    """`down_t` is a view of it."""
    made = drawn(tokens, gated, -1.0)
    made[3] = turned(made[3])
    for seed in range(2):
        made[0] = drawn(tokens, gated, -1.0, seed=seed)[0]
        found = inference.infer(*made, down_t=made[3].t(), path=path, hot=hot)
        close(found, layer(*plain(made))[0])
        if path != "dense":
            apart = [*made[:3], made[3].contiguous(), *made[4:]]
            assert torch.equal(found, inference.infer(*apart, down_t=made[3].t().clone(), path=path, hot=hot))


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "packs, biased, lies", [("sm90", True, "plain"), ("sm80", False, "plain"), ("sm90", True, "turned")]
)
def test_training_steps(driver, monkeypatch, gated, biased, packs, lies):
    if packs == "sm80":
        monkeypatch.setattr(hopper_pack, "takes", lambda x, gate: False)
    made = drawn(90, gated, -1.2, biased)
    made[3] = turned(made[3]) if lies == "turned" else made[3]
    dy, dl1 = (pretend(t) for t in (torch.randn(90, D_MODEL).bfloat16(), torch.rand(90) / 10))
    wide = [t if t is None else t.requires_grad_() for t in plain(made)]
    wanted_y, wanted_l1, h = layer(*wide)
    asked = [t for t in wide if t is not None]
    wanted = torch.autograd.grad([wanted_y, wanted_l1], asked, [plain([dy])[0], plain([dl1])[0]])
    for _ in range(2):
        y, l1, kept, *saved = differentiable._forward_cuda(*made)
        close(y, wanted_y.detach())
        close(l1, wanted_l1.detach())
        assert (kept - (h != 0).sum(1)).abs().sum() <= 20  # bfloat16 moves a few across zero
        found = differentiable._backward_cuda(dy, dl1, *made, kept, *saved)
        found = [d for d, t in zip(found, made) if t is not None]
        for one, other in zip(found, wanted):
            close(one, other, 0.04)
    recorded = [tape.recorded for tapes in differentiable._tapes._kept.values() for tape in tapes]
    assert recorded == [lies == "plain", True]  # a copy is made of what is turned
    assert {each.name.startswith("gate_pack") and each.file[:4] for each in driver.launches} == {False, packs}


@pytest.mark.parametrize("path", differentiable.PATHS)
def test_training_calls_seen_before_are_not_checked_again(driver, monkeypatch, path):
    """Through autograd, for rows and for batches of sequences; a call that differs in anything is checked."""
    checked, real = [], checks.layer
    monkeypatch.setattr(checks, "layer", lambda *given: checked.append(1) or real(*given))
    monkeypatch.setattr(differentiable, "Tensor", Pretended)
    kernel = train_dense.dense_gradients  # within a backward pass a product of tensors that pretend does not
    monkeypatch.setattr(train_dense, "dense_gradients", lambda *given: kernel(*map(pretend, given)))
    made = drawn(90, True, -1.2, biased=False)
    x, *weights = (t if t is None else t.requires_grad_() for t in made)
    found = []
    for shape in ((90, D_MODEL), (90, D_MODEL), (3, 30, D_MODEL), (2, 45, D_MODEL)):
        rows = pretend(x.detach().as_subclass(torch.Tensor).view(shape)).requires_grad_()
        y, l1, kept = differentiable.train_ffn(rows, *weights, path=path)
        assert y.shape == shape and l1.shape == kept.shape == shape[:-1]
        gradients = torch.autograd.grad([y.float().sum() + l1.sum()], [rows, *weights[:3]])
        found.append([t.as_subclass(torch.Tensor).flatten() for t in (y, *gradients)])
    assert all(torch.equal(one, other) for each in found for one, other in zip(each, found[0]))
    assert len(checked) == 1
    between = differentiable._middle_tapes._kept.values()  # forward and backward
    assert [tape.recorded for tape in between] == [True] * (2 if path == "dense" else 0)
    with pytest.raises(InputError, match="up"):
        differentiable.train_ffn(x, weights[0], weights[1][:, :32], *weights[2:], path=path)
    with pytest.raises(InputError, match="x"):
        differentiable.train_ffn(x[..., None], *weights, path=path)
    differentiable.train_ffn(x[:70], *weights, path=path)
    assert len(checked) == 4


@pytest.mark.parametrize("gated", [True, False])
def test_training_steps_with_heavy_rows(driver, gated, monkeypatch):
    """Three rows have so many entries that others share them; none is lost. A row of so narrow a layer counts as heavy
    from fewer entries on than usual: with as many its tiles would overflow."""
    for module, name in ((portable, "specialisation"), (train_rows, "_slab_defines")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *layer, real=real: (*real(*layer), ("HEAVY", 128)))
    made = drawn(70, gated, -1.6, biased=False)
    made[0][[3, 20, 69], 0] = 0.33
    wide = [t if t is None else t.requires_grad_() for t in plain(made)]
    y, l1, h = layer(*wide)
    assert ((h != 0).sum(1) > 128).nonzero()[:, 0].tolist() == [3, 20, 69]
    dy, dl1 = torch.randn(70, D_MODEL).bfloat16(), torch.rand(70) / 10
    asked = [t for t in wide if t is not None]
    wanted = torch.autograd.grad([y, l1], asked, [dy.float(), dl1])
    *found, kept, down_t, spans, words, ups, lost = differentiable._forward_cuda(*made)
    assert lost[0] == 0 and lost.flip(0)[:4].tolist() == [3, 3, 20, 69]
    assert ((kept - (h != 0).sum(1)).abs() <= 2).all()
    saved = (kept, down_t, spans, words, ups, lost)
    gradients = differentiable._backward_cuda(pretend(dy), pretend(dl1), *made, *saved)
    found += [d for d, t in zip(gradients, made) if t is not None]
    for one, other in zip(found, (y.detach(), l1.detach(), *wanted), strict=True):
        close(one, other, 0.04)


@torch.no_grad()
@pytest.mark.parametrize("seed", range(3))
def test_calls_in_any_order_between_changes_of_weights(driver, seed):
    """Three layers, of which weights are changed in place, replaced, moved and given back: nothing stale is launched."""
    draw = random.Random(seed)
    layers = [drawn(1, gated=number != 1, shift=-1.0, seed=number) for number in range(3)]
    downs = [made[3].t().contiguous() for made in layers]
    for step in range(40):
        number = draw.randrange(3)
        made = layers[number]
        change = draw.choice(["nothing", "nothing", "in place", "replaced", "moved"])
        at = draw.choice([at for at, t in enumerate(made) if at and t is not None])
        if change == "in place":
            made[at].mul_(-1)
        elif change == "replaced":  # the old one is gone: the new one may lie there
            made[at] = None
            made[at] = drawn(1, made[1] is not None, -1.0, seed=100 + step)[at]
        elif change == "moved":
            made[at].data = made[at].clone()
        if at == 3 and change != "nothing":
            downs[number] = made[3].t().contiguous()
        tokens = draw.choice([1, 8, 40, 70, 300])
        made[0] = drawn(tokens, True, -1.0, seed=1000 + step)[0]
        close(inference.infer(*made, down_t=downs[number]), layer(*plain(made))[0])
        if step % 8 == 0:
            path, hot = draw.choice([("dense", 0), ("hot_cold", 256)])
            close(inference.infer(*made, down_t=downs[number], path=path, hot=hot), layer(*plain(made))[0])
