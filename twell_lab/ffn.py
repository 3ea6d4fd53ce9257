"""SparseFFN: a ReLU feed-forward layer that skips its silent neurons, in the place of the dense one.

Recognised modules (found by the names of their parts; more families are added to `_LAYOUTS`):
  gate_proj, up_proj, down_proj, act_fn   gated: transformers Llama with hidden_act="relu", this course's model
  up_proj, down_proj, act_fn              plain: this course's model
  fc1, fc2, activation_fn                 plain: transformers OPT, where the parts sit in the decoder layer itself
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from . import ops
from .errors import InputError
from .formats import TILE, WORDS, check_geometry

# (gate, up, down, activation): attribute names; the first layout whose names are all there is taken.
_LAYOUTS = (
    ("gate_proj", "up_proj", "down_proj", "act_fn"),
    (None, "up_proj", "down_proj", "act_fn"),
    (None, "fc1", "fc2", "activation_fn"),
)
_IN_BLOCK = _LAYOUTS[2]  # the parts sit in the decoder layer, beside its attention


@dataclass(frozen=True)
class FeedForward:
    """One feed-forward layer found in a model. gate is None for plain layers."""

    name: str
    module: nn.Module
    gate: nn.Linear | None
    up: nn.Linear
    down: nn.Linear

    @property
    def pattern(self) -> nn.Linear:
        """The projection whose positive outputs are the neurons that fire."""
        return self.up if self.gate is None else self.gate


def _is_relu(activation) -> bool:
    return isinstance(activation, nn.ReLU) or activation in (torch.relu, nn.functional.relu)


def _layout(module: nn.Module) -> tuple | None:
    """The first layout that fits the module, whatever its activation."""
    for layout in _LAYOUTS:
        *linears, activation = layout
        parts = [getattr(module, name, None) for name in linears if name]
        if all(isinstance(p, nn.Linear) for p in parts) and hasattr(module, activation):
            return layout
    return None


def _describe(name: str, module: nn.Module) -> FeedForward | None:
    if isinstance(module, SparseFFN):
        place = name if module._borrowed is None else name.rpartition(".")[0]  # OPT's is named by its layer
        return FeedForward(place, module, module.gate, module.up, module.down)
    layout = _layout(module)
    if layout is None or not _is_relu(getattr(module, layout[3])):
        return None
    gate, up, down, _ = layout
    return FeedForward(name, module, getattr(module, gate) if gate else None, getattr(module, up), getattr(module, down))


def feed_forwards(model: nn.Module) -> list[FeedForward]:
    """Every ReLU feed-forward layer of the model, dense or already sparse, in the order of its modules.

    Raises InputError if there is none, naming the activations that were found instead.
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}")
    found = [f for name, module in model.named_modules() if (f := _describe(name, module))]
    if not found:
        others = {m for m in model.modules() if (lay := _layout(m)) and not _is_relu(getattr(m, lay[3]))}
        kinds = sorted({type(getattr(m, _layout(m)[3])).__name__ for m in others})
        seen = f"its feed-forward layers use {', '.join(kinds)}" if kinds else "none of its modules has the known parts"
        raise InputError(
            f"no ReLU feed-forward layer in {type(model).__name__}: {seen}; "
            "layers with gate_proj/up_proj/down_proj, up_proj/down_proj or fc1/fc2 and a ReLU are accepted"
        )
    return found


