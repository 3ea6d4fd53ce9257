"""The row kernels of a training step on the GPU, at real sizes: against float64, twice with the same bits, in graphs.

Outputs are poisoned: torch fills what it allocates with NaN in deterministic mode, so a row that is forgotten is seen,
and a lost row that somebody writes."""

import pytest
import torch

from tests.ops.train_kernels.row_cases import (
    RowCase,
    adversarial,
    gate_of,
    most_light,
    poisoned_pack,
    same_bits,
    with_counts,
)
from twell_lab import simulator
from twell_lab.formats import packed_and_pool
from twell_lab.ops import train_rows

pytestmark = [pytest.mark.gpu, pytest.mark.usefixtures("poisoned")]
DTYPES = [torch.bfloat16, torch.float16]


def drawn(tokens: int, d_model: int, d_ff: int, dtype=torch.bfloat16, **more) -> RowCase:
    case = RowCase.draw(adversarial(tokens, d_ff, dtype).to("cuda"), d_model, **more)
    for row, gate, value in (
        (5, "nan", torch.nan),
        (21, "silent", -torch.inf),
        (30, "mixed", torch.inf),
        (130, "nan", torch.inf),
    ):
        if row < tokens:
            case.spoil(row, gate, value, column=-1 - row % 3)
    return case


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "tokens, d_model, d_ff", [(1, 8, 8), (300, 264, 600), (300, 2048, 5632), (70, 4096, 1100), (36, 1040, 65536)]
)
def test_adversarial_rows(tokens, d_model, d_ff, gated, dtype):
    case = drawn(tokens, d_model, d_ff, dtype, gated=gated, biases=d_model % 3 == 0)
    s = case.survivors()
    lost = case.check_survivors(s)
    for version in (1, 2):
        case.check_rows(s, lost, version)


@pytest.mark.parametrize("gated", [True, False])
def test_real_size_and_the_same_bits_again(gated):
    gate = gate_of(4096, 5632, torch.bfloat16, 0.008)
    gate[::50, 256:400] = gate[::50, 256:400].abs()  # every one past the pool
    gate[25::50, 600:640] = gate[25::50, 600:640].abs()
    case = RowCase.draw(gate.to("cuda"), 2048, gated=gated, biases=True)
    case.spoil(77, "silent")
    s = case.survivors()
    lost = case.check_survivors(s)
    assert 80 <= lost.sum() <= 90
    first, entries = case.check_rows(s, lost), int(s.kept[~lost].sum())
    for _ in range(3):
        again = case.survivors()
        assert torch.equal(again.spans, s.spans) and same_bits(again.l1, s.l1)
        assert same_bits(again.words[:entries], s.words[:entries])
        assert not gated or same_bits(again.ups[:entries], s.ups[:entries])
        y, dh, dx = case.check_rows(again, lost)
        assert same_bits(y, first[0]) and same_bits(dh[:entries], first[1][:entries]) and same_bits(dx, first[2])


def test_past_the_capacity_and_many_rounds_of_the_prefix_sum():
    case = RowCase.draw(gate_of(40_000, 264, torch.bfloat16, 0.05).to("cuda"), 64, capacity=450_000)
    s = case.survivors()
    lost = case.check_survivors(s)
    assert lost[-1] and not lost[0] and 1000 < lost.sum() < 39_000
    case.check_rows(s, lost)


MOST = most_light(torch.bfloat16, 2048)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("capacity", [None, 80_000])  # fewer than the rows have
@pytest.mark.parametrize("many", [0, 1, 97, 125])
def test_heavy_rows_are_shared(many, capacity, gated):
    counts = torch.randint(30, (2600,), generator=torch.Generator().manual_seed(many)) + 25
    counts[3::20] = MOST
    rows = range(8, 8 + 20 * many, 20)  # none shares its part of the pool with another
    counts[rows] = 1500
    counts[rows[-1:]] = MOST + 1
    case = RowCase.draw(with_counts(counts, 5632), 2048, gated=gated, capacity=capacity, biases=many == 97)
    case.gate[30] = 1.0  # which the pool cannot hold
    case.spoil(31, "nan")
    case = case.to("cuda")
    s = case.survivors()
    lost = case.check_survivors(s)
    found = set(lost.nonzero()[:, 0].tolist())
    assert found == {30, 31} if capacity is None else found > {30, 31} and lost[-1]
    assert capacity or s.lost[-1] == many
    same_again(case, s, lost, 3)


