"""2:4 in every step of training: which values stay, gradients, what reaches torch, and what is refused."""

import math
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional as F

from twell_lab.core import DeviceError, InputError
from twell_lab.ops.reference import PlainFeedForward
from twell_lab.sparsities import two_four_training
from twell_lab.sparsities.two_four import is_two_four, two_four_mask
from twell_lab.sparsities.two_four_training import (
    TwoFourLinear,
    dropped,
    step_times,
    to_linears,
    train_two_four,
    two_four,
)
from twell_lab.sparsities.weights import prune


def drawn(*sizes, seed=0):
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 4), st.integers(1, 4), st.sampled_from([torch.float32, torch.bfloat16]), st.integers(0, 9))
def test_values_and_their_transpose_are_2_4_and_the_gradient_is_of_all(rows, columns, dtype, seed):
    values = drawn(4 * rows, 4 * columns, seed=seed).to(dtype).requires_grad_()
    kept = two_four(values)
    assert is_two_four(kept.detach()) and is_two_four(kept.detach().t().contiguous())
    assert torch.equal(kept, torch.where(two_four_mask(values, transposable=True), values, 0))
    (gradient,) = torch.autograd.grad(kept.sum(), values)
    assert torch.equal(gradient, torch.ones_like(values))


@pytest.mark.parametrize("shape", [(8,), (1, 8), (3, 5, 8), (0, 8)])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("operand", ["weight", "input"])
def test_a_layer_is_the_dense_one_with_one_operand_kept(operand, bias, shape):
    dense = nn.Linear(8, 12, bias)
    layer = TwoFourLinear(dense, operand)
    assert layer.weight is dense.weight and layer.bias is dense.bias
    x = drawn(*shape).requires_grad_()
    rows = x.reshape(-1, 8)
    filled = F.pad(rows, (0, 0, 0, -len(rows) % 4))
    mask = two_four_mask(filled, transposable=True)[: len(rows)] if operand == "input" else torch.ones(len(rows), 8) > 0
    weight = dense.weight * two_four_mask(dense.weight, transposable=True) if operand == "weight" else dense.weight
    kept = rows * mask
    y, right = layer(x), F.linear(kept, weight, dense.bias)
    torch.testing.assert_close(y, right.view(*shape[:-1], 12))
    dy = drawn(*y.shape, seed=1)
    y.backward(dy)
    flat = dy.reshape(-1, 12)
    torch.testing.assert_close(x.grad.reshape(-1, 8), flat @ weight)  # of an input as if all had stayed
    torch.testing.assert_close(dense.weight.grad, flat.t() @ kept)
    if bias:
        torch.testing.assert_close(dense.bias.grad, flat.sum(0))


def test_under_autocast_both_operands_are_cast():
    for operand in two_four_training.OPERANDS:
        layer = TwoFourLinear(nn.Linear(8, 12), operand)
        with torch.autocast("cpu", torch.bfloat16):
            y = layer(drawn(4, 8))
        assert y.dtype == torch.bfloat16
        y.float().sum().backward()
        assert layer.weight.grad.dtype == torch.float32


def test_weights_that_were_dropped_come_back():
    weight = torch.tensor([[4.0, 3, 2, 1]]).repeat(4, 1)
    layer = TwoFourLinear(linear := nn.Linear(4, 4, False))
    linear.weight.data = weight * torch.tensor([[1.0], [0.9], [0.8], [0.7]])
    before = two_four(layer.weight) != 0
    optimizer = torch.optim.SGD(layer.parameters(), lr=1.0)
    (layer(torch.tensor([[0.0, 0, 0, 1]])) * -9).sum().backward()
    optimizer.step()
    after = two_four(layer.weight) != 0
    assert after[:, 3].sum() == 2 and before[:2, 3].sum() == 0 and not torch.equal(before, after)


def test_a_model_trains_and_is_dense_again():
    torch.manual_seed(0)
    model = PlainFeedForward(8, 16, "relu2")
    names, weights = [*dict(model.named_parameters())], [*model.parameters()]
    x, wanted = drawn(32, 8), drawn(32, 8, seed=1)
    optimizer = torch.optim.Adam(model.parameters(), lr=0.02)
    assert train_two_four(model, "input", only=lambda name, module: "down" in name) is model
    assert train_two_four(model, only=lambda name, module: "up" in name) is model
    assert (model.down_proj.operand, model.up_proj.operand) == ("input", "weight") and "2:4 input" in repr(model)
    assert [*dict(model.named_parameters())] == names and all(a is b for a, b in zip(weights, model.parameters()))
    losses = []
    for _ in range(60):
        loss = F.mse_loss(model(x), wanted)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    with pytest.raises(InputError, match="TwoFourLinear"):
        prune(model, 0.5)
    y = model(x)
    assert to_linears(model) is model and type(model.up_proj) is type(model.down_proj) is nn.Linear
    assert all(a is b for a, b in zip(weights, model.parameters())) and not torch.equal(model(x), y)


