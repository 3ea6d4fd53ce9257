"""The properties that tests/formats and tests/simulator hold for a few drawn examples, for as many thousands; and of the
kernels that take their overflow from the pool, which have drawn layers here alone. --attack-case has no part in them."""

import hypothesis
import pytest
import torch
from hypothesis import strategies as st

from tests.formats import test_formats as formats
from tests.ops import table
from tests.ops.rows.drawn import gate_of
from tests.ops.rows.pooled import Pooled, case_of
from tests.simulator import test_few_rows, test_kernels
from twell_lab import simulator

needs_a_compiler = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
WIDTH = 264


def many(extent, report, name: str, cases: int, *checks) -> None:
    """Run each check, a test of hypothesis and its arguments, with this many examples."""
    how = extent(cases)
    for check in dict.fromkeys(check for check, *_ in checks):
        hypothesis.settings(max_examples=how["cases"], deadline=None, database=None)(check)
        hypothesis.seed(how["seed"])(check)
    for check, *arguments in checks:
        check(*arguments)
    report(name, {"cases": how["cases"] * len(checks), "seed": how["seed"]})


def test_formats_and_packing(extent, report):
    classics = [(formats.test_classics_give_back_every_bit, name) for name in formats.CLASSICS]
    others = formats.test_twell_word_by_word, formats.test_hybrid_splits_by_the_limit
    many(extent, report, "formats and packing", 4000, *classics, *((check,) for check in others))


def pooled(data):
    """Some rows overflow the words, and some the pool; some of x are not finite."""
    draw = data.draw
    dtype, rows = draw(st.sampled_from([torch.bfloat16, torch.float16])), draw(st.integers(1, 40))
    columns = draw(st.one_of(st.integers(1, 60), st.integers(200, 600)))
    gate = gate_of(draw(st.sampled_from([0.01, 0.1, 0.3])), rows, columns, dtype, seed=draw(st.integers(0, 2**30)))
    for _ in range(draw(st.integers(0, 3))):
        row, first = draw(st.integers(0, rows - 1)), draw(st.integers(0, columns - 1))
        count = draw(st.integers(31, 256))
        gate[row : row + draw(st.sampled_from([1, 16])), first : first + count] = 1.0
    layer = Pooled.draw(gate, WIDTH, draw(st.booleans()), draw(st.booleans()), draw(st.integers(0, 2**30)))
    for _ in range(draw(st.integers(0, 2))):
        place = draw(st.integers(0, rows - 1)), draw(st.integers(0, WIDTH - 1))
        layer.x[place] = draw(st.sampled_from([torch.nan, torch.inf, -torch.inf]))
    kernel = draw(st.sampled_from([("gated", 5), ("gated", 6), ("gated", 7), ("down", 4), ("down", 5)]))
    table.check(case_of(*kernel, lambda: layer), "cpu")


@needs_a_compiler
def test_kernels_in_the_simulator(extent, report):
    drawn = hypothesis.given(data=st.data())  # anew, since these have numbers of examples of their own
    of = lambda check: drawn(check.hypothesis.inner_test)  # noqa: E731
    layers = [(of(test_kernels.test_down_and_gated_keep_the_error_promise), name) for name in ("down", "gated")]
    packing = [(of(test_kernels.test_pack_of_any_geometry), vectors) for vectors in (False, True)]
    others = of(test_kernels.test_a_gate_that_is_not_finite), of(test_few_rows.test_any_rows), drawn(pooled)
    many(extent, report, "kernels in the simulator", 2500, *packing, *layers, *((check,) for check in others))
