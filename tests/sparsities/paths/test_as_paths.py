"""Other sparsities as paths of a feed-forward layer: found by name, exact or called lossy, and up to date."""

import copy
import gc
import io
import math
import subprocess
import sys
import threading
import weakref
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import twell_lab as tl
from twell_lab.analysis import planner
from twell_lab.analysis.costs import Firing, Rates
from twell_lab.core import DeviceError, InputError
from twell_lab.layers.choice import Candidate, Choice, LayerPlan
from twell_lab.layers.lossy import ThresholdedActivation
from twell_lab.layers.paths import PATHS
from twell_lab.layers.paths.cost import Work
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.layers.weights import Weights
from twell_lab.ops import differentiable
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward
from twell_lab.sparsities import blocks, experts, predictors, two_four
from twell_lab.sparsities.blocks import block_mask
from twell_lab.sparsities.quantised import output_error
from twell_lab.sparsities.two_four import two_four_mask

pytestmark = pytest.mark.filterwarnings("ignore:Sparse (CSR|BSR)", "ignore:Sparse invariant")
D_MODEL, D_FF = 64, 128
RATES = Rates("CPU", "float32", bandwidth=1e10, l2=1e11, matmul=1e10, launch=1e-7)
FURTHER = ["two_four", "blocks", "int8", "fp8", "twell_int8", "predicted", "experts"]
LOSSY = ["int8", "fp8", "twell_int8", "predicted", "experts"]


def layer(gated=True, bias=False, activation="relu", mask=None, seed=0):
    torch.manual_seed(seed)
    made = (GatedFeedForward if gated else PlainFeedForward)(D_MODEL, D_FF, activation).requires_grad_(False)
    for part in [part for part in made.children() if isinstance(part, nn.Linear)]:
        if mask is not None:
            part.weight.mul_(mask(part.weight))
        if bias:
            part.bias = nn.Parameter(torch.randn(part.out_features) / 4, requires_grad=False)
    return made.eval()


def empty_blocks(weight):
    return block_mask(weight, 0.75, 32)


@pytest.fixture
def dense():
    return layer(bias=True, mask=empty_blocks)


@pytest.fixture
def x():
    return torch.randn(5, D_MODEL, generator=torch.Generator().manual_seed(1))


@pytest.fixture
def two_four_here(monkeypatch):
    """A stand-in for torch's 2:4 tensors, which a CPU does not have: the dense product of a weight that is 2:4."""

    def made(linear):
        two_four.check_two_four(linear.weight)
        weight = linear.weight.detach().clone()
        weight.packed, weight.meta, weight.packed_t, weight.meta_t = weight, None, None, None
        linear.weight = nn.Parameter(torch.zeros(0))
        linear.__dict__["_parameters"] = {"weight": weight}
        return linear

    monkeypatch.setattr(two_four, "to_semi_structured", made)
    monkeypatch.setattr(two_four, "product", nn.functional.linear)
    monkeypatch.setattr(two_four, "check_convertible", lambda *_: None)


def assert_equals(sparse, dense, x):
    with torch.no_grad():
        torch.testing.assert_close(sparse(x), dense(x), rtol=1e-4, atol=1e-5)


# ---- the names ----