def test_what_is_dropped_is_measured():
    assert dropped(torch.zeros(3, 8)) == 0 == dropped(torch.eye(8))
    assert dropped(torch.ones(4, 4)) == pytest.approx(0.5**0.5)
    h = torch.relu(drawn(64, 128) - 1.5).square()  # 7% fire
    assert 0 < dropped(h) < 0.1 < dropped(torch.relu(drawn(64, 128)).square()) < dropped(drawn(64, 128))
    with pytest.raises(InputError, match="multiple of 4 columns"):
        dropped(torch.ones(4, 6))


def test_bad_input():
    linear = nn.Linear(8, 12)
    with pytest.raises(InputError, match="operand is 'output'; accepted: 'weight', 'input'"):
        TwoFourLinear(linear, "output")
    with pytest.raises(InputError, match="backend is 'magma'"):
        TwoFourLinear(linear, backend="magma")
    with pytest.raises(InputError, match=r"the weight is .* \[10, 8\]; multiples of 4"):
        TwoFourLinear(nn.Linear(8, 10))
    assert TwoFourLinear(nn.Linear(8, 10), "input")(drawn(3, 8)).shape == (3, 10)
    with pytest.raises(InputError, match=r"0: the input .*; 1: the input"):
        train_two_four(model := nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 4)), "input")
    assert type(model[0]) is nn.Linear
    with pytest.raises(InputError, match="no nn.Linear to prune in ReLU"):
        train_two_four(nn.ReLU())
    with pytest.raises(InputError, match="no nn.Linear to prune in Sequential"):
        train_two_four(nn.Sequential(linear), only=lambda name, module: False)
    with pytest.raises(InputError, match="not finite"):
        TwoFourLinear(linear, "input")(torch.full((4, 8), math.nan))
    with pytest.raises(InputError, match=r"shape \[4, 6\]"):
        two_four(torch.ones(4, 6))


# ---- the part for a GPU, without one ----


@pytest.mark.filterwarnings("ignore:The PyTorch API of SparseSemi")
def test_torch_is_asked_for_the_largest_magnitudes(monkeypatch):
    asked, values = [], torch.arange(128.0 * 64).bfloat16().view(128, 64).t()

    def pack(given, algorithm="", use_cutlass=True):
        asked.append((tuple(given.shape), given.is_contiguous(), algorithm, use_cutlass))
        return (None, None, None, None, given > 5)

    kind = torch.sparse.SparseSemiStructuredTensorCUSPARSELT
    monkeypatch.setattr(two_four_training, "tensor_kind", lambda *_: kind)
    monkeypatch.setattr(torch, "_sparse_semi_structured_tile", pack)
    monkeypatch.setattr(torch, "_sparse_semi_structured_apply_dense", lambda given, masks: given * masks)
    monkeypatch.setattr(torch, "_cslt_compress", lambda given: given.clone() if given.is_contiguous() else None)
    made = two_four_training._packed(values, "cusparselt")
    assert asked == [((64, 128), True, "largest_abs_values_greedy", True)]
    assert torch.equal(made.packed, values * (values > 5)) and torch.equal(made.packed_t, made.packed.t())
    assert made.fuse_transpose_cusparselt and made.shape == values.shape and made.t().packed is made.packed_t


def test_what_torch_cannot_pack_is_said(monkeypatch):
    def fails(*_, **__):
        raise RuntimeError("no kernel\nand more")

    values = torch.ones(64, 128).bfloat16()
    kind = types.SimpleNamespace(prune_dense_static_sort=fails)
    monkeypatch.setattr(two_four_training, "tensor_kind", lambda *_: kind)
    monkeypatch.setattr(torch, "_sparse_semi_structured_tile", fails)
    for backend in ("cutlass", "cusparselt"):
        with pytest.raises(DeviceError, match=f"torch's {backend} does not pack 2:4 values here: no kernel; accepted"):
            two_four_training._packed(values, backend)
    with pytest.raises(InputError, match=r"shape \[64, 32\]; multiples of 64"):
        two_four_training._packed(torch.ones(64, 32), "cusparselt")


def test_times_need_a_gpu(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="on a CPU"):
        step_times(128, 256, 64)


def test_steps_are_checked_before_they_are_timed(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(two_four_training, "tensor_kind", lambda *_: None)
    monkeypatch.setattr(
        two_four_training.clock,
        "time_cuda",
        lambda calls, rounds: {name: [1.0, 2.0] for name, call in calls.items() if call(0) is None or "chosen" in name},
    )
    rows = {row["path"]: row for row in step_times(128, 256, 64, dtype=torch.float32)}
    assert [*rows] == ["dense step", "2:4 weight step", "2:4 input step", "2:4 weight chosen", "2:4 input chosen"]
    assert rows["dense step"]["dropped"] == 0 < rows["2:4 input step"]["dropped"] < rows["2:4 weight step"]["dropped"]
    assert all(row["d_ff"] == 256 and row["d_model"] == 64 and row["ms"] == 1.5 for row in rows.values())
    monkeypatch.setattr(two_four_training.F, "linear", lambda x, weight, bias=None: 2 * x @ weight.t())
    with pytest.raises(two_four_training.clock.WrongResult, match="nothing was timed"):
        step_times(128, 256, 64, dtype=torch.float32)
