"""Other sparsities as paths of a feed-forward layer: found by name, exact or close to what they say, and owned."""

import copy
import math
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import twell_lab as tl
from twell_lab.core import DeviceError, InputError
from twell_lab.layers.choice import Choice
from twell_lab.layers.paths import PATHS
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward
from twell_lab.sparsities import blocks, two_four
from twell_lab.sparsities.blocks import block_mask
from twell_lab.sparsities.quantised import output_error
from twell_lab.sparsities.two_four import two_four_mask

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR)", "ignore:Sparse invariant")
D_MODEL, D_FF = 64, 128
LOSSY = {"int8": 0.05, "fp8": 0.1, "twell_int8": 0.02}
HERE = ["int8", "twell_int8"]  # lossy ones that a CPU runs


def layer(kind="gated", bias=False, mask=None, seed=0, dtype=torch.float32):
    torch.manual_seed(seed)
    made = GatedFeedForward(D_MODEL, D_FF) if kind == "gated" else PlainFeedForward(D_MODEL, D_FF, "relu")
    made = PlainFeedForward(D_MODEL, D_FF, "relu2") if kind == "squared" else made
    for part in [part for part in made.requires_grad_(False).children() if isinstance(part, nn.Linear)]:
        if mask is not None:
            part.weight.mul_(mask(part.weight))
        part.bias = nn.Parameter(torch.randn(part.out_features) / 4, requires_grad=False) if bias else None
    return made.to(dtype).eval()


def empty_blocks(weight):
    return block_mask(weight, 0.75, 32)


@pytest.fixture
def x():
    return torch.randn(5, D_MODEL, generator=torch.Generator().manual_seed(1))


def test_nothing_is_imported_before_a_further_path_is_named():
    code = (
        "import sys, twell_lab as tl; from twell_lab.layers.choice import Choice; Choice('twell')\n"
        "assert not [name for name in sys.modules if 'sparsities' in name]\n"
        "Choice('blocks').path; from twell_lab.layers.paths import PATHS; PATHS['blocks']\n"
        "assert 'twell_lab.sparsities.int8' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@given(
    kind=st.sampled_from(["gated", "plain", "squared"]),
    bias=st.booleans(),
    shape=st.sampled_from([(0,), (1,), (7,), (2, 3), ()]),
    sizes=st.lists(st.sampled_from([16, 32, 64, None]), min_size=3, max_size=3),
    kernel=st.booleans(),
    odd=st.sampled_from([None, math.nan, math.inf]),
    seed=st.integers(0, 99),
)
@settings(max_examples=20, deadline=None)
def test_blocks_are_exact(kind, bias, shape, sizes, kernel, odd, seed):
    """Whatever its blocks are, or are not; a projection of which few are empty is dense. kernel: 16 bits, for which a CPU
    computes what the kernel does."""
    each, dtype = iter(sizes), torch.bfloat16 if kernel else torch.float32
    dense = layer(kind, bias, lambda w: 1 if (size := next(each)) is None else block_mask(w, 0.7, size), seed, dtype)
    try:
        sparse = SparseFFN(dense, plan=Choice("blocks"))
    except InputError as error:
        assert "blocks" in str(error) and all(size is None for size in sizes[: 2 + (kind == "gated")])
        return
    x = torch.randn(*shape, D_MODEL, generator=torch.Generator().manual_seed(seed)).to(dtype)
    y, wanted = sparse(x), dense(x)
    close = {"rtol": 0.05, "atol": 0.05 * float(wanted.abs().max())} if kernel and x.numel() else {}
    torch.testing.assert_close(y, wanted, **(close or {"rtol": 1e-4, "atol": 1e-5}))
    if odd is not None and x.numel():
        x.view(-1, D_MODEL)[0, seed % D_MODEL] = odd
        rows = sparse(x).view(-1, D_MODEL)
        assert rows[0].isnan().all() and torch.equal(rows[1:], y.view(-1, D_MODEL)[1:])


def test_the_largest_blocks_that_are_nearly_as_empty_are_taken():
    weight, path = torch.zeros(256, 256), PATHS["blocks"]
    weight[:128, :128] = 1
    assert blocks.fitting(weight) == (128, 0.25)
    weight[200, 200] = 1  # a whole block of 128 for one value
    assert blocks.fitting(weight) == (32, 17 / 64)
    weight[:, ::16] = 1
    for wrong in (weight, torch.zeros(20, 32)):
        with pytest.raises(InputError, match="accepted"):
            path.product(wrong)


