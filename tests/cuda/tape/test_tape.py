"""Calls that are recorded and replayed, with a driver that runs nothing and remembers what it was given."""

import gc
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.cuda.launcher.fake_driver import driving
from tests.ops.calls.pretended import pretend
from twell_lab.core import DeviceError
from twell_lab.cuda import batch, launcher, tape
from twell_lab.cuda.launcher import Structure
from twell_lab.cuda.sources import Entry
from twell_lab.cuda.tape import Tape, empty
from twell_lab.simulator.source import Parameter

GPU = torch.device("cuda", 0)
KINDS = {"P": ("float", True), "H": ("Hidden", False), "i": ("int", False)}


def PAIR(one, other):  # the bytes of a structure of two addresses
    return one.to_bytes(8, "little") + other.to_bytes(8, "little")


@pytest.fixture
def driver(monkeypatch):
    with driving(monkeypatch) as made:
        real, made.kept = torch.empty, []

        def on_gpu(*shape, device=None, **more):
            if device != GPU:
                return real(*shape, device=device, **more)
            made.kept.append(pretend(real(*shape, **more)))
            return made.kept[-1]

        monkeypatch.setattr(torch, "empty", on_gpu)
        yield made


def launch(name, kinds, *arguments, early=False, grid=(1, 1)):
    made = launcher.kernel("some.cu", name, (("KINDS", kinds),), early=early)
    made.entry = Entry(name, tuple(Parameter(KINDS[kind][0], kind, KINDS[kind][1]) for kind in kinds), 32, 1)
    made.launch(GPU, grid, arguments)


def gpu(*shape):
    return pretend(torch.zeros(*shape))


def new(*shape):
    return empty(*shape, dtype=torch.float32, device=GPU)


def chain(x, bias, weight):
    """Three kernels, with the buffers `first` and `second` between them; returns (y, None)."""
    first, second, y = new(100), new(100), new(4, 4)
    launch("one", "PPPi", x, weight[2:], first, len(x))
    launch("two", "HP", Structure(PAIR, (first[50:], bias)), second, grid=(len(x), 1))
    launch("three", "PPPP", second, bias, None, y)
    return y, None


def seen(driver, call):
    driver.launches.clear()
    result = call()
    return [(each.name, each.grid[:2], each.values()) for each in driver.launches], result


def test_a_replay_launches_the_same_for_tensors_that_lie_elsewhere(driver):
    made, weight = Tape(), gpu(10)
    x, bias = gpu(7), gpu(7)
    first, (y, nothing) = seen(driver, lambda: made.play(chain, (x, bias), (weight,)))
    assert made.recorded and nothing is None and y.shape == (4, 4)
    for _ in range(3):
        x, bias = gpu(7), gpu(7)
        driver.kept.clear()
        again, (y, nothing) = seen(driver, lambda x=x, bias=bias: made.play(chain, (x, bias), (weight,)))
        out, between = driver.kept  # one piece of memory for all that lies between
        begin = between.data_ptr()
        assert y is out and nothing is None and y.shape == (4, 4) and between.dtype == torch.uint8
        # `first` and `second` are used by one launch together, so each has a place of its own.
        place, other = (begin, begin + 512) if again[0][2][2] == begin else (begin + 512, begin)
        assert again == [
            ("one", (1, 1), [x.data_ptr(), weight.data_ptr() + 8, place, 7]),
            ("two", (7, 1), [(place + 200, bias.data_ptr()), other]),
            ("three", (1, 1), [other, bias.data_ptr(), 0, y.data_ptr()]),
        ]
        assert [each[:2] for each in again] == [each[:2] for each in first]


