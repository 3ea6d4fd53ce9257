"""A path that computes with its own form of the weights, made by its own code, such as another library's tensors.

A form is made of a layer's weights as they are, and noted as copies are (ops.copies): whatever replaces or changes a
weight has the next forward make it anew, which waits for the device. Where none can be made, a forward is dense: of
weights that changed so that the path does not take them any more, that can change unseen, or that are no Parameters, as
in torch.func.functional_call; under autocast; of what another library watches; and where a CUDA graph is captured
before the form is up to date. Gradients are dense, and so is compiled code of another activation than the ReLU, or
where a plan finds that its one operator would take the host too long. Forms are in no state_dict, and a copied or moved
layer makes its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ...core import InputError, TwellError
from ...ops import checks, copies
from ..again import Known
from ..weights import Weights
from .cost import Work
from .dense import by_torch
from .path import Path


class Form(NamedTuple):
    """What a path made of a layer's weights.

    value: anything; None where it does not take them. tensors: what it holds. note: of the weights it was made of."""

    value: Any
    tensors: Sequence[Tensor]
    note: copies.Note

    @property
    def nbytes(self) -> int:
        return sum(t.nbytes for t in self.tensors)


class Converted(Path):
    """A path of which a subclass says what it makes of the weights (`convert`, `form_bytes`), how it computes with that
    (`compute`), and `cost`."""

    learns = "dense"
    packs = False
    opaque = True

    def convert(self, weights: Weights) -> tuple[Any, Sequence[Tensor]]:
        """What `compute` needs, and the tensors that this holds. Raises a TwellError for weights that it does not
        take."""
        raise NotImplementedError

    def form_bytes(self, weights: Weights) -> int:
        """About the bytes of these tensors; 0 where it does not take the weights."""
        raise NotImplementedError

    def compute(self, layer: nn.Module, x: Tensor, weights: Sequence[Tensor | None], value: Any) -> Tensor:
        """The layer's output for x [..., d_model]. weights: in the order of Weights."""
        raise NotImplementedError

    def copy_bytes(self, weights: Weights, turned: Collection[str], reordered: bool) -> int:
        return self.form_bytes(weights)

    def refuses(self, layer: nn.Module, weights: Weights) -> str:
        used = [t for t in weights if t is not None]
        if self._unnoted(used):
            return "its weights may change unseen (made in inference mode, shared, sharded or no plain parameters)"
        form = layer.forms.get(self.name)
        current = form is not None and copies.made_of(form.note, used)
        if current and form.value is not None:
            return ""
        try:
            self.fitted(Weights(*[t if t is None else t.detach() for t in weights]))
        except TwellError as error:
            return str(error)
        return "no form could be made of its weights" if current else ""

    @staticmethod
    def _unnoted(used: Sequence[Tensor]) -> bool:
        """Whether it cannot be noted which values a form is made of, so that none is made."""
        return checks.watched(*used) or any(not isinstance(t, nn.Parameter) or copies.changes_unseen(t) for t in used)

    def prepare(self, layer: nn.Module, weights: Weights) -> tuple[None, list]:
        self._form(layer, weights, True)
        return None, []

    def release(self, layer: nn.Module) -> None:
        layer.forms.pop(self.name, None)

    def moved(self, layer: nn.Module, weights: Weights) -> None:
        self.release(layer)

    def fit(self, layer: nn.Module, weights: Weights) -> None:
        pass

    def ready(self, layer: nn.Module, weights: Weights) -> Weights:
        return weights

    def forward(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int, stats: Tensor | None) -> Tensor:
        if not isinstance(x, Tensor) or torch.compiler.is_compiling() or torch.is_autocast_enabled(x.device.type):
            return by_torch(x, weights, **layer.formula)
        form = self._form(layer, weights, layer.takes(self.name))  # if another thread changed the plan, it does not
        if form is None or form.value is None or not x.numel():
            return by_torch(x, weights, **layer.formula)
        gate, up, down, *biases, _ = weights
        checks.check_tensor("x", x)
        checks.check_weights(x.shape[-1], up.shape[0], gate, up, down, *biases)
        checks.check_together(x, x.dtype, up=up)
        with torch.no_grad():
            return self.compute(layer, x, weights, form.value)

    def again(self, layer: nn.Module, x: Tensor, weights: Weights, hot: int, stats: Tensor | None) -> Known | None:
        form = layer.forms.get(self.name)
        if not x.is_cuda or form is None or form.value is None:  # a CPU takes longer for a layer than Python does
            return None
        value, tensors, note = form
        held = ref(layer)  # which holds what is returned here

        def run(x: Tensor, given: list[Tensor | None]) -> Tensor:
            with torch.no_grad():
                return self.compute(held(), x, given, value)

        return Known(run, tensors, note)

    def _form(self, layer: nn.Module, weights: Weights, hold: bool) -> Form | None:
        """The form of these weights, up to date and safe to read on the current stream; None where there is none. hold:
        whether the layer keeps one that is made anew."""
        used = [t for t in weights if t is not None]
        if self._unnoted(used):
            return None
        form = layer.forms.get(self.name)
        if form is None or not copies.made_of(form.note, used):
            if used[0].is_cuda and torch.cuda.is_current_stream_capturing():
                return None
            try:
                with torch.inference_mode(False), torch.no_grad():
                    plain = {id(t): t.detach() for t in used}  # a weight that is there twice stays one
                    value, tensors = self.convert(Weights(*[t if t is None else plain[id(t)] for t in weights]))
            except TwellError:
                value, tensors = None, ()
            form = Form(value, tensors, copies.note(used))
            if hold:
                layer.forms[self.name] = form
        elif form.note.moment is not None:
            form.note.moment.enter(form.tensors)
        return form


