"""Products of INT8 rows by one kernel: in the simulator with C++ in the place of its PTX, bit by bit beside steps that are
exact; which of them the kernel takes; and barriers and copies that are left out."""

import shutil

import pytest
import torch

from tests.simulator.without_ptx import without_ptx
from twell_lab import simulator
from twell_lab.core import InputError
from twell_lab.cuda import launcher, macros, registry
from twell_lab.ops import int8_products
from twell_lab.ops.int8_products import DTYPES, FILE, Weight, takes, tile_for

from . import cases

AMPERE, HOPPER, ADA = (8, 0), (9, 0), (8, 9)
simulated_only = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def source():
    return without_ptx(FILE)


def simulated(source, x, scale, weights, dtype, tile, version, capability=AMPERE, tokens=None):
    """What ops.int8_products launches; memory behind y is not to be written."""
    tokens, out = len(x) if tokens is None else tokens, len(weights[0].values)
    memory = torch.full((tokens + 128, out), torch.nan, dtype=dtype)
    made = int8_products.launch(x, scale, weights, memory[:tokens], tile, capability, version)
    kernel = registry.find(FILE)
    assert (kernel, made.defines) in registry.builds(capability, DTYPES, [])
    entry = kernel.entries(made.defines)[made.entry]
    launcher.check_arguments(entry, made.arguments)
    program = simulator.compile(source, dict(made.defines))
    # Unwatched: shared memory is read through addresses of 32 bits, which the simulator does not know.
    program.launch(made.entry, made.grid, entry.threads, made.arguments, watch=None, shared_bytes=made.shared)
    assert memory[tokens:].isnan().all()
    return memory[:tokens]


# (tile, tokens, in, out, GPU): whole tiles and parts of them, fewer stages than there are and more, a last stage that is
# not full, and a last product of which only half is there.
SIZES = [
    ("few", 1, 16, 16, AMPERE),
    ("few", 16, 1200, 48, HOPPER),
    ("few", 20, 1072, 80, AMPERE),
    ("some", 70, 656, 112, HOPPER),
    ("some", 3, 48, 16, AMPERE),
    ("many", 130, 208, 272, HOPPER),
    ("many", 9, 464, 144, ADA),
]


