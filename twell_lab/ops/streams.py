"""Tensors that several CUDA streams use: no stream reads one before it is written, and its memory goes to nobody else
while a stream still works with it.

torch's allocator knows on which stream memory was allocated, and takes freed memory as done with once that stream is.
What other streams do with it the allocator has to be told: Tensor.record_stream."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from ..cuda.launcher import current_stream
from . import checks


class Moment:
    """When some tensors were written, on the stream that was current then. Nothing here has the host wait.

    A moment that is kept on a tensor is not pickled or copied with it: the other tensor has None in its place."""

    __slots__ = "device", "event", "known", "_index"

    def __init__(self, device: torch.device) -> None:
        stream = torch.cuda.current_stream(device)
        self.device, self.event, self.known = device, stream.record_event(), {stream.cuda_stream}
        self._index = device.index

    def __reduce__(self):
        return type(None), ()

    def enter(self, tensors: Sequence[Tensor]) -> None:
        """Make all the tensors that were written at this moment safe to read on the current stream."""
        if current_stream(self._index) in self.known:
            return
        stream = torch.cuda.current_stream(self.device)
        for t in tensors:
            t.record_stream(stream)
        if not torch.cuda.is_current_stream_capturing():  # capturing begins with a device that has done all before it
            self.event.wait(stream)
            self.known.add(stream.cuda_stream)


def allocated(t: Tensor) -> None:
    """Keep a moment on a tensor of a GPU that has just been allocated, and whose first writes were queued. Not where
    something watches, as torch.compile does, or captures."""
    if t.is_cuda and not checks.watched(t) and not torch.cuda.is_current_stream_capturing():
        t.moment = Moment(t.device)


def enter(t: Tensor) -> None:
    """Make a tensor safe to use on the current stream, if it is on a GPU: the stream waits until the tensor was
    allocated. The second time on a stream this costs next to nothing."""
    moment = getattr(t, "moment", None)
    if moment is not None:
        moment.enter([t])
    elif t.is_cuda and not checks.watched(t):  # it was moved or copied since, or somebody else made it
        t.record_stream(torch.cuda.current_stream(t.device))
        allocated(t)