def test_nothing_is_imported_before_a_further_path_is_named():
    code = (
        "import sys, twell_lab as tl; from twell_lab.layers.choice import Choice; Choice('twell'); tl.sparsify\n"
        "assert not [name for name in sys.modules if 'sparsities' in name]\n"
        "Choice('two_four'); assert 'twell_lab.sparsities.two_four' in sys.modules\n"
        "assert 'twell_lab.sparsities.blocks' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_name_is_that_of_its_path_and_the_own_ones_stay_three():
    assert PATHS.names() == ["dense", "twell", "hot_cold", *FURTHER, "kept_inputs"]
    for name in FURTHER:
        path = PATHS[name]
        assert path.name == name and path.exact == (name not in LOSSY) and path.learns in differentiable.PATHS
        assert not path.splits and str(Choice(name)) == (f"{name} (lossy)" if name in LOSSY else name)
        assert path is PATHS[name] and name in PATHS.used()
    assert [*PATHS] == ["dense", "twell", "hot_cold"]
    with pytest.raises(KeyError):
        PATHS["three_four"]


@pytest.mark.parametrize("wrong", ["three_four", 3, ["blocks"], None])
def test_a_name_that_nobody_gave(wrong, dense, x):
    with pytest.raises(InputError, match="'dense', 'twell', .*'blocks'"):
        Choice(wrong)
    with pytest.raises(InputError, match=r"paths has .*; accepted: 'dense', .*'predicted', 'experts'"):
        tl.plan(tl.profile(dense, [x]), dense, rates=RATES, paths=["twell", wrong])
    with pytest.raises(InputError, match="depends on a layer's weights; accepted with the model"):
        tl.plan(tl.profile(dense, [x]), rates=RATES, paths="blocks")


# ---- exact ----


@given(
    gated=st.booleans(),
    bias=st.booleans(),
    activation=st.sampled_from(["relu", "relu2"]),
    shape=st.sampled_from([(0,), (1,), (7,), (2, 3), (0, 2), ()]),
    sizes=st.lists(st.sampled_from([16, 32, 64, None]), min_size=3, max_size=3),
    odd=st.sampled_from([None, math.nan, math.inf, -math.inf]),
    seed=st.integers(0, 99),
)
@settings(max_examples=40, deadline=None)
def test_blocks_are_exact(gated, bias, activation, shape, sizes, odd, seed):
    """Whatever its blocks are, or are not; a projection of which few are empty is dense."""
    each = iter(sizes)
    activation = "relu" if gated else activation
    made = layer(
        gated, bias, activation, lambda w: 1 if (size := next(each)) is None else block_mask(w, 0.7, size), seed
    )
    try:
        sparse = SparseFFN(made, plan=Choice("blocks"))
    except InputError as error:
        assert "blocks" in str(error) and all(size is None for size in sizes[: 2 + gated])
        return
    x = torch.randn(*shape, D_MODEL, generator=torch.Generator().manual_seed(seed))
    if odd is not None and x.numel():
        x.view(-1, D_MODEL)[0, seed % D_MODEL] = odd
        y = sparse(x).view(-1, D_MODEL)
        assert y[0].isnan().all() and not made(x).view(-1, D_MODEL)[0].isfinite().any()
        torch.testing.assert_close(y[1:], made(x).view(-1, D_MODEL)[1:], rtol=1e-4, atol=1e-5)
    else:
        assert_equals(sparse, made, x)


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("tokens", [1, 40])
def test_where_there_is_a_kernel_it_multiplies_the_blocks(bias, tokens, monkeypatch):
    """Which takes 16 bits on a GPU; here it is told that there is one, and computes by torch."""
    monkeypatch.setattr(blocks, "_has_kernel", lambda weight: True)
    monkeypatch.setattr(blocks, "_check_product", lambda *given: None)
    made = layer(bias=bias, mask=empty_blocks).bfloat16()
    x = torch.randn(tokens, made.up_proj.in_features).bfloat16()
    sparse = SparseFFN(made, plan=Choice("blocks"))
    torch.testing.assert_close(sparse(x), made(x), rtol=0.05, atol=0.05 * float(made(x).abs().max()))
    (form,) = sparse.forms.values()
    assert all(isinstance(each, blocks.block_linear.BlockOperand) for each in form.value)
    assert len(form.tensors) == 12 and {t.data_ptr() for t in form.tensors} >= {e.values.data_ptr() for e in form.value}


def test_the_largest_blocks_that_are_nearly_as_empty_are_taken():
    weight = torch.zeros(256, 256)
    weight[:128, :128] = 1
    assert blocks.Blocks().weigh(weight)[1:] == (128, 0.25)
    weight[200, 200] = 1  # a whole block of 128 for one value
    held, size, share = blocks.Blocks().weigh(weight)
    assert size == 32 and share == 17 / 64 and held == 17 * (4096 + 8) + 8 * 9
    weight[:, ::16] = 1
    with pytest.raises(InputError, match="0.0% of the weight's blocks of .* are empty; at least 50% are accepted"):
        blocks.Blocks().weigh(weight)
    with pytest.raises(InputError, match=r"shape \[20, 32\]; multiples of 16"):
        blocks.Blocks().weigh(torch.zeros(20, 32))
    with pytest.raises(InputError, match="float16 on cpu"):
        blocks.Blocks().weigh(torch.zeros(32, 32).half())


@pytest.mark.parametrize("gated", [True, False])
def test_two_four_takes_the_projections_that_are(gated, two_four_here, x):
    made = layer(gated, True, mask=two_four_mask)
    sparse = SparseFFN(made, plan=Choice("two_four"))
    assert_equals(sparse, made, x)
    (form,) = sparse.forms.values()
    assert all(each is not None for each in form.value[not gated :])
    made.up_proj.weight.fill_(1.0)  # not 2:4 any more: that one is dense
    assert_equals(sparse, made, x)
    assert sparse.forms["two_four"].value[1] is None and sparse.forms["two_four"].value[2] is not None


def test_two_four_is_refused_where_there_is_none(dense):
    for dtype in (torch.float32, torch.bfloat16):  # the CPU is the obstacle, which no other dtype mends
        model = nn.Sequential(layer(mask=two_four_mask).to(dtype))
        with pytest.raises(DeviceError, match="path 'two_four', layer '0': the weight is on a CPU; GPUs of 8.0"):
            tl.sparsify(model, "two_four")
        assert isinstance(model[0], GatedFeedForward)
        with pytest.raises(DeviceError, match="on a CPU"):
            SparseFFN(model[0], plan=Choice("two_four"))


def test_two_four_costs_half_the_operations_and_no_more_memory(two_four_here):
    made = layer(mask=two_four_mask)
    path = PATHS["two_four"].fitted(Weights.of(made.gate_proj, made.up_proj, made.down_proj))
    assert path.form_bytes(Weights.of(made.gate_proj, made.up_proj, made.down_proj)) == 3 * D_MODEL * D_FF * 9 / 8
    assert PATHS["two_four"].counted == ()  # the one that all layers share


def test_blocks_cost_what_the_l2_cache_serves():
    """docs/kernels/sm80_blocks.md: 4,096 in each direction, 90% of the blocks of 32 x 32 empty."""
    rates = Rates("a GPU", "bfloat16", 3.0e12, 7.4e12, 700e12, 0.0, cache=50 * 2**20)
    firing = Firing(4096, True, torch.zeros(4096).double(), torch.zeros(4097).double())
    work, counted = Work(firing, rates, 4096, 2), (3.4e6, 32, 0.1)
    assert PATHS["blocks"].seconds(work, 4096, 4096, counted) == pytest.approx(65e-6, rel=0.01)
    assert PATHS["blocks"].seconds(work, 4096, 4096, (3.4e6, 128, 0.1)) < 30e-6  # device memory, then
    without = Work(firing, replace(rates, cache=0), 4096, 2)
    assert PATHS["blocks"].seconds(without, 4096, 4096, counted) == pytest.approx((3.4e6 + 67.1e6) / 3.0e12, rel=0.01)


def test_int8_costs_no_sums_where_the_kernel_takes_it():
    rates = Rates("a GPU", "bfloat16", 3.0e12, 7.4e12, 1e18, 1e-6, cache=50 * 2**20)
    firing = Firing(2048, True, torch.zeros(5632).double(), torch.zeros(5633).double())
    weight = 5632 * 2048
    seconds = lambda n, itemsize: PATHS["int8"].seconds(Work(firing, rates, 16384, itemsize), n, 2048, (weight,))  # noqa: E731
    within = (weight + 16384 * (2048 * 4 + 5632 * 2)) / 3.0e12 + 2e-6
    assert seconds(5632, 2) == pytest.approx(within)
    apart = (weight + 16384 * (2048 * 4 + 5624 * 18)) / 3.0e12 + 5e-6
    assert seconds(5624, 2) == pytest.approx(apart) and seconds(5632, 4) > apart


# ---- what a layer promises ----


def test_what_is_held_is_no_state_and_goes_with_the_path(dense, x):
    sparse = SparseFFN(dense, plan=Choice("blocks"))
    assert {*sparse.state_dict()} == {*dense.state_dict()}
    assert {name for name, _ in sparse.named_buffers()} == {"handle"}  # compiled code's, without elements
    parts = [dense.gate_proj, dense.up_proj, dense.down_proj]
    made = [part.weight.detach().to_sparse_bsr((32, 32)) for part in parts]
    assert sparse.extra_bytes == sum(each().nbytes for t in made for each in (t.values, t.col_indices, t.crow_indices))
    assert PATHS["blocks"].form_bytes(Weights.of(*parts)) == sparse.extra_bytes
    sparse.follow(Choice("dense"))
    assert sparse.extra_bytes == 0 and not sparse.forms
    assert_equals(sparse, dense, x)


def test_a_weight_that_is_there_twice_is_held_once(x):
    squared = layer(False, activation="relu2", mask=empty_blocks)
    plain = layer(False, mask=empty_blocks)
    held = [SparseFFN(made, plan=Choice("blocks")).extra_bytes for made in (squared, plain)]
    assert held[0] == held[1] > 0


def replaced(dense):
    old = dense.up_proj.weight
    dense.up_proj.weight = nn.Parameter(torch.randn_like(old) * (old != 0), requires_grad=False)


def new_data(dense):
    dense.down_proj.weight.data = torch.randn_like(dense.down_proj.weight) * (dense.down_proj.weight != 0)


def other_blocks(dense):
    dense.gate_proj.weight.copy_(dense.gate_proj.weight.flip(0))


def none_empty(dense):
    for part in (dense.gate_proj, dense.up_proj, dense.down_proj):
        part.weight.normal_()


def loaded(dense):
    dense.load_state_dict({name: 2 * t for name, t in dense.state_dict().items()})


def stepped(dense):
    dense.requires_grad_(True)
    dense(torch.randn(3, D_MODEL)).sum().backward()
    torch.optim.SGD(dense.parameters(), lr=0.1).step()
    dense.requires_grad_(False)


@pytest.mark.parametrize(
    "change",
    [replaced, new_data, other_blocks, none_empty, loaded, stepped],
    ids=lambda change: change.__name__,
)
def test_changed_weights_are_followed(change, dense, x):
    sparse = SparseFFN(dense, plan=Choice("blocks"))
    assert_equals(sparse, dense, x)
    before = sparse(x)
    change(dense)
    assert_equals(sparse, dense, x)
    assert not torch.equal(sparse(x), before)
    if change is none_empty:
        assert sparse.forms["blocks"].value is None and sparse.extra_bytes == 0  # dense, until they have some again
        for part in (dense.gate_proj, dense.up_proj, dense.down_proj):
            part.weight.mul_(empty_blocks(part.weight))
        assert_equals(sparse, dense, x)
        assert sparse.forms["blocks"].value is not None


def test_a_change_that_torch_does_not_count_is_followed_after_refresh(dense, x):
    sparse = SparseFFN(dense, plan=Choice("blocks"))
    sparse(x)
    dense.up_proj.weight.data.mul_(3)
    sparse.refresh()
    assert_equals(sparse, dense, x)


def test_what_changes_unseen_is_dense(dense, x):
    dense.up_proj.weight.data.share_memory_()
    sparse = SparseFFN(dense, plan=Choice("blocks"))
    assert_equals(sparse, dense, x)
    dense.up_proj.weight.data.mul_(2)
    assert_equals(sparse, dense, x)
    assert not sparse.forms


def test_copies_and_casts_make_their_own(dense, x):
    sparse = SparseFFN(dense, plan=Choice("blocks"))
    twin = copy.deepcopy(sparse)
    assert not twin.forms
    dense.up_proj.weight.mul_(2)
    assert not torch.equal(twin(x), sparse(x)) and twin.forms["blocks"] is not sparse.forms["blocks"]
    kept = io.BytesIO()
    torch.save(twin, kept)
    kept.seek(0)
    assert torch.equal(torch.load(kept, weights_only=False)(x), twin(x))
    sparse.to(torch.bfloat16)  # torch has no such product of bfloat16 on a CPU
    assert torch.equal(sparse(x.bfloat16()), dense(x.bfloat16()))
    assert_equals(sparse.float(), dense, x)


@pytest.mark.parametrize("name", ["blocks", "int8", "twell_int8", "predicted", "experts"])
def test_gradients_are_those_of_the_dense_layer(name, x):
    made = layer(bias=True, mask=empty_blocks).requires_grad_(True)
    sparse = SparseFFN(copy.deepcopy(made), plan=Choice(name)).train()
    for each in (made, sparse):
        each(x).square().sum().backward()
    for ours, theirs in zip(sparse.parameters(), made.parameters()):
        torch.testing.assert_close(ours.grad, theirs.grad, rtol=1e-4, atol=1e-5)
    sparse.eval()
    with torch.no_grad():
        assert output_error(sparse(x), made(x)) < (1.0 if name in ("predicted", "experts") else 0.1)


def test_other_weights_for_one_call_are_dense(dense, x):
    sparse = SparseFFN(dense, plan=Choice("blocks"))
    other = {name: torch.randn_like(t) for name, t in dense.named_parameters()}
    expected = torch.func.functional_call(dense, other, (x,))
    torch.testing.assert_close(torch.func.functional_call(sparse, other, (x,)), expected, rtol=1e-4, atol=1e-5)
    assert_equals(sparse, dense, x)


def test_a_layer_goes_when_nobody_has_it(dense, x):
    sparse = SparseFFN(dense, plan=Choice("blocks"))
    path, weights = PATHS["blocks"], Weights.of(dense.gate_proj, dense.up_proj, dense.down_proj)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.Tensor, "is_cuda", True)  # where a call is remembered
        known = path.again(sparse, x, weights, 0, None)
    assert torch.equal(known.run(x, [*weights]), sparse(x))
    sparse._again = known
    gone = weakref.ref(sparse)
    gc.collect()
    gc.disable()
    try:
        del sparse, known
        assert gone() is None
    finally:
        gc.enable()