def _check_finite(weights: Weights) -> None:
    """InputError for a weight that holds what is not finite: the layer is dense then, whose result shows it."""
    for name, weight in weights.named().items():
        if "bias" not in name and not weight.is_meta and not weight.detach().isfinite().all():
            raise InputError(f"{name} holds a value that is not finite; finite weights are accepted")


class Products(Converted):
    """The layer with other products in the place of those that its three projections are, or some of them.

    A subclass says what it makes of one weight (`product`), and counts what that takes (`weigh`)."""

    counted: tuple[tuple[Any, ...] | None, ...] = ()  # of `fitted`: what `weigh` says of gate, up and down

    def product(self, weight: Tensor) -> tuple[Callable[[Tensor, Tensor | None], Tensor], Sequence[Tensor]]:
        """x [..., k] and a bias -> x weight^T + bias, of weight [n, k]; and the tensors that this holds. Raises a
        TwellError for a weight that it does not take."""
        raise NotImplementedError

    def weigh(self, weight: Tensor) -> tuple[Any, ...]:
        """What its bytes (the first value) and `seconds` are counted from. Raises a TwellError for a weight that
        `product` does not take."""
        raise NotImplementedError

    def seconds(self, work: Work, n: int, k: int, counted: tuple[Any, ...]) -> float:
        """What the product of a weight [n, k] takes, of which `weigh` says this."""
        raise NotImplementedError

    def fitted(self, weights: Weights) -> Path:
        _check_finite(weights)
        counted, refused = [], None
        for weight in weights[:3]:
            try:
                counted.append(None if weight is None else self.weigh(weight.detach()))
            except TwellError as error:
                counted.append(None)
                refused = refused or error
        if refused is not None and not any(counted):
            raise refused
        made = copy.copy(self)
        made.counted = tuple(counted)
        return made

    def form_bytes(self, weights: Weights) -> int:
        try:
            counted = self.fitted(weights).counted
        except TwellError:
            return 0
        squared = weights.gate is weights.up  # which needs one product of the two
        return sum(each[0] for each in counted[squared:] if each is not None)

    def convert(self, weights: Weights) -> tuple[Any, Sequence[Tensor]]:
        _check_finite(weights)
        made: list[Callable | None] = []
        held: list[Tensor] = []
        refused = None
        for at, weight in enumerate(weights[:3]):
            if at == 1 and weights.gate is weights.up:
                made.append(made[0])
                continue
            try:
                product, tensors = (None, ()) if weight is None else self.product(weight)
                held += tensors
            except TwellError as error:
                product, refused = None, refused or error
            made.append(product)
        if refused is not None and not any(made):
            raise refused
        return made, held

    def compute(self, layer: nn.Module, x: Tensor, weights: Sequence[Tensor | None], value: Any) -> Tensor:
        def of(at: int, rows: Tensor) -> Tensor:
            return (
                F.linear(rows, weights[at], weights[at + 3]) if value[at] is None else value[at](rows, weights[at + 3])
            )

        acts, both = layer.formula["acts"], layer.formula["both"]
        if weights[0] is None:
            hidden = acts(of(1, x))
        elif weights[0] is weights[1]:
            hidden = acts(of(1, x)).square()
        else:
            beside = of(1, x)
            hidden = acts(of(0, x)) * (acts(beside) if both else beside)
        y = of(2, hidden)
        # What multiplies no zeros does not see that 0 * inf is NaN, as the dense layer does. Some products lie turned.
        return y.add_(torch.linalg.vector_norm(x, torch.inf, dim=-1, keepdim=True) * 0).contiguous()

    def cost(self, work: Work, hot: int = 0) -> dict[str, float]:
        d_model, d_ff, gated = work.firing.d_model, work.firing.d_ff, work.firing.gated
        counted = self.counted or (None, None, None)
        sizes = [(d_ff, d_model)] * 2 + [(d_model, d_ff)]
        seconds = [
            work.gemm(n, k) if counted[at] is None else self.seconds(work, n, k, counted[at])
            for at, (n, k) in enumerate(sizes)
            if at or gated
        ]
        values = (5 if gated else 2) * work.tokens * d_ff * work.itemsize  # between the products, as of the dense layer
        return {
            "gemm": sum(seconds),
            "rows": 0.0,
            "memory": values / work.rates.bandwidth,
            "launches": (8 if gated else 6) * work.rates.launch,
            "lost": 0.0,
        }