@simulated_only
@pytest.mark.parametrize("version", [1, 2])
@pytest.mark.parametrize("at, size", list(enumerate(SIZES)))
def test_bit_for_bit(source, at, size, version):
    tile, tokens, inner, out, capability = size
    dtype = DTYPES[at % 2]
    x, scale = cases.rows(tokens, inner)
    w, up = cases.weight(out, inner, dtype, bias=at % 3 != 0), cases.weight(out, inner, dtype, 2, bias=at % 3 != 1)
    y = simulated(source, x, scale, (w,), dtype, tile, version, capability)
    assert cases.same(y, cases.product(x, scale, w, dtype)) and y[: tokens // 2 + 1].any()
    h = simulated(source, x, scale, (w, up), dtype, tile, version, capability)
    assert cases.same(h, cases.gate_up(x, scale, w, up, dtype)) and h.any()


@simulated_only
def test_rows_of_padding_are_not_computed_and_a_row_that_is_not_finite_is_nan(source):
    x, scale = cases.rows(24, 64)
    x[2], scale[2], x[4], scale[4] = 0, torch.inf, 0, torch.nan
    w, up = cases.weight(32, 64, torch.bfloat16), cases.weight(32, 64, torch.bfloat16, 2)
    y = simulated(source, x, scale, (w,), torch.bfloat16, "few", 2, tokens=7)
    assert y.isnan().all(1).tolist() == [False, False, True, False, True, False, False]
    assert cases.same(y, cases.product(x[:7], scale[:7], w, torch.bfloat16))
    h = simulated(source, x, scale, (w, up), torch.bfloat16, "few", 2, tokens=7)
    assert h.isnan().all(1).tolist() == [False, False, True, False, True, False, False]


@simulated_only
@pytest.mark.parametrize(
    "statement, by",
    [
        ("__syncthreads();", ""),
        ("const bool there = k_ < o_.in;", "const bool there = true;"),
        ("(x_at ^ k * 32)", "(x_at + k * 32)"),
        ("gate <= 0.0f ? 0.0f : gate", "gate"),
        ("rounded(value(1, 2 * j + b))", "value(1, 2 * j + b)"),
        ("if (token >= o.tokens) continue;", ""),
        ("left_((o.in + BK - 1) / BK)", "left_(o.in / BK)"),
    ],
)
def test_what_is_left_out_is_noticed(source, statement, by, tmp_path):
    """Mutants of v2. Beyond this are what waits for copies, which are made at once here, and reads past the end of x and W,
    whose sums are not stored: GPU tests and the sanitizers see these."""
    text = source.read_text()
    at = text.index("int8_v2") if statement == "__syncthreads();" else 0
    assert text[at:].count(statement) >= 1
    for file in source.parent.iterdir():
        shutil.copy(file, tmp_path)
    (tmp_path / FILE).write_text(text[:at] + text[at:].replace(statement, by))
    x, scale = cases.rows(21, 1072)
    w, up = cases.weight(48, 1072, torch.bfloat16), cases.weight(48, 1072, torch.bfloat16, 2)
    try:
        h = simulated(tmp_path / FILE, x, scale, (w, up), torch.bfloat16, "few", 2)
    except (AssertionError, simulator.Fault):
        return
    assert not cases.same(h, cases.gate_up(x, scale, w, up, torch.bfloat16))


@pytest.mark.parametrize("capability", [AMPERE, (8, 6), ADA, HOPPER, (12, 0)])
def test_shared_memory_fits(capability):
    for tile in macros.INT8_TILES:
        for gated in (False, True):
            defines, shared = macros.int8(torch.bfloat16, gated, tile, capability)
            assert 0 < shared <= macros._SHARED.get(capability, macros._LEAST_SHARED) * 1024
            assert dict(defines)["GATED"] == gated
    longer = dict(macros.int8(torch.bfloat16, False, "many", capability)[0])["BK"]
    assert longer == (128 if capability in (AMPERE, HOPPER) else 64)


def test_which_tile():
    assert [tile_for(tokens, 2048, 1, 132) for tokens in (1, 16, 17, 1024, 1153, 16384)] == [
        *("few",) * 2,
        *("some",) * 2,
        *("many",) * 2,
    ]
    assert tile_for(256, 5632, 2, 132) == "many" and tile_for(128, 5632, 2, 132) == "some"


def test_a_cpu_and_other_sizes_are_refused():
    x, scale = cases.rows(3, 32)
    w = cases.weight(16, 32, torch.bfloat16)
    assert not takes(x, w, torch.bfloat16)
    with pytest.raises(InputError, match="on cpu.*compute capability 8.0"):
        int8_products.product(x, scale, w, torch.bfloat16)
    with pytest.raises(InputError, match=r"up is \[32, 32\]; \[16, 32\], as the gate"):
        int8_products.gate_up(x, scale, w, cases.weight(32, 32, torch.bfloat16), torch.bfloat16)
    for given, said in (
        ((x[:0], scale[:0], w), "on cpu.*compute capability 8.0"),
        ((x[0, 0], scale, w), r"scale is .*\[3\].*; contiguous float32 \[\]"),
        ((x, scale[:2], w), r"scale is .*\[2\] on cpu; contiguous float32 \[3\]"),
        ((x, scale.double(), w), "scale is torch.float64"),
        ((x, scale, w._replace(values=w.values[0])), r"values are \[32\] on cpu; \[out, in\]"),
        ((x, scale, w._replace(values=w.values.to("meta"))), r"values are \[16, 32\] on meta"),
        ((x, scale, w._replace(scale=w.scale[:9])), r"scale is .*\[9\] on cpu; contiguous torch.float32 \[16\]"),
        ((x, scale, w._replace(scale=torch.ones(32)[::2])), "of the weight, scale is"),
        ((x, scale, w._replace(bias=torch.ones(16))), "bias is torch.float32.*; contiguous torch.bfloat16"),
        ((x, scale, w._replace(bias=torch.ones(8).bfloat16())), r"bias is .*\[8\]"),
    ):
        with pytest.raises(InputError, match=said):
            int8_products.product(*given, torch.bfloat16)
    y = torch.empty(3, 16, dtype=torch.bfloat16)
    for version, tile in ((3, "few"), (1, "more")):
        with pytest.raises(InputError, match="1, 2 and few, some, many are accepted"):
            int8_products.launch(x, scale, (Weight(w.values, w.scale),), y, tile, AMPERE, version)