def test_calls_of_a_thread_share_memory_on_the_default_stream_alone(driver, monkeypatch):
    calls = [(Tape(), gpu(7), gpu(7), gpu(10)) for _ in range(2)]
    for each in calls:
        play(driver, *each)

    def pieces():
        driver.kept.clear()
        for each in calls:
            play(driver, *each)
        return [t for t in driver.kept if t.dtype == torch.uint8]

    def stream(number):
        monkeypatch.setattr(launcher, "current_stream", lambda index: number)

    stream(0)
    (shared,) = pieces()
    begin, end = shared.data_ptr(), shared.data_ptr() + shared.nbytes
    inside = [[begin <= value < end for value in each.values() if isinstance(value, int)] for each in driver.launches]
    assert not pieces() and any(map(any, inside))
    with ThreadPoolExecutor(1) as other:
        assert len(other.submit(pieces).result()) == 1
    stream(5)
    assert len(pieces()) == len(calls)
    stream(0)
    monkeypatch.setattr(tape, "_SHARED", 100)
    assert len(pieces()) == len(calls)


def test_other_dimensions_are_replayed_and_the_result_has_those_of_the_first_input(driver):
    made, x, weight = Tape(), gpu(6, 4), gpu(3)

    def run(x, weight):
        y, turned = new(6, 4), new(4, 6)
        launch("one", "PPPP", x, weight, y, turned)
        return y, turned

    assert made.replayed((x,)) is None
    made.play(run, (x,), (weight,))
    for shape in [(6, 4), (2, 3, 4), (24,)]:
        deep = gpu(24).view(shape)
        launches, (y, turned) = seen(driver, lambda deep=deep: made.replayed((deep,)))
        assert (y.shape, turned.shape, y.is_contiguous()) == (shape, (4, 6), True)
        assert launches == [("one", (1, 1), [deep.data_ptr(), weight.data_ptr(), y.data_ptr(), turned.data_ptr()])]
    assert made.replayed((gpu(25)[1:],)) is None  # aligned otherwise


def test_another_input_that_is_none_is_no_replay(driver):
    def run(x, dl1):
        y = new(4)
        launch("with" if dl1 is not None else "without", "PPP", x, dl1, y)
        return y

    x = gpu(4)
    for recorded in (None, gpu(4)):
        made = Tape()
        made.play(run, (x, recorded))
        for dl1_now in (None, gpu(4), None):
            launches, _ = seen(driver, lambda dl1_now=dl1_now, made=made: made.play(run, (x, dl1_now)))
            (name, _, values), expected = launches[0], dl1_now is not None
            assert name == ("with" if expected else "without")
            assert values[:2] == [x.data_ptr(), dl1_now.data_ptr() if expected else 0]


def test_a_structure_is_made_again_only_for_other_addresses(driver):
    made, asked = Tape(), []

    def pair(one, other):
        asked.append((one, other))
        return PAIR(one, other)

    def run(x, weight):
        launch("one", "HP", Structure(pair, (weight, x)), x)
        return x

    x, other, weight = gpu(4), gpu(4), gpu(3)
    made.play(run, (x,), (weight,))
    asked.clear()
    for t in (x, x, other, other, x):
        launches, _ = seen(driver, lambda t=t: made.play(run, (t,), (weight,)))
        assert launches == [("one", (1, 1), [(weight.data_ptr(), t.data_ptr()), t.data_ptr()])]
    assert asked == [(weight.data_ptr(), t.data_ptr()) for t in (x, other, x)]  # first, and after each change


def test_a_replay_in_a_thread_without_a_context_launches_again(driver, monkeypatch):
    entered, made, x, bias, weight = [], Tape(), gpu(7), gpu(7), gpu(10)
    monkeypatch.setattr(launcher, "enter", entered.append)
    made.play(chain, (x, bias), (weight,))
    driver.status = [201]
    launches, _ = seen(driver, lambda: made.play(chain, (x, bias), (weight,)))
    assert entered == [GPU] and [name for name, *_ in launches] == ["one", "one", "two", "three"]