def test_under_autocast_it_is_dense(dense, x):
    sparse = SparseFFN(dense, plan=Choice("blocks"))
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(sparse(x), dense(x))


def test_one_operator_in_compiled_code(dense, x):
    torch._dynamo.reset()
    sparse = SparseFFN(dense, plan=Choice("blocks"))
    with torch.no_grad():
        run = torch.compile(sparse, backend="eager", fullgraph=True)
        assert torch.equal(run(x), sparse(x))
        dense.up_proj.weight.mul_(2)
        assert torch.equal(run(x), sparse(x))
    torch._dynamo.reset()


def test_threads_that_make_it_anew_together(dense, x):
    sparse, found, errors = SparseFFN(dense, plan=Choice("blocks")), [], []
    replaced(dense)
    expected = dense(x)

    def work():
        try:
            found.extend(sparse(x) for _ in range(5))
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not errors and len(found) == 20
    for y in found:
        torch.testing.assert_close(y, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["blocks", "int8", "twell_int8", "predicted", "experts"])
@pytest.mark.parametrize("wrong", [torch.zeros(2, 63), torch.zeros(2, 64).half(), "x"], ids=["width", "dtype", "word"])
def test_an_input_that_does_not_fit(name, wrong, dense):
    with pytest.raises(InputError, match="accepted"):
        SparseFFN(dense, plan=Choice(name))(wrong)


