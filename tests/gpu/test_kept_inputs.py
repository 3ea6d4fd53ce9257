"""The kernel that reads the weights of kept inputs alone, and the path that has it (TEAL), on a GPU."""

import copy

import pytest
import torch
from torch import nn

import twell_lab as tl
from tests.models.thresholds.models_of import ours
from tests.ops.kept_inputs.cases import Case
from twell_lab.core import InputError
from twell_lab.ops import kept_inputs

pytestmark = pytest.mark.gpu
SHAPES = [(1, 2048, 5632), (4, 2048, 5632), (2, 768, 3072), (3, 77, 301), (1, 264, 9000), (4, 9000, 264), (1, 1, 1)]


@pytest.fixture(autouse=True)
def poisoned():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip(f"the kernel needs sm_80; this is {torch.cuda.get_device_name()}")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def launched(case, version):
    """h before its threshold, and y."""
    gate, up, down, *biases = case.turned()
    first = (up, None, biases[1], None) if gate is None else (gate, up, *biases[:2])
    how = {"threshold": case.kept.inputs, "kind": case.kept.kind, "version": version}
    h = kept_inputs.product(case.x, *first, **how)
    return h, kept_inputs.product(h, down, None, biases[2], threshold=case.kept.hidden, version=version)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", kept_inputs.KINDS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_both_versions(shape, gated, kind, dtype):
    case = Case.draw(*shape, kind, gated, kind != "relu", 0.6, dtype, "cuda")
    if shape[0] > 2:
        case.x[1, -1], case.x[2, -1] = torch.inf, torch.nan
    for version in (1, 2) if shape[1] % 8 == shape[2] % 8 == 0 else (1,):
        found = launched(case, version)
        case.check(*found)
        for own, again in zip(found, launched(case, version)):
            assert torch.equal(own.view(torch.int16), again.view(torch.int16))
    gate, up, down, *biases = case.turned()
    if kept_inputs.takes(case.x, gate, up, down):
        y = kept_inputs.layer(case.x, gate, up, down, *biases, case.kept)
        assert torch.equal(y.view(torch.int16), found[1].view(torch.int16))


def test_what_is_refused():
    x, w = torch.zeros(1, 16, device="cuda").half(), torch.zeros(16, 12, device="cuda").half()
    for given, how, said in (
        ((x.float(), w), {}, "are accepted"),
        ((x, w[:8]), {}, "are accepted"),
        ((x, w.cpu()), {}, "are accepted"),
        ((x.cpu(), w), {}, "are accepted"),
        ((x[0], w), {}, "are accepted"),
        ((x[:0], w), {}, "are accepted"),
        ((x.short(), w.short()), {}, "are accepted"),
        ((x, w, None, w[0, :5]), {}, "are accepted"),
        ((x.expand(5, 16).contiguous(), w), {}, r"1 to 4, inputs"),
        ((x, w), {"kind": "above"}, "None or relu, silu"),
        ((x, w, w), {}, "kind is None for two weights"),
        ((x, w), {"version": 2}, "version is 2; for 12 outputs"),
    ):
        with pytest.raises(InputError, match=said):
            kept_inputs.product(*given, threshold=0.5, **how)
    for threshold in (-1.0, torch.inf, torch.nan):
        with pytest.raises(InputError, match=f"threshold is {threshold}; finite"):
            kept_inputs.product(x, w, threshold=threshold)


@torch.no_grad()
@pytest.mark.parametrize("gated", [True, False])
def test_a_swapped_model(gated):
    """Turned weights, nothing held twice, logits as near to float32 as the dense model's, also replayed from a graph."""
    model = ours(nn.SiLU(), d_model=256, d_ff=1024, gated=gated).cuda()
    ids = torch.randint(64, (8, 32), generator=torch.Generator().manual_seed(0)).cuda()
    cut = tl.thresholds(model, [ids], 0.5, method="teal").apply(model)
    exact, dense = cut(ids[:1, :3]), copy.deepcopy(cut).bfloat16()
    off = (dense(ids[:1, :3]).float() - exact).norm()
    sparse = tl.sparsify(copy.deepcopy(dense), "kept_inputs")
    layer = sparse.layers[0].mlp
    assert layer.status()["layout"] == "turned" and layer.extra_bytes == 0
    for _ in range(3):
        y = sparse(ids[:1, :3])
        assert (y.float() - exact).norm() <= 2 * off + 2e-3 * exact.norm()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = sparse(ids[:1, :3])
    graph.replay()
    assert torch.equal(captured, y)
    many = cut.float()(ids)
    assert (sparse(ids).float() - many).norm() <= 2 * (dense(ids).float() - many).norm()
    state, own = tl.densify(sparse).state_dict(), dense.state_dict()
    assert all(torch.equal(state[name], t) and state[name].is_contiguous() for name, t in own.items())


@torch.no_grad()
def test_layers_decide_by_time():
    model = ours(nn.SiLU(), d_model=2048, d_ff=5632, layers=1, heads=16).cuda().bfloat16()
    ids = torch.randint(64, (8, 32), device="cuda")
    cut = tl.thresholds(model, [ids], 0.7, method="teal").apply(model)
    plan = tl.plan(tl.profile(cut, [ids]), cut, tokens=(1, 64), batches=[ids], calls="captured", progress=False)
    found = {(each.tokens, each.path): each for each in plan.layers[0].candidates}
    assert found[1, "kept_inputs"].measured_us and {path for tokens, path in found if tokens == 64} == {"dense"}
    assert tl.report(tl.sparsify(cut, plan)).rows[0]["layout"] in ("turned", "plain")
