"""The kernels that take their overflow from the pool, run on the CPU, against the reference in float64.

Outputs are poisoned: a row of y that a kernel forgets, or one that it must leave alone, is seen.
"""

import dataclasses

import pytest
import torch
from torch import Tensor
from torch.nn.functional import linear

from tests.simulator import cases
from twell_lab import accuracy, launch, reference, simulator
from twell_lab.errors import InputError
from twell_lab.formats import POOL_ROWS, TwELL
from twell_lab.pool import packed_and_pool

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
DTYPES = [torch.bfloat16, torch.float16]
VERSIONS = {"gated": (5, 6, 7), "down": (4, 5)}
KERNELS = {"gated": {5: ["gated_v5"], 6: ["gated_v6"], 7: ["up_v1", "down_v6"]}, "down": {4: ["down_v4"], 5: ["down_v5"]}}
EVERY = [(name, version) for name, versions in VERSIONS.items() for version in versions]
STATS = [50, 60, 70, 80]  # what stats holds before a launch
POISON = 12345


@pytest.fixture(autouse=True, scope="module")
def poisoned():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


@dataclasses.dataclass
class Pooled:
    """A layer, its gate with a pool, and what a launch wrote."""

    x: Tensor
    gate: Tensor
    up: Tensor
    down_t: Tensor
    up_bias: Tensor | None
    down_bias: Tensor | None
    start: Tensor | None

    @classmethod
    def draw(cls, gate: Tensor, d_model: int, biases: bool = False, start: bool = False, seed: int = 0):
        generator = torch.Generator().manual_seed(d_model + gate.shape[1] + seed)
        normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
        (tokens, d_ff), dtype = gate.shape, gate.dtype
        x, up, down_t = normal(tokens, d_model), normal(d_ff, d_model) / d_model**0.5, normal(d_ff, d_model) / d_ff**0.5
        both = (normal(d_ff).to(dtype), normal(d_model).to(dtype)) if biases else (None, None)
        return cls(x.to(dtype), gate, up.to(dtype), down_t.to(dtype), *both, normal(tokens, d_model) if start else None)

    def run(self, name: str, version: int, stats: bool = True) -> Tensor:
        """y; self.lost, self.lost_x, self.stats: what was handed on and counted."""
        tokens = len(self.x)
        packed, pool, self.expected_lost = packed_and_pool(self.gate)
        counts = packed[..., 0]
        self.kept, self.over = counts.sum().item(), (counts > 31).any(1)
        unread = torch.arange(31) >= counts[..., None]
        packed[..., 1:][unread] = POISON  # nobody may read these, nor what lies past the pool's end
        used = (counts - 31).clamp(min=0)
        used = torch.cat([used, used.new_zeros(-tokens % POOL_ROWS, used.shape[1])]).view(-1, POOL_ROWS, used.shape[1]).sum(1)
        pool[torch.arange(64) >= used[..., None]] = POISON
        self.lost = torch.full((1 + tokens,), POISON, dtype=torch.int32)
        self.lost[0] = 0
        self.lost_x = torch.full_like(self.x, POISON)
        self.stats = torch.tensor(STATS) if stats else None
        rest = (self.start, self.lost, self.lost_x, self.stats, version)
        if name == "down":
            return launch.down_pooled(self.x, packed, pool, self.down_t, self.down_bias, *rest)
        return launch.gated_pooled(self.x, packed, pool, self.up, self.down_t, self.up_bias, self.down_bias, *rest)

    def exact_and_dense(self, name: str) -> tuple[Tensor, Tensor]:
        wide = lambda t: None if t is None else t.double()  # noqa: E731
        active, act = reference.relu(self.gate.double()), torch.relu(self.gate)
        if name == "gated":
            active = active * linear(self.x.double(), wide(self.up), wide(self.up_bias))
            act = act * linear(self.x, self.up, self.up_bias)
        exact = linear(active, wide(self.down_t).t(), wide(self.down_bias))
        dense = linear(act, self.down_t.t(), self.down_bias)
        if self.start is None:
            return exact, dense
        return exact + self.start.double(), (dense.float() + self.start).to(dense.dtype)

    def check(self, name: str, version: int) -> Tensor:
        """Run it; y, the list of lost rows and the counts are as they must be. Returns y."""
        y = self.run(name, version)
        lost, count = self.expected_lost, int(self.expected_lost.sum())
        rows = self.lost[1 : 1 + count].long()
        assert self.lost[0] == count and sorted(rows.tolist()) == lost.nonzero()[:, 0].tolist()
        assert (self.lost[1 + count :] == POISON).all()
        assert torch.equal(cases.bits(self.lost_x[:count]), cases.bits(self.x[rows]))
        assert (self.lost_x[count:] == torch.tensor(POISON, dtype=self.x.dtype)).all()
        pooled = int((self.over & ~lost).sum())
        assert self.stats.tolist() == [STATS[0] + len(y), STATS[1] + self.kept, STATS[2] + pooled, STATS[3] + count]
        assert y[lost].isnan().all()  # torch's poison
        exact, dense = (t[~lost] for t in self.exact_and_dense(name))
        if name == "gated":
            spoilt = ~self.x.isfinite().all(1) & (self.gate <= 0).any(1)
            assert y[spoilt & ~lost].isnan().all()
            keep = ~spoilt[~lost]
            exact, dense = exact[keep], dense[keep]
            got = y[~lost][keep]
        else:
            got = y[~lost]
        assert len(got) == 0 or accuracy.worst_row(got, dense, exact)[0] <= 1.0, (name, version)
        return y


