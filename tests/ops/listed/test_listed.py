"""The kernels behind a dense gate for some hundred tokens, in the simulator, and what their launch refuses."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.ops.listed.cases import HEAVY, Case
from twell_lab.core import InputError
from twell_lab.cuda import sources
from twell_lab.ops import listed


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("biases", [True, False])
def test_rows_with_few_and_many_kept_values(gated, biases, dtype):
    Case.draw(HEAVY, 264, 1504, gated, biases, dtype).check()


def test_rows_wider_than_a_block():
    Case.draw([900, 2, 0, 600], 2056, 1000, biases=True).check()


def test_a_gate_wider_than_what_is_read_at_once():
    """8,192 columns are loaded before any is looked at; the kept values lie at both ends and where a load ends."""
    case = Case.draw([0, 0], 8, 8200 + 64)
    case.gate[0, [0, 2047, 2048, 8191, 8192, 8263]] = 1.0
    case.gate[1, 8100:] = 0.5
    case.check()


@pytest.mark.parametrize("heavy", [1, 5, 6, 7, 13])
def test_as_many_heavy_rows_as_blocks_and_more(heavy):
    """Six blocks are simulated: up to six heavy rows are cut, or have a block each; more are taken in turn."""
    Case.draw([600] * heavy + [4], 16, 640).check((2,))


def test_many_tokens():
    """More than two for each multiprocessor: the version with fewer registers, and more counts than threads."""
    Case.draw([3] * 299 + [600, 2], 16, 640, biases=True).check((2,))


@pytest.mark.parametrize("gated", [True, False])
def test_values_that_are_not_finite(gated):
    """In x, with silent neurons and without; in the gate, where NaN is kept; minus infinity is silent."""
    case = Case.draw([5, 600, 640, 640, 7, 4, 0], 72, 640, gated)
    case.x[0, 3], case.x[1, 9], case.x[2, 0], case.x[6, 1] = torch.inf, torch.nan, -torch.inf, torch.inf
    case.gate[4, 77], case.gate[5, 78] = torch.nan, -torch.inf
    case.check()


def test_what_lies_behind_the_rows_stays():
    """y is what was asked for and nothing else: rows of exactly zero where nothing fires, the bias where there is one."""
    case = Case.draw([0, 0], 16, 64)
    assert torch.equal(case.run(), torch.zeros(2, 16).bfloat16())
    case = Case.draw([0, 0], 16, 64, biases=True)
    assert torch.equal(case.run(), case.down_bias.expand(2, 16))


@given(
    counts=st.lists(st.integers(0, 900), min_size=1, max_size=6),
    d_model=st.integers(1, 40).map(lambda n: 8 * n),
    d_ff=st.integers(1, 110).map(lambda n: 8 * n),
    gated=st.booleans(),
    biases=st.booleans(),
    seed=st.integers(0, 99),
)
def test_any_layer(counts, d_model, d_ff, gated, biases, seed):
    Case.draw(counts, d_model, d_ff, gated, biases, seed=seed).check((None,))


def test_no_tokens():
    assert Case.draw([], 16, 64).run().shape == (0, 16)


def test_what_is_refused():
    case, number = Case.draw([1, 2], 16, 64, biases=True), listed.MOST_TOKENS
    for changed, message in (
        ({"x": case.x.float()}, "torch.float32.*all bfloat16 or all float16"),
        ({"gate": case.gate.half()}, "all bfloat16 or all float16"),
        ({"gate": case.gate[:1]}, r"\[1, 64\].*\[2, 64\].*accepted"),
        ({"up": case.up[:8]}, r"\[8, 16\].*accepted"),
        ({"up_bias": case.up_bias[:8]}, r"\[8\].*accepted"),
        ({"down_bias": case.down_bias[:8]}, r"\[8\].*accepted"),
        ({"x": case.x[:, :12].contiguous()}, "multiples of 8"),
        ({"gate": case.gate.t().contiguous().t()}, "not contiguous"),
        ({"x": torch.zeros(33).bfloat16()[1:].view(2, 16)}, "multiple of 16 bytes"),
        ({"x": case.x.expand(2, 16)[:1].expand(number + 1, 16)}, f"up to {number} tokens"),
        ({"x": case.x[0]}, r"x is \[16\]"),
        ({"gate": None}, "gate is None.*for a plain layer up is None"),
        ({"up": case.up.to("meta")}, "on cpu, cpu, meta.*accepted"),
        ({name: t if t is None else t.to("meta") for name, t in case._asdict().items()}, "on meta, meta"),
    ):
        with pytest.raises(InputError, match=message):
            case._replace(**changed).run()
    with pytest.raises(InputError, match="version is 3; 1 and 2 are accepted"):
        case.run(3)


def test_the_numbers_of_the_kernel():
    assert listed.MOST_TOKENS == sources.number(listed.FILE, "MOST_LISTED") and listed.takes(*_given(64, 16))
    assert not listed.takes(*_given(60, 16)) and not listed.takes(*_given(64, 12))


def _given(d_ff, d_model):
    weight = torch.zeros(d_ff, d_model).half()
    return torch.zeros(1, d_model).half(), weight, weight, None