# ---- lossy ----


@pytest.mark.parametrize("name, most", [("int8", 0.05), ("twell_int8", 0.02)])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_lossy_paths_are_close_and_say_so(name, most, gated, dtype, x):
    made = layer(gated, True).to(dtype)
    model = tl.sparsify(nn.Sequential(copy.deepcopy(made)), name)
    off = output_error(model(x.to(dtype)), made.double()(x.to(dtype).double()))
    assert 0 < off < most
    assert f"{name} (lossy)" in repr(model) and f"{name} (lossy)" in str(tl.report(model))
    assert model[0].extra_bytes < 0.7 * sum(p.nbytes for p in made.float().to(dtype).parameters())
    bad = x.to(dtype).clone()
    bad[2, 3] = math.inf
    y = model(bad)
    assert y[2].isnan().all() and torch.equal(y[:2], model(x.to(dtype))[:2])


@pytest.mark.parametrize("tokens", [1, 64, 4096])
@pytest.mark.parametrize("fuses", [False, True])
def test_rows_of_few_bits_are_predicted_to_gain_what_was_measured(tokens, fuses):
    profile = tl.profile(nn.Sequential(layer()), [torch.randn(90, D_MODEL)]).layers[0]
    work = Work(Firing.of(profile), replace(RATES, fuses=fuses), tokens, 2)
    ours, twell = (PATHS[name].cost(work) for name in ("twell_int8", "twell"))
    assert ours["rows"] == pytest.approx(twell["rows"] / 1.14, rel=0.02) and ours["lost"] == 0
    assert ours["gemm"] == twell["gemm"] and ours["launches"] >= twell["launches"] * (not fuses)
    assert (ours["memory"] > twell["memory"]) == (tokens <= 64 or fuses)


