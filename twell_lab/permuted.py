"""The hot/cold order of a layer's weights: copies in which the most used neurons come first, kept equal to the weights.

They are buffers outside the state_dict: who saves, loads or trains the layer sees the module's own order alone.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from . import ops
from .errors import InputError

# gate, up and down are the first three weights; down is held twice, also transposed, and the two biases of the neurons last.
NAMES = ("gate", "up", "down", "down_t", "gate_bias", "up_bias")
_ROWS, _COLUMNS, _ROWS_OF_TRANSPOSE = 0, 1, 2
_HOW = (_ROWS, _ROWS, _COLUMNS, _ROWS_OF_TRANSPOSE, _ROWS, _ROWS)

_library = torch.library.Library("twell_lab", "FRAGMENT")
_library.define(
    "refresh_permuted(Tensor[] weights, Tensor order, Tensor(a!)[] copies, int[] how, Tensor(b!) stamp, bool changing) -> ()"
)


class HotFirst(nn.Module):
    """What SparseFFN needs for hot/cold: `order`, int64 [d_ff], and `hot_first_*`, the weights in that order.

    All are non-persistent buffers, None until `_hold_order` is called. The sources that the methods take are the module's
    own gate, up and down weights, and gate's and up's bias (None where there is none), in this order.
    """

    def __init__(self) -> None:
        super().__init__()
        self._neurons: list[int] | None = None  # the order once more, should its buffer be moved by to_empty
        self._order_stamp: Tensor | None = None
        self._order_seen: list = []
        for name in ("order", *(f"hot_first_{each}" for each in NAMES)):
            self.register_buffer(name, None, persistent=False)

    def _hold_order(self, order: Tensor, sources: list[Tensor | None]) -> None:
        """Keep copies in this order; made from the sources."""
        self._neurons = order.tolist()
        self._renew_order(sources)

    def _drop_order(self) -> None:
        self._neurons, self.order, self._order_seen = None, None, []
        for name in NAMES:
            setattr(self, f"hot_first_{name}", None)

    def _hot_first(self, sources: list[Tensor | None]) -> dict[str, Tensor | None]:
        """The copies by name, as ops.infer takes them, brought up to date."""
        # Versions and addresses alone would take another tensor for the last one if it lies where that one lay.
        if any(a is not b for a, b in zip(self._order_seen, sources)) or not self._order_fits(sources):
            self._renew_order(sources)
        present = [(t, f"hot_first_{name}", how) for t, name, how in zip(_doubled(sources), NAMES, _HOW) if t is not None]
        changing = torch.is_grad_enabled() and any(t.requires_grad for t, _, _ in present)
        weights, copies = [t.detach() for t, _, _ in present], [getattr(self, name) for _, name, _ in present]
        dispatched = torch.compiler.is_compiling() or any(type(t) is not Tensor for t in weights)
        refresh = torch.ops.twell_lab.refresh_permuted if dispatched else _refresh
        refresh(weights, self.order, copies, [how for _, _, how in present], self._order_stamp, changing)
        return {name: getattr(self, f"hot_first_{name}") for name in NAMES}

    def _order_fits(self, sources: list) -> bool:
        """Whether every copy is a place for its weight: same shape, dtype and device."""
        for name, how, source in zip(NAMES, _HOW, _doubled(sources)):
            copy = getattr(self, f"hot_first_{name}")
            if (copy is None) != (source is None):
                return False
            if copy is None:
                continue
            place = copy.t() if how == _ROWS_OF_TRANSPOSE else copy
            if place.shape != source.shape or copy.dtype != source.dtype or copy.device != source.device:
                return False
        return self.order is not None and self.order.device == sources[1].device

    def _renew_order(self, sources: list, anew: bool = False) -> None:
        """Have the next refresh make all copies again, whatever they were made from before; anew: in other memory."""
        up = sources[1]
        if up.shape[0] != len(self._neurons):
            raise InputError(f"up has {up.shape[0]} neurons, but the layer's plan is for {len(self._neurons)}; as many are accepted")
        with torch.inference_mode(False):  # what is made inside inference mode could not be written to outside of it
            if anew or not self._order_fits(sources):
                self.order = torch.tensor(self._neurons, device=up.device)
                for name, how, source in zip(NAMES, _HOW, _doubled(sources)):
                    shape = () if source is None else source.t().shape if how == _ROWS_OF_TRANSPOSE else source.shape
                    setattr(self, f"hot_first_{name}", None if source is None else source.new_empty(shape, requires_grad=False))
            if self._order_stamp is None:  # no buffer: it stays on the CPU
                self._order_stamp = torch.empty(2 * len(NAMES) + 1, dtype=torch.int64)
        self._order_stamp.fill_(-1)
        # In a list, so that they are no parameters of this module. Anything but a parameter is made anew each time.
        self._order_seen = [each if each is None or isinstance(each, nn.Parameter) else False for each in sources]

    @property
    def _order_buffers(self) -> list[Tensor]:
        held = [self.order, *(getattr(self, f"hot_first_{name}") for name in NAMES)]
        return [each for each in held if each is not None]


def _doubled(sources: list) -> list:
    """gate, up, down, gate_bias, up_bias -> one source for each of NAMES."""
    gate, up, down, gate_bias, up_bias = sources
    return [gate, up, down, down, gate_bias, up_bias]


@torch.library.impl(_library, "refresh_permuted", "CUDA")
@torch.library.impl(_library, "refresh_permuted", "CPU")
def _refresh(weights, order, copies, how, stamp, changing):
    """Make the copies equal the weights in this order again, if any weight has changed; see ops.refresh_transposed."""
    seen = [ops._steps]
    for weight in weights:
        seen += [weight.data_ptr(), -1 if weight.is_inference() else weight._version]
    seen += [0] * (stamp.numel() - len(seen))
    unseen = changing and order.is_cuda and torch.cuda.is_current_stream_capturing()
    if stamp.tolist() == seen and not unseen:
        return
    with torch.no_grad():
        for weight, copy, kind in zip(weights, copies, how):
            source = weight.t() if kind == _ROWS_OF_TRANSPOSE else weight
            torch.index_select(source, int(kind == _COLUMNS), order, out=copy)
    stamp.copy_(torch.tensor(seen))


@torch.library.register_fake("twell_lab::refresh_permuted", lib=_library)
def _(weights, order, copies, how, stamp, changing):
    return None
