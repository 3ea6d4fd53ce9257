"""CPU tensors that claim to be on a GPU, so that launches can be tested without one."""

from collections import deque
from contextlib import contextmanager

import torch

from tests.cuda.launcher.fake_driver import driving
from twell_lab.cuda import launcher, tma
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
    """A CPU tensor that claims to be on a GPU; so do the results of operations on it."""

    is_cuda = True
    device = GPU


def pretend(t: torch.Tensor | None) -> Pretended | None:
    return None if t is None else t.as_subclass(Pretended)


def map_of(out, dtype, rank, address, dims, strides, box, steps, interleave, swizzle, promotion, fill):
    """Takes the place of cuTensorMapEncodeTiled: its map holds the arguments, readable for `computed.matrix`."""
    import ctypes

    words = [address.value, dtype, *dims, *strides, *box]
    ctypes.memset(out.value, 0, 128)
    (ctypes.c_uint64 * 16).from_address(out.value)[: len(words)] = words
    return 0


@contextmanager
def pretending(monkeypatch, capability=(9, 0)):
    """A context in which `pretend`ed tensors are taken for GPU tensors; gives the driver that remembers the launches."""
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
        driver.alive = deque(maxlen=20)  # the last of them, kept so that no other tensor gets their addresses
        monkeypatch.setattr(torch, "empty", on_gpu)
        monkeypatch.setattr(torch, "empty_like", like_it)
        entered = lambda: hasattr(driver.entered, "context")  # noqa: E731
        encode = lambda *given: map_of(*given) if entered() else launcher.NO_CONTEXT  # noqa: E731
        monkeypatch.setattr(tma, "_encode", lambda: encode)
        monkeypatch.setattr(portable, "multiprocessors", lambda index: 132)
        monkeypatch.setattr(train_lost, "multiprocessors", lambda index: 2)
        monkeypatch.setattr(inference, "Tensor", Pretended)
        monkeypatch.setattr(checks, "Tensor", Pretended)
        monkeypatch.setattr(hopper_dense, "multiprocessors", lambda index: 132)
        cached = [tma.tensor_map, decode._layer]
        for each in (
            *cached,
            dispatch.calls,
            differentiable._tapes,
            differentiable._checked,
            differentiable._middle_tapes,
        ):
            getattr(each, "cache_clear", getattr(each, "clear", None))()
        yield driver
        for each in (
            *cached,
            dispatch.calls,
            differentiable._tapes,
            differentiable._checked,
            differentiable._middle_tapes,
        ):
            getattr(each, "cache_clear", getattr(each, "clear", None))()
