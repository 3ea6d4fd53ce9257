"""What each path of the registry promises; and a new path, added here, which layers, planner and benches then use."""

import pytest
import torch
from torch import nn

import twell_lab as tl
from twell_lab.analysis import costs
from twell_lab.bench import attack
from twell_lab.core import InputError
from twell_lab.layers.choice import Choice, one_of_each
from twell_lab.layers.paths import PATHS, Path
from twell_lab.layers.paths.dense import by_torch
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.ops import clock, differentiable, inference
from twell_lab.ops.copies import TRANSPOSED
from twell_lab.ops.reference import GatedFeedForward

RATES = costs.Rates("CPU", "float32", bandwidth=1e10, l2=1e11, matmul=1e10, launch=1e-6)


class Halves(Path):
    """The dense layer, half of its neurons at a time; it holds `up` transposed, and claims to cost next to nothing."""

    name = "halves"
    packs = False
    learns = "dense"
    copies = (PATHS["twell"].copies[0]._replace(buffer="up_t", name="down_t", source="up", how=TRANSPOSED),)

    def sizes(self, d_ff):
        return (0,) if d_ff % 2 == 0 else ()

    def forward(self, layer, x, weights, hot, stats):
        up = self.ready(layer, weights).down_t.t()
        half = weights.up.shape[0] // 2
        parts = []
        for rows in (slice(None, half), slice(half, None)):
            gate = None if weights.gate is None else weights.gate[rows]
            parts.append(by_torch(x, weights._replace(gate=gate, up=up[rows], down=weights.down[:, rows])))
        return parts[0] + parts[1]

    def cost(self, work, hot=0):
        return {"gemm": 1e-9, "rows": 0.0, "memory": 0.0, "launches": 0.0, "lost": 0.0}


@pytest.fixture
def halves(monkeypatch):
    monkeypatch.setitem(PATHS, "halves", Halves())


@pytest.fixture
def dense():
    torch.manual_seed(0)
    return GatedFeedForward(16, 600).requires_grad_(False)


def test_the_registry_names_what_the_operators_know():
    assert tuple(PATHS) == inference.PATHS
    assert all(path.name == name and path.learns in differentiable.PATHS for name, path in PATHS.items())


@pytest.mark.parametrize("name", PATHS)
@pytest.mark.parametrize("d_ff", [1, 256, 257, 600])
def test_a_path_accepts_the_sizes_that_it_names(name, d_ff):
    path, accepted = PATHS[name], [hot for hot in range(d_ff + 300) if PATHS[name].accepts(d_ff, hot)]
    assert accepted == [*path.sizes(d_ff)]
    for hot in accepted:
        Choice(name, hot).check(d_ff)
    for hot in {0, 256, 512} - {*accepted}:
        with pytest.raises(InputError, match="hot is"):
            Choice(name, hot).check(d_ff)


def test_what_is_not_taken_is_left_out():
    assert [str(choice) for choice in one_of_each(600, 256)] == ["dense", "twell", "hot_cold 256"]
    assert [str(choice) for choice in one_of_each(200, 256)] == ["dense", "twell"]


@pytest.mark.parametrize("name", PATHS)
def test_what_a_path_holds_is_gone_with_it(name, dense):
    choice = next(choice for choice in one_of_each(600, 256) if choice.path == name)
    layer = SparseFFN(dense, plan=choice)
    layer(torch.randn(3, 16))
    held = {copy.buffer for copy in PATHS[name].copies if not copy.source.endswith("bias")}  # which it has none of
    assert held <= {buffer for buffer, _ in layer.named_buffers()}
    assert not held & {*layer.state_dict()}
    layer.follow(Choice("dense"))
    assert not [*layer.named_buffers()] and layer.extra_bytes == 0


def test_a_layer_goes_a_new_way(halves, dense):
    layer, x = SparseFFN(dense, plan=Choice("halves")), torch.randn(7, 16)
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-4, atol=1e-5)
    assert layer.extra_bytes == layer.up_t.numel() * 4 and layer.status()["classes"][0]["path"] == "halves"
    dense.up_proj.weight.neg_()
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-4, atol=1e-5)
    layer.double().float()
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-4, atol=1e-5)
    layer.requires_grad_(True)
    torch.testing.assert_close(layer(x), dense(x), rtol=1e-4, atol=1e-5)


def test_the_planner_weighs_a_new_path_and_a_plan_keeps_it(halves, tmp_path):
    dense, inputs = clock.workload(90, 32, 600, 20, "lognormal", torch.float32, "cpu")
    plan = tl.plan(tl.profile(dense, inputs[:1]), rates=RATES, tokens=(4, 64))
    assert {choice.path for choice in plan.layers[0].choices.values()} == {"halves"}
    assert {row["path"] for row in plan.table()} == {*PATHS} - {"hot_cold"}  # whose hot neurons no CPU computes apart
    loaded = tl.Plan.load(plan.save(tmp_path / "plan.json"))
    model = tl.sparsify(nn.Sequential(dense), tl.plan(tl.profile(nn.Sequential(dense), inputs[:1]), rates=RATES))
    assert loaded == plan and "path=halves" in repr(model[0])
    narrow = GatedFeedForward(16, 41)
    odd = tl.plan(tl.profile(narrow, [torch.randn(9, 16)]), rates=RATES, tokens=(4,))
    assert {row["path"] for row in odd.table()} == {"dense", "twell"}


def test_benches_try_a_new_path(halves):
    layer = next(layer for number in range(100) if not (layer := attack.draw(1, number)).d_ff % 2)
    assert "module, halves" in attack.paths_of(layer)


def test_a_name_that_nobody_gave(halves):
    with pytest.raises(
        InputError, match="path is 'thirds'; 'dense', 'twell', 'hot_cold', 'halves', 'two_four', .* are accepted"
    ):
        Choice("thirds")
    with pytest.raises(InputError, match="are accepted"):
        Choice(["dense"])