def test_a_refused_replay_names_kernel_and_error_and_the_next_one_runs(driver):
    made, x, bias, weight = Tape(), gpu(7), gpu(7), gpu(10)
    made.play(chain, (x, bias), (weight,))
    driver.status = [0, 719]
    with pytest.raises(DeviceError, match=r"a launch of two with grid \(7, 1\).*CUDA error 719"):
        made.play(chain, (x, bias), (weight,))
    launches, _ = seen(driver, lambda: made.play(chain, (x, bias), (weight,)))
    assert [name for name, *_ in launches] == ["one", "two", "three"]


@pytest.fixture
def graphs(driver, monkeypatch):
    """The numbers of launches in each graph that was started; three launches are many enough for one."""
    monkeypatch.setattr(batch, "_LEAST", 3)
    return driver.graphs


def play(driver, made, x, bias, weight):
    """Play `chain`, and hold its launches against the tensors."""
    launches, (y, _) = seen(driver, lambda: made.play(chain, (x, bias), (weight,)))
    assert [name for name, *_ in launches] == ["one", "two", "three"]
    one, two, three = (values for _, _, values in launches)
    assert one[:2] == [x.data_ptr(), weight.data_ptr() + 8] and two[0] == (one[2] + 200, bias.data_ptr())
    assert three == [two[1], bias.data_ptr(), 0, y.data_ptr()]
    return y


@pytest.fixture
def same_memory(driver, monkeypatch):
    """Every replay gets the memory that the one before got, as in training."""
    real, made = torch.empty, {}

    def again(*shape, device=None, **more):
        key = str((shape, more)), device
        if device == GPU and shape and key in made:
            return made[key]
        return made.setdefault(key, real(*shape, device=device, **more))

    monkeypatch.setattr(torch, "empty", again)


def test_launches_at_addresses_that_were_met_before_are_one_graph(driver, graphs, same_memory):
    made, weight = Tape(), gpu(10)
    pairs = [(gpu(7), gpu(7)) for _ in range(3)]
    found = []
    for turn in (0, 0, 0, 0, 1, 0, 1, 2, 1, 2, 0, 2):
        graphs.clear()
        play(driver, made, *pairs[turn], weight)
        found.append(len(graphs))
    # The first is recorded, the next two launch one by one; each other pair does so twice.
    assert found == [0, 0, 0, 1, 0, 1, 0, 0, 1, 0, 1, 1]


def test_few_launches_are_no_graph(driver, graphs, same_memory, monkeypatch):
    monkeypatch.setattr(batch, "_LEAST", 4)
    made, given = Tape(), (gpu(7), gpu(7), gpu(10))
    for _ in range(6):
        play(driver, made, *given)
    assert graphs == []


def test_a_graph_in_a_thread_without_a_context_starts_again(driver, graphs, same_memory, monkeypatch):
    made, given, entered = Tape(), (gpu(7), gpu(7), gpu(10)), []
    for _ in range(4):
        play(driver, made, *given)
    monkeypatch.setattr(launcher, "enter", entered.append)
    driver.status = [201]
    play(driver, made, *given)
    assert entered == [GPU] and graphs == [3, 3]


def test_a_graph_runs_on_the_current_stream(driver, graphs, same_memory, monkeypatch):
    made, given = Tape(), (gpu(7), gpu(7), gpu(10))
    for stream in (5, 5, 5, 5, 6, 7):
        monkeypatch.setattr(launcher, "current_stream", lambda index, stream=stream: stream)
        play(driver, made, *given)
        assert {each.stream for each in driver.launches} == {stream}
    assert graphs == [3, 3, 3]


