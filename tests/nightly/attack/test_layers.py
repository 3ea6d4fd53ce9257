"""Random and hostile layers on a CPU against float64, and proof that the attack sees a layer that is wrong."""

import multiprocessing
import os
import signal
import time

import pytest
import torch

from twell_lab.bench import attack
from twell_lab.ops import accuracy


def test_layers(extent, report):
    how = extent(5000)
    report("layers on a CPU", attack.layers(**how).row())


def a_value_lost(path, y):
    """One value, in the row with the largest values, is off by a tenth of the largest and 1: what one neuron may add."""
    y = y.clone()
    row = y.abs().float().nan_to_num(0, 0, 0).amax(1).argmax()
    y[row, 0] += (y[row].abs().max() * 0.1 + 1).to(y.dtype)
    return y


def a_row_of_another(path, y):
    return y.roll(1, 0) if len(y) > 1 else y + 1


def an_unwritten_row(path, y):
    y = y.clone()
    y[-1] = torch.nan if y[-1].isfinite().all() else 0.0
    return y


@pytest.mark.parametrize("change", [a_value_lost, a_row_of_another, an_unwritten_row])
@pytest.mark.parametrize("wrong", ["infer, hot_cold", "module", "trained, twell", "dgate, twell"])
def test_it_sees_a_path_that_is_wrong(wrong, change):
    with pytest.raises(attack.Broken) as told:
        attack.layers(seed=7, cases=40, change=lambda path, y: change(path, y) if path == wrong and y.dim() == 2 else y)
    named = "gradient of gate, twell" if wrong.startswith("d") else wrong
    for line in str(told.value).splitlines()[1:]:
        assert "seed 7, case " in line and named in line


def test_it_sees_other_bits_the_second_time(monkeypatch):
    calls = []
    real = attack.functional.infer

    def unsteady(x, *weights, **how):
        y = real(x, *weights, **how)
        calls.append(1)
        return torch.nextafter(y, torch.full_like(y, torch.inf)) if len(calls) % 2 and y.dtype == torch.float32 else y

    monkeypatch.setattr(attack.functional, "infer", unsteady)
    with pytest.raises(attack.Broken, match="infer, twell: the second call gave other bits"):
        attack.layers(seed=1, cases=20)


def test_a_case_can_be_made_again_alone():
    for number in (3, 11):
        a, b = attack.draw(5, number), attack.draw(5, number)
        assert a.say() == b.say()
        for one, two in zip(a.tensors, b.tensors):
            assert (
                one is two is None or torch.equal(one.nan_to_num(7), two.nan_to_num(7)) and one.stride() == two.stride()
            )
        assert attack.layers(5, number=number).layers == attack.layers(5, number=number, cases=2).layers == 1
    assert attack.draw(5, 3).say() != attack.draw(6, 3).say()


def test_an_error_in_another_process_is_raised_here(monkeypatch):
    monkeypatch.setattr(attack, "_part", raising_part)
    with pytest.raises(torch.OutOfMemoryError, match="no more") as told:
        attack.layers(5, cases=7, processes=2)
    assert "in draw_nothing" in "".join(told.value.__notes__) and not multiprocessing.active_children()


def raising_part(*arguments, part=attack._part):
    def draw_nothing(*_):
        raise torch.OutOfMemoryError("no more")

    attack.draw = draw_nothing
    part(*arguments)


def test_a_process_that_dies_ends_the_attack(monkeypatch):
    monkeypatch.setattr(attack, "_part", dying_part)
    with pytest.raises(RuntimeError, match="a process of the attack ended with exit status -9"):
        attack.layers(5, cases=7, processes=2)
    assert not multiprocessing.active_children()


def dying_part(writer, seed, numbers, *how):
    if 0 in numbers:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(60)


# ---- interrupted ----


@pytest.fixture
def interrupted_in(monkeypatch):
    """interrupted_in(layer): an interruption comes within the last path of this layer, counted from 0."""
    real, seen = attack.paths_of, []

    def interrupt(layer, x):
        raise KeyboardInterrupt

    def install(number):
        def paths_of(layer):
            seen.append(layer)
            found = real(layer)
            return found | ({list(found)[-1]: interrupt} if len(seen) == number + 1 else {})

        monkeypatch.setattr(attack, "paths_of", paths_of)

    return install


def test_an_interrupted_attack_has_the_counts_of_whole_layers(interrupted_in):
    whole = attack.layers(5, cases=3)
    interrupted_in(3)
    with pytest.raises(attack.Interrupted, match="stopped after 3 layers") as told:
        attack.layers(5, cases=7)
    assert told.value.counts == whole and whole.layers == 3 and whole.cases > 20


def test_every_trait_and_path_is_drawn():
    by = attack.layers(3, cases=150).by
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


HALF, END = torch.float16, 65504.0


@pytest.mark.parametrize(
    "ours, dense, exact, kept",
    [
        ([1.0, 2.0], [1.0, 2.0], [1.0, 2.0], True),
        ([1.0, 2048.0], [1.0, 2048.0], [1.0, 2049.9], True),  # one unit in the last place of the largest is 2
        ([1.0, 2044.0], [1.0, 2048.0], [1.0, 2049.9], False),
        ([1.0, torch.inf], [1.0, torch.inf], [1.0, 1e5], True),
        ([1.0, torch.inf], [1.0, END], [1.0, 65519.0], True),
        ([1.0, END], [1.0, torch.inf], [1.0, 65521.0], True),
        ([1.0, -torch.inf], [1.0, torch.inf], [1.0, 1e5], False),
        ([1.0, 5e4], [1.0, torch.inf], [1.0, 1e5], False),
        ([1.0, torch.inf], [1.0, 2.0], [1.0, 2.0], False),
        ([1.0, torch.nan], [1.0, 2.0], [1.0, 2.0], False),
        ([1.0, torch.inf], [1.0, torch.inf], [1.0, 2.0], True),  # the dense layer's sums overflow, too
        ([1.5, torch.inf], [1.0, torch.inf], [1.0, 2.0], False),
    ],
)
def test_what_is_allowed_of_a_gradient(ours, dense, exact, kept):
    ours, dense = (torch.tensor(values, dtype=HALF) for values in (ours, dense))
    off = attack._off(ours, dense, torch.tensor(exact, dtype=torch.float64), torch.zeros((), dtype=torch.float64))
    assert (off <= 1.0) == kept
