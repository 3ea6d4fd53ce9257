"""Random and hostile layers on a CPU against float64, and proof that the attack sees a layer that is wrong."""

import multiprocessing
import os
import signal
import time
from contextlib import suppress

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
@pytest.mark.parametrize("wrong", ["operator", "infer, hot_cold", "packed", "module", "trained, twell", "dgate, twell"])
def test_it_sees_a_path_that_is_wrong(wrong, change):
    with pytest.raises(attack.Broken) as told:
        attack.layers(seed=7, cases=40, change=lambda path, y: change(path, y) if path == wrong and y.dim() == 2 else y)
    named = "gradient of gate, twell" if wrong.startswith("d") else wrong
    for line in str(told.value).splitlines()[1:]:
        assert "seed 7, case " in line and named in line


def test_it_sees_other_bits_the_second_time(monkeypatch):
    calls = []
    real = attack.inference.infer

    def unsteady(x, *weights, **how):
        y = real(x, *weights, **how)
        calls.append(1)
        return torch.nextafter(y, torch.full_like(y, torch.inf)) if len(calls) % 2 and y.dtype == torch.float32 else y

    monkeypatch.setattr(attack.inference, "infer", unsteady)
    with pytest.raises(attack.Broken, match="infer, twell: the second call gave other bits"):
        attack.layers(seed=1, cases=20)


def test_a_path_that_raises_is_told_and_the_others_go_on(monkeypatch):
    real, calls = attack.inference.infer, []

    def raising(*tensors, **how):
        calls.append(1)
        if len(calls) == 3:
            raise RuntimeError("out of luck")
        return real(*tensors, **how)

    monkeypatch.setattr(attack.inference, "infer", raising)
    with pytest.raises(
        attack.Broken, match="1 failures in 5 layers:\nlayers, seed 1, case 0, cpu: RuntimeError: out of"
    ):
        attack.layers(seed=1, cases=5)


def test_memory_that_nobody_wrote_is_seen(monkeypatch):
    real = attack.inference.infer

    def careless(x, *weights, **how):
        y = torch.empty_like(real(x, *weights, **how), memory_format=torch.contiguous_format)
        y[:-1] = real(x, *weights, **how)[:-1]
        return y

    monkeypatch.setattr(attack.inference, "infer", careless)
    with pytest.raises(attack.Broken, match="infer, "):
        attack.layers(seed=2, cases=20)


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


def test_several_processes_do_what_one_does():
    one, several = attack.layers(5, cases=7), attack.layers(5, cases=7, processes=2)
    assert several == one and several.layers == 7 and several.cases > 50
    assert attack.layers(5, seconds=0.0, processes=2).layers <= 2
    assert attack.layers(5, number=3, processes=2) == attack.layers(5, number=3)


def test_what_fails_in_another_process_is_told(monkeypatch):
    monkeypatch.setattr(attack, "_part", broken_part)
    with pytest.raises(attack.Broken) as told:
        attack.layers(5, cases=7, processes=2)
    first, *lines = str(told.value).splitlines()  # whoever is ready first is told first
    assert first == "2 failures in 7 layers:" and sorted(lines) == ["numbers 0 2 4 6", "numbers 1 3 5"]


def broken_part(writer, seed, numbers, seconds, device):
    writer.send(attack.Counts(layers=len(numbers), failures=[f"numbers {' '.join(map(str, numbers))}"]))


def test_an_attack_ends_after_so_many_failures_of_all_processes(monkeypatch):
    monkeypatch.setattr(attack, "_part", endless_part)
    with pytest.raises(attack.Broken, match=f"^{attack.MOST_FAILURES} failures in {attack.MOST_FAILURES} layers:"):
        attack.layers(5, cases=7, processes=2)
    assert not multiprocessing.active_children()


def endless_part(writer, *attacked):
    with suppress(BrokenPipeError):
        while True:
            writer.send(attack.Counts(layers=1, failures=["wrong"]))


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


def test_interrupted_before_a_layer_is_whole_an_attack_has_nothing(interrupted_in):
    interrupted_in(0)
    with pytest.raises(KeyboardInterrupt) as told:
        attack.layers(5, cases=7)
    assert told.type is KeyboardInterrupt


@pytest.mark.parametrize("layers", [0, 1])
def test_what_failed_before_an_interruption_is_told(layers, interrupted_in):
    """Also of the layer in which it came."""
    interrupted_in(layers)
    with pytest.raises(attack.Broken) as told:
        attack.layers(5, cases=7, change=lambda path, y: y + 1 if path == "operator" else y)
    first, *lines = str(told.value).splitlines()
    assert first == f"{layers + 1} failures in {layers} layers:"
    for number, line in enumerate(lines):
        assert line.startswith(f"layers, seed 5, case {number}, cpu: operator: row ")


def test_every_trait_and_path_is_drawn():
    by = attack.layers(3, cases=150).by
    traits = {
        "heavy rows",
        "bursts",
        "integers",
        "zeros",
        "opposites",
        "rows that are not finite",
        "strided",
        "poisoned memory",
    }
    paths = {
        "operator",
        "infer, dense",
        "infer, twell",
        "infer, hot_cold",
        "packed",
        "module",
        "module, hot_cold",
        "trained, twell",
        "trained, dense",
        "gradients, twell",
        "gradients, dense",
        "bfloat16",
        "float16",
        "float32",
    }
    assert traits | paths <= set(by) and any(name.startswith("scaled") for name in by)


def test_the_yardstick_lets_a_neuron_in_doubt_count_either_way():
    """Of a gate whose sign rounding decides, both results are right, and a third one is wrong."""
    x = torch.tensor([[1.0, 1.0, 1.0]])
    gate = torch.tensor([[1.0, -1.0, 2.0**-24], [1.0, 0.0, 0.0]])  # the first sum of |x w| is 2: in doubt below 4.8e-7
    up, down = torch.full((2, 3), 1e6), torch.tensor([[1e3, 1.0], [0.0, 1.0], [1e3, 0.0]])
    exact = accuracy.Exact(x, gate, up, down)
    silent, fires = (
        (torch.where(torch.tensor([keep, True]), exact.first, 0) * 3e6) @ down.double().t() for keep in (False, True)
    )
    dense = fires.float()
    assert exact.judge(fires.float(), dense) == accuracy.Verdict(pytest.approx(0.0, abs=0.5), 0)
    verdict = exact.judge(silent.float(), dense)
    assert verdict.ratio <= 1.0 and verdict.excused == 1
    half = ((silent + fires) / 2).float()
    assert exact.judge(half, dense).ratio > 1.0 and exact.judge(half, dense).excused == 0
    clear = gate.clone()
    clear[0, 2] = 2.0**-20  # above that: no doubt
    other = accuracy.Exact(x, clear, up, down)
    assert other.judge(torch.zeros_like(dense), other.y.float()).ratio > 1.0


def test_the_yardstick_does_not_excuse_what_no_sign_explains():
    g = torch.Generator().manual_seed(0)
    x, gate, up = (torch.randn(n, 16, generator=g) for n in (20, 64, 64))
    down = torch.randn(16, 64, generator=g)
    tensors = [t.bfloat16() for t in (x, gate, up, down)]
    exact = accuracy.Exact(*tensors)
    dense = attack.dense(*tensors, None, None, None)
    assert exact.judge(dense, dense).ratio <= 0.5
    for row in range(20):
        y = dense.clone()
        y[row] *= 1.1
        verdict = exact.judge(y, dense)
        assert verdict.ratio > 1.0 and verdict.row == row and verdict.excused == 0


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