def test_at_most_a_few_sets_of_addresses_have_graphs_and_unused_ones_give_way(driver, graphs, same_memory, monkeypatch):
    monkeypatch.setattr(batch, "_VARIANTS", 2)
    monkeypatch.setattr(batch, "_UNUSED", 10)
    made, weight = Tape(), gpu(10)
    pairs = [(gpu(7), gpu(7)) for _ in range(3)]
    for turn in (0, 0, 0, 1, 1, 2, 2, 2):
        play(driver, made, *pairs[turn], weight)
    graphs.clear()
    for turn in (0, 1, 2):
        play(driver, made, *pairs[turn], weight)
    assert graphs == [3, 3] and len(driver.captured) == 4
    for _ in range(10):
        play(driver, made, *pairs[2], weight)
    graphs.clear()
    for turn in (0, 1, 2):  # 0 was the least recently used
        play(driver, made, *pairs[turn], weight)
    assert graphs == [3, 3] and len(driver.captured) == 4


def test_while_something_captures_a_call_launches_one_by_one(driver, graphs, same_memory, monkeypatch):
    made, x, other, bias, weight = Tape(), gpu(7), gpu(7), gpu(7), gpu(10)
    for _ in range(3):
        play(driver, made, x, bias, weight)
    for t, captures in ((x, 0), (other, 1), (other, 1), (other, 1), (x, 0), (x, 1), (other, 0), (x, 1), (x, 0)):
        monkeypatch.setattr(launcher, "capturing", lambda captures=captures: bool(captures))
        graphs.clear()
        play(driver, made, t, bias, weight)
        assert graphs == ([] if captures or t is other else [3])


def test_where_the_driver_makes_no_graph_a_call_launches_one_by_one(driver, graphs, same_memory, monkeypatch):
    asked = []
    monkeypatch.setattr(driver, "cuGraphInstantiateWithFlags", lambda *_: asked.append(1) or 801)
    made, given = Tape(), (gpu(7), gpu(7), gpu(10))
    for _ in range(6):
        play(driver, made, *given)
    assert graphs == [] and not driver.captured and asked == [1]


def test_a_refused_graph_is_an_error_and_the_next_call_runs(driver, graphs, same_memory):
    made, given = Tape(), (gpu(7), gpu(7), gpu(10))
    for _ in range(4):
        play(driver, made, *given)
    driver.status = [719]
    with pytest.raises(DeviceError, match=r"3 launches as a CUDA graph: CUDA error 719"):
        play(driver, made, *given)
    play(driver, made, *given)


def test_graphs_are_bounded_and_end_with_their_call(driver, graphs, same_memory, monkeypatch):
    monkeypatch.setattr(batch, "_MOST_GRAPHS", 2)
    tapes, given = [Tape() for _ in range(3)], (gpu(7), gpu(7), gpu(10))
    for made in tapes:
        for _ in range(5):
            play(driver, made, *given)
    assert graphs == [3] * 4 and len(driver.captured) == 2 * 2  # of each what is started, and what it was made from
    tapes.clear()
    del made
    gc.collect()
    assert driver.captured == {}


def test_what_is_not_in_use_at_the_same_time_shares_a_place(driver):
    def run(x):
        parts = [new(1000) for _ in range(6)]
        launch("begin", "PP", x, parts[0])
        for one, other in zip(parts, parts[1:]):
            launch("go on", "PP", one, other)
        launch("end", "PP", parts[-1], x)
        return x

    made, x = Tape(), gpu(3)
    made.play(run, (x,))
    driver.kept.clear()
    launches, result = seen(driver, lambda: made.play(run, (x,)))
    (between,) = driver.kept
    assert result is x and between.nbytes == 2 * 4096  # 1000 floats, to the next multiple of 256
    assert all(one != other for _, _, (one, other) in launches)


def test_a_kernel_that_starts_early_gets_no_memory_that_is_still_read(driver):
    def run(x, early):
        first, second, third = new(64), new(64), new(64)
        launch("one", "PP", x, first)
        launch("two", "PP", first, second)
        launch("three", "PP", second, third, early=early)
        launch("four", "PP", third, x)
        return x

    for early, places in ((False, 2), (True, 3)):
        made, x = Tape(), gpu(3)
        made.play(lambda x, early=early: run(x, early), (x,))
        driver.kept.clear()
        made.play(run, (x,))
        assert driver.kept[0].nbytes == 256 * places


