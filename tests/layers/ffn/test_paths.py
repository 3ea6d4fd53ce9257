"""A layer on a plan: whatever the path, the same function of the same parameters; what is held, followed and
counted."""

import copy
import io

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch.nn.utils import parametrizations

from tests.layers.ffn.follows import assert_follows
from twell_lab import formats
from twell_lab.core import InputError
from twell_lab.layers.choice import Candidate, Choice, LayerPlan
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import densify, sparsify
from twell_lab.ops import accuracy, reference
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward

D_MODEL, D_FF = 16, 300
PATHS = {"dense": Choice("dense"), "twell": Choice("twell"), "hot_cold": Choice("hot_cold", 256)}


def layer(gated=True, bias=False, d_ff=D_FF, seed=0):
    torch.manual_seed(seed)
    module = (GatedFeedForward if gated else PlainFeedForward)(D_MODEL, d_ff).requires_grad_(False)
    for projection in module.children() if bias else ():
        if isinstance(projection, nn.Linear):
            projection.bias = nn.Parameter(torch.randn(projection.out_features) / 4, requires_grad=False)
    return module


def plan_for(module, *choices, counts=None):
    """A plan with these choices for classes 4, 8, ...; the neurons' counts are drawn, so that their order is random."""
    d_ff = module.up_proj.weight.shape[0]
    counts = (
        torch.randint(0, 999, (d_ff,), generator=torch.Generator().manual_seed(d_ff)).tolist()
        if counts is None
        else counts
    )
    candidates = [Candidate(4 * (i + 1), c.path, c.hot, 1.0, None, True, "a test's") for i, c in enumerate(choices)]
    gated = hasattr(module, "gate_proj")
    return LayerPlan("", D_MODEL, d_ff, gated, 1000, tuple(counts), tuple(candidates))


@pytest.fixture(params=[True, False], ids=["gated", "plain"])
def module(request):
    return layer(request.param, bias=True)


@pytest.fixture
def x():
    return torch.randn(5, D_MODEL, generator=torch.Generator().manual_seed(1))


# ---- the permutation is invisible ----


@given(
    gated=st.booleans(),
    bias=st.booleans(),
    d_ff=st.integers(257, 800),
    steps=st.integers(1, 3),
    rows=st.integers(1, 12),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    shift=st.floats(-1, 0.3),
    seed=st.integers(0, 2**16),
)
@settings(max_examples=60)
def test_hot_and_cold_together_are_as_exact_as_promised(gated, bias, d_ff, steps, rows, dtype, shift, seed):
    hot = min(256 * steps, (d_ff - 1) // 256 * 256)
    dense = layer(gated, bias, d_ff, seed)
    if bias:
        (dense.gate_proj if gated else dense.up_proj).bias.add_(shift)
    dense = dense.to(dtype)
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 1000, (d_ff,), generator=generator).tolist()
    sparse = SparseFFN(dense, plan=plan_for(dense, Choice("hot_cold", hot), counts=counts))
    x = torch.randn(rows, D_MODEL, generator=generator).to(dtype)
    wide = copy.deepcopy(dense).double()
    pattern = (dense.gate_proj if gated else dense.up_proj)(x).double()  # its rounding, torch's own, decides who fires
    if gated:
        exact = reference.gated(
            x.double(), pattern, wide.up_proj.weight, wide.down_proj.weight, wide.up_proj.bias, wide.down_proj.bias
        )
    else:
        exact = wide.down_proj(reference.relu(pattern))
    assert accuracy.worst_row(sparse(x), dense(x), exact)[0] <= 1.0


@pytest.mark.parametrize("path", PATHS)
def test_parameters_and_state_stay_what_they_were(path, module, x):
    names, state = (
        [(n, id(p)) for n, p in module.named_parameters()],
        {k: v.clone() for k, v in module.state_dict().items()},
    )
    sparse = sparsify(module, "twell")
    sparse.follow(plan_for(module, PATHS[path]))
    assert_follows(sparse, module, x)
    assert [(n, id(p)) for n, p in sparse.named_parameters()] == names and list(sparse.state_dict()) == list(state)
    assert all(torch.equal(v, state[k]) for k, v in sparse.state_dict().items())
    assert all(p.is_contiguous() for p in sparse.parameters())
    assert densify(sparse) is module


# ---- what may happen to the parameters ----


def add_in_place(module, which):
    getattr(module, which).weight.add_(1)


def add_to_bias(module, which):
    getattr(module, which).bias.add_(1)


