"""Layers with weights of few bits beside the dense one, on small sizes: what rows say, and what is not timed."""

import pytest
import torch

from twell_lab.bench import few_bits
from twell_lab.bench.comparison import Batch
from twell_lab.bench.methods import swapped
from twell_lab.layers.choice import Choice
from twell_lab.ops import clock
from twell_lab.ops.clock import WrongResult
from twell_lab.records import Record
from twell_lab.sparsities.fp8 import fp8_linear
from twell_lab.sparsities.quantised import output_error, quantise

FEW = Batch(4, 16, 64, 128, (4,), 48, 2, torch.float32, "cpu", 0.01)


def test_each_path_beside_the_dense_layer_with_its_error():
    made = few_bits.few_bits_rows(5, FEW)
    Record.new("comparison", "a test", made)
    assert [row["path"] for row in made] == [
        "dense eager",
        "forced twell",
        "forced int8 (lossy)",
        "forced twell_int8 (lossy)",
        few_bits.PLAIN,
        few_bits.APART,
        few_bits.EXPANDED,
    ]
    assert all(row["kind"] == "few bits" and row["tokens"] == 5 and row["d_ff"] == 128 for row in made)
    dense, exact, *lossy, _, part, _ = made
    assert dense["left_out"].keys() == {"fp8", few_bits.WITHIN, few_bits.TWO_FOUR}
    assert "8.9" in dense["left_out"]["fp8"] and "cuSPARSELt" in dense["left_out"][few_bits.TWO_FOUR]
    assert exact["error"] < 1e-6 and all(1e-4 < row["error"] < 0.08 for row in lossy)
    assert "error" not in part and part["x_dense"] is None


def test_what_is_too_far_off_is_not_timed(monkeypatch):
    monkeypatch.setitem(few_bits.MOST_OFF, "int8", 1e-9)
    with pytest.raises(WrongResult, match=r"g of int8 is off by 0\.\d{4}% of .*, more than 0%: nothing was timed"):
        few_bits.few_bits_rows(5, FEW)


@torch.no_grad()
def test_a_product_of_few_bits_is_held_against_rounded_values(monkeypatch):
    """A large value in each row makes INT8 far off from the exact result; a wrong scale is told apart from that."""
    layer, (x, *_) = clock.workload(64, 256, 512, 29, "lognormal", torch.bfloat16, "cpu")
    y = swapped(layer, Choice("int8"))(x)
    assert output_error(y, few_bits._exact(layer, x)) > MOST
    off = few_bits.off_on_rounded(layer, x, y, *few_bits.ROUNDED["int8"])
    assert off.keys() == {"g", "u", "y"} and max(off.values()) < 0.004  # a rounding to bfloat16
    monkeypatch.setattr(few_bits, "swapped", lambda layer, choice: lambda x: 1.03 * swapped(layer, choice)(x))
    monkeypatch.setattr(few_bits, "PATHS", ("int8",))
    with pytest.raises(WrongResult, match="y of int8 is off by [23]"):
        few_bits.few_bits_rows(5, FEW)


def layer_of(linear, gate, up, down):
    """A gated layer of these rows of few bits."""
    return lambda x: linear(torch.relu(linear(x, gate)) * linear(x, up), down)


E4M3 = torch.float8_e4m3fn
MOST = few_bits.MOST_OFF["fp8"]


def in_e4m3(tokens):
    """A drawn layer, an x, and the rows of its weights in E4M3."""
    layer, (x, *_) = clock.workload(tokens, 256, 256, 29, "lognormal", torch.bfloat16, "cpu")
    return layer, x, [quantise(part.weight, E4M3) for part in (layer.gate_proj, layer.up_proj, layer.down_proj)]


@torch.no_grad()
@pytest.mark.parametrize("fault", ["gate's scale", "down's scale", "neuron left out", "token's scale"])
def test_a_fault_of_one_row_is_found(fault):
    """Of a neuron that fires, an output or a token: a scale that is 20% off, or a neuron that is not there."""
    layer, x, (gate, up, down) = in_e4m3(64)
    fires = int((torch.relu(fp8_linear(x, gate)) * fp8_linear(x, up)).abs().sum(0).argmax())
    scaled = lambda rows, at: rows._replace(scale=rows.scale.index_fill(0, torch.tensor(at), 1.2 * rows.scale[at]))  # noqa: E731
    if fault == "gate's scale":
        gate = scaled(gate, fires)
    elif fault == "down's scale":
        down = scaled(down, int(layer_of(fp8_linear, gate, up, down)(x).abs().sum(0).argmax()))
    elif fault == "neuron left out":
        up = up._replace(scale=up.scale.index_fill(0, torch.tensor(fires), 0))
    y = layer_of(fp8_linear, gate, up, down)(x)
    if fault == "token's scale":
        y[-1] *= 1.2
    off = few_bits.off_on_rounded(layer, x, y, fp8_linear, E4M3)
    assert off["y"] > MOST > max(off["g"], off["u"])
