"""The decode kernels: 1 to 64 tokens, beside torch's dense layer and float64."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from torch.nn.functional import linear

from twell_lab import formats
from twell_lab.ops import accuracy, reference
from twell_lab.ops import decode as launch_decode

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16]
SHAPES = [(2048, 5632), (768, 3072), (64, 333), (2056, 1000), (8, 5)]
WIDE = [(1024, 4096, False), (2048, 8192, False), (3584, 18944, True), (4096, 14336, True), (5120, 13824, True)]


@pytest.fixture(autouse=True)
def poisoned():
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip(f"the decode kernels need sm_80; this is {torch.cuda.get_device_name()}")
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


class Layer:
    """A layer whose neurons fire as `pattern` says, and inputs [tokens, d_model] for it."""

    def __init__(self, tokens, d_model, d_ff, dtype, *, gated=True, biases=True, pattern="sparse", seed=0):
        generator = torch.Generator("cuda").manual_seed(seed + 7919 * tokens + d_model + d_ff)
        normal = lambda *shape: torch.randn(*shape, generator=generator, device="cuda")  # noqa: E731
        self.x = normal(tokens, d_model).to(dtype)
        self.gate, self.up = ((normal(d_ff, d_model) / d_model**0.5).to(dtype) for _ in range(2))
        self.down = (normal(d_model, d_ff) / d_ff**0.5).to(dtype)
        self.down_t = self.down.t().contiguous()
        self.up_bias, self.down_bias = (normal(d_ff).to(dtype), normal(d_model).to(dtype)) if biases else (None, None)
        shift = {"sparse": -2.2, "half": 0.0, "silent": -60.0, "all": 60.0}[pattern]
        self.gate_bias = torch.full((d_ff,), shift, device="cuda", dtype=dtype) if gated else None
        if not gated:
            self.gate, self.up_bias = None, torch.full((d_ff,), shift, device="cuda", dtype=dtype)

    def decode(self, version=None, stats=None):
        extra = {} if version is None else {"version": version}
        biases = (self.gate_bias, self.up_bias, self.down_bias)
        return launch_decode.decode(self.x, self.gate, self.up, self.down_t, *biases, stats, **extra)

    def first(self):
        """What decides who fires, before the ReLU, as torch computes it."""
        return linear(self.x, self.up, self.up_bias) if self.gate is None else linear(self.x, self.gate, self.gate_bias)

    def dense(self):
        hidden = torch.relu(self.first())
        return linear(
            hidden if self.gate is None else hidden * linear(self.x, self.up, self.up_bias), self.down, self.down_bias
        )

    def exact(self):
        wide = [
            None if t is None else t.double()
            for t in (self.x, self.gate, self.up, self.down, self.gate_bias, self.up_bias, self.down_bias)
        ]
        x, gate, up, down, gate_bias, up_bias, down_bias = wide
        if gate is None:
            return reference.plain_ffn(x, up, down, up_bias, down_bias)
        return reference.gated_ffn(x, gate, up, down, gate_bias, up_bias, down_bias)


def same_bits(a, b):
    return torch.equal(a.view(torch.int16), b.view(torch.int16))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("pattern", ["sparse", "half", "silent", "all"])
@pytest.mark.parametrize("d_model, d_ff", SHAPES)
def test_it_keeps_the_error_promise(d_model, d_ff, pattern, dtype):
    for i, tokens in enumerate((1, 2, 7, 8, 9, 16, 31, 64)):
        layer = Layer(tokens, d_model, d_ff, dtype, gated=i % 3 != 1, biases=i % 2 == 0, pattern=pattern)
        assert launch_decode.takes(layer.x, layer.up)
        dense, exact = layer.dense(), layer.exact()
        for version in launch_decode.VERSIONS:
            y = layer.decode(version)
            ratio, row = accuracy.worst_row(y, dense, exact)
            assert ratio <= 1.0, (tokens, version, row, ratio)
            assert same_bits(y, layer.decode(version)), (tokens, version)


@pytest.mark.parametrize("d_model, d_ff, gated", WIDE)
def test_wide_layers(d_model, d_ff, gated):
    for tokens in (1, 5, 16, 20, 64):
        layer = Layer(tokens, d_model, d_ff, torch.bfloat16, gated=gated)
        ratio, row = accuracy.worst_row(layer.decode(), layer.dense(), layer.exact())
        assert ratio <= 1.0, (tokens, row, ratio)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("pattern", ["sparse", "all"])
def test_rows_that_are_not_finite_follow_the_dense_layer(pattern, gated, dtype):
    for tokens in (1, 8, 16, 40):
        layer = Layer(tokens, 256, 333, dtype, gated=gated, pattern=pattern)
        layer.x[0, 3] = torch.nan
        if tokens > 1:
            layer.x[1, 0], layer.x[4, 5], layer.x[tokens - 1, -1] = torch.inf, -torch.inf, torch.inf
        exact = layer.exact()
        finite = layer.x.isfinite().all(1)
        for version in launch_decode.VERSIONS:
            y = layer.decode(version)
            assert torch.equal(y.isnan(), exact.isnan()), (tokens, version)
            if finite.any():
                assert accuracy.worst_row(y[finite], layer.dense()[finite], exact[finite])[0] <= 1.0


def test_a_row_not_finite_where_every_neuron_fires_is_not_spoilt():
    """No silent neuron: nothing is multiplied by zero, so the dense layer's infinities stay as they are."""
    one = torch.ones(1, 8, device="cuda", dtype=torch.bfloat16)
    weights = torch.ones(5, 8, device="cuda", dtype=torch.bfloat16)
    one[0, 2] = torch.inf
    for version in launch_decode.VERSIONS:
        assert (launch_decode.decode(one, weights, weights, weights, version=version) == torch.inf).all()


