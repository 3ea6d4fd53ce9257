"""Layers on a GPU: every path is the dense layer, for any tokens, widths, types and patterns; inside torch, whatever it
does with streams, threads, graphs and compiled code; and with weights that are changed, moved or replaced afterwards."""

import copy
import gc
import threading

import pytest
import torch
from torch import nn

import twell_lab as tl
from tests.ops.rows.drawn import Layer
from tests.ops.table import bits
from twell_lab.core import InputError
from twell_lab.layers.choice import Candidate, Choice, LayerPlan
from twell_lab.layers.lossy import ThresholdedActivation
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import densify, sparsify
from twell_lab.ops import accuracy, functional
from twell_lab.ops.activation import Activation
from twell_lab.ops.checks import is_turned
from twell_lab.ops.reference import GatedFeedForward

from .drawn import captured, dense_of, exact_of, module, on_another_stream, tensors, unwaiting

pytestmark = pytest.mark.gpu
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CHOICES = [Choice("dense"), Choice("twell"), Choice("hot_cold", 256)]
each_path = pytest.mark.parametrize("choice", CHOICES, ids=str)
each_kind = pytest.mark.parametrize("gated", [True, False], ids=["gated", "plain"])


@pytest.fixture(autouse=True)
def without_gradients():
    torch._dynamo.reset()
    with torch.no_grad():
        yield


def swapped(made, choice) -> SparseFFN:
    return SparseFFN.from_module(module(*made), plan=choice)


def assert_dense(made, choice, rows=200):
    """A first call and the prepared one after it, of x elsewhere in memory, have the same bits; `rows` rows keep the
    promise, and all are about right."""
    sparse, x = swapped(made, choice), made[0]
    y, prepared = sparse(x), sparse(x.clone())
    assert torch.equal(bits(y), bits(prepared))
    picked = torch.linspace(0, len(y) - 1, min(rows, len(y)), device="cuda").long()
    dense = dense_of(*made)
    ratio, row = accuracy.worst_row(y[picked], dense[picked], exact_of(x[picked], *made[1:]))
    assert ratio <= 1.0, (ratio, int(picked[row]), sparse.runs(len(x)))
    finite = dense.isfinite().all(1)
    assert torch.equal(y.isfinite().all(1), finite)
    off = (y[finite].float() - dense[finite].float()).norm(dim=1) / dense[finite].float().norm(dim=1).clamp(min=1.0)
    assert not len(off) or off.max() < 0.05
    return y


# ---- every path is the dense layer


SHAPES = [
    (2048, 5632, True),
    (768, 3072, True),
    (1024, 4096, False),
    (2048, 8192, False),
    (3584, 18944, True),
    (4096, 14336, True),
    (5120, 13824, True),
]


@each_path
@pytest.mark.parametrize("d_model, d_ff, gated", SHAPES)
@pytest.mark.parametrize("tokens", [1, 64, 600, 2100])
def test_shapes_of_models(d_model, d_ff, gated, tokens, choice):
    assert_dense(tensors(tokens, d_model, d_ff, gated), choice)


@each_path
@each_kind
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("biased", [True, False], ids=["biased", ""])
@pytest.mark.parametrize("tokens", [1, 3, 65, 300, 1100, 2047, 2049])
def test_types_biases_and_token_counts(tokens, biased, gated, dtype, choice):
    assert_dense(tensors(tokens, dtype=dtype, gated=gated, biased=biased, seed=tokens), choice)


@each_path
@pytest.mark.parametrize("d_model, d_ff", [(64, 264), (200, 777), (100, 300), (8, 513)])
@pytest.mark.parametrize("tokens", [5, 700, 2050])
def test_widths_that_some_kernels_do_not_take(d_model, d_ff, tokens, choice):
    assert_dense(tensors(tokens, d_model, d_ff), choice)


