"""Activations other than the ReLU on a GPU: FATReLU, SiLU and GELU with a threshold, dReLU; beside torch's dense layer and
float64.

A gate at the threshold fires or not by its last bit. So the gates here are sums of few bits, which every order of adding
gives exactly: the kernels, torch and the reference decide alike."""

import copy

import pytest
import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.functional import linear

from twell_lab.layers.choice import Choice
from twell_lab.layers.lossy import ThresholdedActivation
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.ops import accuracy, inference
from twell_lab.ops import decode as launch_decode
from twell_lab.ops.activation import Activation
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
DTYPES = [torch.bfloat16, torch.float16]
KINDS = [
    Activation("above", 0.5),
    Activation("above", 1.9),
    Activation("silu", 0.2),
    Activation("gelu", 0.4),
    Activation("gelu_tanh", 0.4),
    Activation(both=True),
]
SHAPES = [(2048, 5632), (768, 3072), (64, 333), (2056, 1000), (8, 5)]
# Each kind, shape and type is compiled by itself: one kind has all shapes, one shape all kinds and types.
DECODED = [(acts, 768, 3072, dtype) for acts in KINDS for dtype in DTYPES]
DECODED += [(KINDS[2], *shape, torch.bfloat16) for shape in SHAPES if shape != (768, 3072)]


class Layer:
    """A layer with this activation, and inputs [tokens, d_model] for it."""

    def __init__(self, acts, tokens, d_model, d_ff, dtype, *, gated=True, biases=True, seed=0):
        generator = torch.Generator("cuda").manual_seed(seed + 7919 * tokens + d_model + d_ff)
        normal = lambda *shape: torch.randn(*shape, generator=generator, device="cuda")  # noqa: E731

        def few_bits(most, unit, *shape):
            whole = torch.randint(-most, most + 1, shape, generator=generator, device="cuda")
            return (whole * unit).to(dtype)

        scale = 2.0 ** round(torch.tensor((10 * d_model) ** -0.5).log2().item())
        self.acts, self.x = acts, few_bits(4, 0.25, tokens, d_model)
        first, self.up = few_bits(8, scale, d_ff, d_model), (normal(d_ff, d_model) / d_model**0.5).to(dtype)
        self.gate, self.up = (first, self.up) if gated else (None, first)
        self.down = (normal(d_model, d_ff) / d_ff**0.5).to(dtype)
        self.down_t = self.down.t().contiguous()
        self.gate_bias = few_bits(2, 0.25, d_ff) if biases and gated else None
        self.up_bias = None if not biases else normal(d_ff).to(dtype) if gated else few_bits(2, 0.25, d_ff)
        self.down_bias = normal(d_model).to(dtype) if biases else None

    @property
    def tensors(self):
        return self.x, self.gate, self.up, self.down, self.gate_bias, self.up_bias, self.down_bias

    def infer(self, **how):
        return inference.infer(*self.tensors, down_t=self.down_t, acts=self.acts, **how)

    def decode(self, version=2, stats=None):
        biases = (self.gate_bias, self.up_bias, self.down_bias)
        return launch_decode.decode(self.x, self.gate, self.up, self.down_t, *biases, stats, version, acts=self.acts)

    def _computed(self, activated, x, gate, up, down, gate_bias, up_bias, down_bias):
        h = activated(linear(x, up if gate is None else gate, up_bias if gate is None else gate_bias))
        return linear(h if gate is None else h * self.acts.of_up(linear(x, up, up_bias)), down, down_bias)

    def keeps(self):
        first = (self.up, self.up_bias) if self.gate is None else (self.gate, self.gate_bias)
        return self.acts.keeps(linear(self.x, *first))

    def dense(self):
        return self._computed(self.acts.dense, *self.tensors)

    def exact(self):
        wide, keep = (None if t is None else t.double() for t in self.tensors), self.keeps()
        return self._computed(lambda first: torch.where(keep, self.acts.value(first), 0.0), *wide)


