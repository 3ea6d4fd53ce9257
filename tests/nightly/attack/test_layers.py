"""Random and hostile layers against float64, on a GPU where there is one, and proof that the attack notices a layer that
is wrong."""

import functools

import pytest
import torch

from tests.nightly.attack import layers
from tests.nightly.attack.harness import attack, randomness
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


def a_value_lost(y):
    """One value, in the row with the largest values, is off by a tenth of the largest and 1: what one neuron may add."""
    y = y.clone()
    row = y.abs().float().nan_to_num(0, 0, 0).amax(1).argmax()
    y[row, 0] += (y[row].abs().max() * 0.1 + 1).to(y.dtype)
    return y


def a_row_of_another(y):
    return y.roll(1, 0) if len(y) > 1 else y + 1


def an_unwritten_row(y):
    y = y.clone()
    y[-1] = torch.nan if y[-1].isfinite().all() else 0.0
    return y


@pytest.mark.parametrize("change", [a_value_lost, a_row_of_another, an_unwritten_row])
@pytest.mark.parametrize("wrong", ["infer, hot_cold", "module", "trained, twell"])
def test_it_notices_a_path_that_is_wrong(wrong, change, monkeypatch):
    real = layers.paths_of

    def paths_of(layer):
        paths = real(layer)
        right = paths.get(wrong)
        return paths | ({wrong: lambda layer, x: change(right(layer, x))} if right else {})

    monkeypatch.setattr(layers, "paths_of", paths_of)
    with pytest.raises(AssertionError, match="case [0-9]+") as failed:
        attack("layers", layers.check, seed=7, cases=40)
    assert {line.partition("AssertionError: ")[2].partition(": row")[0] for line in lines_of(failed)} == {wrong}


@pytest.mark.parametrize("change", [a_value_lost, a_row_of_another, an_unwritten_row])
def test_it_notices_a_gradient_that_is_wrong(change, monkeypatch):
    real = layers.gradients

    def gradients(step, tensors, dy, dl1):
        y, (dx, dgate, *others) = real(step, tensors, dy, dl1)
        ours = isinstance(step, functools.partial) and step.keywords == {"path": "twell"}
        return y, [dx, change(dgate) if ours and dgate is not None else dgate, *others]

    monkeypatch.setattr(layers, "gradients", gradients)
    with pytest.raises(AssertionError) as failed:
        attack("layers", layers.check, seed=7, cases=40)
    assert all("gradient of gate, twell: off by" in line and ";" not in line for line in lines_of(failed))


def lines_of(failed):
    found = [line for line in str(failed.value).splitlines() if "AssertionError: " in line]
    assert found
    return found


def test_it_notices_other_bits_the_second_time(monkeypatch):
    calls = []
    real = layers.functional.infer

    def unsteady(x, *weights, **how):
        y = real(x, *weights, **how)
        calls.append(1)
        return torch.nextafter(y, torch.full_like(y, torch.inf)) if len(calls) % 2 and y.dtype == torch.float32 else y

    monkeypatch.setattr(layers.functional, "infer", unsteady)
    with pytest.raises(AssertionError, match="infer, twell: the second call gave other bits"):
        attack("layers", layers.check, seed=1, cases=20)


def test_a_case_can_be_made_again_alone():
    for number in (3, 11):
        a, b = (layers.draw(randomness("layers", 5, number)) for _ in range(2))
        assert a.say() == b.say()
        for one, two in zip(a.tensors, b.tensors):
            assert one is two is None or torch.equal(one.nan_to_num(7), two.nan_to_num(7))
            assert one is None or one.stride() == two.stride()
    assert layers.draw(randomness("layers", 6, 3)).say() != a.say()


def test_every_trait_and_path_is_drawn():
    by = attack("layers", layers.check, seed=3, cases=150)
    traits = ("heavy rows", "bursts", "integers", "zeros", "opposites", "rows that are not finite", "strided")
    paths = ("operator", "infer, dense", "infer, twell", "infer, hot_cold", "packed", "module", "module, hot_cold")
    trained = ("trained, twell", "trained, dense", "gradients, twell", "gradients, dense")
    others = ("poisoned memory", "bfloat16", "float16", "float32")
    assert {*traits, *paths, *trained, *others} <= set(by) and any(name.startswith("scaled") for name in by)


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
    assert (
        judged(0.5, 32768.0, inf).ratio == 0.0 and judged(0.5, 32704.0, float("nan")).ratio > 1.0
    )  # where it alone overflows
    assert judged(2.0, largest, largest).ratio > 0.4 and judged(2.0, -inf, largest).ratio > 1.0
