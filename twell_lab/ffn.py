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
_ACCEPTED = "accepted: gate_proj, up_proj, down_proj, or up_proj, down_proj, or fc1, fc2, each a plain torch.nn.Linear,"


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


def _is_linear(module) -> bool:
    """Whether the module computes x W^T + b, so that its weight and bias say all about it.

    A subclass of nn.Linear with a forward of its own (an adapter, a quantised layer) need not.
    """
    if not isinstance(module, nn.Linear):
        return False
    return getattr(module.forward, "__func__", module.forward) in (nn.Linear.forward, _hand_on)


def _hand_on(x: Tensor) -> Tensor:
    """The forward of a projection whose work is done elsewhere: it only keeps its parameters and their names."""
    return x


def _layout(module: nn.Module) -> tuple | None:
    """The first layout whose names are all there, whatever the activation; None if a projection is no plain Linear."""
    for layout in _LAYOUTS:
        if all(getattr(module, name, None) is not None for name in layout if name):
            fits = all(_is_linear(getattr(module, name)) for name in layout[:3] if name)
            return layout if fits else None
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
        raise InputError(f"no ReLU feed-forward layer in {type(model).__name__}: {seen}; {_ACCEPTED} and a ReLU")
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
            raise InputError(f"{type(source).__name__} is no feed-forward layer known here; {_ACCEPTED} and a ReLU")
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
        with torch.inference_mode(False):  # a later forward outside inference mode writes to it
            self._stamp = torch.empty(3, dtype=torch.int64)  # no buffer: it must stay on the CPU
        self.register_buffer("down_t", None, persistent=False)
        self._renew(self.down.weight)

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

    def refresh(self) -> None:
        """Have the next forward copy `down` anew.

        Only for what torch itself does not notice: a change in place of `down.weight.data`, such as
        `p.data += delta`, raises no version. Optimizers, `load_state_dict` and `p.add_` under no_grad are followed.
        """
        self._stamp.fill_(-1)

    def forward(self, x: Tensor) -> Tensor:
        """x: [..., d_model] -> [..., d_model]."""
        gate, up, down = self.gate, self.up, self.down
        down_weight = down.weight  # read once: where it is parametrized, each reading makes a new tensor
        # The stamp alone would take another tensor for the last one if it lies where that one lay.
        if self._seen[0] is not down_weight or not self._fits(down_weight):
            self._renew(down_weight)
        ops.refresh_transposed(down_weight, self.down_t, self._stamp)
        weights = [up.weight, down_weight] if gate is None else [gate.weight, up.weight, down_weight]
        biases = [up.bias, down.bias] if gate is None else [gate.bias, up.bias, down.bias]
        call = ops.plain_ffn if gate is None else ops.gated_ffn
        return call(x, *weights, *biases, down_t=self.down_t, tile=self.tile, words=self.words)

    def extra_repr(self) -> str:
        d_ff, d_model = self.up.weight.shape
        return f"d_model={d_model}, d_ff={d_ff}, tile={self.tile}, words={self.words}"

    def _fits(self, weight: Tensor) -> bool:
        """Whether down_t is a place for the transpose of `weight`."""
        t = self.down_t
        return t is not None and t.dtype == weight.dtype and t.device == weight.device and t.t().shape == weight.shape

    def _renew(self, weight: Tensor) -> None:
        """Have the next refresh make down_t from `weight`, whatever it was made from before."""
        if not self._fits(weight):
            with torch.inference_mode(False):
                self.down_t = weight.new_empty(weight.shape[1], weight.shape[0])
        self._stamp.fill_(-1)
        # In a list, so that it is no parameter of this module. Anything but a parameter is made anew each time.
        self._seen = [weight if isinstance(weight, nn.Parameter) else None]

    def _apply(self, fn, recurse=True):
        super()._apply(fn, recurse)
        if self.down_t.is_inference():  # moved inside inference mode: nothing outside could write to it
            with torch.inference_mode(False):
                self.down_t = torch.empty_like(self.down_t)
        self.refresh()
        return self


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
        source.fc1.forward = source.fc2.forward = _hand_on
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
            for projection in (source.fc1, source.fc2):
                vars(projection).pop("forward", None)
            (source.activation_fn,) = sparse._activation
            if isinstance(source.activation_fn, nn.Module):
                source.activation_fn.train(sparse.training)
    return model


def _replace(model: nn.Module, old: nn.Module, new: nn.Module) -> nn.Module:
    """Put `new` in every seat of the model that holds `old`; the model itself may be that seat."""
    for parent in list(model.modules()):
        for name, child in list(parent._modules.items()):  # named_children() skips a child's second seat
            if child is old:
                setattr(parent, name, new)
    return new if model is old else model