@each_path
@each_kind
@pytest.mark.parametrize("tokens", [40, 1000, 2100])
def test_overflow(tokens, gated, choice):
    """Tiles of 32, 40, 64 and 256, groups of 16 rows that exceed the pool, rows that fire everything or nothing."""
    made = tensors(tokens, gated=gated, d_ff=1536)
    x, first = made[0], made[1] if gated else made[2]
    for feature, (start, many) in enumerate([(0, 32), (300, 40), (512, 64), (1280, 256)], start=1):
        x[:, feature] = 0
        x[feature :: 2 * feature + 5, feature] = 16.0
        first[start : start + many, feature] = 1.0
    x[16:32, 2] = 16.0  # 16 x 9 or more beyond the 31 of a tile: the pool holds 64
    x[3], x[4] = 0, 0
    x[3, 0], x[4, 0] = -8.0, 8.0  # everything fires; nothing does
    counts = tl.pack(nn.functional.linear(x, first)).counts
    assert int(counts[3].sum()) == 1536 and int(counts[4].sum()) == 0 and int((counts > 31).sum()) > 20
    y = assert_dense(made, choice, rows=tokens)
    alone = swapped(made, choice)(torch.cat([x[17:18]] * tokens))  # what other rows overflow is no business of a row
    if choice.path == "dense" or tokens <= 64:
        assert (alone[0].float() - y[17].float()).norm() <= 0.01 * y[17].float().norm()


@each_path
@each_kind
@pytest.mark.parametrize("tokens", [20, 800, 2060])
def test_rows_that_are_not_finite(tokens, gated, choice):
    made = tensors(tokens, gated=gated)
    for row, value in [(0, torch.nan), (7, torch.inf), (15, -torch.inf), (tokens - 1, torch.nan)]:
        made[0][row, 3] = value
    assert_dense(made, choice, rows=tokens)


@pytest.mark.parametrize("choice", CHOICES[1:], ids=str)
def test_more_tokens_than_one_pass(choice):
    """Beyond 32,768 tokens a call is cut in pieces, rows of the last one included."""
    assert_dense(tensors(32768 + 700, 64, 512), choice)


@each_path
def test_no_tokens_and_more_dimensions(choice):
    made = tensors(60)
    sparse, x = swapped(made, choice), made[0]
    assert sparse(x[:0]).shape == (0, 256)
    assert torch.equal(sparse(x.view(3, 20, 256)), sparse(x).view(3, 20, 256))


@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=str)
@pytest.mark.parametrize("tokens", [3, 300, 600])
@pytest.mark.parametrize("cold_fires", [1, 256])
def test_hot_and_cold_parts_that_cancel_are_rounded_together(cold_fires, tokens, dtype):
    """Each part alone is past the end of float16, and a rounded one would leave its rounding."""
    up, down = torch.zeros(512, 64), torch.zeros(64, 512)
    up[0, 0], down[:, 0] = 256.0, -512.0
    up[256 : 256 + cold_fires, 0], down[:, 256 : 256 + cold_fires] = 256.0, 512.0 / cold_fires
    made = (torch.ones(tokens, 64), None, up, down, None, None, torch.full((64,), 0.3125))
    made = [None if t is None else t.to("cuda", dtype) for t in made]
    y = swapped(made, CHOICES[2])(made[0])
    assert torch.equal(y, torch.full_like(y, 0.3125))


@each_kind
@pytest.mark.parametrize("tokens", [30, 300, 2100])
def test_the_same_bits_a_hundred_times(tokens, gated):
    made = tensors(tokens, gated=gated)
    made[0][3:9, 0] = -8.0  # heavy rows, which blocks share
    sparse = swapped(made, Choice("twell"))
    first = sparse(made[0])
    assert all(torch.equal(first, sparse(made[0])) for _ in range(100))


# ---- other activations

# A gate at the threshold fires or not by its last bit. So the gates here are sums of few bits, which every order of
# adding gives exactly: the kernels, torch and the reference decide alike.
KINDS = [
    Activation("above", 0.5),
    Activation("above", 1.9),
    Activation("silu", 0.2),
    Activation("gelu", 0.4),
    Activation("gelu_tanh", 0.4),
    Activation(both=True),
]