def replace_data(module, which):
    weight = getattr(module, which).weight
    weight.data = torch.randn_like(weight)


def replace_parameter(module, which):
    projection = getattr(module, which)
    projection.weight = nn.Parameter(torch.randn_like(projection.weight), requires_grad=False)


def load_state(module, which):
    module.load_state_dict({k: torch.randn_like(v) for k, v in module.state_dict().items()})


def load_state_assigning(module, which):
    module.load_state_dict({k: torch.randn_like(v) for k, v in module.state_dict().items()}, assign=True)


def fused_step(module, which):
    parameters = [p.requires_grad_() for p in getattr(module, which).parameters()]
    for parameter in parameters:
        parameter.grad = torch.ones_like(parameter)
    torch.optim.AdamW(parameters, lr=0.1, fused=True).step()
    for parameter in parameters:
        parameter.requires_grad_(False)


CHANGES = [add_in_place, add_to_bias, replace_data, replace_parameter, load_state, load_state_assigning, fused_step]


@pytest.mark.parametrize("which", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_permuted_copies_follow(change, which, x):
    module = layer(bias=True)
    sparse = SparseFFN(module, plan=plan_for(module, PATHS["hot_cold"]))
    assert_follows(sparse, module, x)
    before = sparse(x)
    for _ in range(3):
        with torch.no_grad():
            change(module, which)
        assert_follows(sparse, module, x)
    assert not torch.allclose(sparse(x), before)


def test_unchanged_weights_are_not_copied_again(module, x):
    sparse = SparseFFN(module, plan=plan_for(module, PATHS["hot_cold"]))
    sparse(x)
    before = sparse(x)
    sparse.hot_first_down_t.zero_()
    assert not torch.equal(sparse(x), before)
    sparse.refresh()
    assert torch.equal(sparse(x), before)


def test_another_dtype_place_and_copy_follow(module, x):
    sparse = SparseFFN(module, plan=plan_for(module, PATHS["hot_cold"], PATHS["twell"]))
    assert_follows(sparse, module, x)
    sparse.to(torch.bfloat16)
    assert (
        sparse(x.bfloat16()).dtype == sparse.hot_first_up.dtype == torch.bfloat16 and sparse.order.dtype == torch.int64
    )
    sparse.float()
    assert_follows(sparse, module, x)
    twin = copy.deepcopy(sparse)
    assert twin.hot_first_up.data_ptr() != sparse.hot_first_up.data_ptr()
    with torch.no_grad():
        twin.down_proj.weight.neg_()
    assert_follows(sparse, module, x)
    assert not torch.allclose(twin(x), sparse(x))
    assert_follows(twin, densify(copy.deepcopy(twin)), x)
    file = io.BytesIO()
    torch.save(sparse, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(loaded(x), sparse(x)) and loaded.plan == sparse.plan


def test_weights_that_arrive_after_the_plan(x):
    module = layer()
    with torch.device("meta"):
        empty = GatedFeedForward(D_MODEL, D_FF).requires_grad_(False)
    for assign in (True, False):
        sparse = SparseFFN(copy.deepcopy(empty), plan=plan_for(module, *PATHS.values()))
        if not assign:
            sparse.to_empty(device="cpu")
        sparse.load_state_dict(module.state_dict(), assign=assign)
        for rows in (4, 8, 12):
            assert_follows(sparse, module, x[:1].repeat(rows, 1))
        assert sparse.stats.tolist()[0] == [0, 0, 0, 0] and sparse.stats.tolist()[1][0] == 8


def test_a_parametrized_layer(x):
    module = layer().requires_grad_(True)
    parametrizations.weight_norm(module.up_proj)
    sparse = SparseFFN(module, plan=plan_for(module, PATHS["hot_cold"]))
    for _ in range(2):
        assert_follows(sparse, module, x)
        with torch.no_grad():
            module.up_proj.parametrizations.weight.original0.mul_(1.5)


def test_inference_mode(x):
    with torch.inference_mode():
        module = layer()
        sparse = SparseFFN(module, plan=plan_for(module, PATHS["hot_cold"], PATHS["twell"]))
        assert_follows(sparse, module, x)
    module = layer()
    sparse = SparseFFN(module, plan=plan_for(module, PATHS["hot_cold"], PATHS["twell"]))
    with torch.inference_mode():
        assert_follows(sparse, module, x)
        sparse.to(torch.bfloat16).float()
    assert not any(t.is_inference() for t in (sparse.order, sparse.stats, sparse.hot_first_up))
    assert_follows(sparse, module, x[:3])
    assert_follows(sparse, module, x)


def test_fewer_neurons_than_planned_are_refused(x):
    module = layer()
    sparse = SparseFFN(module, plan=plan_for(module, PATHS["hot_cold"]))
    for projection in module.children():
        if isinstance(projection, nn.Linear):
            projection.weight = nn.Parameter(
                torch.randn(40, D_MODEL) if projection is not module.down_proj else torch.randn(D_MODEL, 40)
            )
    with torch.no_grad(), pytest.raises(InputError, match="up has 40 neurons, but the layer's plan is for 300"):
        sparse(x)


# ---- what is taken, held and counted ----


def test_the_number_of_tokens_picks_the_path(module):
    sparse = SparseFFN(module, plan=plan_for(module, *PATHS.values()))
    for shape in [(4,), (2, 2), (5,), (2, 4), (9,), (1000,), (0,), ()]:
        assert_follows(sparse, module, torch.randn(*shape, D_MODEL))
    assert {row["path"]: row["rows"] for row in sparse.status()["classes"]} == {
        "dense": None,  # which counts nothing
        "twell": 5 + 8,
        "hot_cold": 9 + 1000,
    }


@pytest.mark.parametrize("path", PATHS)
def test_gradients_are_those_of_the_dense_layer(path, module, x):
    module.requires_grad_(True)
    sparse = SparseFFN(module, plan=plan_for(module, PATHS[path]))
    x = x.requires_grad_()
    sparse(x).square().sum().backward()
    found = [p.grad.clone() for p in (x, *module.parameters())]
    module.zero_grad(), setattr(x, "grad", None)
    module(x).square().sum().backward()
    for gradient, p in zip(found, (x, *module.parameters()), strict=True):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-3, atol=1e-4 * p.grad.abs().max().item())


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
def test_under_autocast(path, to, module, x):
    sparse = SparseFFN(module, plan=plan_for(module, PATHS[path]))
    with torch.autocast("cpu", to):
        y, expected = sparse(x), module(x)
    assert y.dtype == expected.dtype == to
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.02)


