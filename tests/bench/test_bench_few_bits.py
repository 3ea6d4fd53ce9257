"""Layers with weights of few bits beside the dense one, on small sizes: what rows say, and what is not timed."""

import pytest
import torch

from twell_lab.bench import methods
from twell_lab.bench.methods import Sizes, swapped
from twell_lab.layers.choice import Choice
from twell_lab.ops import clock
from twell_lab.records import Record
from twell_lab.sparsities.quantised import fp8_linear, output_error, quantise

FEW = Sizes(64, 128, dtype=torch.float32, device="cpu", seconds=0.01)


def test_each_path_beside_the_dense_layer_with_its_error():
    made = methods.few_bits_rows(5, FEW)
    Record.new("comparison", "a test", made)
    paths = ["dense eager", "forced twell", "forced int8 (lossy)", "forced twell_int8 (lossy)"]
    assert [row["path"] for row in made] == [*paths, methods.PLAIN, methods.APART]
    assert all(row["kind"] == "few bits" and row["tokens"] == 5 and row["d_ff"] == 128 for row in made)
    dense, exact, *lossy, _, part = made
    assert dense["left_out"].keys() == {"forced fp8 (lossy)", methods.WITHIN}
    assert "8.9" in dense["left_out"]["forced fp8 (lossy)"]
    assert exact["error"] < 1e-6 and all(1e-4 < row["error"] < 0.08 for row in lossy)
    assert "error" not in part and part["x_dense"] is None


@torch.no_grad()
def test_a_product_of_few_bits_is_held_against_rounded_values(monkeypatch):
    """A large value in each row makes INT8 far off from the exact result; a wrong scale is told apart from that."""
    layer, (x, *_) = clock.workload(64, 256, 512, 29, "lognormal", torch.bfloat16, "cpu")
    y = swapped(layer, Choice("int8"))(x)
    assert output_error(y, layer.double()(x.double())) > MOST
    off = methods.off_on_rounded(layer.bfloat16(), x, y, *methods.ROUNDED["int8"])
    assert off.keys() == {"g", "u", "y"} and max(off.values()) < 0.004  # a rounding to bfloat16
    monkeypatch.setattr(methods, "swapped", lambda layer, choice: lambda x: 1.03 * swapped(layer, choice)(x))
    monkeypatch.setattr(methods, "PATHS", ("int8",))
    dense, *parts = methods.few_bits_rows(5, FEW)
    assert "y of int8: off by 0.0" in dense["left_out"]["forced int8 (lossy)"]
    assert all(row["path"].startswith("part: ") for row in parts)


E4M3 = torch.float8_e4m3fn
MOST = methods.MOST_OFF["fp8"]


@torch.no_grad()
@pytest.mark.parametrize("fault", ["gate's scale", "down's scale", "neuron left out", "token's scale", "no number"])
def test_a_fault_of_one_row_is_found(fault):
    """Of a neuron that fires, an output or a token: a scale that is 20% off, or a neuron that is not there."""
    layer, (x, *_) = clock.workload(64, 256, 256, 29, "lognormal", torch.bfloat16, "cpu")
    gate, up, down = (quantise(part.weight, E4M3) for part in (layer.gate_proj, layer.up_proj, layer.down_proj))

    def scaled(rows, at, by):
        return rows._replace(scale=rows.scale.index_fill(0, torch.tensor(at), float(by * rows.scale[at])))

    hidden = torch.relu(fp8_linear(x, gate)) * fp8_linear(x, up)
    fires, output = int(hidden.abs().sum(0).argmax()), int(fp8_linear(hidden, down).abs().sum(0).argmax())
    gate = scaled(gate, fires, 1.2) if fault == "gate's scale" else gate
    up = scaled(up, fires, 0) if fault == "neuron left out" else up
    down = scaled(down, output, 1.2) if fault == "down's scale" else down
    y = fp8_linear(torch.relu(fp8_linear(x, gate)) * fp8_linear(x, up), down)
    y[-1] *= {"token's scale": 1.2, "no number": torch.nan}.get(fault, 1)
    off = methods.off_on_rounded(layer, x, y, fp8_linear, E4M3)
    assert not off["y"] <= MOST and max(off["g"], off["u"]) < MOST