class SparseFFN(nn.Module):
    """A ReLU feed-forward layer, gated or plain, that computes only what its firing neurons need.

    Holds the source module's own projections under their own names, so parameters, their shapes and the
    state_dict stay what they were. `down` is also kept transposed, in a buffer outside the state_dict that
    follows the parameter (`extra_bytes` says what it costs).
    """

    def __init__(self, source: nn.Module, *, tile: int = TILE, words: int = WORDS, _registered: bool = True):
        super().__init__()
        check_geometry(tile, words)
        layout = _layout(source)
        if layout is None:
            raise InputError(
                f"{type(source).__name__} is no feed-forward layer that is known here: "
                "gate_proj/up_proj/down_proj, up_proj/down_proj or fc1/fc2 are accepted"
            )
        *names, activation = layout
        if not _is_relu(getattr(source, activation)):
            raise InputError(
                f"{type(source).__name__} uses {type(getattr(source, activation)).__name__}; a ReLU is accepted"
            )
        self.tile, self.words = tile, words
        self._names = names
        # In plain lists: neither the source nor, inside OPT, its projections are this module's children.
        self._source = [source]
        self._borrowed = None if _registered else [getattr(source, name) if name else None for name in names]
        for name in names if _registered else ():
            if name:
                setattr(self, name, getattr(source, name))
        self.train(source.training)
        weight = self.down.weight
        with torch.inference_mode(False):
            down_t = weight.new_empty(weight.shape[1], weight.shape[0])
        self.register_buffer("down_t", down_t, persistent=False)
        self._forget()

    @classmethod
    def from_module(cls, module: nn.Module, *, tile: int = TILE, words: int = WORDS) -> SparseFFN:
        """The sparse twin of a feed-forward module (or OPT decoder layer); the two share their parameters."""
        return cls(module, tile=tile, words=words)

    def _projection(self, index: int) -> nn.Linear | None:
        if self._borrowed is not None:
            return self._borrowed[index]
        return getattr(self, self._names[index]) if self._names[index] else None

    @property
    def gate(self) -> nn.Linear | None:
        return self._projection(0)

    @property
    def up(self) -> nn.Linear:
        return self._projection(1)

    @property
    def down(self) -> nn.Linear:
        return self._projection(2)

    @property
    def extra_bytes(self) -> int:
        """Memory held beyond the dense layer's parameters: the transposed down projection."""
        return self.down_t.numel() * self.down_t.element_size()

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., d_model] -> [..., d_model]."""
        gate, up, down = self.gate, self.up, self.down
        ops.refresh_transposed(down.weight, self.down_t, self._stamp)
        weights = [up.weight, down.weight] if gate is None else [gate.weight, up.weight, down.weight]
        biases = [up.bias, down.bias] if gate is None else [gate.bias, up.bias, down.bias]
        tensors = [x, *weights, *biases, self.down_t]
        if torch.is_autocast_enabled(x.device.type):
            # What nn.Linear does there: compute in the autocast dtype, whatever the parameters are in.
            dtype = torch.get_autocast_dtype(x.device.type)
            tensors = [t if t is None else t.to(dtype) for t in tensors]
        call = ops.plain_ffn if gate is None else ops.gated_ffn
        return call(*tensors[:-1], down_t=tensors[-1], tile=self.tile, words=self.words)

    def extra_repr(self) -> str:
        d_ff, d_model = self.up.weight.shape
        return f"d_model={d_model}, d_ff={d_ff}, tile={self.tile}, words={self.words}"

    def _forget(self) -> None:
        """Have the next forward rebuild down_t. The stamp is no buffer: it must stay on the CPU."""
        self._stamp = torch.full((2,), -1, dtype=torch.int64)

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        self._forget()
        return self


class _PassThrough(nn.Linear):
    """A projection whose work is done elsewhere: keeps its parameters and their names, hands its input on."""

    def forward(self, x: Tensor) -> Tensor:
        return x


def sparsify(model: nn.Module, *, tile: int = TILE, words: int = WORDS) -> nn.Module:
    """Swap every ReLU feed-forward layer of the model for a SparseFFN, in place; returns the model.

    Parameters stay the same objects under the same names; `densify` takes it back. Raises InputError if the
    model has no ReLU feed-forward layer; layers that are sparse already stay as they are.
    """
    for found in feed_forwards(model):
        source = found.module
        if isinstance(source, SparseFFN):
            continue
        if _layout(source) != _IN_BLOCK:
            model = _replace(model, source, SparseFFN(source, tile=tile, words=words))
            continue
        # OPT's decoder layer calls fc1, the activation and fc2 itself, so there is no module to swap: the
        # activation's seat does all the work and the projections on either side of it hand their input on.
        sparse = SparseFFN(source, tile=tile, words=words, _registered=False)
        source.fc1.__class__ = source.fc2.__class__ = _PassThrough
        sparse._activation = [source.activation_fn]
        source.activation_fn = sparse
    return model


def densify(model: nn.Module) -> nn.Module:
    """Undo sparsify, in place; returns the model. A model without a SparseFFN is left as it is."""
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}")
    for sparse in [m for m in model.modules() if isinstance(m, SparseFFN)]:
        (source,) = sparse._source
        if sparse._borrowed is None:
            source.train(sparse.training)
            model = _replace(model, sparse, source)
        else:
            source.fc1.__class__ = source.fc2.__class__ = nn.Linear
            (source.activation_fn,) = sparse._activation
    return model


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Put `new` in every seat of the model that holds `old`; the model itself may be that seat."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if child is old:
                setattr(parent, name, new)
    return new if model is old else model
