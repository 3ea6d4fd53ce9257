"""The decode kernels in the simulator, with C++ in the place of their PTX: every activation, beside float64."""

import struct

import pytest
import torch
from torch.nn.functional import linear

from tests.simulator.without_ptx import without_ptx
from twell_lab import simulator
from twell_lab.cuda import macros, sources
from twell_lab.ops import accuracy
from twell_lab.ops.activation import RELU, Activation

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
FILE = "sm80_decode.cu"
KINDS = [
    RELU,
    Activation("above", 0.5),
    Activation("silu", 0.3),
    Activation("gelu", 0.3),
    Activation("gelu_tanh", 0.3),
    Activation(both=True),
]


@pytest.fixture(scope="module")
def source():
    return without_ptx(FILE)


def decode(source, version, acts, x, gate, up, down, gate_bias, up_bias, down_bias):
    """What ops.decode.decode launches on an H100: y, and how many values were kept."""
    (tokens, d_model), d_ff = x.shape, len(up)
    rows = macros.decode_tokens(tokens)
    defines, shared = macros.decode(x.dtype, d_model, rows, macros.decode_shape(rows, d_ff, (9, 0), 132), acts.macros)
    number = lambda name: sources.number(FILE, name, defines)  # noqa: E731
    band, program = number("BAND"), simulator.compile(source, dict(defines))
    bands = -(-d_ff // band)
    masks, values = torch.full((tokens, bands), -1, dtype=torch.int16), torch.full((tokens, bands * band), torch.nan)
    y, stats = torch.full_like(x, torch.nan), torch.zeros(4, dtype=torch.int64)
    hidden, down_t = struct.pack("<QQ", masks.data_ptr(), values.data_ptr()), down.t().contiguous()
    first = (up, up_bias, None) if gate is None else (gate, gate_bias, up)
    given = (x, *first, up_bias, down_t, hidden, stats, tokens, d_ff, acts.bound(x.dtype))
    neurons, threads = (band * number("BANDS"), number("THREADS")) if version == 2 else (band, band * 32)
    # Unwatched: the addresses in the structure are those of no array that the simulator knows.
    how = {"watch": None, "shared_bytes": shared if version == 2 else 0}
    program.launch(f"decode_gate_v{version}", -(-d_ff // neurons), threads, given, **how)
    grid = -(-d_model // number("DOWN_COLUMNS")), tokens
    program.launch("decode_down", grid, number("DOWN_THREADS"), (hidden, down_t, down_bias, y, bands), watch=None)
    assert stats[0] == tokens and not stats[2:].any()
    return y, int(stats[1])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens, d_ff, d_model", [(1, 333, 264), (3, 37, 72), (12, 50, 64), (40, 70, 64)])
@pytest.mark.parametrize("acts", KINDS, ids=str)
def test_decode(source, acts, tokens, d_ff, d_model, gated):
    """Who fires is decided by the gate as it is rounded, in the reference, too."""
    if acts.both and not gated:
        pytest.skip("two ReLUs are for gated layers")
    dtype = torch.float16 if tokens == 12 else torch.bfloat16
    torch.manual_seed(tokens)
    new = lambda *shape, by=1.0: (torch.randn(*shape) / by).to(dtype)  # noqa: E731
    x, up, down = new(tokens, d_model), new(d_ff, d_model, by=d_model**0.5), new(d_model, d_ff, by=d_ff**0.5)
    gate, gate_bias = (new(d_ff, d_model, by=d_model**0.5), new(d_ff, by=2)) if gated else (None, None)
    up_bias, down_bias = (new(d_ff, by=2), new(d_model)) if tokens != 3 else (None, None)
    if tokens > 1:
        x[1, 5], x[2, 1] = torch.inf, torch.nan
    layer = (x, gate, up, down, gate_bias, up_bias, down_bias)

    def computed(x, gate, up, down, gate_bias, up_bias, down_bias, activated):
        first = linear(x, up if gate is None else gate, up_bias if gate is None else gate_bias)
        h = activated(first) if gate is None else activated(first) * acts.of_up(linear(x, up, up_bias))
        return first, linear(h, down, down_bias)

    first, dense = computed(*layer, acts.dense)
    keep = acts.keeps(first)
    wide = (None if t is None else t.double() for t in layer)
    exact = computed(*wide, lambda first: torch.where(keep, acts.value(first), 0.0))[1]
    finite = x.isfinite().all(1)
    for version in (1, 2):
        y, kept = decode(source, version, acts, *layer)
        assert accuracy.worst_row(y[finite], dense[finite], exact[finite])[0] <= 1.0
        assert torch.equal(y.isnan(), dense.isnan())
        if finite.all():
            assert kept == keep.sum()
