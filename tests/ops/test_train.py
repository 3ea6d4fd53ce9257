"""The operator of training: y, L1 and every gradient are those of the dense formula, whatever torch does around it."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from tests.ops.dense import first
from tests.ops.dense import step as dense
from twell_lab.core import InputError
from twell_lab.ops import train
from twell_lab.ops.train import PATHS, train_ffn

OFF = {torch.float64: 1e-10, torch.float32: 1e-4, torch.bfloat16: 0.05, torch.float16: 0.01}  # relative, of norms


def layer(tokens, d_model, d_ff, dtype=torch.float32, gated=True, biases=(True,) * 3, seed=0):
    """[x, gate, up, down, gate_bias, up_bias, down_bias], leaves; None where there is none."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator).to(dtype).requires_grad_()  # noqa: E731
    x, gate, up, down = draw(tokens, d_model), draw(d_ff, d_model), draw(d_ff, d_model), draw(d_model, d_ff)
    three = [draw(n) if biased else None for biased, n in zip(biases, (d_ff, d_ff, d_model))]
    return [x, gate, up, down, *three] if gated else [x, None, up, down, None, *three[1:]]


def loss_of(y, l1, weights):
    """A scalar to which each value contributes differently. weights: of y, and of l1."""
    rows = torch.arange(1, l1.numel() + 1, device=y.device) / (l1.numel() + 1)
    columns = torch.arange(1, y.shape[-1] + 1, device=y.device) / y.shape[-1]
    parts = (y.reshape(-1, y.shape[-1]) * rows[:, None] * columns).sum(), (l1.reshape(-1) * rows).sum()
    return sum(weight * part for weight, part in zip(weights, parts) if weight)


def leaves(made):
    return [t for t in made if t is not None]


def gradients(function, made, weights=(1.0, 0.3), create_graph=False):
    y, l1, *_ = function(*made)
    return torch.autograd.grad(loss_of(y, l1, weights), leaves(made), create_graph=create_graph, allow_unused=True)


def exact(made):
    return [None if t is None else t.detach().double().requires_grad_() for t in made]


def assert_near(found, wanted, dtype):
    for a, b in zip(found, wanted, strict=True):
        if b is None:  # of what the loss does not depend on, the operator may give zeros
            assert a is None or not a.any()
            continue
        assert a.shape == b.shape and (a.double() - b).norm() <= OFF[dtype] * b.norm() + 1e-6


@settings(max_examples=60, deadline=None)
@given(
    path=st.sampled_from(PATHS),
    sizes=st.tuples(st.integers(0, 7), st.integers(1, 9), st.integers(1, 17)),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    gated=st.booleans(),
    biases=st.tuples(*[st.booleans()] * 3),
    weights=st.sampled_from([(1.0, 0.3), (1.0, 0.0), (0.0, 1.0)]),
    turned=st.booleans(),
    lead=st.booleans(),
)
def test_gradients_are_those_of_the_dense_formula(path, sizes, dtype, gated, biases, weights, turned, lead):
    made = layer(*sizes, dtype, gated, biases, seed=sum(sizes))
    if turned:
        made[3] = made[3].detach().t().contiguous().t().requires_grad_()
    given = [made[0][None], *made[1:]] if lead else made
    y, l1, kept = train_ffn(*given, path=path)
    assert y.dtype == dtype and l1.dtype == torch.float32 and kept.dtype == torch.int32 and not kept.requires_grad
    assert y.shape == given[0].shape and l1.shape == kept.shape == y.shape[:-1]
    wide = exact(made)
    if dtype == torch.float32:
        assert torch.equal(kept.view(-1), (first(*wide) > 0).sum(-1, dtype=torch.int32))
        assert_near((y.view(made[0].shape), l1.view(-1)), dense(*wide), dtype)
    if sizes[0]:
        found = torch.autograd.grad(loss_of(y, l1, weights), leaves(made), allow_unused=True)
        beside = gradients(dense, [t if t is None else t.detach().requires_grad_() for t in made], weights)
        for a, b, right in zip(found, beside, gradients(dense, wide, weights), strict=True):
            if right is None:
                assert a is None or not a.any()
                continue
            off, theirs = (a.double() - right).norm(), (b.double() - right).norm()
            assert off <= 2 * theirs + 2 * torch.finfo(dtype).eps * (right.norm() + 1e-3)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gated", [True, False])
def test_gradcheck(path, gated):
    made = layer(5, 6, 11, torch.float64, gated)

    def outputs(*tensors):
        given = iter(tensors)
        return torch.ops.twell_lab.train(*(None if t is None else next(given) for t in made), path)[:2]

    assert torch.autograd.gradcheck(outputs, tuple(leaves(made)))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gated", [True, False])
def test_the_operator_keeps_torch_s_rules(path, gated):
    torch.library.opcheck(torch.ops.twell_lab.train.default, (*layer(5, 6, 11, gated=gated), path))


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gated", [True, False])
def test_second_derivatives(path, gated):
    made = layer(5, 6, 11, torch.float32, gated)

    def second(function, tensors):
        first = gradients(function, tensors, create_graph=True)
        squares = sum(t.square().sum() for t in first if t is not None)
        return torch.autograd.grad(squares, leaves(tensors), allow_unused=True)

    assert_near(second(lambda *t: train_ffn(*t, path=path), made), second(dense, exact(made)), torch.float32)