@pytest.mark.parametrize("name", ["blocks", "int8", "twell_int8", "predicted", "experts"])
@pytest.mark.parametrize("part", ["gate_proj", "up_proj", "down_proj"])
def test_weights_that_are_not_finite_are_refused_and_later_dense(name, part, x):
    made = layer(bias=True, mask=empty_blocks)
    sparse = SparseFFN(made, plan=Choice(name))
    made.get_submodule(part).weight[0, 0] = math.nan
    torch.testing.assert_close(sparse(x), made(x), equal_nan=True, rtol=0, atol=0)
    assert made(x).isnan().any() and sparse.extra_bytes == 0
    with pytest.raises(InputError, match=f"path '{name}', layer '0': .* not finite"):
        tl.sparsify(nn.Sequential(made), name)


def test_rows_of_few_bits_with_another_activation(x):
    made = layer(True, True)
    made.act_fn = ThresholdedActivation(nn.SiLU(), 0.1)
    sparse = tl.sparsify(nn.Sequential(copy.deepcopy(made)), "twell_int8")
    assert 0 < output_error(sparse(x), made(x)) < 0.02
    with torch.no_grad():
        torch._dynamo.reset()
        assert torch.equal(torch.compile(sparse, backend="eager")(x), made(x))  # dense, see layers.paths.converted
        torch._dynamo.reset()


def predicted_by_hand(made, x, squared=False):
    """The formula in float64 for the neurons that the truncated gate scores highest, a token each."""
    gate = getattr(made, "gate_proj", made.up_proj)
    u, s, v = torch.linalg.svd(gate.weight.double(), full_matrices=False)
    rank, count = D_MODEL // 4, D_FF // 8
    scores = x.double() @ ((u[:, :rank] * s[:rank]) @ v[:rank]).t() + (0 if gate.bias is None else gate.bias.double())
    keep = torch.zeros(len(x), D_FF, dtype=torch.bool).scatter_(1, scores.topk(count).indices, True)
    wide = copy.deepcopy(made).double()
    hidden = wide.gate_proj(x.double()).relu() if gate is not made.up_proj else 1
    beside = wide.up_proj(x.double())
    beside = beside if gate is not made.up_proj else beside.relu().square() if squared else beside.relu()
    return wide.down_proj((hidden * beside).where(keep, 0))