def of_few_bits(tokens, d_model, d_ff, dtype, gated, biases=True):
    x, gate, up, down_t, *biases = Layer.draw(tokens, d_model, d_ff, dtype, gated, biases, bits=True)
    return [None if t is None else t.cuda() for t in (x, gate, up, down_t.t(), *biases)]


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("d_model, d_ff", [(512, 1024), (333, 777)])
@pytest.mark.parametrize("acts", KINDS, ids=str)
@pytest.mark.usefixtures("poisoned")
def test_other_activations(acts, d_model, d_ff, dtype):
    for i, tokens in enumerate((1, 5, 64, 65, 300, 2500)):
        made = of_few_bits(tokens, d_model, d_ff, dtype, acts.both or i % 2 == 0, i % 3 != 1)
        dense, exact = dense_of(*made, acts), exact_of(*made, acts)
        for how in (("twell",), ("dense",), ("hot_cold", 256), ("twell", 0, 64, 8)):
            y = functional.infer(*made, *how, acts=acts)
            assert accuracy.worst_row(y, dense, exact)[0] <= 1.0, (tokens, how)
            assert torch.equal(y, functional.infer(*made, *how, acts=acts)), (tokens, how)


@pytest.mark.parametrize("dtype", [BF16, FP32], ids=str)
@pytest.mark.parametrize("acts, gated", [(a, g) for a in KINDS for g in (True, False) if g or not a.both], ids=str)
def test_rows_that_are_not_finite_with_other_activations(acts, gated, dtype):
    for d_ff, tokens in ((333, 1), (333, 8), (5, 40), (333, 100), (5, 100)):
        made = of_few_bits(tokens, 256, d_ff, dtype, gated)
        x = made[0]
        x[0, 3] = torch.nan
        if tokens > 1:
            x[1, 0], x[4, 5], x[tokens - 1, -1] = torch.inf, -torch.inf, torch.inf
        y, dense, finite = functional.infer(*made, "twell", acts=acts), dense_of(*made, acts), x.isfinite().all(1)
        assert torch.equal(y.isnan(), dense.isnan()), (d_ff, tokens)
        if finite.any():
            assert accuracy.worst_row(y[finite], dense[finite], exact_of(*made, acts)[finite])[0] <= 1.0


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_a_gate_that_overflows_to_minus_infinity_is_silent(kind):
    for tokens in (1, 20, 100):
        made = of_few_bits(tokens, 256, 300, FP16, True)
        made[0][0], made[1][17] = 1.0, -6e4
        acts = Activation(kind, 0.2)
        assert functional.infer(*made, "twell", acts=acts)[0].isfinite().all()
        assert not acts.keeps(nn.functional.linear(made[0], made[1], made[4]))[0, 17]


@pytest.mark.parametrize("gated, act", [(True, "silu"), (False, "gelu"), (True, "threshold")])
def test_a_layer_with_another_activation(gated, act):
    """Eager, in a graph and compiled."""
    kinds = {"silu": ThresholdedActivation(nn.SiLU(), 0.3), "gelu": ThresholdedActivation(nn.functional.gelu, 0.3)}
    dense = module(*of_few_bits(1, 256, 1024, BF16, gated, False))
    dense.act_fn = kinds.get(act) or nn.Threshold(1.0, 0.0)
    sparse = SparseFFN.from_module(copy.deepcopy(dense), plan=Choice("twell"))
    assert sparse.acts is not None or sparse.kept is not None
    for tokens in (1, 16, 70):
        x = (torch.randint(-4, 5, (tokens, 256), device="cuda") / 4).bfloat16()
        y = sparse(x)
        assert accuracy.worst_row(y, dense(x), copy.deepcopy(dense).double()(x.double()))[0] <= 1.0
        assert torch.equal(torch.compile(sparse, fullgraph=True)(x), y)
        assert torch.equal(captured(lambda x=x: sparse(x)), y) and torch.equal(sparse(x), y)


# ---- inside torch


