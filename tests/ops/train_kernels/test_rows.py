"""The row kernels of a training step, run on the CPU, against plain torch in float64.

Outputs are poisoned: torch fills what it allocates with NaN (or the largest integer), so what a kernel forgets to write
is seen, and what it must leave alone."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.ops.train_kernels.row_cases import RowCase, adversarial, gate_of, most_light, same_bits, with_counts
from twell_lab import simulator
from twell_lab.core import InputError
from twell_lab.formats import fires
from twell_lab.ops import portable, train_rows

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
DTYPES = [torch.bfloat16, torch.float16]


@pytest.fixture(autouse=True, scope="module")
def poisoned():
    torch.use_deterministic_algorithms(True, warn_only=True)
    yield
    torch.use_deterministic_algorithms(False)


def spoilt_rows(case: RowCase) -> RowCase:
    for row, gate, value in (
        (5, "nan", torch.nan),
        (21, "silent", -torch.inf),
        (30, "mixed", torch.inf),
        (37, "nan", torch.inf),
    ):
        if row < len(case.x):
            case.spoil(row, gate, value, column=-1 - row % 3)
    if len(case.x) == 17:
        case.spoil(16, "nan")  # the last of them, in a block of its own
    return case


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens, d_model", [(1, 8), (17, 264), (60, 48), (40, 1032), (32, 16)])
def test_adversarial_rows(tokens, d_model, gated, dtype):
    """No entries, a tile over its slots, a pool that overflows, x that is not finite, a narrow last tile."""
    gate = adversarial(tokens, 600, dtype)
    if tokens > 2:
        gate[2] = -1.0
        gate[2, : 33 * 18 : 18] = 0.5  # a warp reads 32 entries at a time
    case = spoilt_rows(RowCase.draw(gate, d_model, gated=gated, biases=tokens % 2 == 1, dl1=tokens > 1))
    s = case.survivors()
    lost = case.check_survivors(s)
    if tokens == 60:
        assert {5, 21, 30, 31, 32, 37} <= set(lost.nonzero()[:, 0].tolist()) and not lost[[0, 2, 16, 48, 49, 59]].any()
        assert s.spans[48].tolist()[1] == 0 and s.l1[48] == 0
    assert tokens == 1 or s.kept[2] == 33
    for version in (1, 2):
        case.check_rows(s, lost, version)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("d_model", [8, 128, 1056, 2320])
def test_both_versions_and_any_number_of_slabs(d_model, gated):
    """A last slab that is narrower, and more slabs than have room for their pieces at once."""
    case = RowCase.draw(gate_of(9, 300, torch.bfloat16, 0.1), d_model, gated=gated, biases=True)
    s = case.survivors()
    lost = case.check_survivors(s)
    assert not lost.any()
    (y, dh, dx), (y1, dh1, _) = (case.check_rows(s, lost, version) for version in (2, 1))
    assert same_bits(y, y1)  # what is added has one order in both; the dot products have not
    assert same_bits(train_rows.input_gradient(s, dh, case.Wg, case.up, 1), dx)
    entries = int(s.kept.sum())
    torch.testing.assert_close(dh[:entries], dh1[:entries], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("spoilt", [False, True])
@pytest.mark.parametrize("capacity", [0, 1, 20, -1, None, 10**6])
def test_rows_past_the_capacity_are_lost_and_all_behind_them(capacity, spoilt):
    gate = gate_of(30, 100, torch.bfloat16, 0.05)
    gate[7:9] = -1.0
    gate[12:14] = -1.0
    all_entries = int((gate > 0).sum()) - spoilt * int((gate[1] > 0).sum())
    if capacity in (-1, None):  # one too few, and just enough
        capacity = all_entries + (capacity or 0)
    case = RowCase.draw(gate, 16, capacity=capacity)
    if spoilt:
        case.spoil(1, "nan")  # before the room ends
    s = case.survivors()
    assert s.words.shape == s.ups.shape == (capacity,)
    lost = case.check_survivors(s)
    assert lost[-1] == (capacity < all_entries) and lost[1] >= spoilt
    case.check_rows(s, lost)


# ---- heavy rows; with low_limit a row with more than 6 entries is heavy


@pytest.fixture
def low_limit(monkeypatch):
    for module, name in ((portable, "specialisation"), (train_rows, "_slab_defines")):
        real = getattr(module, name)
        monkeypatch.setattr(module, name, lambda *layer, real=real: (*real(*layer), ("HEAVY", 6)))
    assert most_light(torch.bfloat16, 16) == 6


def checked_twice(case: RowCase) -> Tensor:
    """The case is right, without a fault, and has the same bits when it is run again. Returns which rows are lost."""
    with simulator.watching("faults"):
        s = case.survivors()
        lost = case.check_survivors(s)
        made = case.check_rows(s, lost)
    again = case.survivors()
    case.check_survivors(again)
    used, there = int(s.spans[:, 1].sum()), ~lost
    assert same_bits(again.words[:used], s.words[:used]) and same_bits(again.l1[there], s.l1[there])
    assert s.ups is None or same_bits(again.ups[:used], s.ups[:used])
    for one, other, part in zip(made, case.check_rows(again, lost), (there, slice(used), there), strict=True):
        assert same_bits(one[part], other[part])
    return lost


@pytest.mark.parametrize("d_model, dtype", [(8, torch.float16), (264, torch.bfloat16)])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("rows", [[0], [53], [0, 7, 53], list(range(54))])
def test_heavy_rows_first_last_and_all(d_model, rows, gated, dtype, low_limit):
    """30 of 100 neurons, in one narrow tile; one slab, and two of which the second is narrower."""
    counts = torch.tensor([6, 0, 5] * 18)
    counts[rows] = 30
    case = RowCase.draw(with_counts(counts, 100).to(dtype), d_model, gated=gated, biases=len(rows) == 3)
    if len(rows) < 54:
        case.spoil(8, "nan")
        case.gate[20] = 1.0  # which the pool cannot hold
    lost = checked_twice(case)
    assert lost.nonzero()[:, 0].tolist() == ([8, 20] if len(rows) < 54 else [])


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("dl1", [True, False])
def test_a_heavy_row_as_it_comes(gated, dl1):
    """By the limit of the source. One row has few entries but for four tiles, one has entries in every tile, and some
    of both kinds lie in the pool; a third has as many as a row may have that is not heavy, and a fourth one more."""
    most = most_light(torch.bfloat16, 1056)
    counts = torch.full((40,), 9)
    counts[[19, 21]] = torch.tensor([most, most + 1])
    gate = with_counts(counts, 1500)
    gate[5, 256 : 256 + 90] = 1.0
    gate[5, 600:640] = 1.0
    gate[5, 768 : 768 + 90] = 1.0
    gate[5, 1024 : 1024 + 76] = 1.0
    gate[39] = with_counts(torch.tensor([400]), 1500)[0]
    case = RowCase.draw(gate, 1056, gated=gated, dl1=dl1, biases=dl1)
    assert (fires(gate).sum(1) > most).nonzero()[:, 0].tolist() == [5, 21, 39]
    assert not checked_twice(case).any()


@pytest.mark.parametrize("gated", [True, False])
def test_every_neuron_fires_in_a_heavy_row(gated, low_limit):
    """As many as the words and the pool can hold; and one more, or a row before it, so that it is lost."""
    for d_ff, counts, expected in ((95, [1, 95, 0], []), (96, [1, 96, 0], [1]), (95, [1, 32, 95, 40], [2, 3])):
        lost = checked_twice(RowCase.draw(with_counts(torch.tensor(counts), d_ff), 16, gated=gated))
        assert lost.nonzero()[:, 0].tolist() == expected


@pytest.mark.parametrize("capacity", [0, 30, 57, 58, 59, 97, 98, 99])
def test_heavy_rows_take_room_and_may_find_none(capacity, low_limit):
    counts = torch.tensor([6, 1] * 20)
    counts[[2, 17, 18, 36]] = 40
    case = RowCase.draw(with_counts(counts, 100), 16, capacity=capacity)
    case.spoil(3, "nan")
    lost = checked_twice(case)
    assert lost[3] and lost[0] == (capacity < 6) and lost[2] == (capacity < 47) and lost[39]


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("few, most, lost", [(3, 6, True), (4, 99, False), (3, 5, False), (0, 6, True)])
@pytest.mark.parametrize("capacity", [None, 57])
def test_many_heavy_rows_are_lost_where_there_is_room_for_them(few, most, lost, capacity, gated, low_limit):
    """Four heavy rows and two that are lost anyway."""
    counts = torch.tensor([6, 1] * 20)
    counts[[2, 17, 18, 36]] = 40
    case = RowCase.draw(with_counts(counts, 100), 16, gated=gated, capacity=capacity, dense=(few, most))
    case.spoil(3, "nan")
    case.gate[30] = 1.0  # which the pool cannot hold
    found = checked_twice(case)
    assert found[2] == lost and found[3] and (capacity or found.sum() == (6 if lost else 2))


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    rows=st.lists(st.sampled_from([0, 1, 6, 7, 40, "pool", "nan", "silent", "mixed"]), min_size=1, max_size=50),
    calm=st.integers(0, 40),
    room=st.none() | st.floats(0, 1),
    gated=st.booleans(),
    dense=st.none() | st.tuples(st.integers(0, 9), st.integers(0, 99)),
)
def test_heavy_rows_among_all_others(low_limit, rows, calm, room, gated, dense):
    rows = rows + [2] * calm
    counts = torch.tensor([100 if row == "pool" else row if isinstance(row, int) else 0 for row in rows])
    case = RowCase.draw(with_counts(counts, 100), 8, gated=gated, dense=dense)
    for row, kind in enumerate(rows):
        if kind in ("nan", "silent", "mixed"):
            case.spoil(row, kind, torch.inf)
    if room is not None:
        case.capacity = int(room * counts.sum())
    s = case.survivors()
    lost = case.check_survivors(s)
    case.check_rows(s, lost)
    again = case.survivors()
    entries = int(s.kept[~lost].sum())
    assert torch.equal(again.spans, s.spans) and same_bits(again.words[:entries], s.words[:entries])


def test_heavy_rows_in_every_round_of_the_prefix_sum(low_limit):
    """One thread has the 2nd and the 1026th block, and another the last one of all."""
    tokens = 16384 + 77
    counts = torch.arange(tokens) % 3 // 2
    counts[[20, 21, 16384 + 20, tokens - 1]] = 8
    case = RowCase.draw(with_counts(counts, 8), 8, gated=False)
    s = case.survivors()
    assert not case.check_survivors(s).any() and s.lost[-1] == 4
    case.check_rows(s, case.expected_lost())


def test_a_heavy_row_has_the_same_bits_wherever_it_lies(low_limit):
    """Alone, first among others and last, with other heavy rows and without."""
    counts = torch.tensor([40, 3, 40, 2, 5, 40] * 7)
    case = RowCase.draw(with_counts(counts, 100), 264, biases=True)
    s = case.survivors()
    y, dh, dx = case.check_rows(s, case.check_survivors(s))
    for row in (0, 2, 35, 41):
        one = RowCase(
            *(t[row : row + 1] for t in (case.x, case.dy, case.gate)),
            *(case.Wg, case.up, case.down_t, case.up_bias, case.down_bias, case.dl1[row : row + 1]),
        )
        t = one.survivors()
        y1, dh1, dx1 = one.check_rows(t, one.check_survivors(t))
        start, count = s.spans[row].tolist()
        assert same_bits(y1[0], y[row]) and same_bits(dx1[0], dx[row]) and same_bits(t.l1[0], s.l1[row])
        assert same_bits(dh1[:count], dh[start : start + count])


def test_values_that_are_not_finite_in_a_finite_row():
    """A gate may be infinite or NaN though x is not: such entries are kept, and the row is not lost."""
    gate = gate_of(6, 300, torch.float16, 0.1)
    gate[1, :3] = torch.tensor([torch.inf, torch.nan, -torch.nan])
    gate[2, 280] = torch.nan
    gate[3] = -torch.inf
    case = RowCase.draw(gate, 64)
    s = case.survivors()
    lost = case.check_survivors(s)
    assert not lost.any() and s.l1[2].isnan() and s.spans[3, 1] == 0
    case.check_rows(s, lost)


def test_zeros_have_no_sign_and_nan_keeps_its_own():
    case = RowCase.draw(gate_of(3, 64, torch.bfloat16, 0.3), 32, gated=False)
    case.down_t.zero_()
    case.gate[0, 5], case.gate[1, 6] = 1e-45, torch.nan
    s = case.survivors()
    case.check_rows(s, case.check_survivors(s))
    gated = RowCase.draw(gate_of(3, 64, torch.bfloat16, 0.3), 32)
    gated.up.zero_(), gated.down_t.zero_()
    s = gated.survivors()
    dh = train_rows.hidden_gradient(gated.dy, s, gated.down_t, gated.dl1)
    assert (dh[: int(s.kept.sum())] == 0).all() and s.l1.eq(0).all()


def test_more_tiles_than_lanes_and_many_entries():
    gate = gate_of(18, 256 * 34 + 8, torch.bfloat16, 0.01)
    gate[3, 256 * 33 : 256 * 33 + 50] = 1.0
    gate[6, 256 * 33 : 256 * 33 + 80] = 1.0
    gate[7, -4:] = 1.0
    case = RowCase.draw(gate, 8)
    s = case.survivors()
    lost = case.check_survivors(s)
    assert lost.nonzero()[:, 0].tolist() == [6]
    case.check_rows(s, lost)


def test_many_rows_take_several_rounds_of_the_prefix_sum():
    tokens = 16384 + 77
    gate = torch.full((tokens, 4), -1.0, dtype=torch.bfloat16)
    gate[::3, 1], gate[::5, 3] = 1.0, 2.0
    case = RowCase.draw(gate, 8, gated=False, capacity=3000)
    for row in (0, 17, 4000, 4001):
        case.spoil(row, "silent")
    s = case.survivors()
    lost = case.check_survivors(s)
    assert lost[16384:].all()
    case = RowCase.draw(gate, 8, gated=False)
    s = case.survivors()
    case.check_rows(s, case.check_survivors(s))


def test_rows_do_not_depend_on_their_neighbours_nor_on_the_run():
    case = spoilt_rows(RowCase.draw(adversarial(40, 520, torch.bfloat16), 264, biases=True))
    s = case.survivors()
    lost = case.check_survivors(s)
    y, dh, dx = case.check_rows(s, lost)
    again = case.survivors()
    assert all(torch.equal(a, b) for a, b in zip((s.spans, s.lost, s.kept), (again.spans, again.lost, again.kept)))
    for row in (2, 3, 16, 34):
        alone = RowCase(
            *(t[row : row + 1] for t in (case.x, case.dy, case.gate)),
            case.Wg,
            case.up,
            case.down_t,
            case.up_bias,
            case.down_bias,
            case.dl1[row : row + 1],
        )
        one = alone.survivors()
        start, count = s.spans[row].tolist()
        assert same_bits(one.words[:count], s.words[start : start + count])
        assert same_bits(one.ups[:count], s.ups[start : start + count]) and same_bits(one.l1, s.l1[row : row + 1])
        y1, dh1, dx1 = alone.check_rows(one, alone.check_survivors(one))
        assert (
            same_bits(y1[0], y[row])
            and same_bits(dx1[0], dx[row])
            and same_bits(dh1[:count], dh[start : start + count])
        )


@pytest.mark.parametrize("gated", [True, False])
def test_no_fault_and_which_kernels_run(gated):
    case = spoilt_rows(RowCase.draw(adversarial(36, 520, torch.bfloat16), 264, gated=gated, biases=True))
    with simulator.watching("faults") as runs:
        s = case.survivors()
        case.check_rows(s, case.check_survivors(s))
    up = ["pieces_v1", "up_values_v1"] if gated else []
    survivors = ["survivor_counts_v2", "survivor_places_v2", "survivor_words_v2", *up]
    names = [*survivors, "weighted_rows_v2", "pieces_v1", "hidden_gradient_v2", "input_gradient_v2"]
    assert [run.kernel for run in runs] == names


def test_no_tokens():
    case = RowCase.draw(gate_of(0, 300, torch.bfloat16), 64)
    s = case.survivors()
    y, dh, dx = case.check_rows(s, case.expected_lost())
    assert s.lost.tolist() == [0, 0] and y.shape == dx.shape == (0, 64) and dh.shape == (16 * 300,)


def test_what_is_refused():
    case = RowCase.draw(gate_of(5, 300, torch.bfloat16), 64)
    s = case.survivors()
    takes = train_rows.takes
    assert takes(torch.bfloat16, 16384, 2048, 5632) and takes(torch.float16, 1, 8, 65536)
    assert not takes(torch.float32, 1, 64, 64) and not takes(torch.bfloat16, 1, 12, 64)
    assert not takes(torch.bfloat16, 1, 64, 65537) and not takes(torch.bfloat16, 2**24, 64, 64)
    for capacity in (2**31 - 1, -1):
        with pytest.raises(InputError, match=f"capacity is {capacity} entries"):
            train_rows.survivors(case.x, *[None] * 4, 300, capacity)
    with pytest.raises(InputError, match=r"pool is \[1, 2, 64\]; for 5 tokens and 600 columns \[5, 3, 32\]"):
        train_rows.survivors(case.x, torch.empty(5, 2, 32), torch.empty(1, 2, 64), case.up, None, 600)
    with pytest.raises(InputError, match="d_ff is 65537"):
        train_rows.survivors(case.x, *[None] * 4, 65537)
    with pytest.raises(InputError, match="16-bit values"):
        train_rows.hidden_gradient(case.dy.float(), s, case.down_t.float(), None)
    with pytest.raises(InputError, match=r"dl1 is torch.float64 \[5\]; float32 \[5\]"):
        train_rows.hidden_gradient(case.dy, s, case.down_t, case.dl1.double())
    with pytest.raises(InputError, match="two tensors, or twice None"):
        train_rows.input_gradient(s, s.ups, None, case.up)
    with pytest.raises(InputError, match="version is 3; 1 and 2"):
        train_rows.weighted_rows(s, case.down_t, None, version=3)
    shifted = torch.cat([case.up.new_zeros(1), case.up.reshape(-1)])[1:].view(case.up.shape)
    with pytest.raises(InputError, match="multiple of 16 bytes"):
        train_rows.weighted_rows(s, shifted, None)
    with pytest.raises(InputError, match=r"up is \[300, 32\]; \[300, 64\]"):
        train_rows.survivors(case.x, torch.empty(5, 2, 32), torch.empty(1, 2, 64), case.up[:, :32], None, 300)
