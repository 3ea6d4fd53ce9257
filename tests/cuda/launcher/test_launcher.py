"""Launches without a driver: a C function takes its place and reads the arguments back."""

import struct
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from tests.cuda.launcher.fake_driver import driving
from twell_lab.core import DeviceError, InputError
from twell_lab.cuda import launcher
from twell_lab.cuda.sources import Entry
from twell_lab.simulator.source import Parameter

GPU = torch.device("cuda", 0)


@pytest.fixture
def driver(monkeypatch):
    with driving(monkeypatch) as made:
        yield made


TYPES = {"P": "float", "H": "Hidden", "i": "int", "q": "long long", "f": "float", "M": "TensorMap"}


def kernel(kinds, **more):
    """A kernel that takes pointers (P), structures of two pointers (H), numbers (i, q, f) and tensor maps (M)."""
    made = launcher.kernel("some.cu", "some", (("KINDS", kinds),), **more)
    made.entry = Entry("some", tuple(Parameter(TYPES[kind], kind, kind == "P") for kind in kinds), 96, 1)
    return made


def test_every_kind_of_argument_arrives_where_it_belongs(driver):
    x, big = torch.zeros(3), bytes(range(128))
    made = kernel("PiMPHqMi", shared=5000)
    made.launch(
        GPU, (7, 3), (x, -5, big, None, struct.pack("<QQ", 1 << 40, x.data_ptr()), -(2**40), big[::-1], 2**31 - 1)
    )
    (seen,) = driver.launches
    assert (seen.grid, seen.block, seen.shared, seen.stream) == ((7, 3, 1), (96, 1, 1), 5000, 77)
    at = x.data_ptr()
    unsigned = [at, 2**32 - 5, big, 0, (1 << 40, at), 2**64 - 2**40, big[::-1], 2**31 - 1]
    assert seen.values() == unsigned and not seen.early
    places = [place for place, _ in seen.arguments]
    assert all(place % 64 == 0 for place, data in seen.arguments if len(data) == 128)
    assert all(place % 8 == 0 for place in places) and places == sorted(places)


def test_a_float_arrives_as_its_bits_and_nothing_else_is_taken_for_one(driver):
    made = kernel("if")
    with pytest.raises(InputError, match="f of some is int 1; a float is accepted"):
        made.launch(GPU, (1, 1), (7, 1))
    made.launch(GPU, (1, 1), (7, 0.1))
    assert driver.launches[0].values() == [7, int.from_bytes(struct.pack("<f", 0.1), "little")]


def test_the_next_launch_keeps_nothing_of_the_one_before(driver):
    made = kernel("PPi")
    x = torch.zeros(3)
    made.launch(GPU, (7, 3), (x, x, 9))
    made.launch(GPU, (1, 1), (None, 16, 0))
    first, second = driver.launches
    assert first.values() == [x.data_ptr(), x.data_ptr(), 9] and second.values() == [0, 16, 0]
    assert second.grid == (1, 1, 1) and len(driver.kernels) == 1  # loaded once
    assert [at for at, _ in first.arguments] == [at for at, _ in second.arguments]


def test_kernels_of_other_macros_or_shared_memory_are_others(driver):
    for more in ({}, {"shared": 1 << 16}, {"early": True}):
        kernel("i", **more).launch(GPU, (1, 1), (1,))
    assert [seen.shared for seen in driver.launches] == [0, 1 << 16, 0]
    assert [seen.early for seen in driver.launches] == [False, False, True]
    assert kernel("i") is kernel("i") and kernel("i") is not kernel("i", shared=8)


@pytest.mark.parametrize(
    "version, capability, early", [(13_000, (9, 0), True), (12_020, (9, 0), False), (13_000, (8, 9), False)]
)
def test_where_a_kernel_may_start_early(monkeypatch, version, capability, early):
    with driving(monkeypatch, capability) as driver:
        driver.version = version
        kernel("i", early=True).launch(GPU, (1, 1), (1,))
        assert driver.launches[0].early is early


def test_a_thread_without_a_context_gets_one_and_launches_again(driver, monkeypatch):
    entered = []
    monkeypatch.setattr(launcher, "enter", entered.append)
    driver.status = [201]
    kernel("i").launch(GPU, (1, 1), (4,))
    assert entered == [GPU] and [seen.values() for seen in driver.launches] == [[4], [4]]


def test_a_refusal_names_kernel_grid_and_error(driver):
    driver.status = [1]
    with pytest.raises(DeviceError, match=r"some with grid \(5, 2\), 96 threads a block and 0 bytes.*CUDA error 1"):
        kernel("i").launch(GPU, (5, 2), (4,))


@pytest.mark.parametrize(
    "arguments, told",
    [
        ((torch.zeros(3), 2, bytes(128), 4), r"some takes 3 arguments \(P, i, M\); 4 were given"),
        (
            (torch.zeros(3).double(), 2, bytes(128)),
            r"P of some is a tensor of torch.float64; a tensor for float\*, None",
        ),
        ((None, 2**31, bytes(128)), "i of some is int 2147483648; a whole number from -2147483648 to 2147483647"),
        ((None, 2, None), "M of some is NoneType None; the bytes of one TensorMap is accepted"),
    ],
)
def test_wrong_arguments_are_named_at_the_first_launch_of_each_thread(driver, arguments, told):
    made = kernel("PiM")
    with pytest.raises(InputError, match=told):
        made.launch(GPU, (1, 1), arguments)
    made.launch(GPU, (1, 1), (None, 2, bytes(128)))
    with ThreadPoolExecutor(1) as pool, pytest.raises(InputError, match=told):
        pool.submit(made.launch, GPU, (1, 1), arguments).result()
    assert len(driver.launches) == 1  # nothing wrong was launched


def test_threads_do_not_write_over_each_others_arguments(driver):
    made, together = kernel("qq"), threading.Barrier(4)

    def some(number):
        together.wait()
        for turn in range(500):
            made.launch(GPU, (1 + number, 1), (number, turn))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(some, range(4)))
    seen = [(launch.grid[0] - 1, *launch.values()) for launch in driver.launches]
    assert all(grid == number for grid, number, _ in seen)
    assert {(number, turn) for _, number, turn in seen} == {(n, t) for n in range(4) for t in range(500)}
    assert len({launch.arguments[0][0] for launch in driver.launches}) == 4  # a block of memory each


def test_the_least_recently_used_kernel_is_prepared_anew(driver, monkeypatch):
    monkeypatch.setattr(launcher, "_MOST_PREPARED", 2)
    monkeypatch.setattr(launcher, "own", launcher._Own())
    kernels = [kernel("i", shared=n) for n in (16, 32, 48)]
    for turn in range(3):
        for made in kernels:
            made.launch(GPU, (1, 1), (turn,))
    assert [seen.values() for seen in driver.launches] == [[turn] for turn in range(3) for _ in range(3)]
    assert [seen.shared for seen in driver.launches] == [16, 32, 48] * 3
    assert launcher.own.prepared.cache_info().currsize == 2
