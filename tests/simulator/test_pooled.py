"""The kernels that take their overflow from the pool, run on the CPU, against the reference in float64.

Outputs are poisoned: a row of y that a kernel forgets, or one that it must leave alone, is seen.
"""

import pytest
import torch

from tests.simulator import cases
from tests.simulator.pooled_cases import Pooled, adversarial, bits, gate_of
from twell_lab import simulator
from twell_lab.core import InputError
from twell_lab.formats import TwELL, packed_and_pool
from twell_lab.ops import portable

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
DTYPES = [torch.bfloat16, torch.float16]
VERSIONS = {"gated": (5, 6, 7), "down": (4, 5)}
KERNELS = {
    "gated": {5: ["gated_v5"], 6: ["gated_v6"], 7: ["up_v1", "down_v6"]},
    "down": {4: ["down_v4"], 5: ["down_v5"]},
}
EVERY = [(name, version) for name, versions in VERSIONS.items() for version in versions]


@pytest.fixture(autouse=True, scope="module")
def poisoned():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name, version", EVERY)
@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 300])
def test_adversarial_rows(tokens, name, version, dtype):
    """No overflow, a pool that holds it, one that does not; a narrow last tile; rows of x that are not finite."""
    layer = Pooled.draw(adversarial(tokens, 600, dtype), 264, biases=tokens % 2 == 1, start=tokens > 15)
    if tokens == 300:
        x = layer.x
        x[5, 3], x[48, 0], x[33, 9], x[20, 1], x[29, 263] = torch.nan, torch.inf, -torch.inf, torch.inf, torch.nan
    layer.check(name, version)
    if tokens == 300:
        lost = set(layer.expected_lost.nonzero()[:, 0].tolist())
        assert {32, 33, 23, 31} <= lost and not {0, 2, 14, 16, 22, 34, 48, 299} & lost