WAYS = {
    "compiled": lambda step: torch.compile(step, fullgraph=True, backend="aot_eager"),
    "checkpointed": lambda step: lambda *t: checkpoint(step, *t, use_reentrant=False),
    "checkpointed anew": lambda step: lambda *t: checkpoint(step, *t, use_reentrant=True),
}


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("way", WAYS)
def test_inside_of_what_torch_does_with_a_step(way, path, gated):
    made = layer(5, 6, 11, gated=gated)
    y, l1, _ = WAYS[way](lambda *t: train_ffn(*t, path=path))(*made)
    loss_of(y, l1, (1.0, 0.3)).backward()  # checkpointing that enters anew has no torch.autograd.grad
    assert_near([t.grad for t in leaves(made)], gradients(dense, exact(made)), torch.float32)


@pytest.mark.parametrize("path", PATHS)
def test_many_gradients_at_once(path):
    made = layer(5, 6, 11)

    def jacobian(function, tensors):
        return torch.autograd.functional.jacobian(lambda x: function(x, *tensors[1:])[0], tensors[0], vectorize=True)

    assert_near([jacobian(lambda *t: train_ffn(*t, path=path), made)], [jacobian(dense, exact(made))], torch.float32)


@pytest.mark.parametrize("path", PATHS)
def test_inside_torch_func(path):
    made = [t.detach() for t in layer(5, 6, 11)]
    of_x = lambda x, tensors, f: torch.func.grad(lambda x: loss_of(*f(x, *tensors)[:2], (1.0, 0.3)))(x)  # noqa: E731
    found = of_x(made[0], made[1:], lambda *t: train_ffn(*t, path=path))
    assert_near([found], [of_x(made[0].double(), [t.double() for t in made[1:]], dense)], torch.float32)
    together = torch.func.vmap(lambda x: train_ffn(x, *made[1:], path=path)[0])(made[0][:, None])
    assert_near([together[:, 0]], [dense(*exact(made))[0]], torch.float32)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast(path, dtype):
    made = [t.detach().to(dtype).requires_grad_() for t in layer(5, 6, 11, torch.bfloat16)]
    with torch.autocast("cpu", torch.bfloat16):
        y, l1, _ = train_ffn(*made, path=path)
    assert y.dtype == torch.bfloat16 and l1.dtype == torch.float32
    found = torch.autograd.grad(loss_of(y, l1, (1.0, 0.3)), leaves(made))
    assert all(a.dtype == dtype for a in found)
    assert_near(found, gradients(dense, exact(made)), torch.bfloat16)


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
def test_a_row_that_is_not_finite_is_nan_alone(path, value):
    made = [t.detach() for t in layer(4, 8, 30)]
    made[0][1, 3] = value
    y, l1, _ = train_ffn(*made, path=path)
    assert y[1].isnan().all() and l1[1].isnan() and y[[0, 2, 3]].isfinite().all() and l1[[0, 2, 3]].isfinite().all()


def test_the_sparse_path_keeps_nothing_as_wide_as_the_layer():
    for path in PATHS:
        shapes = []
        with torch.autograd.graph.saved_tensors_hooks(lambda t: shapes.append(tuple(t.shape)) or t, lambda t: t):
            train_ffn(*layer(5, 6, 11), path=path)[0].sum().backward()
        assert ((5, 11) in shapes) == (path == "dense")


def test_a_gate_that_is_up_gets_both_gradients():
    x, _, up, down, *_ = layer(5, 6, 11)
    found = torch.autograd.grad(train_ffn(x, up, up, down)[0].sum(), [x, up, down])
    x, up, down = exact([x, up, down])
    wanted = torch.autograd.grad(linear(torch.relu(linear(x, up)).square(), down).sum(), [x, up, down])
    assert_near(found, wanted, torch.float32)


def test_nothing_is_lost_where_there_is_no_list():
    assert train.counts(train.train(*layer(5, 6, 11), path="twell")[2], 5)[1] is None
    assert not train.takes(torch.device("cpu"), torch.bfloat16, 16, 64, 64)


@pytest.mark.parametrize(
    "change, message",
    [
        (dict(path="sparse"), "path is 'sparse'; 'dense', 'twell' are accepted"),
        (dict(down=torch.zeros(6, 10)), "down has shape"),
        (dict(gate=torch.zeros(11, 6, dtype=torch.bfloat16)), "one dtype"),
        (dict(x=[1.0]), "x is a list"),
        (dict(x=torch.zeros(3, 7)), "x has rows of 7"),
        (dict(up=None), "up is a NoneType"),
    ],
)
def test_wrong_arguments_are_named(change, message):
    x, gate, up, down, *_ = layer(5, 6, 11)
    with pytest.raises(InputError, match=message):
        train_ffn(**{"x": x, "gate": gate, "up": up, "down": down, **change})
