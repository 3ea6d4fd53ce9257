"""The clocks: whose turn it is, what is read before a call, and what the numbers are."""

from __future__ import annotations

from functools import partial
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from twell_lab.ops import clock


class Machine:
    """A host that takes so many seconds for a call, and a device that works off what it was given."""

    def __init__(self, host: float, device: float) -> None:
        self.host, self.device, self.now, self.free = host, device, 0.0, 0.0

    def call(self, turn: int) -> None:
        self.now += self.host
        self.free = max(self.free, self.now) + self.device

    def wait(self) -> None:
        self.now = max(self.now, self.free)


@given(st.floats(1e-6, 1e-2), st.floats(1e-6, 1e-2), st.integers(1, 30))
def test_a_burst_tells_the_host_from_the_wall(host, device, count):
    machine = Machine(host, device)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(clock.time, "perf_counter", lambda: machine.now)
        ((returned, ended),) = clock.time_bursts({"it": machine.call}, machine.wait, rounds=3, count=count).values()
    assert returned == pytest.approx([1e3 * host] * 3)
    slower, other = max(host, device), min(host, device)
    assert ended == pytest.approx([1e3 * (slower * count + other) / count] * 3)


@pytest.mark.parametrize("warm, first", [(None, 2), (0, 0), (3, 3)])
def test_bursts_take_turns_and_are_waited_for(warm, first):
    seen = []
    calls = {name: lambda turn, name=name: seen.append(f"{name}{turn}") for name in ("a", "b")}
    clock.time_bursts(calls, lambda: seen.append("wait"), rounds=2, count=2, warm=warm)
    before = lambda name: [*(f"{name}{turn}" for turn in range(first)), "wait"]  # noqa: E731
    assert seen == [step for _ in range(2) for name in "ab" for step in (*before(name), f"{name}0", f"{name}1", "wait")]


@pytest.mark.parametrize(
    "host_ms, gigabyte_ms, reads", [(0.1, 0.36, 1), (1.0, 0.36, 4), (40.0, 0.36, 100), (1.0, 3.5, 1), (40.0, 3.5, 12)]
)
def test_before_a_call_is_timed_the_device_is_kept_busy_for_its_host(monkeypatch, host_ms, gigabyte_ms, reads):
    machine, seen = Machine(host_ms / 1e3, 0.0), []
    event = SimpleNamespace(record=lambda: seen.append("event"), elapsed_time=lambda end: gigabyte_ms)
    monkeypatch.setattr(clock.time, "perf_counter", lambda: machine.now)
    monkeypatch.setattr(clock.torch, "zeros", lambda *_, **__: SimpleNamespace(sum=lambda: seen.append("read")))
    monkeypatch.setattr(clock.torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(clock.torch.cuda, "Event", lambda **_: event)
    found = clock.time_cuda({"it": machine.call}, 2)
    first = ["read", "event", "read", "event"]  # of one read
    assert found == {"it": [gigabyte_ms] * 2} and seen == first + [*["read"] * reads, "event", "event"] * 2


def host(monkeypatch, **seconds: float):
    """Calls that take the host so many seconds, by name, and what was called."""
    now, seen = [0.0], []

    def call(name, turn):
        seen.append((name, turn))
        now[0] += seconds[name]

    monkeypatch.setattr(clock.time, "perf_counter", lambda: now[0])
    return {name: partial(call, name) for name in seconds}, seen


@pytest.mark.parametrize("seconds, turns", [(0.0, 5), (0.29, 10), (9.0, 40)])
def test_plain_calls_take_turns_from_five_to_forty(monkeypatch, seconds, turns):
    calls, seen = host(monkeypatch, a=0.01, b=0.02)
    found = clock.time_calls(calls, torch.device("cpu"), seconds=seconds, beside=999)
    assert found == {"a": pytest.approx([10.0] * turns), "b": pytest.approx([20.0] * turns)}
    assert [name for name, _ in seen] == [*"aaabbb"] + ["a", "b"] * turns


def test_calls_on_a_cpu_take_turns_of_twenty(monkeypatch):
    calls, seen = host(monkeypatch, a=0.002, b=0.001)
    found = clock.time_cpu(calls, seconds=0.6)
    assert sorted(seen[:4]) == [("a", 0), ("a", 1), ("b", 0), ("b", 1)]
    assert seen[4:] == [(name, turn + i) for turn in range(0, 200, 20) for name in "ab" for i in range(20)]
    assert found == {"a": pytest.approx([2.0] * 200), "b": pytest.approx([1.0] * 200)}
