"""The rows that a sparse training step cannot hold, in the simulator, against float64."""

import pytest
import torch

from tests.ops.train_lost.cases import POISON, Case, bits
from twell_lab import simulator
from twell_lab.core import InputError
from twell_lab.ops import train_lost

needs_simulator = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
DTYPES = [torch.bfloat16, torch.float16]


@needs_simulator
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "tokens, d_model, d_ff, rows",
    [
        (3, 8, 1, [1]),
        (20, 24, 70, range(20)),
        (40, 264, 130, [0, 3, 4, 17, 22, 23, 24, 30, 39]),
        (9, 2056, 37, [8]),
    ],
)
def test_against_float64(tokens, d_model, d_ff, rows, gated, dtype):
    for biases, slope in ((False, True), (True, False)):
        Case.draw(tokens, d_model, d_ff, dtype, rows, gated=gated, biases=biases, slope=slope).check()


@needs_simulator
@pytest.mark.parametrize("gated", [True, False])
def test_more_groups_than_blocks(gated, monkeypatch):
    """Groups with a block each, and others cut into slices; several batches of rows for the weights' gradients."""
    tokens = 8 * (train_lost._BLOCKS_ON_CPU * 5 + 4) + 3
    assert tokens > 256  # BATCH_ROWS
    case = Case.draw(tokens, 24, 70, torch.bfloat16, range(tokens), gated=gated, biases=True)
    case.check()
    before = case.backward()
    monkeypatch.setattr(train_lost, "_MOST_ENTRIES", 1)
    assert all(a is b or torch.equal(bits(a), bits(b)) for a, b in zip(before, case.backward()))


@needs_simulator
@pytest.mark.parametrize("d_ff", [64, 65, 128])
def test_batches_of_neurons_that_end_with_the_layer_and_just_before(d_ff):
    Case.draw(
        48, 24, d_ff, torch.bfloat16, range(48)
    ).check()  # as many groups as blocks: each has all neurons, 64 at a time


@needs_simulator
@pytest.mark.parametrize("rows", [256, 257, 512])
@pytest.mark.parametrize("most", [48 << 20, 1])
def test_as_many_lost_rows_as_a_batch_has_and_one_more(rows, most, monkeypatch):
    monkeypatch.setattr(train_lost, "_MOST_ENTRIES", most)
    Case.draw(rows + 2, 24, 9, torch.bfloat16, range(1, rows + 1), biases=True).check()


@needs_simulator
def test_more_slices_than_lanes(monkeypatch):
    monkeypatch.setattr(train_lost, "_BLOCKS_ON_CPU", 40)
    Case.draw(3, 24, 1280, torch.bfloat16, [1]).check()  # 40, of 32 neurons each


@needs_simulator
@pytest.mark.parametrize("room", [0, 48 << 20])
def test_rows_wider_than_a_piece(room, monkeypatch):
    monkeypatch.setattr(train_lost, "_MOST_ENTRIES", room)
    Case.draw(300, 1032, 3, torch.float16, range(0, 300, 1), biases=True).check()


@needs_simulator
@pytest.mark.parametrize("room", [1, 45])
def test_what_there_is_no_room_for_is_computed_again(room, monkeypatch):
    case = Case.draw(50, 40, 22, torch.bfloat16, range(2, 48), biases=True)
    before = case.backward()
    monkeypatch.setattr(train_lost, "_MOST_ENTRIES", room * 4 * 3 * 4 * 6)
    case.check()
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(before, case.backward()))


@needs_simulator
def test_no_row_is_lost():
    case = Case.draw(30, 24, 70, torch.float16, [], biases=True)
    case.check()
    assert all((t == POISON).all() for t in case.forward())
    assert all(torch.equal(bits(a), bits(b)) for a, b in zip(case.backward()[1:], case.start))


@needs_simulator
@pytest.mark.parametrize("density", [1e-9, 0.01, 0.999999999])
def test_none_few_and_all_neurons_fire(density):
    Case.draw(12, 24, 70, torch.bfloat16, range(1, 11), density=density).check()


@needs_simulator
@pytest.mark.parametrize("gated", [True, False])
def test_rows_that_are_not_finite(gated, monkeypatch):
    for room in (train_lost._MOST_ENTRIES, 1):
        monkeypatch.setattr(train_lost, "_MOST_ENTRIES", room)
        case = Case.draw(30, 24, 70, torch.bfloat16, range(3, 30, 2), gated=gated, biases=True)
        case.x[5, 0], case.x[6, 1], case.x[9, 23], case.x[29, 7] = torch.nan, torch.inf, -torch.inf, torch.inf
        case.check()
        everything = case.forward() + case.backward()[1:]
        assert not any(t[case.rows].isnan().any() for t in everything[3:] if t is not None and len(t) == 30)
        case.rows = torch.tensor([5, 9])
        case.check()


@needs_simulator
def test_an_incoming_gradient_that_is_not_finite():
    """As in torch, it spreads to all that depends on it."""
    case = Case.draw(10, 24, 40, torch.bfloat16, [2, 7], density=0.5)
    case.dy[7, 3] = torch.inf
    dx, dgate, *_ = case.backward()
    assert dx[2].isfinite().all() and not dx[7].isfinite().any() and not dgate.isfinite().all()


@needs_simulator
@pytest.mark.parametrize("gated, most", [(True, 48 << 20), (True, 1), (False, 1)])
def test_no_kernel_reads_out_of_bounds_or_races(gated, most, monkeypatch):
    monkeypatch.setattr(train_lost, "_MOST_ENTRIES", most)
    with simulator.watching("faults"):
        case = Case.draw(70, 24, 38, torch.bfloat16, range(5, 68), gated=gated, biases=True)
        case.forward(), case.backward()


def test_no_tokens():
    case = Case.draw(0, 8, 4, torch.bfloat16, [])
    case.check()


def test_what_is_refused():
    case = Case.draw(4, 16, 6, torch.bfloat16, [1])

    def with_(**other):
        return Case(**{**{k: getattr(case, k) for k in case.__dataclass_fields__}, **other})

    for changed, says in [
        ({"x": case.x.float()}, "float32"),
        ({"x": case.x[:, :12]}, r"\[4, 12\]"),
        ({"up": case.up.half()}, "float16"),
        ({"down_t": case.down_t.t()}, "strides"),
        ({"dl1": case.dl1.double()}, "float64"),
        ({"dy": case.dy[:3]}, r"\[3, 16\]"),
        ({"up_bias": case.up[0]}, r"\[16\]"),
    ]:
        with pytest.raises(InputError, match=says):
            with_(**changed).backward()
    with pytest.raises(InputError, match="kept is torch.int64"):
        y, l1, kept = torch.empty_like(case.x), torch.empty(4), torch.empty(4, dtype=torch.long)
        train_lost.lost_forward(case.lost, case.x, case.gate, case.up, case.down_t, None, None, None, y, l1, kept)
    with pytest.raises(InputError, match="lost is torch.int64"):
        train_lost.lost_forward(
            case.lost.long(), case.x, case.gate, case.up, case.down_t, None, None, None, y, l1, kept.int()
        )
    with pytest.raises(InputError, match="dgate is needed for a gated layer"):
        g = case.start
        train_lost.lost_backward(
            case.lost, case.x, case.dy, None, None, case.up, case.down_t, None, None, y, g[0], g[1], g[2], None, None
        )