def test_nor_does_a_second_kernel_that_starts_early_behind_it(driver):
    def run(x):
        first, second, third, fourth = (new(64) for _ in range(4))
        launch("one", "PP", x, first)
        launch("two", "PP", first, second)
        launch("three", "PP", second, third, early=True)
        launch("four", "PP", third, fourth, early=True)
        launch("five", "PP", fourth, x)
        return x

    made, x = Tape(), gpu(3)
    made.play(run, (x,))
    driver.kept.clear()
    launches, _ = seen(driver, lambda: made.play(run, (x,)))
    read_by_two, written_by_four = launches[1][2][0], launches[3][2][1]
    assert read_by_two != written_by_four  # "four" may start while "three" has not yet waited for "two"


def test_an_input_on_another_boundary_runs_again(driver):
    made, runs = Tape(), []

    def run(x):
        runs.append(x.data_ptr() & 15)
        launch("one", "P", x)
        return x

    x = gpu(9)
    for t in (x, x, x[4:], x[1:], x[1:], x):
        assert made.play(run, (t,)) is t
    assert runs == [0, 4, 4] and len(driver.launches) == 6


def not_recorded():
    """Functions run(x, other) that do something that cannot be replayed."""

    def unknown(x, other):
        launch("one", "P", gpu(3) + 1)
        return x

    def inside_a_structure(x, other):
        launch("one", "H", Structure(PAIR, (x, gpu(3) + 1)))
        return x

    def returned(x, other):
        launch("one", "P", x)
        return gpu(3) + 1

    def a_part(x, other):
        launch("one", "P", x)
        return new(8)[:4]

    def of_other_strides(x, other):
        launch("one", "P", x)
        return new(2, 4).t()

    yield from (unknown, inside_a_structure, returned, a_part, of_other_strides)


@pytest.mark.parametrize("run", [*not_recorded()], ids=lambda run: run.__name__)
def test_what_cannot_be_replayed_runs_each_time(driver, run):
    made, x = Tape(), gpu(16)
    for turn in range(3):
        made.play(run, (x, gpu(4)))
        assert not made.recorded and len(driver.launches) == turn + 1


def test_a_copy_where_freed_memory_was_is_not_taken_for_that_memory(driver, monkeypatch):
    room = bytearray(256)  # all that this allocator has
    allocate = lambda *_, **__: pretend(torch.frombuffer(room, dtype=torch.float32))  # noqa: E731

    def run(x):
        launch("one", "PP", x, new(64))
        copy = allocate()
        launch("two", "PP", copy, x)
        return x

    with monkeypatch.context() as patched:
        patched.setattr(torch, "empty", allocate)
        made = Tape()
        made.play(run, (gpu(3),))
    assert not made.recorded


def test_inputs_that_share_memory_are_not_told_apart_later(driver):
    def run(x, other, weight):
        launch("one", "PPP", x, other, weight)
        return x

    whole, weight = gpu(16), gpu(16)
    for x, other, fixed in ((whole, whole[4:], weight), (whole, gpu(3), whole), (whole[8:], weight[:4], weight[2:6])):
        made = Tape()
        made.play(run, (x, other), (fixed,))
        assert not made.recorded
    made = Tape()
    made.play(run, (whole[:8], whole[8:]), (weight,))  # beside each other
    assert made.recorded


def test_fixed_tensors_may_share_memory(driver):
    def run(x, weight, same):
        launch("one", "PPP", x, weight, same)
        return x

    made, x, weight = Tape(), gpu(3), gpu(16)
    made.play(run, (x,), (weight, weight))
    assert made.recorded
    launches, _ = seen(driver, lambda: made.play(run, (x,), (weight, weight)))
    assert launches == [("one", (1, 1), [x.data_ptr(), weight.data_ptr(), weight.data_ptr()])]