def test_an_fp16_overflow_in_a_silent_neuron_does_no_harm():
    layer = Layer(4, 256, 300, torch.float16, biases=False)
    layer.x.abs_()
    layer.up[17], layer.gate_bias[17] = 6e4, -6e4
    y, exact = layer.decode(), layer.exact()
    assert y.isfinite().all() and (y.double() - exact).norm() / exact.norm() < 1e-3


def test_what_it_counts():
    for tokens, pattern in ((1, "sparse"), (16, "sparse"), (50, "half"), (3, "all"), (8, "silent")):
        layer = Layer(tokens, 512, 1001, torch.bfloat16, pattern=pattern)
        x, gate, bias = (t.double() for t in (layer.x, layer.gate, layer.gate_bias))
        kept = int(formats.fires(linear(x, gate, bias)).sum())  # torch may round before it adds the bias
        for version in launch_decode.VERSIONS:
            stats = torch.tensor([5, 7, 9, 11], device="cuda")
            layer.decode(version, stats)
            found = stats.tolist()
            assert found[0] == 5 + tokens and found[2:] == [9, 11]
            assert abs(found[1] - 7 - kept) <= 1 + kept // 500  # fp32 sums may move a value across zero


def test_in_a_graph_on_a_side_stream_and_after_a_change_of_input():
    layer = Layer(3, 2048, 5632, torch.bfloat16)
    layer.decode()
    stream = torch.cuda.Stream()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        with torch.cuda.graph(graph, stream=stream):
            y = layer.decode()
        for seed in range(3):
            layer.x.copy_(Layer(3, 2048, 5632, torch.bfloat16, seed=seed).x)
            graph.replay()
            assert same_bits(y, layer.decode())


def test_in_threads_of_their_own():
    layers = [Layer(5, 768, 3072, torch.bfloat16, seed=seed) for seed in range(4)]
    expected = [layer.decode() for layer in layers]
    torch.cuda.synchronize()

    def repeated(layer):
        return [layer.decode() for _ in range(50)]

    with ThreadPoolExecutor(4) as pool:
        for results, first in zip(pool.map(repeated, layers), expected):
            assert all(same_bits(y, first) for y in results)


def test_what_it_does_not_take():
    layer = Layer(4, 64, 333, torch.bfloat16)
    x, up = layer.x, layer.up
    assert launch_decode.takes(x, up)
    many = x.repeat(17, 1)
    assert (
        not launch_decode.takes(many[:65], up)
        and not launch_decode.takes(many[:0], up)
        and launch_decode.takes(many[:64], up)
    )
    assert not launch_decode.takes(x.float(), up.float()) and not launch_decode.takes(x.cpu(), up.cpu())
    assert not launch_decode.takes(x[:, :60].contiguous(), up[:, :60].contiguous())
    assert not launch_decode.takes(x[:, ::2], up[:, :32].contiguous())
    shifted = torch.cat([x.new_zeros(1), x.reshape(-1)])[1:].view(x.shape)
    assert not launch_decode.takes(shifted, up)