def gate_of(tokens: int, d_ff: int, dtype: torch.dtype, rate: float = 0.05, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(tokens + d_ff + seed)
    keep = torch.rand(tokens, d_ff, generator=generator) < rate
    value = torch.randn(tokens, d_ff, generator=generator).abs() + 1e-3
    return torch.where(keep, value, -value).to(dtype)


def adversarial(tokens: int, d_ff: int, dtype: torch.dtype) -> Tensor:
    """Rows with one full tile, one over, 40 in a tile, several tiles over, all, none: in groups that fit and that do not."""
    gate = gate_of(tokens, d_ff, dtype)

    def put(row: int, tile: int, count: int) -> None:
        if row < tokens and tile * 256 < d_ff:
            part = gate[row, tile * 256 : (tile + 1) * 256]
            part.copy_(-part.abs())
            part[-count:] = part[-count:].abs()

    put(0, 0, 40), put(1, 0, 31), put(2, 0, 32), put(2, 1, 45), put(3, 0, 33), put(14, 1, 63)
    for row in range(16, 32):
        put(row, 0, 40)  # 64 / 9: seven of them fit
    gate[32:34] = 1.0
    put(34, 0, 30)  # behind a lost row, with no need of the pool
    gate[48:49], gate[49:50] = -1.0, -0.0
    put(299, d_ff // 256, 45)
    return gate


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
    """So nothing depends on where a value lies, on other rows or on the launch; and the versions without teams agree."""
    layer = Pooled.draw(adversarial(35, 520, torch.bfloat16), 1032, biases=True)
    wide = TwELL.from_gate(layer.gate, 256, 257).packed
    if name == "gated":
        expected = launch.gated(layer.x, wide, None, cases.NO_TAIL, layer.up, layer.down_t, layer.up_bias, layer.down_bias, 256, 3)
    else:
        expected = launch.down(wide, None, cases.NO_TAIL, layer.down_t, layer.down_bias, 520, 256, 2)
    for version in {"gated": (5, 7), "down": (4,)}[name]:
        y = layer.run(name, version)
        kept = ~layer.expected_lost
        assert 0 < kept.sum() < 35 and torch.equal(cases.bits(y[kept]), cases.bits(expected[kept])), version


@pytest.mark.parametrize("name, version", EVERY)
def test_a_row_does_not_depend_on_its_neighbours(name, version):
    gate = adversarial(48, 520, torch.bfloat16)
    layer = Pooled.draw(gate, 264, biases=True, start=True)
    y, lost = layer.run(name, version), layer.expected_lost
    for row in (2, 14, 22, 34):
        alone = Pooled(*(t[row : row + 1] for t in (layer.x, gate)), *(layer.up, layer.down_t, layer.up_bias, layer.down_bias),
                       layer.start[row : row + 1])  # fmt: skip
        assert not lost[row] and torch.equal(cases.bits(alone.run(name, version)[0]), cases.bits(y[row]))


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
        assert torch.equal(cases.bits(layer.run(name, version, stats=False)), cases.bits(y))


def test_the_default_version_and_no_tokens():
    layer = Pooled.draw(gate_of(5, 300, torch.bfloat16), 264)
    with simulator.watching(None) as runs:
        assert layer.run("gated", None).isfinite().all() and layer.run("down", None).isfinite().all()
        none = Pooled(layer.x[:0], layer.gate[:0], layer.up, layer.down_t, None, None, None)
        x, packed, pool = none.x, torch.empty(0, 2, 32, dtype=torch.int32), torch.empty(0, 2, 64, dtype=torch.int32)
        assert launch.down_pooled(x, packed, pool, none.down_t, None, None, layer.lost, x, None).shape == (0, 264)
    assert [run.kernel for run in runs] == ["up_v1", "down_v6", "down_v4"]


def test_what_is_refused():
    layer = Pooled.draw(gate_of(17, 300, torch.bfloat16), 264)
    packed, pool, _ = packed_and_pool(layer.gate)
    lost = torch.zeros(18, dtype=torch.int32)

    def down(x=layer.x, packed=packed, pool=pool, down_t=layer.down_t, version=None):
        return launch.down_pooled(x, packed, pool, down_t, None, None, lost, x, None, version)

    assert launch.pooled_takes(torch.bfloat16, 264) and not launch.pooled_takes(torch.bfloat16, 12)
    with pytest.raises(InputError, match="16-bit values"):
        down(x=layer.x.float(), down_t=layer.down_t.float())
    with pytest.raises(InputError, match=r"pool is \[1, 2, 64\]"):
        down(pool=pool[:1])
    with pytest.raises(InputError, match=r"packed is \[17, 1, 32\]"):
        down(packed=packed[:, :1])
    with pytest.raises(InputError, match="version is 2; 4, 5"):
        down(version=2)
    shifted = torch.cat([layer.x.new_zeros(1), layer.x.reshape(-1)])[1:].view(layer.x.shape)
    with pytest.raises(InputError, match="16 bytes at a time"):
        down(x=shifted)
