"""Random and hostile layers against float64, on a GPU where there is one, and that a wrong path is noticed."""

import functools

import pytest
import torch

from tests.nightly.attack import layers
from tests.nightly.attack.harness import attack
from twell_lab.cuda import launch
from twell_lab.ops import accuracy


def test_layers(request, extent, report):
    device = "cuda" if torch.cuda.is_available() else "cpu"
    how = extent(5000)
    if (seconds := request.config.getoption("--attack-seconds")) and not request.config.getoption("--attack-cases"):
        how["cases"] = 2**31
    counts = attack("layers", functools.partial(layers.check, device=device), seconds=seconds, **how)
    names = {"cases": "layers", "checked": "cases", "rows": "rows", "worst": "worst_ratio"}
    names |= {name: f"{name}_rows" for name in ("excused", "overflowed", "rounded")}
    row = {there: counts.pop(name, 0) for name, there in names.items()}
    row["worst_ratio"] = round(row["worst_ratio"], 4)
    where = "GPU" if device == "cuda" else "CPU"
    report(f"layers on a {where}", {**row, "by": dict(sorted(counts.items())), "kernels": sorted(launch.loaded())})


@pytest.mark.parametrize("wrong", ["infer, hot_cold", "module", "trained, twell"])
def test_it_notices_a_path_that_is_wrong(wrong, monkeypatch):
    real = layers.paths_of

    def paths_of(layer):
        paths = real(layer)
        right = paths.get(wrong)
        return paths | ({wrong: lambda layer, x: right(layer, x).roll(1, 0) + 1} if right else {})

    monkeypatch.setattr(layers, "paths_of", paths_of)
    with pytest.raises(AssertionError, match=f"case [0-9]+.*\n.*AssertionError: {wrong}: row"):
        attack("layers", layers.check, seed=7, cases=40)


def test_the_yardstick_at_the_end_of_a_dtype():
    """A value at the end of the dtype may round either way, and one may be infinite where the dense layer overflows."""
    x, gate, up = torch.tensor([[256.0]]), torch.ones(1, 1), torch.ones(1, 1)

    def judged(factor, y, dense):
        exact = accuracy.Exact(x.half(), gate.half(), up.half(), torch.tensor([[factor]]).half())
        return exact.judge(torch.tensor([[y]]).half(), torch.tensor([[dense]]).half())

    inf, largest = float("inf"), 65504.0
    assert judged(1.0, inf, inf).ratio == 0.0  # 65,536
    assert judged(1.0, largest, largest).ratio <= 1.0  # 32 below it, and so is the dense layer
    assert judged(0.5, inf, 32768.0).ratio == inf and judged(0.5, inf, inf).overflowed == 1
    assert judged(0.5, 16384.0, inf).ratio > 1.0 and judged(0.5, float("nan"), inf).ratio == 0.0
    assert judged(0.5, 32768.0, inf).ratio == 0.0  # where it alone overflows
    assert judged(0.5, 32704.0, float("nan")).ratio > 1.0
    assert judged(2.0, largest, largest).ratio > 0.4 and judged(2.0, -inf, largest).ratio > 1.0
