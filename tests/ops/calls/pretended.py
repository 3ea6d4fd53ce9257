"""CPU tensors that say they are on a GPU, so that what is prepared for one can be looked at without one."""

from collections import deque
from contextlib import contextmanager

import torch

from tests.cuda.launcher.fake_driver import driving
from twell_lab.cuda import tma
from twell_lab.ops import (
    checks,
    decode,
    differentiable,
    dispatch,
    hopper_dense,
    inference,
    portable,
    train_lost,
)

GPU = torch.device("cuda", 0)


class Pretended(torch.Tensor):
    """Its memory is where `data_ptr` says; operations on it give more of its kind."""

    is_cuda = True
    device = GPU


def pretend(t: torch.Tensor | None) -> Pretended | None:
    return None if t is None else t.as_subclass(Pretended)


def map_of(out, dtype, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, fill):
    """In the place of cuTensorMapEncodeTiled: a map that says what it is of."""
    import ctypes

    words = [address.value, dtype, *dims, *strides, *box]
    ctypes.memset(out.value, 0, 128)
    (ctypes.c_uint64 * 16).from_address(out.value)[: len(words)] = words
    return 0


@contextmanager
def pretending(monkeypatch, capability=(9, 0)):
    """Inside it, `pretend`ed tensors are taken for tensors on a GPU; gives the driver that remembers the launches."""
    with driving(monkeypatch, capability) as driver:
        empty, like = torch.empty, torch.empty_like

        def on_gpu(*shape, device=None, **more):
            made = empty(*shape, **more)
            if device == GPU and made.numel():  # what nobody wrote is no number
                made.view(-1).view(torch.uint8).fill_(255)
            driver.allocated.append((made.data_ptr(), made.nbytes))
            driver.alive.append(made)
            return pretend(made) if device == GPU else made

        def like_it(t, **more):
            made = like(t, **more)
            driver.allocated.append((made.data_ptr(), made.nbytes))
            driver.alive.append(made)
            return made

        driver.allocated = []
        driver.alive = deque(maxlen=20)  # of them the last, so that no other takes their place
        monkeypatch.setattr(torch, "empty", on_gpu)
        monkeypatch.setattr(torch, "empty_like", like_it)
        monkeypatch.setattr(tma, "_encode", lambda: map_of)
        monkeypatch.setattr(portable, "multiprocessors", lambda index: 132)
        monkeypatch.setattr(train_lost, "multiprocessors", lambda index: 2)
        monkeypatch.setattr(inference, "Tensor", Pretended)
        monkeypatch.setattr(checks, "Tensor", Pretended)
        monkeypatch.setattr(
            dispatch, "_start", lambda h, down: pretend(torch.zeros(len(h), len(down), dtype=torch.float32))
        )
        monkeypatch.setattr(hopper_dense, "multiprocessors", lambda index: 132)
        cached = [tma.tensor_map, decode._layer]
        for each in (*cached, dispatch.calls, differentiable._tapes):
            getattr(each, "cache_clear", getattr(each, "clear", None))()
        yield driver
        for each in (*cached, dispatch.calls, differentiable._tapes):
            getattr(each, "cache_clear", getattr(each, "clear", None))()