@pytest.mark.parametrize("path", PATHS)
def test_compiled(path, module):
    torch._dynamo.reset()
    sparse = SparseFFN(module, plan=plan_for(module, PATHS[path]))
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(sparse, fullgraph=True, backend=counter, dynamic=True)
    for rows in (5, 9, 7):
        x = torch.randn(rows, D_MODEL)
        for _ in range(2):
            assert_follows(run, module, x)
            with torch.no_grad():
                module.down_proj.weight.add_(1), module.up_proj.weight.mul_(0.9)
    assert counter.frame_count == 1
    replace_parameter(module, "up_proj")
    assert_follows(run, module, x)
    torch._dynamo.reset()


def test_a_compiled_dense_layer_is_torchs_own(module, x):
    torch._dynamo.reset()
    graphs = []
    run = torch.compile(
        SparseFFN(module, plan=Choice("dense")), fullgraph=True, backend=lambda g, _: graphs.append(g) or g.forward
    )
    with torch.no_grad():
        run(x)
    targets = {str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"}
    assert targets and not any("twell" in target for target in targets)
    torch._dynamo.reset()


def test_compiled_with_several_classes(module):
    torch._dynamo.reset()
    sparse = SparseFFN(module, plan=plan_for(module, *PATHS.values()))
    run = torch.compile(sparse, fullgraph=True, backend="aot_eager", dynamic=True)
    for rows in (3, 7, 30, 4, 8, 50):
        assert_follows(run, module, torch.randn(rows, D_MODEL))
    assert [row["rows"] for row in sparse.status()["classes"]] == [None, 15, 80]
    torch._dynamo.reset()


def test_compiled_by_inductor(module, x):
    torch._dynamo.reset()
    sparse = SparseFFN(module, plan=plan_for(module, PATHS["hot_cold"]))
    run = torch.compile(sparse, fullgraph=True)
    for _ in range(2):
        assert_follows(run, module, x)
        with torch.no_grad():
            module.up_proj.weight.mul_(0.9)
    assert sparse.status()["classes"][0]["rows"] == 10
    torch._dynamo.reset()


def test_only_what_a_choice_needs_is_held(module):
    copies = sum(p.numel() for p in (module.up_proj.weight, module.down_proj.weight, module.up_proj.bias))
    if hasattr(module, "gate_proj"):
        copies += module.gate_proj.weight.numel() + D_FF
    hot, transposed, counters = 4 * copies + 8 * D_FF, 4 * D_MODEL * D_FF, 32
    sparse = SparseFFN(module, plan=plan_for(module, PATHS["dense"], PATHS["dense"]))
    assert sparse.extra_bytes == 0 and not list(sparse.buffers())
    for choices, expected in [
        (["twell"], transposed + counters),
        (["hot_cold", "dense"], hot + 2 * counters),
        (["twell", "hot_cold"], hot + transposed + 2 * counters),
        (["dense"], 0),
    ]:
        sparse.follow(plan_for(module, *(PATHS[path] for path in choices)))
        assert sparse.extra_bytes == expected == sum(b.numel() * b.element_size() for b in sparse.buffers())
    sparse.follow(None)
    assert sparse.extra_bytes == transposed + counters and sparse.plan is None


def test_status(module):
    counts = [1000] * 256 + [100] * (D_FF - 256)
    sparse = SparseFFN(module, plan=plan_for(module, PATHS["dense"], PATHS["twell"], PATHS["hot_cold"], counts=counts))
    x = torch.randn(30, D_MODEL)
    for rows in (4, 7, 30, 30):
        assert_follows(sparse, module, x[:rows])
    fires = formats.fires(getattr(module, "gate_proj", module.up_proj)(x))
    status = sparse.status()
    dense, twell, hot = status["classes"]
    assert status["plan"] == "planned" and status["extra_bytes"] == sparse.extra_bytes
    assert dense == {
        "tokens": 4,
        "path": "dense",
        "hot": 0,
        **dict.fromkeys(["rows", "mean_nnz", "pooled", "lost", "planned_nnz", "drift"]),
    }
    assert (twell["tokens"], hot["tokens"], hot["hot"]) == (8, None, 256) and (twell["rows"], hot["rows"]) == (7, 60)
    assert twell["mean_nnz"] == pytest.approx(fires[:7].sum().item() / 7) and twell["planned_nnz"] == pytest.approx(
        260.4
    )
    cold = fires[:, 256:].sum().item() / 30
    assert hot["mean_nnz"] == pytest.approx(cold) and hot["planned_nnz"] == pytest.approx(4.4)
    assert hot["drift"] == pytest.approx(cold / 4.4) and (hot["pooled"], hot["lost"]) == (0, 0)
    assert SparseFFN(module).status()["plan"] == "none"
    sparse.follow(sparse.plan)
    assert all(row["rows"] is None for row in sparse.status()["classes"])


def test_repr_names_the_paths(module):
    assert "path=dense, hot_cold 256" in repr(
        SparseFFN(module, plan=plan_for(module, PATHS["dense"], PATHS["hot_cold"]))
    )


@pytest.mark.parametrize("path", PATHS)
def test_wrong_inputs_name_themselves(path, module):
    sparse = SparseFFN(module, plan=plan_for(module, PATHS[path], PATHS["dense"]))
    for wrong, named in [
        ([1.0], "list"),
        (torch.randn(3, D_MODEL + 1), "shape"),
        (torch.randn(3, D_MODEL).double(), "float64"),
    ]:
        with pytest.raises(InputError, match=named):
            sparse(wrong)


def test_a_plan_of_ones_own_ends_the_watch():
    model = nn.ModuleList([GatedFeedForward(64, 1024)]).requires_grad_(False)
    (layer,) = sparsify(model, "auto")
    layer.follow(Choice("hot_cold", 256))
    for _ in range(10):
        layer(torch.randn(600, 64))
    assert layer.status()["plan"] == "planned" and layer.plan == Choice("hot_cold", 256)


@pytest.mark.parametrize("wrong", [torch.ones(2, 63), torch.ones(2, 64).to_sparse()], ids=["width", "layout"])
def test_wrong_input_is_an_input_error_and_the_watch_goes_on(wrong):
    model = nn.ModuleList([GatedFeedForward(64, 1024)]).requires_grad_(False)
    (layer,) = sparsify(model, "auto")
    with pytest.raises(InputError):
        layer(wrong)
    assert layer.status()["plan"] == "watching"


def test_an_interrupted_watch_goes_on(monkeypatch):
    model = nn.ModuleList([GatedFeedForward(64, 1024)]).requires_grad_(False)
    (layer,) = sparsify(model, "auto")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(type(layer._watch), "see", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        layer(torch.randn(3, 64))
    assert layer.status()["plan"] == "watching"