def test_after_an_error_nothing_is_recorded(driver):
    def run(x):
        launch("one", "P", x)
        raise ValueError("midway")

    made = Tape()
    for _ in range(2):
        with pytest.raises(ValueError, match="midway"):
            made.play(run, (gpu(3),))
        assert launcher.own.recording is None and not made.recorded


def test_a_call_within_a_call_is_recorded_with_it(driver):
    inner, outer = Tape(), Tape()

    def within(x):
        y = new(4)
        launch("inner", "PP", x, y)
        return y

    def run(x):
        y, z = inner.play(within, (x,)), new(4)
        launch("outer", "PP", y, z)
        return z

    for _ in range(2):
        launches, _ = seen(driver, lambda: outer.play(run, (gpu(4),)))
        assert [name for name, *_ in launches] == ["inner", "outer"]
        assert outer.recorded and not inner.recorded


def test_a_call_that_was_recorded_is_recorded_again_within_another(driver):
    inner, outer, x = Tape(), Tape(), gpu(4)

    def within(x):
        launch("inner", "P", x)
        return x

    def run(x):
        y = new(4)
        launch("outer", "PP", inner.play(within, (x,)), y)
        return y

    inner.play(within, (x,))
    assert inner.recorded
    for _ in range(3):
        launches, _ = seen(driver, lambda: outer.play(run, (x,)))
        assert [name for name, *_ in launches] == ["inner", "outer"]
    assert outer.recorded


def test_no_tensor_is_held_alive(driver):
    made, tensors = Tape(), [gpu(7), gpu(7), gpu(10)]
    for _ in range(2):
        made.play(chain, tensors[:2], tensors[2:])
    references = [weakref.ref(t) for t in (*tensors, *driver.kept)]
    tensors.clear()
    driver.kept.clear()
    gc.collect()
    assert [each() for each in references] == [None] * len(references)


def test_threads_replay_one_tape(driver):
    made, weight, together = Tape(), gpu(10), threading.Barrier(4)
    mine = [(gpu(7), gpu(7)) for _ in range(4)]

    def some(number):
        together.wait()
        return [made.play(chain, mine[number], (weight,))[0].data_ptr() for _ in range(100)]

    with ThreadPoolExecutor(4) as pool:
        results = [*pool.map(some, range(4))]
    assert len({at for each in results for at in each}) == 400  # driver.kept keeps them all
    for x, bias in mine:
        launched = [each for each in driver.launches if each.name == "one" and each.values()[0] == x.data_ptr()]
        assert len(launched) == 100
        assert sum(each.name == "three" and each.values()[1] == bias.data_ptr() for each in driver.launches) == 100


def test_on_a_cpu_nothing_is_recorded():
    made, runs = Tape(), []

    def run(x):
        runs.append(x)
        return empty(2, 3, dtype=torch.int32, device=x.device)

    for turn in range(2):
        assert made.play(run, (torch.zeros(3),)).shape == (2, 3)
        assert len(runs) == turn + 1 and not made.recorded


pieces = st.lists(
    st.tuples(st.integers(0, 5000), st.integers(0, 8), st.integers(0, 4)).map(lambda p: (p[0], (p[1], p[1] + p[2]))),
    max_size=12,
)


@given(pieces)
def test_places_overlap_only_where_one_is_free(drawn):
    sizes, uses = [size for size, _ in drawn], [use for _, use in drawn]
    places, end = tape._offsets(sizes, uses)
    assert all(at % 256 == 0 and at + size <= end for at, size in zip(places, sizes))
    assert end <= sum(-(-size // 256) * 256 for size in sizes)
    for i, (at, size, (first, free)) in enumerate(zip(places, sizes, uses)):
        for other_at, other_size, (other_first, other_free) in [*zip(places, sizes, uses)][i + 1 :]:
            if first < other_free and other_first < free:
                assert at + size <= other_at or other_at + other_size <= at