@pytest.mark.parametrize("heavy", [0, 1, 8, 64, 512])
def test_heavy_rows_of_the_benchmark(heavy):
    """As bench.inference.make_heavy: the same 1,500 neurons in rows spread evenly over 16,384, the first and the last
    among them, beside a mean of 29."""
    generator = torch.Generator("cuda").manual_seed(heavy)
    gate = torch.rand(16384, 5632, device="cuda", generator=generator) - (1 - 29 / 5632)
    rows = torch.linspace(0, 16383, heavy).long()
    neurons = torch.randperm(5632, generator=torch.Generator().manual_seed(heavy))[:1500]
    gate[rows[:, None], neurons] = gate[rows[:, None], neurons].abs()
    case = RowCase.draw(gate.mul(150).bfloat16(), 2048)
    del gate
    s = case.survivors()
    lost = case.check_survivors(s)
    assert lost.sum() == 0 and s.lost[-1] == heavy
    same_again(case, s, lost, 1)


def same_again(case, s, lost, times):
    """The row kernels on s are right, and all has the same bits when it is run again."""
    first, entries = case.check_rows(s, lost), int(s.kept[~lost].sum())
    for _ in range(times):
        again = case.survivors()
        assert torch.equal(again.spans, s.spans) and same_bits(again.words[:entries], s.words[:entries])
        assert torch.equal(again.lost[: 1 + int(lost.sum())], s.lost[: 1 + int(lost.sum())])
        assert same_bits(again.l1[~lost], s.l1[~lost])
        y, dh, dx = case.check_rows(again, lost)
        assert same_bits(y[~lost], first[0][~lost]) and same_bits(dx[~lost], first[2][~lost])
        assert same_bits(dh[:entries], first[1][:entries])


@pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
def test_the_simulator_has_the_same_bits(gated, dtype):
    for d_model in (264, 2048):
        there = drawn(40, d_model, 600, dtype, gated=gated, biases=gated)
        here = there.to("cpu")
        s, t = here.survivors(), there.survivors()
        lost = here.check_survivors(s)
        entries = int(s.kept[~lost].sum())
        made, made_there = (case.check_rows(part, case.expected_lost()) for case, part in ((here, s), (there, t)))
        assert torch.equal(s.spans, t.spans.cpu()) and same_bits(s.words[:entries], t.words[:entries].cpu())
        assert same_bits(s.l1[~lost], t.l1.cpu()[~lost]) and same_bits(made[1][:entries], made_there[1][:entries].cpu())
        assert all(same_bits(a[~lost], b.cpu()[~lost]) for a, b in zip(made[::2], made_there[::2]))


def test_in_a_graph():
    case = drawn(1000, 2048, 1100)
    s = case.survivors()
    y, dh, dx = case.check_rows(s, case.check_survivors(s))
    packed, pool, _ = packed_and_pool(case.gate)
    graph, lost = torch.cuda.CUDAGraph(), case.expected_lost()
    with torch.cuda.graph(graph):
        t = train_rows.survivors(case.x, packed, pool, case.up, case.up_bias, 1100)
        again = train_rows.weighted_rows(t, case.down_t, case.down_bias)
        gradient = train_rows.hidden_gradient(case.dy, t, case.down_t, case.dl1)
        into_x = train_rows.input_gradient(t, gradient, case.Wg, case.up)
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(t.spans, s.spans) and torch.equal(
            t.lost[: 1 + int(lost.sum())], s.lost[: 1 + int(lost.sum())]
        )
        assert same_bits(again[~lost], y[~lost]) and same_bits(into_x[~lost], dx[~lost])


def test_another_stream_waits_for_nothing():
    case = drawn(300, 264, 600)
    packed, pool, _ = poisoned_pack(case.gate)
    expected = case.survivors()
    torch.cuda.synchronize()
    with torch.cuda.stream(torch.cuda.Stream()):
        torch.cuda.set_sync_debug_mode("error")
        try:
            s = train_rows.survivors(case.x, packed, pool, case.up, None, 600)
            y = train_rows.weighted_rows(s, case.down_t, None)
            dh = train_rows.hidden_gradient(case.dy, s, case.down_t, None)
            train_rows.input_gradient(s, dh, case.Wg, case.up)
        finally:
            torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    assert torch.equal(s.spans, expected.spans) and y.shape == case.x.shape
