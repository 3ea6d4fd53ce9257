"""Copies of weights, and counters, on several CUDA streams: who waits for whom, and which memory is kept for whom.

Without a GPU: tensors that say they are on one, and streams that note what they are asked."""

import copy
import pickle

import pytest
import torch

from twell_lab.layers.choice import Choice
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.ops import checks, copies, streams
from twell_lab.ops.reference import GatedFeedForward


class OnGPU(torch.Tensor):
    """A CPU tensor that says it is on a GPU; its memory is known by its address."""

    is_cuda = True
    _is_param = True  # as a Parameter's

    def record_stream(self, stream):
        stream.gpu.kept.append((self.data_ptr(), stream.cuda_stream))


class Event:
    def __init__(self, stream):
        self.stream = stream

    def wait(self, stream):
        stream.gpu.waits.append((stream.cuda_stream, self.stream.cuda_stream))

    def query(self):
        return True


class Stream:
    def __init__(self, gpu, number):
        self.gpu, self.cuda_stream = gpu, number

    def record_event(self):
        return Event(self)


class GPU:
    """Its current stream is a number. kept: (address, stream) of each record_stream; waits: (who, for whom)."""

    def __init__(self):
        self.now, self.capturing, self.kept, self.waits = 1, False, [], []

    def asked(self, now):
        """What was asked since the last call, which is made anew on stream `now`."""
        asked, self.kept, self.waits, self.now = (self.kept, self.waits), [], [], now
        return asked


@pytest.fixture
def gpu(monkeypatch):
    gpu, empty = GPU(), torch.empty
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: Stream(gpu, gpu.now))
    monkeypatch.setattr(streams, "current_stream", lambda index: gpu.now)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: gpu.capturing)
    monkeypatch.setattr(torch, "empty", lambda *shape, pin_memory=False, **more: empty(*shape, **more))
    monkeypatch.setattr(checks, "watched", lambda *tensors: False)
    return gpu


@pytest.fixture
def weight():
    return torch.randn(3, 5).as_subclass(OnGPU)


@pytest.fixture
def place(gpu, weight):
    """Memory for its transpose, allocated on stream 1."""
    return copies.place(copies.TRANSPOSED, weight)


def refresh(weight, place, training=False):
    copies.refresh({"down": weight}, [place], [copies.TRANSPOSED], training=training)
    assert torch.equal(place, weight.t())


def test_another_stream_waits_and_the_memory_is_kept_for_it(gpu, weight, place):
    refresh(weight, place)
    gpu.asked(now=2)
    refresh(weight, place)
    assert gpu.asked(now=2) == ([(place.data_ptr(), 2)], [(2, 1)])
    refresh(weight, place)
    assert gpu.asked(now=1) == ([], [])  # both are known by then
    refresh(weight, place)
    assert gpu.asked(now=3) == ([], [])


def test_the_first_use_on_another_stream_waits_for_the_allocation(gpu, weight, place):
    gpu.asked(now=2)
    refresh(weight, place)
    assert gpu.asked(now=1) == ([(place.data_ptr(), 2)], [(2, 1)])
    refresh(weight, place)
    assert gpu.asked(now=3) == ([(place.data_ptr(), 1)], [(1, 2)])  # and the first stream for what the second one wrote
    refresh(weight, place)
    assert gpu.asked(now=1) == ([(place.data_ptr(), 3)], [(3, 2)])


def test_a_copy_that_is_made_anew_is_waited_for_again(gpu, weight, place):
    for stream in (1, 2):
        gpu.asked(now=stream)
        refresh(weight, place)
    weight.mul_(2)
    gpu.asked(now=1)
    refresh(weight, place)
    gpu.asked(now=2)
    refresh(weight, place)
    assert gpu.asked(now=1)[1] == [(2, 1)]


def test_who_only_looks_for_values_that_are_not_finite_waits_as_well(gpu, weight, place):
    weight.requires_grad_(True)
    refresh(weight, place, training=True)
    gpu.asked(now=2)
    refresh(weight, place)
    assert gpu.asked(now=3) == ([(place.data_ptr(), 2)], [(2, 1)])
    refresh(weight, place)
    assert gpu.asked(now=1) == ([(place.data_ptr(), 3)], [(3, 2)])


def test_the_order_is_kept_for_whoever_copies_by_it(gpu, weight):
    order = torch.tensor([2, 0, 1]).as_subclass(OnGPU)
    place = copies.place(copies.ROWS, weight)
    gpu.asked(now=2)
    copies.refresh({"up": weight}, [place], [copies.ROWS], order)
    assert {(order.data_ptr(), 2), (place.data_ptr(), 2)} == {*gpu.asked(now=1)[0]}


def test_a_capture_keeps_the_memory_and_waits_for_nothing(gpu, weight, place):
    refresh(weight, place)
    gpu.asked(now=2)
    gpu.capturing = True
    refresh(weight, place)
    assert gpu.asked(now=2) == ([(place.data_ptr(), 2)], [])
    gpu.capturing = False
    refresh(weight, place)
    assert gpu.asked(now=1)[1] == [(2, 1)]


@pytest.mark.parametrize("twin_of", [copy.deepcopy, lambda t: pickle.loads(pickle.dumps(t))])
def test_another_tensor_begins_anew(twin_of, gpu):
    counters = torch.zeros(4)
    counters.moment = streams.Moment(counters.device)
    assert twin_of(counters).moment is None


def test_of_a_tensor_that_nobody_said_anything_about(gpu):
    counters = torch.zeros(4).as_subclass(OnGPU)
    streams.enter(counters)
    assert gpu.asked(now=1) == ([(counters.data_ptr(), 1)], [])
    streams.enter(counters)
    assert gpu.asked(now=2) == ([], [])
    streams.enter(counters)
    assert gpu.asked(now=1) == ([(counters.data_ptr(), 2)], [(2, 1)])


def test_counters_are_kept_for_the_streams_that_count_in_them(gpu):
    sparse = SparseFFN(GatedFeedForward(8, 40).requires_grad_(False), plan=Choice())
    sparse.register_buffer("stats", sparse.stats.as_subclass(OnGPU), persistent=False)
    streams.allocated(sparse.stats)
    for stream in (2, 3):
        gpu.asked(now=stream)
        sparse(torch.randn(4, 8))
        assert (sparse.stats.data_ptr(), stream) in gpu.kept and (stream, 1) in gpu.waits
    gpu.asked(now=1)
    sparse(torch.randn(4, 8))
    assert gpu.asked(now=1) == ([], [])
