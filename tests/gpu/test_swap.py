"""Layers asked on a GPU what they compute: in their own type there, and with the GPU's random numbers left as they were.
And the memory of a swapped model: `down` is turned, not copied."""

import copy
import gc

import pytest
import torch
from torch import nn

from twell_lab.core import InputError
from twell_lab.layers.choice import Candidate, Choice, LayerPlan
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import densify, sparsify
from twell_lab.ops import turned
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward

pytestmark = pytest.mark.gpu


class Dropping(GatedFeedForward):
    def __init__(self, *sizes, p):
        super().__init__(*sizes)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.down_proj(self.drop(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class Scaled(GatedFeedForward):
    def forward(self, x):
        return 1.01 * super().forward(x)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("sizes", [(2048, 5632), (256, 1400), (33, 70)])
def test_what_computes_the_formula_is_taken_and_nothing_else(dtype, sizes):
    torch.manual_seed(0)
    with torch.device("cuda"):
        for kind in (GatedFeedForward, PlainFeedForward):
            assert isinstance(SparseFFN.from_module(kind(*sizes).to(dtype)), SparseFFN)
        assert isinstance(SparseFFN.from_module(Dropping(*sizes, p=0.0).to(dtype)), SparseFFN)
        dropping = Dropping(*sizes, p=0.1).to(dtype)
        before = torch.cuda.get_rng_state(), torch.get_rng_state()
        with pytest.raises(InputError, match="in training mode"):
            sparsify(dropping, "twell")
        assert torch.equal(torch.cuda.get_rng_state(), before[0]) and torch.equal(torch.get_rng_state(), before[1])
        with pytest.raises(InputError, match=r"1(\.\d+)?% off"):
            sparsify(Scaled(*sizes).to(dtype), "twell")


# ---- memory ----

D_MODEL, D_FF, LAYERS = 512, 2048, 6


@pytest.fixture(params=[GatedFeedForward, PlainFeedForward])
def model(request, gpu):
    """Some layers in bfloat16, of whose neurons few fire."""
    torch.manual_seed(0)
    layers = [request.param(D_MODEL, D_FF).to(gpu, torch.bfloat16) for _ in range(LAYERS)]
    for layer in layers:
        gate = getattr(layer, "gate_proj", layer.up_proj)
        gate.bias = nn.Parameter(torch.full((D_FF,), -1.0, device=gpu, dtype=torch.bfloat16))
    return nn.Sequential(*layers).eval()


def allocated():
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def inputs(gpu, *counts):
    return [torch.randn(tokens, D_MODEL, device=gpu, dtype=torch.bfloat16) for tokens in counts or (1, 100, 3000)]


def each_of(layers, x):
    """What each layer makes of x: in a row, nothing would be left of it for the later ones."""
    return torch.stack([layer(x) for layer in layers])


@torch.no_grad()
def close(found, dense, x):
    alike(each_of(found, x), each_of(dense, x))


def alike(found, wanted):
    largest = wanted.float().abs().max().item()
    assert largest > 0.01
    torch.testing.assert_close(found.float(), wanted.float(), rtol=0.05, atol=0.05 * largest)


@pytest.mark.parametrize("wanted", [False, True], ids=["frozen", "as it was loaded"])
def test_a_swapped_model_holds_next_to_nothing_more(wanted, model, gpu):
    model.requires_grad_(wanted)
    dense = copy.deepcopy(model)
    with torch.no_grad():
        for x in inputs(gpu):  # cuBLAS and the kernels are loaded
            each_of(sparsify(copy.deepcopy(model), "twell"), x), each_of(model, x)
    weights, before = sum(p.nbytes for p in model.parameters()), allocated()
    sparsify(model, "twell")
    assert allocated() - before <= 0.02 * weights
    for x in inputs(gpu):
        close(model, dense, x)
    assert allocated() - before <= 0.02 * weights
    assert all(turned.is_turned(layer.down.weight) for layer in model)
    assert sum(layer.extra_bytes for layer in model) <= 0.02 * weights
    saved = model.state_dict()
    assert all(t.is_contiguous() and torch.equal(t, dense.state_dict()[name]) for name, t in saved.items())
    del saved
    assert not any(turned.is_turned(layer.down.weight) for layer in model.train())
    assert allocated() - before <= 0.02 * weights
    for x in inputs(gpu):
        close(model, dense, x)
    model.eval()
    assert all(turned.is_turned(layer.down.weight) for layer in model) and allocated() - before <= 0.02 * weights
    densify(model)
    assert all(p.is_contiguous() for p in model.parameters()) and allocated() - before <= 0.02 * weights
    for x in inputs(gpu):
        assert torch.equal(each_of(model, x), each_of(dense, x))


def test_a_turned_layer_follows_its_weight_and_its_plan(model, gpu):
    dense = copy.deepcopy(model.requires_grad_(False))
    sparsify(model, "twell")
    for change in (
        lambda p: p.mul_(-2.0),
        lambda p: setattr(p, "data", p.data * 1.5),
        lambda p: setattr(p, "data", (p.data * 1.5).contiguous()),
        lambda p: p[0].fill_(0.25),
    ):
        for each in (model, dense):
            for layer in each:
                change(layer.down_proj.weight)
        for x in inputs(gpu):
            close(model, dense, x)
    for plan in (Choice("hot_cold", 256), Choice("dense"), Choice("twell")):
        for layer in model:
            layer.follow(plan)
        for x in inputs(gpu):
            close(model, dense, x)
    moved = copy.deepcopy(model).cpu().to(gpu)
    assert all(turned.is_turned(layer.down.weight) for layer in moved)
    for x in inputs(gpu):
        close(moved, dense, x)


def test_a_gradient_has_the_plain_layout(model, gpu):
    dense = copy.deepcopy(model)
    sparsify(model, "twell")
    (x,) = inputs(gpu, 200)
    for each in (model, dense):
        each_of(each, x).float().square().sum().backward()
    for layer, plain in zip(model, dense):
        assert layer.down.weight.is_contiguous() and layer.down.weight.grad.is_contiguous()
        found, wanted = layer.down.weight.grad.float(), plain.down_proj.weight.grad.float()
        assert 0 < wanted.norm() and (found - wanted).norm() <= 0.1 * wanted.norm()


def read_late(model, gpu, swap):
    """Swap, train, evaluate and densify, while a late forward on another stream still reads the weights as they lay.
    Nobody but the swap waits. Memory that is given back too soon is overwritten with NaN."""
    (x,), side, late = inputs(gpu, 3000), torch.cuda.Stream(), torch.randn(4096, 4096, device=gpu)
    expected, size = each_of(model, x), D_MODEL * D_FF * next(model.parameters()).itemsize
    torch.cuda.synchronize()
    for turn in (swap, lambda: model.train(), lambda: model.eval(), lambda: densify(model)):
        with torch.cuda.stream(side):
            for _ in range(20):  # so that the forward is late
                late @ late
            y = each_of(model, x)
        turn()
        written = [torch.full((size,), 255, dtype=torch.uint8, device=gpu) for _ in range(2 * LAYERS)]
        torch.cuda.synchronize()
        alike(y, expected)
        assert all((each == 255).all() for each in written)


def test_what_a_side_stream_still_reads_stays_in_memory_while_a_weight_is_turned(model, gpu):
    """In both directions."""
    model.requires_grad_(False)
    read_late(model, gpu, lambda: sparsify(model, "twell"))


def test_not_while_a_graph_is_captured(gpu):
    weight, graph = nn.Parameter(torch.randn(64, 128, device=gpu)), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        assert not turned.turn(weight)
    assert turned.turn(weight) and turned.turn_back(weight)


HOT = Choice("hot_cold", 512)


def in_some_order(model):
    """Have each layer follow a plan whose hot neurons lie all over the layer."""
    for layer in model:
        counts = torch.randperm(D_FF).tolist()
        chosen = Candidate(1, HOT.path, HOT.hot, 1.0, None, True, "a test's")
        layer.follow(LayerPlan("", D_MODEL, D_FF, layer.gate is not None, D_FF, tuple(counts), (chosen,)))


@pytest.mark.parametrize("loaded", [True, False], ids=["as loaded", "for inference"])
def test_a_reordered_model_for_inference_holds_next_to_nothing_more(model, gpu, loaded):
    """As loaded, its parameters require gradients."""
    model.requires_grad_(loaded)
    dense = copy.deepcopy(model)
    weights, before = sum(p.nbytes for p in model.parameters()), allocated()
    sparsify(model, "dense", reorder=True)
    in_some_order(model)
    for x in inputs(gpu):
        close(model, dense, x)
    del x
    assert all(layer.reordered for layer in model)
    assert sum(layer.extra_bytes for layer in model) <= 0.02 * weights and allocated() - before <= 0.02 * weights
    for name, saved in densify(model).state_dict().items():
        assert torch.equal(saved, dense.state_dict()[name])
    assert allocated() - before <= 0.02 * weights


def test_hot_and_cold_beyond_the_room_is_not_copied(model, gpu):
    weights, before = sum(p.nbytes for p in model.parameters()), allocated()
    with pytest.raises(InputError, match="memory=0.02 leaves"):
        sparsify(model, HOT, memory=0.02)
    assert allocated() - before <= 0.02 * weights and not any(isinstance(layer, SparseFFN) for layer in model)


def test_what_a_side_stream_still_reads_stays_in_memory_while_neurons_are_reordered(model, gpu):
    sparsify(model.requires_grad_(False), "dense", reorder=True)
    read_late(model, gpu, lambda: in_some_order(model))


def test_a_captured_graph_of_a_reordered_layer(model, gpu):
    """It reads what is loaded later. One that was captured before the neurons were reordered has to be captured anew;
    its forward with gradients cannot be captured."""
    dense = copy.deepcopy(model.requires_grad_(False))
    sparsify(model, "dense", reorder=True)
    in_some_order(model)
    (x,) = inputs(gpu, 1000)
    graph, y = captured(model, x)
    for seed in range(2):
        torch.manual_seed(seed)
        for layer in dense:
            layer.down_proj.weight.normal_(0, 0.02)
            layer.up_proj.weight.normal_(0, 0.02)
        for layer, other in zip(model, dense):
            layer.load_state_dict(other.state_dict())
        x.copy_(inputs(gpu, 1000)[0])
        graph.replay()
        alike(y, each_of(dense, x))
    model.train()
    graph, y = captured(model, x)
    graph.replay()
    alike(y, each_of(dense, x))
    model.eval().requires_grad_(True)
    with pytest.raises(InputError, match="is being captured"), torch.cuda.graph(torch.cuda.CUDAGraph()):
        model[0](x)


def captured(model, x):
    """A graph of all layers, after some calls on a side stream, and its output."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), torch.no_grad():
        for _ in range(3):
            each_of(model, x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), torch.no_grad():
        y = each_of(model, x)
    return graph, y


def test_a_captured_graph_of_a_turned_layer(model, gpu):
    dense = copy.deepcopy(model.requires_grad_(False))
    sparsify(model, "twell")
    (x,) = inputs(gpu, 100)
    graph, y = captured(model, x)
    for factor in (1.0, -0.5):
        for each in (model, dense):
            for layer in each:
                layer.down_proj.weight.mul_(factor)  # the graph reads the weight itself
        x.copy_(inputs(gpu, 100)[0])
        graph.replay()
        alike(y, each_of(dense, x))
