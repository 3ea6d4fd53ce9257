"""The rows that a sparse training step cannot hold, on the GPU: against float64, the simulator's bits, graphs."""

import pytest
import torch

from tests.ops.train_lost.cases import POISON, Case, bits
from twell_lab import simulator
from twell_lab.ops import train_lost

pytestmark = pytest.mark.gpu
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture
def no_tensor_cores(monkeypatch):
    monkeypatch.setattr(train_lost, "held", lambda x: 0)


@pytest.fixture(params=["on tensor cores", "a few on tensor cores", "without"])
def room(request, monkeypatch):
    """Whether tensor cores compute all lost rows, the first 70 of them, or none."""
    rows = {"on tensor cores": 10**6, "a few on tensor cores": 70, "without": 0}[request.param]
    monkeypatch.setattr(train_lost, "held", lambda x: min(rows, len(x)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "tokens, d_model, d_ff, rows",
    [
        (3, 8, 1, [1]),
        (300, 264, 600, range(0, 300, 7)),
        (700, 2048, 5632, range(90, 690)),
        (64, 2048, 5632, [3]),
        (40, 4096, 1100, range(40)),
        (20, 16384, 300, range(20)),
        (4000, 72, 130, range(4000)),
    ],
)
def test_against_float64(tokens, d_model, d_ff, rows, gated, dtype, room):
    for biases, slope in ((False, True), (True, False)):
        Case.draw(tokens, d_model, d_ff, dtype, rows, gated=gated, biases=biases, slope=slope).to("cuda").check()


@pytest.mark.parametrize("density", [1e-9, 0.01, 1 - 1e-9])
@pytest.mark.parametrize("lost", [0, 1, 9, 2000])
def test_none_few_and_many_rows_and_neurons(lost, density, room):
    case = Case.draw(2100, 768, 1000, torch.bfloat16, range(50, 50 + lost), density=density, biases=True)
    if lost > 1:
        case.x[51, 3], case.x[50 + lost - 1, 0] = torch.nan, -torch.inf
    case.to("cuda").check()


@pytest.mark.parametrize("gated", [True, False])
def test_what_there_is_no_room_for_is_computed_again(gated, monkeypatch, no_tensor_cores):
    case = Case.draw(600, 1024, 1100, torch.bfloat16, range(2, 598), gated=gated, biases=True)
    case.x[500, 5] = torch.inf
    case = case.to("cuda")
    before = case.backward()
    for room in (1, 595):
        monkeypatch.setattr(train_lost, "_MOST_ENTRIES", room * 4 * (3 if gated else 2) * 1100)
        case.check()
        for a, b in zip(before, case.backward()):
            assert a is None or torch.equal(bits(a), bits(b))


def test_the_same_bits_every_time_and_in_a_graph(room):
    case = Case.draw(400, 2048, 5632, torch.bfloat16, range(0, 400, 3)).to("cuda")
    first = (*case.forward(), *case.backward()[:4])
    for _ in range(3):
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, (*case.forward(), *case.backward()[:4])))
    graph, lost, out = torch.cuda.CUDAGraph(), case.lost, [torch.full_like(t, POISON) for t in first[:3]]
    weights = (case.gate, case.up, case.down_t, None, None)
    gradients = [t.clone() for t in case.start[:3]]
    dx = torch.full_like(case.x, POISON)
    with torch.cuda.graph(graph):
        train_lost.lost_forward(lost, case.x, *weights, None, *out)
        train_lost.lost_backward(lost, case.x, case.dy, case.dl1, *weights, dx, *gradients, None, None)
    for count in (len(case.rows), 0):
        lost[0] = count
        graph.replay()
        assert all(torch.equal(bits(a), bits(b)) for a, b in zip(first, (*out, dx, *gradients)))


@pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
@pytest.mark.parametrize("gated", [True, False])
def test_the_simulator_has_the_same_bits(gated, monkeypatch, no_tensor_cores):
    monkeypatch.setattr(train_lost, "_grid", lambda x: train_lost._BLOCKS_ON_CPU)
    case = Case.draw(120, 264, 70, torch.bfloat16, range(3, 110), gated=gated, biases=True)
    here, there = (*case.forward(), *case.backward()), (*case.to("cuda").forward(), *case.to("cuda").backward())
    for a, b in zip(here, there):
        assert a is None or torch.equal(bits(a), bits(b.cpu()))