@pytest.mark.parametrize("kind", ["gated", "plain", "squared"])
@pytest.mark.parametrize("bias", [True, False])
def test_predicted_neurons_are_those_that_the_truncated_gate_scores_highest(kind, bias, x):
    made = layer(kind == "gated", bias, "relu2" if kind == "squared" else "relu")
    sparse = SparseFFN(made, plan=Choice("predicted"))
    expected = predicted_by_hand(made, x, kind == "squared")
    torch.testing.assert_close(sparse(x).double(), expected, rtol=1e-4, atol=1e-5)
    for row, right in zip(x, expected):  # gathered, where the others are masked
        torch.testing.assert_close(sparse(row).double(), right, rtol=1e-4, atol=1e-5)
        assert sparse(row[None, None]).shape == (1, 1, D_MODEL)
    assert 0 < output_error(sparse(x), made(x)) < 1
    (form,) = sparse.forms.values()
    assert (
        PATHS["predicted"].form_bytes(
            Weights.of(
                *[made.get_submodule(n) if hasattr(made, n) else None for n in ("gate_proj", "up_proj", "down_proj")]
            )
        )
        == form.nbytes
        == sparse.extra_bytes
    )
    made.down_proj.weight.neg_()
    torch.testing.assert_close(sparse(x).double(), predicted_by_hand(made, x, kind == "squared"), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_predicted_neurons_of_what_is_not_finite(value, x):
    made = layer(bias=True)
    sparse, x = SparseFFN(made, plan=Choice("predicted")), x.clone()
    right = sparse(x)
    x[2, 3] = value
    y = sparse(x)
    assert y[2].isnan().all() and sparse(x[2]).isnan().all() and torch.equal(y[:2], right[:2])
    made.up_proj.weight[0, 0] = value
    torch.testing.assert_close(sparse(x), made(x), equal_nan=True)  # dense
    with pytest.raises(InputError, match="path 'predicted', layer '0': .* not finite"):
        tl.sparsify(nn.Sequential(made), "predicted")


def test_where_the_gate_has_the_rank_prediction_is_right(x):
    """With as low a rank, and no more neurons firing than are computed, nothing is missing."""
    made = layer()
    with torch.no_grad():
        narrow, wide = torch.randn(D_MODEL // 4, D_MODEL), torch.randn(D_FF, D_MODEL // 4)
        made.gate_proj.weight.copy_(wide @ narrow / D_MODEL)
        made.gate_proj.bias = nn.Parameter(-made.gate_proj(x).topk(D_FF // 8 + 1).values[:, -1].max().expand(D_FF))
        made.requires_grad_(False)
    assert_equals(SparseFFN(made, plan=Choice("predicted")), made, x)


# ---- a layer's neurons as experts ----


def as_experts_by_hand(made, x, squared=False):
    """The formula in float64 for the groups in which the most fires, a token each."""
    gate = getattr(made, "gate_proj", made.up_proj)
    size, groups, taken = experts.AsExperts.sizes_of(D_FF)
    wide = copy.deepcopy(made).double()
    first = (wide.gate_proj if gate is not made.up_proj else wide.up_proj)(x.double()).relu()
    first = first.square() if squared else first
    group = torch.empty(D_FF, dtype=torch.int64)
    group[experts.alike(gate.weight, size)] = torch.arange(D_FF) // size
    strength = torch.zeros(len(x), groups, dtype=torch.float64).index_add(1, group, first)
    keep = torch.zeros(len(x), groups, dtype=torch.bool).scatter_(1, strength.topk(taken).indices, True)
    hidden = first if gate is made.up_proj else first * wide.up_proj(x.double())
    return wide.down_proj(hidden.where(keep[:, group], 0))


@pytest.mark.parametrize("kind", ["gated", "plain", "squared"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("grouped", [True, False])
def test_experts_are_the_groups_in_which_the_most_fires(kind, bias, grouped, x, monkeypatch):
    if not grouped:
        monkeypatch.setattr(experts, "takes_grouped", lambda rows, weight: False)
    calls = []
    product = experts._grouped_linear
    monkeypatch.setattr(experts, "_grouped_linear", lambda *given: calls.append(given) or product(*given))
    monkeypatch.setattr(experts, "_TOKENS", 3)
    made = layer(kind == "gated", bias, "relu2" if kind == "squared" else "relu")
    sparse = SparseFFN(made, plan=Choice("experts"))
    expected = as_experts_by_hand(made, x, kind == "squared")
    torch.testing.assert_close(sparse(x).double(), expected, rtol=1e-4, atol=1e-5)
    for row, right in zip(x, expected):
        torch.testing.assert_close(sparse(row[None, None]).double()[0, 0], right, rtol=1e-4, atol=1e-5)
    assert bool(calls) == grouped and 0.01 < output_error(sparse(x), made(x)) < 1
    (form,) = sparse.forms.values()
    parts = [made.get_submodule(n) if hasattr(made, n) else None for n in ("gate_proj", "up_proj", "down_proj")]
    assert PATHS["experts"].form_bytes(Weights.of(*parts)) == form.nbytes == sparse.extra_bytes
    made.up_proj.weight.neg_()
    expected = as_experts_by_hand(made, x, kind == "squared")
    torch.testing.assert_close(sparse(x).double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("d_ff", [8, 20, 128, 250, 300])
def test_experts_miss_nothing_where_what_fires_lies_in_as_many_as_a_token_is_given(d_ff, dtype, x):
    """Also where the groups do not divide the neurons."""
    size, groups, taken = experts.AsExperts.sizes_of(d_ff)
    assert size % 8 == 0 and (groups - 1) * size < d_ff <= groups * size and groups <= 32
    torch.manual_seed(0)
    made = GatedFeedForward(D_MODEL, d_ff).requires_grad_(False).to(dtype).eval()
    inside = experts.alike(made.gate_proj.weight, size)[: taken * size]  # of the first groups
    bias = torch.full((d_ff,), -1e3).index_fill(0, inside, 0.1)
    made.gate_proj.bias = nn.Parameter(bias.to(dtype), requires_grad=False)
    made.down_proj.bias = nn.Parameter(torch.randn(D_MODEL).to(dtype), requires_grad=False)
    sparse, x = SparseFFN(made, plan=Choice("experts")), x.to(dtype)
    off = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 0.02}[dtype]
    assert output_error(sparse(x), made.double()(x.double())) < off
    assert (made(x.double()) - made.down_proj.bias).abs().amax() > 0.01


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_experts_of_what_is_not_finite(value, x):
    sparse, x = SparseFFN(layer(bias=True), plan=Choice("experts")), x.clone()
    right = sparse(x)
    x[2, 3] = value
    y = sparse(x)
    assert y[2].isnan().all()
    others = [0, 1, 3, 4]  # with another row before theirs a product may sum in another order
    torch.testing.assert_close(y[others], right[others], rtol=1e-4, atol=1e-5)


def test_rows_that_point_alike_come_together():
    centres = nn.functional.normalize(torch.randn(8, 16, generator=torch.Generator().manual_seed(0)), dim=1)
    of = torch.arange(64).view(8, 8).t().flatten() // 8  # 0 1 2 ... 7, 0 1 2 ... 7, ...
    lengths = 1 + torch.rand(64, 1, generator=torch.Generator().manual_seed(1))
    order = experts.alike(centres[of] * lengths, 8)
    assert order.sort().values.tolist() == [*range(64)]
    assert all(len({*group.tolist()}) == 1 for group in of[order].view(8, 8))
    assert torch.equal(experts.alike(centres[of] * lengths, 8), order)
    assert experts.alike(torch.zeros(5, 3), 2).sort().values.tolist() == [*range(5)]
    assert experts.alike(torch.zeros(0, 3), 2).shape == (0,)
    for wrong in (0, 1.5, True):
        with pytest.raises(InputError, match="size is .*; a whole number from 1 up is accepted"):
            experts.alike(torch.ones(4, 4), wrong)


def test_experts_are_predicted_by_what_is_multiplied_and_copied():
    profile = tl.profile(nn.Sequential(layer()), [torch.randn(90, D_MODEL)]).layers[0]
    few, many = (PATHS["experts"].cost(Work(Firing.of(profile), RATES, tokens, 4)) for tokens in (1, 1000))
    dense = PATHS["dense"].cost(Work(Firing.of(profile), RATES, 1000, 4))
    size, groups, taken = experts.AsExperts.sizes_of(D_FF)
    # A third of the dense operations, and of the rest the share of the groups that a token is given.
    assert many["gemm"] == pytest.approx(dense["gemm"] * (1 + 2 * taken / groups) / 3, rel=0.01)
    assert (
        many["rows"] == pytest.approx(1000 * few["rows"]) and few["rows"] == 7 * taken * D_MODEL * 4 / RATES.bandwidth
    )


def test_predicted_neurons_pay_for_one_token_alone():
    profile = tl.profile(nn.Sequential(made := layer()), [torch.randn(90, D_MODEL)])
    how = dict(rates=RATES, tokens=(1, 64), measure=False, paths=["predicted"], progress=False)
    plan = tl.plan(profile, nn.Sequential(made), **how)
    us = {(row["tokens"], row["path"]): row["predicted_us"] for row in plan.layers[0].table()}
    assert us[1, "predicted"] < us[1, "dense"] and us[64, "predicted"] > us[64, "dense"]


@pytest.mark.parametrize("shape", [(1, 1), (3, 2), (40, 24), (24, 40), (9, 9)])
def test_the_truncated_matrix_is_the_closest_of_its_rank(shape):
    weight = torch.randn(*shape, generator=torch.Generator().manual_seed(0))
    for rank in {1, (shape[1] + 1) // 2, shape[1]}:
        narrow, wide = predictors.truncated(weight, rank)
        off = (wide @ narrow - weight).double().square().sum()
        left = torch.linalg.svdvals(weight.double())[rank:].square().sum()
        assert narrow.shape == (rank, shape[1]) and wide.shape == (shape[0], rank)
        torch.testing.assert_close(off, left, rtol=1e-3, atol=1e-6)
    for size in (1e30, 1e-30, 0.0):
        narrow, wide = predictors.truncated(weight * size, shape[1])
        torch.testing.assert_close(wide @ narrow, weight * size, rtol=1e-3, atol=1e-5 * size)
    for wrong in (0, shape[1] + 1, 1.0, True):
        with pytest.raises(InputError, match=f"rank is .*; a whole number from 1 to {shape[1]}"):
            predictors.truncated(weight, wrong)
    with pytest.raises(InputError, match="not finite"):
        predictors.truncated(weight * math.inf, 1)


def test_fp8_needs_a_gpu(dense):
    with pytest.raises(DeviceError, match="path 'fp8', layer '0': .* GPUs of 8.9 and newer"):
        tl.sparsify(nn.Sequential(dense), "fp8")


# ---- plans ----


def test_a_plan_weighs_what_was_named_and_says_what_it_costs(dense, x, tmp_path):
    model = nn.Sequential(layer(mask=empty_blocks), layer(seed=1))
    profile = tl.profile(model, [torch.randn(90, D_MODEL)])
    weighed = lambda plan: [{row["path"] for row in each.table()} for each in plan.layers]  # noqa: E731
    how = dict(rates=RATES, tokens=(16,), progress=False)
    assert weighed(tl.plan(profile, model, measure=False, **how)) == 2 * [{"dense", "twell"}]
    assert weighed(tl.plan(profile, model, measure=False, paths=[], **how)) == 2 * [{"dense"}]
    plan = tl.plan(profile, model, measure=False, paths=["blocks", "int8"], **how)
    assert weighed(plan) == [{"dense", "blocks", "int8"}, {"dense", "int8"}]
    (predicted,) = [row for row in plan.layers[0].table() if row["path"] == "blocks"]
    assert predicted["predicted_us"] < plan.layers[0].candidates[0].predicted_us
    assert all("lossy" in row["why"] for each in plan.layers for row in each.table() if row["path"] == "int8")
    timed = tl.plan(profile, model, batches=[torch.randn(64, D_MODEL)], paths=["int8"], **how)
    rows = [row for each in timed.layers for row in each.table() if row["path"] == "int8" and row["measured_us"]]
    assert all("lossy: its output is " in row["why"] and "% off" in row["why"] for row in rows)
    assert tl.Plan.load(plan.save(tmp_path / "plan.json")) == plan


@pytest.mark.parametrize(
    "name, mask, dtype", [("blocks", empty_blocks, torch.float32), ("two_four", two_four_mask, torch.bfloat16)]
)
def test_without_batches_the_own_zeros_are_timed(name, mask, dtype, two_four_here, monkeypatch):
    """A drawn stand-in has none, and would be refused."""
    monkeypatch.setattr(planner, "_REACH", 100.0)
    model = nn.Sequential(layer(mask=mask).to(dtype))
    before = {key: t.clone() for key, t in model.state_dict().items()}
    profile, rates = tl.profile(model, [torch.randn(90, D_MODEL).to(dtype)]), replace(RATES, dtype=str(dtype)[6:])
    plan = tl.plan(profile, model, rates=rates, tokens=(16,), paths=["twell", name], progress=False)
    timed = {row["path"] for row in plan.layers[0].table() if row["measured_us"] is not None}
    assert timed == {"dense", "twell", name} and plan.inputs == planner.DRAWN
    assert all(torch.equal(t, before[key]) for key, t in model.state_dict().items())


def runs(model):
    return [row["runs"] for row in tl.report(model).rows]


@pytest.mark.parametrize(
    "name, word", [("int8", "int8 (lossy)"), ("twell_int8", "twell_int8 (lossy)"), ("blocks",) * 2]
)
def test_a_report_says_that_gradients_are_dense(name, word, dense, x):
    expected = dense(x)
    model = tl.sparsify(nn.Sequential(dense), name)
    assert runs(model) == [word]
    model.requires_grad_(True)
    assert runs(model) == [f"{word} without gradients, dense with them"] and torch.equal(model(x), expected)
    assert f"{word} without gradients, dense with them" in str(tl.report(model))
    model[0].learn("twell")
    assert runs(model) == [f"{word} without gradients, twell with them"]
    with torch.no_grad():
        assert name == "blocks" or not torch.equal(model(x), expected)


def test_a_report_says_that_weights_are_not_taken(x):
    model = tl.sparsify(nn.Sequential(layer(mask=empty_blocks)), "blocks")
    assert runs(model) == ["blocks"]
    kept = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: torch.randn_like(t) for name, t in kept.items()})
    for _ in range(2):  # before the first forward, and after it
        (row,) = tl.report(model).rows
        assert row["choice"] == "blocks" and row["runs"].startswith("dense: 0.0% of the weight's blocks of 64 x 64")
        model(x)
    assert "dense: 0.0% of the weight's blocks" in str(tl.report(model))
    model.load_state_dict(kept)
    assert runs(model) == ["blocks"]


def test_a_report_gives_no_times_for_what_does_not_run():
    model = nn.Sequential(layer(mask=empty_blocks))
    profile = tl.profile(model, [torch.randn(90, D_MODEL)])
    plan = tl.plan(profile, model, measure=False, rates=RATES, tokens=(16,), paths=["blocks"], progress=False)
    tl.sparsify(model, plan)
    (row,) = tl.report(model).rows
    assert row["us"] and row["x_dense"] and row["how"] and len(tl.report(model).together) == 1
    none_empty(model[0])
    (row,) = tl.report(model).rows
    assert row["us"] is row["x_dense"] is row["how"] is None and not tl.report(model).together


@pytest.mark.parametrize("name", ["int8", "blocks"])
def test_a_report_says_that_weights_may_change_unseen(name, x):
    with torch.inference_mode():
        dense = nn.Sequential(layer(mask=empty_blocks))
        expected = dense(x)
        model = tl.sparsify(dense, name)
        assert torch.equal(model(x), expected)
    assert runs(model)[0].startswith("dense: its weights may change unseen (made in inference mode")


def chosen(model, *choices):
    """A plan that gives each layer of a sequence one path."""
    profile = tl.profile(model, [torch.randn(9, D_MODEL)])
    plan = tl.plan(profile, model, measure=False, rates=RATES, tokens=(16,), progress=False)
    layers = [LayerPlan.forced(each, Choice(path)) for each, path in zip(plan.layers, choices)]
    return tl.Plan(layers, "CPU", "float32", plan.rates)


def test_a_layer_follows_its_plan(x):
    model = nn.Sequential(layer(mask=empty_blocks), layer(seed=1))
    expected, plan = model(x), chosen(model, "blocks", "twell_int8")
    sparse = tl.sparsify(copy.deepcopy(model), plan)
    assert "path=blocks" in repr(sparse) and "path=twell_int8 (lossy)" in repr(sparse)
    assert 0 < output_error(sparse(x), expected) < 0.02
    assert tl.densify(sparse)[0].__class__ is GatedFeedForward
    torch.testing.assert_close(sparse(x), expected)


def test_a_plan_for_weights_that_a_layer_no_longer_has(x):
    model = nn.Sequential(layer(mask=empty_blocks), layer(mask=empty_blocks))
    plan = chosen(model, "blocks", "blocks")
    none_empty(model[1])
    with pytest.raises(InputError, match="path 'blocks', layer '1': .* are empty"):
        tl.sparsify(model, plan)
    assert not any(isinstance(each, SparseFFN) for each in model)
    none_empty(model[0])
    with pytest.raises(InputError, match="path 'blocks', layer '0'"):
        tl.plan(tl.profile(model, [x]), model, rates=RATES, paths=["blocks"], progress=False)


def test_classes_of_tokens_with_paths_of_both_kinds(dense, x):
    two = tuple(Candidate(most, path, 0, 1.0, None, True, "") for most, path in ((2, "twell_int8"), (8, "blocks")))
    sparse = SparseFFN(dense, plan=LayerPlan("", D_MODEL, D_FF, True, 9, (1,) * D_FF, two))
    assert {*sparse.forms} == {"twell_int8", "blocks"} and not torch.equal(sparse(x[:2]), dense(x[:2]))
    assert_equals(sparse, dense, x)
    assert [each["path"] for each in sparse.status()["classes"]] == ["twell_int8", "blocks"]
