"""Layers with weights of few bits beside the dense one, on small sizes: what rows say, and what is not timed."""

import pytest
import torch

from twell_lab.bench import few_bits
from twell_lab.bench.comparison import Batch
from twell_lab.bench.methods import swapped
from twell_lab.layers.choice import Choice
from twell_lab.ops import measure
from twell_lab.ops.measure import WrongResult
from twell_lab.records.record import Record
from twell_lab.sparsities.quantised import output_error

FEW = Batch(4, 16, 64, 128, (4,), 48, 2, torch.float32, "cpu", 0.01)


def test_each_path_beside_the_dense_layer_with_its_error():
    made = few_bits.few_bits_rows(5, FEW)
    Record.new("comparison", "a test", made)
    assert [row["path"] for row in made] == [
        "dense eager",
        "forced twell",
        "forced int8 (lossy)",
        "forced twell_int8 (lossy)",
        few_bits.APART,
    ]
    assert all(row["kind"] == "few bits" and row["tokens"] == 5 and row["d_ff"] == 128 for row in made)
    dense, exact, *lossy, part = made
    assert dense["left_out"].keys() == {"fp8", few_bits.WITHIN} and "8.9" in dense["left_out"]["fp8"]
    assert exact["error"] < 1e-6 and all(1e-4 < row["error"] < 0.08 for row in lossy)
    assert "error" not in part and part["x_dense"] is None


def test_what_is_too_far_off_is_not_timed(monkeypatch):
    monkeypatch.setitem(few_bits.MOST_OFF, "int8", 1e-9)
    with pytest.raises(WrongResult, match="int8 is off by .* of what it should be: nothing was timed"):
        few_bits.few_bits_rows(5, FEW)


@torch.no_grad()
def test_a_product_of_few_bits_is_held_against_rounded_values(monkeypatch):
    """A large value in each row makes INT8 far off from the exact result; a wrong scale is told apart from that."""
    layer, (x, *_) = measure.workload(4, 256, 512, 29, "lognormal", torch.bfloat16, "cpu")
    y = swapped(layer, Choice("int8"))(x)
    on_rounded = few_bits._on_rounded(layer, x, torch.int8)
    assert output_error(y, few_bits._exact(layer, x)) > few_bits.MOST_OFF["int8"]
    assert output_error(y, on_rounded) < few_bits.MOST_OFF["int8"] < output_error(1.03 * y, on_rounded)
    monkeypatch.setattr(few_bits, "swapped", lambda layer, choice: lambda x: 1.03 * swapped(layer, choice)(x))
    monkeypatch.setattr(few_bits, "PATHS", ("int8",))
    with pytest.raises(measure.WrongResult, match="int8 is off by 0.0"):
        few_bits.few_bits_rows(5, FEW)


def test_sections_hold_each_number_of_tokens():
    (steps,) = few_bits.sections(FEW).values()
    assert [step.args for step in steps] == [(tokens, FEW) for tokens in few_bits.TOKENS]