def same_bits(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


def needs_decode():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip(f"the decode kernels need sm_80; this is {torch.cuda.get_device_name()}")


@pytest.mark.parametrize("acts, d_model, d_ff, dtype", DECODED, ids=str)
def test_decode_keeps_the_error_promise(acts, d_model, d_ff, dtype):
    needs_decode()
    for i, tokens in enumerate((1, 2, 8, 9, 16, 31, 64)):
        gated = acts.both or i % 3 != 1
        layer = Layer(acts, tokens, d_model, d_ff, dtype, gated=gated, biases=i % 2 == 0)
        dense, exact = layer.dense(), layer.exact()
        for version in launch_decode.VERSIONS:
            stats = torch.zeros(4, dtype=torch.int64, device="cuda")
            y = layer.decode(version, stats)
            ratio, row = accuracy.worst_row(y, dense, exact)
            assert ratio <= 1.0, (tokens, version, row, ratio)
            assert stats.tolist() == [tokens, int(layer.keeps().sum()), 0, 0]
            assert same_bits(y, layer.decode(version)), (tokens, version)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
@pytest.mark.parametrize("d_model, d_ff", [(512, 1024), (333, 777)])
@pytest.mark.parametrize("acts", KINDS, ids=str)
def test_any_number_of_tokens_keeps_the_error_promise(acts, d_model, d_ff, dtype):
    """The portable kernels, with tiles that overflow, and what is computed densely."""
    for i, tokens in enumerate((1, 5, 64, 65, 300, 2500)):
        layer = Layer(acts, tokens, d_model, d_ff, dtype, gated=acts.both or i % 2 == 0, biases=i % 3 != 1)
        dense, exact = layer.dense(), layer.exact()
        for how in ({}, {"path": "dense"}, {"path": "hot_cold", "hot": 256}, {"tile": 64, "words": 8}):
            y = layer.infer(**how)
            ratio, row = accuracy.worst_row(y, dense, exact)
            assert ratio <= 1.0, (tokens, how, row, ratio)
            assert torch.equal(y, layer.infer(**how)), (tokens, how)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("acts", KINDS, ids=str)
def test_rows_that_are_not_finite_follow_the_dense_layer(acts, gated, dtype):
    if acts.both and not gated:
        pytest.skip("two ReLUs are for gated layers")
    for d_ff, tokens in ((333, 1), (333, 8), (5, 40), (333, 100), (5, 100)):
        layer = Layer(acts, tokens, 256, d_ff, dtype, gated=gated)
        layer.x[0, 3] = torch.nan
        if tokens > 1:
            layer.x[1, 0], layer.x[4, 5], layer.x[tokens - 1, -1] = torch.inf, -torch.inf, torch.inf
        y, dense, finite = layer.infer(), layer.dense(), layer.x.isfinite().all(1)
        assert torch.equal(y.isnan(), dense.isnan()), (d_ff, tokens)
        if finite.any():
            assert accuracy.worst_row(y[finite], dense[finite], layer.exact()[finite])[0] <= 1.0


@pytest.mark.parametrize("kind", ["silu", "gelu", "gelu_tanh"])
def test_a_gate_that_overflows_to_minus_infinity_is_silent(kind):
    for tokens in (1, 20, 100):
        layer = Layer(Activation(kind, 0.2), tokens, 256, 300, torch.float16)
        layer.x[0], layer.gate[17] = 1.0, -6e4
        y, rest = layer.infer(), layer.keeps()[0]
        assert y[0].isfinite().all() and not rest[17]


LAYERS = {
    "silu": lambda: (GatedFeedForward, ThresholdedActivation(nn.SiLU(), 0.3)),
    "plain gelu": lambda: (PlainFeedForward, ThresholdedActivation(F.gelu, 0.3)),
    "threshold": lambda: (GatedFeedForward, nn.Threshold(1.0, 0.0)),
}


@pytest.mark.parametrize("name", LAYERS)
@torch.no_grad()
def test_a_layer_eager_in_a_graph_and_compiled(name):
    kind, act = LAYERS[name]()
    dense = kind(256, 1024).cuda().bfloat16()
    dense.act_fn = act
    with torch.no_grad():  # gates of few bits, as above
        first = getattr(dense, "gate_proj", dense.up_proj).weight
        first.copy_(torch.randint(-8, 9, first.shape) / 64)
    for tokens in (1, 16, 70):
        x = (torch.randint(-4, 5, (tokens, 256), device="cuda") / 4).bfloat16()
        sparse = SparseFFN.from_module(copy.deepcopy(dense), plan=Choice("twell"))
        assert not sparse.dense_alone
        y = sparse(x)
        assert accuracy.worst_row(y, dense(x), copy.deepcopy(dense).double()(x.double()))[0] <= 1.0
        assert torch.equal(torch.compile(sparse, fullgraph=True)(x), y)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            again = sparse(x)
        graph.replay()
        assert torch.equal(again, y) and torch.equal(sparse(x), y)