@each_path
@each_kind
@pytest.mark.parametrize("tokens", [8, 300, 2100, 4200])
def test_nothing_waits_and_graphs_and_streams_give_the_same(tokens, gated, choice):
    made = tensors(tokens, 256, 1024, gated)
    made[0][2, 0] = -8.0  # an overflowing row is no reason to wait either
    sparse = swapped(made, choice)
    expected = sparse(made[0])
    assert torch.equal(unwaiting(lambda: sparse(made[0])), expected)

    def late():
        x = made[0] * 1  # made on the side stream: a kernel on another one would read it too early
        torch.cuda._sleep(20_000_000)
        return sparse(x + 0)

    assert torch.equal(on_another_stream(late), expected)
    x, graph = made[0].clone(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sparse(x)
    for seed in (5, 6):
        x.copy_(tensors(tokens, 256, 1024, gated, seed=seed)[0])
        graph.replay()
        assert torch.equal(y, sparse(x))


@each_path
@each_kind
@pytest.mark.parametrize("tokens", [1, 300, 2100])
def test_compiled_in_one_graph(tokens, gated, choice):
    made = tensors(tokens, gated=gated, biased=True)
    sparse = swapped(made, choice)
    compiled = torch.compile(sparse, fullgraph=True)
    for seed in (0, 1):
        x = tensors(tokens, gated=gated, seed=seed)[0]
        assert_alike(compiled(x), sparse(x), choice)
        sparse.up.weight.mul_(2)
        assert_alike(compiled(x), sparse(x), choice)


def assert_alike(y, wanted, choice):
    """The same bits; on the dense path, which the compiler computes in its own way, about the same values."""
    if choice.path != "dense":
        assert torch.equal(y, wanted)
    torch.testing.assert_close(y.float(), wanted.float(), rtol=0.1, atol=0.05 * float(wanted.abs().max()))


@pytest.mark.parametrize("choice", CHOICES[1:], ids=str)
def test_in_the_graphs_that_torch_captures(choice):
    made = tensors(64)
    sparse = swapped(made, choice)
    expected = [sparse(x) for x in (made[0], made[0].flip(0))]
    compiled = torch.compile(lambda x: sparse(sparse(x)) * 2, mode="reduce-overhead", fullgraph=True)
    for _ in range(4):
        for x, y in zip((made[0], made[0].flip(0)), expected):
            assert torch.equal(compiled(x).clone(), sparse(y) * 2)


@each_path
def test_inference_mode_deterministic_algorithms_and_autocast(choice):
    made = tensors(2100, 256, 1024)
    sparse = swapped(made, choice)
    call = lambda made: tl.ffn(made[0], made[2], made[3], made[1], path=choice.path, hot=choice.hot)
    expected = call(made)
    single = [None if t is None else t.float() for t in made]
    with torch.inference_mode():
        assert torch.equal(call(made), expected)
        assert torch.equal(sparse(made[0]), sparse(made[0].clone()))
    with torch.autocast("cuda", BF16):
        assert torch.equal(call(single), expected)
        y = swapped(single, choice)(single[0])
    assert y.dtype == BF16 and (y.float() - expected.float()).norm() < 0.02 * expected.float().norm()
    torch.use_deterministic_algorithms(True)
    try:
        assert torch.equal(call(made), expected)
    finally:
        torch.use_deterministic_algorithms(False)


@each_path
def test_one_layer_in_two_threads_on_two_streams(choice):
    """They share what the layer has prepared."""
    sparse = swapped(tensors(2100), choice)
    inputs = [tensors(2100, seed=seed)[0] for seed in (0, 1)]
    expected, wrong = [sparse(x) for x in inputs], []
    torch.cuda.synchronize()

    def run(x, wanted):
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for _ in range(20):
                if not torch.equal(sparse(x), wanted):
                    wrong.append(x)

    threads = [threading.Thread(target=run, args=pair) for pair in zip(inputs, expected)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


@each_path
@pytest.mark.parametrize("tokens", [5, 300, 2100, 4200])
def test_tensors_that_lie_anywhere(tokens, choice):
    """x and weights off a boundary of 16 bytes, strided x and biases, a down that is not turned."""
    made = tensors(tokens, biased=True)
    x, weights = made[0], made[1:]
    expected, sparse = functional.infer(x, *weights, choice.path, choice.hot), swapped(made, choice)
    exact = exact_of(*made)
    odd_x = torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)
    wide_x = torch.stack([x, x], 1)[:, 0]
    for given in (odd_x, wide_x, x):
        for _ in range(2):
            assert accuracy.worst_row(sparse(given), dense_of(given, *weights), exact)[0] <= 1.0
    assert torch.equal(sparse(wide_x), sparse(x))
    strided = [torch.stack([b, b + 1], 1)[:, 0] for b in weights[3:5]]
    assert torch.equal(functional.infer(x, *weights[:3], *strided, weights[5], choice.path, choice.hot), expected)
    odd = [torch.cat([t.new_zeros(1), t.reshape(-1)])[1:].view(t.shape) for t in weights]
    y = functional.infer(x, *odd, choice.path, choice.hot)
    assert accuracy.worst_row(y, dense_of(x, *odd), exact)[0] <= 1.0


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@each_path
def test_the_second_gpu_from_the_first(choice):
    for tokens in (4, 300, 2100):
        made = tensors(tokens)
        there = [None if t is None else t.to("cuda:1") for t in made]
        sparse = swapped(there, choice)
        for _ in range(2):
            assert torch.equal(sparse(there[0]).cpu(), swapped(made, choice)(made[0]).cpu())


def test_layers_of_one_shape_never_meet():
    """They share the launches of a shape, but neither weights nor results."""
    made, layers = [tensors(2100, seed=seed) for seed in (1, 2)], []
    for each in made:
        layers.append(swapped(each, Choice("twell")))
    expected = [layer(made[0][0]) for layer in layers]
    for _ in range(3):
        assert all(torch.equal(layer(made[0][0]), y) for layer, y in zip(layers, expected))
    assert not torch.equal(*expected)


# ---- weights that change, and memory


def doubled(linear):
    other = copy.deepcopy(linear)
    other.weight.mul_(2)
    return other


CHANGES = {
    "in place": lambda layer: layer.down_proj.weight.mul_(-2.0),
    "some of it": lambda layer: layer.up_proj.weight[::2].fill_(0.25),
    "its data": lambda layer: setattr(layer.down_proj.weight, "data", layer.down_proj.weight.data * 1.5),
    "its data, contiguous": lambda layer: setattr(
        layer.down_proj.weight, "data", (layer.down_proj.weight.data * 1.5).contiguous()
    ),
    "another parameter": lambda layer: setattr(
        layer.up_proj, "weight", nn.Parameter(layer.up_proj.weight * 3, requires_grad=False)
    ),
    "a state": lambda layer: layer.load_state_dict({k: v * 0.5 for k, v in layer.state_dict().items()}),
    "another module": lambda layer: setattr(layer, "down_proj", doubled(layer.down_proj)),
    "moved": lambda layer: layer.cpu().cuda(),
    "another type": lambda layer: layer.half(),
    "a bias": lambda layer: setattr(
        layer.down_proj, "bias", nn.Parameter(torch.ones_like(layer.down_proj.weight[:, 0]), requires_grad=False)
    ),
}


@each_path
@pytest.mark.parametrize("tokens", [5, 300, 2100])
@pytest.mark.parametrize("change", CHANGES)
def test_weights_that_change_after_a_prepared_call_are_followed(change, tokens, choice):
    made = tensors(tokens)
    sparse, dense, x = swapped(made, choice), module(*made), made[0]
    before = [sparse(x) for _ in range(3)]
    for layer in (sparse, dense):
        CHANGES[change](layer)
    x = x.to(dense.up_proj.weight.dtype)
    wanted = dense(x)
    for _ in range(3):
        y = sparse(x)
        torch.testing.assert_close(y, wanted, rtol=0.05, atol=0.05 * float(wanted.abs().max()))
    assert change == "moved" or not torch.equal(y.float(), before[0].float())


def test_a_graph_reads_what_is_loaded_later():
    made = tensors(300)
    sparse, dense = swapped(made, Choice("twell")), module(*tensors(300, seed=1))
    sparse(made[0])
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sparse(made[0])
    sparse.load_state_dict(dense.state_dict())
    graph.replay()
    assert accuracy.worst_row(y, dense(made[0]), copy.deepcopy(dense).double()(made[0].double()))[0] <= 1.0


def allocated():
    gc.collect()
    torch.cuda.synchronize()
    return torch.cuda.memory_allocated()


def in_an_order(choice, d_model, d_ff, gated):
    """A plan whose hot neurons lie all over the layer."""
    counts = torch.randperm(d_ff, generator=torch.Generator().manual_seed(3)).tolist()
    chosen = Candidate(1, choice.path, choice.hot, 1.0, None, True, "a test's")
    return LayerPlan("", d_model, d_ff, gated, d_ff, tuple(counts), (chosen,))


@pytest.mark.parametrize("wanted", [False, True], ids=["frozen", "as loaded"])
@each_kind
@each_path
def test_a_swapped_model_holds_nothing_more(choice, gated, wanted):
    """Its weights are rewritten in place; a state_dict and densify give them back as they were."""
    d_model, d_ff = 512, 2048
    layers = [module(*tensors(1, d_model, d_ff, gated, biased=True, seed=seed)) for seed in range(6)]
    model = nn.ModuleList(layers).requires_grad_(wanted)
    dense = copy.deepcopy(model)
    inputs = [tensors(tokens, d_model, d_ff)[0] for tokens in (1, 100, 3000)]
    plan = in_an_order(choice, d_model, d_ff, gated)

    def follow(model):
        sparsify(model, choice)
        for layer in model:
            layer.follow(plan)
        return model

    for x in inputs:  # cuBLAS and the kernels are loaded
        [layer(x) for layer in (*follow(copy.deepcopy(model)), *model)]
    weights, before = sum(p.nbytes for p in model.parameters()), allocated()
    follow(model)
    assert allocated() - before <= 0.02 * weights
    if choice.path != "dense":
        assert all(is_turned(layer.down.weight) for layer in model)
    for x in inputs:
        for layer, plain in zip(model, dense):
            y, wanted_y = layer(x).float(), plain(x).float()
            torch.testing.assert_close(y, wanted_y, rtol=0.05, atol=0.05 * float(wanted_y.abs().max()))
    del x, y, wanted_y
    assert allocated() - before <= 0.02 * weights
    saved = model.state_dict()
    assert all(t.is_contiguous() for t in saved.values())
    if choice.path != "hot_cold":
        assert all(torch.equal(t, dense.state_dict()[name]) for name, t in saved.items())
    del saved
    densify(model)
    assert all(p.is_contiguous() for p in model.parameters()) and allocated() - before <= 0.02 * weights
    assert all(torch.equal(t, dense.state_dict()[name]) for name, t in model.state_dict().items())


@each_kind
def test_a_gradient_after_a_swap(gated):
    """Of a turned weight it is right, too, and is the optimizer's to use."""
    made = tensors(200, gated=gated)
    sparse, dense = swapped(made, Choice("twell")).requires_grad_(), module(*made).requires_grad_()
    with torch.enable_grad():
        for layer in (sparse, dense):
            layer(made[0]).float().square().sum().backward()
    for ours, theirs in zip(sparse.parameters(), dense.parameters(), strict=True):
        assert 0 < theirs.grad.norm() and (ours.grad - theirs.grad).float().norm() <= 0.1 * theirs.grad.float().norm()
    torch.optim.AdamW(sparse.parameters(), fused=True).step()


# ---- what is taken


class Dropping(GatedFeedForward):
    def __init__(self, *sizes, p):
        super().__init__(*sizes)
        self.drop = nn.Dropout(p)

    def forward(self, x):
        return self.down_proj(self.drop(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


class Scaled(GatedFeedForward):
    def forward(self, x):
        return 1.01 * super().forward(x)


@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("sizes", [(2048, 5632), (256, 1400), (33, 70)])
def test_what_computes_the_formula_is_taken_and_nothing_else(dtype, sizes):
    """Asked on the GPU, in its own type; the random numbers are left as they were."""
    torch.manual_seed(0)
    with torch.device("cuda"):
        taken, dropping, scaled = Dropping(*sizes, p=0.0), Dropping(*sizes, p=0.1), Scaled(*sizes)
    assert isinstance(SparseFFN.from_module(taken.to(dtype)), SparseFFN)
    before = torch.cuda.get_rng_state(), torch.get_rng_state()
    for other in (dropping, scaled):
        with pytest.raises(InputError, match="% off|training mode"):
            SparseFFN.from_module(other.to(dtype))
    assert torch.equal(torch.cuda.get_rng_state(), before[0]) and torch.equal(torch.get_rng_state(), before[1])