@pytest.mark.parametrize("name, version", EVERY)
@pytest.mark.parametrize("most", [0, 90, 300, 600])
def test_rows_with_more_than_so_many_values_are_lost(most, name, version):
    """At the limit and one beyond it, with overflow and without."""
    gate = gate_of(40, 600, torch.bfloat16, 0.02).clamp(max=0)
    for row, count in enumerate((0, 1, 89, 90, 91, 92)):
        gate[row, torch.arange(count) * 600 // max(1, count)] = 1.0
    gate[20, :90], gate[37, 40:131], gate[38] = 1.0, 1.0, 1.0
    layer = Pooled.draw(gate, 264)
    layer.check(name, version, most)
    counts = {0: 0, 1: 1, 2: 89, 3: 90, 4: 91, 5: 92, 20: 90, 37: 91}
    beyond = {row for row, count in counts.items() if count > most}
    assert set(layer.expected_lost.nonzero()[:, 0].tolist()) == beyond | {38}  # whose tiles the pool cannot hold


@pytest.mark.parametrize("name, version", EVERY)
@pytest.mark.parametrize("biases, start", [(False, False), (True, False), (False, True), (True, True)])
def test_bias_and_start(biases, start, name, version):
    layer = Pooled.draw(adversarial(35, 300, torch.bfloat16), 1032, biases, start)
    y = layer.check(name, version)
    if start:
        layer.start = layer.start + 2.0
        assert not torch.equal(layer.run(name, version).nan_to_num(), y.nan_to_num())


@pytest.mark.parametrize("name, version", EVERY)
def test_more_tiles_than_lanes(name, version):
    gate = gate_of(18, 256 * 34 + 8, torch.bfloat16, 0.01)
    gate[3, 256 * 33 : 256 * 33 + 50] = 1.0
    gate[4, 256 * 33 : 256 * 33 + 47] = 1.0
    gate[5, 256 * 33 : 256 * 33 + 40] = 1.0  # 19 + 16 of 64 words are taken
    gate[6, 256 * 33 : 256 * 33 + 60] = 1.0
    gate[7, -4:] = 1.0
    layer = Pooled.draw(gate, 8)
    layer.check(name, version)
    assert layer.expected_lost.nonzero()[:, 0].tolist() == [6]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_infinite_row_of_which_every_column_is_kept(dtype):
    """As in the dense layer: there is no silent neuron whose zero would make it NaN."""
    gate = torch.full((3, 48), 1.0).to(dtype)
    gate[1, 5] = -1.0
    layer = Pooled.draw(gate, 264)
    layer.up, layer.down_t = layer.up.abs(), layer.down_t.abs()
    layer.x[:] = layer.x.abs()
    layer.x[:2, 0] = torch.inf
    for version in VERSIONS["gated"]:
        y = layer.run("gated", version)
        assert layer.lost[0] == 0
        assert y[0].isposinf().all() and y[1].isnan().all() and y[2].isfinite().all(), version


@pytest.mark.parametrize("name", ["gated", "down"])
def test_the_bits_are_those_of_tiles_with_a_slot_for_every_column(name):
    """So nothing depends on where a value lies, on other rows or on the launch; and the versions without teams
    agree."""
    layer = Pooled.draw(adversarial(35, 520, torch.bfloat16), 1032, biases=True)
    wide = TwELL.from_gate(layer.gate, 256, 257).packed
    if name == "gated":
        expected = portable.gated(
            layer.x, wide, None, cases.NO_TAIL, layer.up, layer.down_t, layer.up_bias, layer.down_bias, 256, 3
        )
    else:
        expected = portable.down(wide, None, cases.NO_TAIL, layer.down_t, layer.down_bias, 520, 256, 2)
    for version in {"gated": (5, 7), "down": (4,)}[name]:
        y = layer.run(name, version)
        kept = ~layer.expected_lost
        assert 0 < kept.sum() < 35 and torch.equal(bits(y[kept]), bits(expected[kept])), version


@pytest.mark.parametrize("name, version", EVERY)
def test_a_row_does_not_depend_on_its_neighbours(name, version):
    gate = adversarial(48, 520, torch.bfloat16)
    layer = Pooled.draw(gate, 264, biases=True, start=True)
    y, lost = layer.run(name, version), layer.expected_lost
    for row in (2, 14, 22, 34):
        alone = Pooled(
            *(t[row : row + 1] for t in (layer.x, gate)),
            *(layer.up, layer.down_t, layer.up_bias, layer.down_bias),
            layer.start[row : row + 1],
        )
        assert not lost[row] and torch.equal(bits(alone.run(name, version)[0]), bits(y[row]))


def test_no_fault_and_which_kernels_run():
    for d_model in (264, 1032):
        layer = Pooled.draw(adversarial(36, 520, torch.bfloat16), d_model, biases=True, start=True)
        layer.x[1, 3], layer.x[32, 0] = torch.nan, torch.inf
        for name, version in EVERY:
            with simulator.watching("faults") as runs:
                layer.check(name, version)
            assert [run.kernel for run in runs] == KERNELS[name][version]


def test_stats_and_the_list_are_wanted_or_not():
    layer = Pooled.draw(gate_of(17, 300, torch.bfloat16), 264)
    for name, version in EVERY:
        y = layer.check(name, version)
        assert torch.equal(bits(layer.run(name, version, stats=False)), bits(y))


def test_two_passes_over_more_rows_than_the_workspace_takes(monkeypatch):
    layer = Pooled.draw(adversarial(60, 520, torch.bfloat16), 264, biases=True, start=True)
    y = layer.check("gated", 7)
    monkeypatch.setattr(portable, "_TWO_PASS_ROWS", 16)
    with simulator.watching("faults") as runs:
        assert torch.equal(bits(layer.check("gated", 7)), bits(y))
    assert [run.kernel for run in runs] == ["up_v1", "down_v6"] * 4


def test_the_default_version_and_no_tokens():
    layer = Pooled.draw(gate_of(5, 300, torch.bfloat16), 264)
    with simulator.watching(None) as runs:
        assert layer.run("gated", None).isfinite().all() and layer.run("down", None).isfinite().all()
        none = Pooled(layer.x[:0], layer.gate[:0], layer.up, layer.down_t, None, None, None)
        x, packed, pool = none.x, torch.empty(0, 2, 32, dtype=torch.int32), torch.empty(0, 2, 64, dtype=torch.int32)
        assert portable.down_pooled(x, packed, pool, none.down_t, None, None, layer.lost, x, None).shape == (0, 264)
    assert [run.kernel for run in runs] == ["up_v1", "down_v6", "down_v4"]


def test_what_is_refused():
    layer = Pooled.draw(gate_of(17, 300, torch.bfloat16), 264)
    packed, pool, _ = packed_and_pool(layer.gate)
    lost = torch.zeros(18, dtype=torch.int32)

    def down(x=layer.x, packed=packed, pool=pool, down_t=layer.down_t, version=None, lost=lost):
        return portable.down_pooled(x, packed, pool, down_t, None, None, lost, x, None, version)

    assert portable.pooled_takes(torch.bfloat16, 264) and not portable.pooled_takes(torch.bfloat16, 12)
    with pytest.raises(InputError, match="16-bit values"):
        down(x=layer.x.float(), down_t=layer.down_t.float())
    with pytest.raises(InputError, match=r"pool is \[1, 2, 64\]"):
        down(pool=pool[:1])
    with pytest.raises(InputError, match=r"packed is \[17, 1, 32\]"):
        down(packed=packed[:, :1])
    with pytest.raises(InputError, match="version is 2; 4, 5"):
        down(version=2)
    for short in (lost[:17], None):
        with pytest.raises(InputError, match=r"lost and lost_x are for 17 rows: int32 \[18\]"):
            down(lost=short)
    shifted = torch.cat([layer.x.new_zeros(1), layer.x.reshape(-1)])[1:].view(layer.x.shape)
    with pytest.raises(InputError, match="multiple of 16 bytes"):
        down(x=shifted)