@pytest.mark.parametrize("kind", ["gated", "plain"])
def test_two_four_takes_the_projections_that_are(kind, x, monkeypatch):
    """With the dense product in the place of torch's tensors, which a CPU does not have."""
    dense = layer(kind, True, mask=two_four_mask)
    with pytest.raises(DeviceError, match="on a CPU; GPUs of 8.0"):
        SparseFFN(dense, plan=Choice("two_four"))

    class Tensors:
        @staticmethod
        def from_dense(weight):
            return weight.clone()

    monkeypatch.setattr(two_four, "tensor_kind", lambda *given: Tensors)
    monkeypatch.setattr(two_four, "product", lambda x, sparse, bias=None: nn.functional.linear(x, sparse, bias))
    dense.up_proj.weight.fill_(1.0)  # that one is no 2:4, and dense
    sparse = SparseFFN(dense, plan=Choice("two_four"))
    torch.testing.assert_close(sparse(x), dense(x), rtol=1e-4, atol=1e-5)
    assert [product is None for product in sparse.forms["two_four"]] == [kind != "gated", True, False]


@pytest.mark.parametrize("method", ["teal", "wina"])
@torch.no_grad()
def test_thresholds_on_inputs_compute_the_same_on_a_cpu(x, method):
    model = nn.Sequential(layer("gated", True), layer("gated", True, seed=1))
    model = tl.thresholds(model, [x], 0.5, method=method).apply(model)
    expected = model(x)
    sparse = tl.sparsify(copy.deepcopy(model), "kept_inputs")
    assert all(isinstance(part, SparseFFN) for part in sparse)
    torch.testing.assert_close(sparse(x), expected, rtol=1e-5, atol=1e-6)
    y = x
    for part in sparse:  # what compiled code runs on a GPU, with the operator's reference
        y = part.by_kept_inputs(y, part.weights())
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-6)
    with pytest.raises(InputError, match="thresholds on their inputs"):
        tl.sparsify(nn.Sequential(layer()), "kept_inputs")


@pytest.mark.parametrize("name", HERE)
@pytest.mark.parametrize("kind", ["gated", "plain", "squared"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lossy_paths_are_close_and_say_so(name, kind, dtype, x):
    dense, x = layer(kind, True, dtype=dtype), x.to(dtype)
    model = tl.sparsify(nn.Sequential(copy.deepcopy(dense)), name)
    y, exact = model(x), dense.double()(x.double())
    assert y.dtype == dtype and 0 < output_error(y, exact) < LOSSY[name] and f"{name} (lossy)" in repr(model)
    for row, one in zip(x, y):
        torch.testing.assert_close(model(row[None, None])[0, 0], one, rtol=0.05, atol=0.05 * float(y.abs().max()))
    assert model(x[:0]).shape == (0, D_MODEL)
    bad = x.clone()
    bad[2, 3] = math.inf
    assert model(bad)[2].isnan().all()
    torch.testing.assert_close(model(bad)[[0, 1, 3, 4]], y[[0, 1, 3, 4]], rtol=1e-3, atol=1e-4)


def test_fp8_needs_a_gpu():
    with pytest.raises(DeviceError, match="GPUs of 8.9 and newer"):
        SparseFFN(layer(), plan=Choice("fp8"))


@pytest.mark.parametrize("name", ["blocks", *HERE])
def test_a_form_is_owned_made_again_when_a_state_is_loaded_and_no_part_of_it(name, x):
    dense = layer(bias=True, mask=empty_blocks)
    sparse = SparseFFN(dense, plan=Choice(name))
    before = sparse(x)
    assert {*sparse.state_dict()} == {*dense.state_dict()}
    assert torch.equal(copy.deepcopy(sparse)(x), before)
    state = {key: -t if key.startswith("down") else t for key, t in dense.state_dict().items()}
    sparse.load_state_dict(state)
    torch.testing.assert_close(sparse(x), -before, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["blocks", *HERE])
def test_gradients_autocast_and_compiled_code_are_the_dense_layers(name, x):
    dense = layer(bias=True, mask=empty_blocks).requires_grad_(True)
    sparse = SparseFFN(copy.deepcopy(dense), plan=Choice(name))
    for module in (dense, sparse):
        module(x).square().sum().backward()
    for ours, theirs in zip(sparse.parameters(), dense.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    with torch.no_grad():
        torch._dynamo.reset()
        assert torch.equal(torch.compile(sparse, backend="eager")(x), dense(x))
        with torch.autocast("cpu", torch.bfloat16):
            assert torch.equal(sparse(x), dense(x))


@pytest.mark.parametrize("name", ["twell", "blocks", *HERE])
@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_weights_that_are_not_finite_are_refused(name, part):
    dense = layer(bias=True, mask=empty_blocks)
    dense.get_submodule(part).weight[0, 0] = math.nan
    with pytest.raises(InputError, match="not finite"):
        SparseFFN(dense, plan=Choice(name))
