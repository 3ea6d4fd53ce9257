"""Dead neurons: which ones have not fired for a while, and the paper's way to bring them back.

A neuron fires at a token where its gate's output, or in a plain layer its up projection's, is positive (see
twell_lab.analysis.profile). It is dead if it fired at none of the last `window_tokens` tokens. The paper (arXiv
2603.23198, appendix D.1) counts over one training step, just above a million tokens: at the L1 it recommends, more than
30% of the neurons are dead. Its remedy (appendix C.3, equation 6) moves the gate row of each dead neuron a little
towards a fresh one,

    Wg[j] <- (1 - lambda) Wg[j] + lambda N(0, sigma^2)        lambda 0.1, sigma 0.02 (as the weights were initialised)

after every training step, which leaves almost no neuron dead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import torch
from torch import Tensor, nn

from ..analysis.running import ALL, Gate, on_gate
from ..core import InputError
from ..formats.twell import fires
from ..layers.find import FeedForward, firing_layers
from . import parallel

STRENGTH, SIGMA = 0.1, 0.02  # the paper's lambda and sigma


class Tracker:
    """For each neuron, how many tokens have passed since it last fired, counted in whole calls of `see`.

    layers: the model's feed-forward layers (layers.find.firing_layers), or their widths d_ff.
    window_tokens: a neuron that was silent for this many tokens or more is dead. Before so many tokens, none is.

    The counts are int64 tensors on the device of what `see` is given; nothing here waits for it. Raises InputError
    for no layers, and for a window or a width that is no whole number from 1 up.
    """

    def __init__(self, layers: Sequence[FeedForward | int], window_tokens: int) -> None:
        widths = [len(each.pattern.weight) if isinstance(each, FeedForward) else each for each in layers]
        if not widths:
            raise InputError("no layers to track; accepted: at least one feed-forward layer, or its width")
        for name, value in (("window_tokens", window_tokens), *(("a width", width) for width in widths)):
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise InputError(f"{name} is {value!r}; accepted: a whole number from 1 up")
        self.window_tokens = window_tokens
        self.silent = [torch.zeros(width, dtype=torch.int64, device="cpu") for width in widths]

    def see(self, fired: Sequence[Tensor], tokens: int) -> None:
        """Count a batch of `tokens` tokens. fired: for each layer bool [d_ff], whether a neuron fired at any of them.

        With several processes, `fired` is to say whether it fired in any of them, and `tokens` to be their sum.
        """
        shapes, wanted = [tuple(each.shape) for each in fired], [tuple(each.shape) for each in self.silent]
        if shapes != wanted or any(each.dtype != torch.bool for each in fired):
            raise InputError(f"fired has shapes {shapes}; accepted: bool tensors of shapes {wanted}")
        if isinstance(tokens, bool) or not isinstance(tokens, int) or tokens < 0:
            raise InputError(f"tokens is {tokens!r}; accepted: a whole number from 0 up")
        with torch.no_grad():
            self.silent = [
                (silent.to(each.device) + tokens).masked_fill(each, 0)
                for silent, each in zip(self.silent, fired, strict=True)
            ]

    def dead(self) -> list[Tensor]:
        """For each layer bool [d_ff]: silent for the whole window. All False until the window is full."""
        return [silent >= self.window_tokens for silent in self.silent]

    def state_dict(self) -> dict[str, Tensor]:
        """The counts as a flat dict of int64 CPU tensors, as safetensors take them."""
        return {
            "window_tokens": torch.tensor(self.window_tokens, device="cpu"),
            **{f"silent.{number}": silent.cpu() for number, silent in enumerate(self.silent)},
        }

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Go on from what `state_dict` gave. InputError for another window, or other layers."""
        mine = self.state_dict()
        shapes = {name: tuple(value.shape) for name, value in state.items()}
        if shapes != {name: tuple(value.shape) for name, value in mine.items()}:
            raise InputError(
                f"the saved counts have shapes {shapes}; accepted: those of {len(self.silent)} layers "
                f"with d_ff {[len(silent) for silent in self.silent]}"
            )
        if state["window_tokens"].item() != self.window_tokens:
            raise InputError(
                f"the saved counts are of a window of {state['window_tokens'].item()} tokens; "
                f"accepted: {self.window_tokens}, the window here"
            )
        self.silent = [
            state[f"silent.{number}"].to(torch.int64).to(silent.device, copy=True)
            for number, silent in enumerate(self.silent)
        ]


@contextmanager
def collect_fired(model: nn.Module) -> Iterator[Callable[[], list[Tensor]]]:
    """A context that notes which neurons fire in the model's forward passes. It gives a function that returns them.

    For each layer, in the order of layers.find.firing_layers, that function returns bool [d_ff]: whether a neuron
    fired at any token since the function was last called. For layers swapped by `sparsify`, each pass computes the gate
    a second time. Passes of a compiled model are not noticed. Raises InputError for a model without such layers.
    """
    layers = firing_layers(model)
    seen: list[Tensor | None] = [None] * len(layers)

    def note(number: int) -> Callable[[Tensor, Gate], None]:
        def see(_: Tensor, gate: Gate) -> None:
            with torch.no_grad():
                fired = fires(gate(ALL).detach()).any(0)
                seen[number] = fired if seen[number] is None else seen[number] | fired

        return see

    def fired() -> list[Tensor]:
        weights = [layer.pattern.weight for layer in layers]
        said = [
            torch.zeros(len(weight), dtype=torch.bool, device=weight.device) if each is None else each
            for weight, each in zip(weights, seen, strict=True)
        ]
        seen[:] = [None] * len(layers)
        return said

    with ExitStack() as hooks:
        for number, layer in enumerate(layers):
            hooks.enter_context(on_gate(layer, note(number)))
        yield fired


def fired_in(model: nn.Module, tokens: Tensor) -> list[Tensor]:
    """Return which neurons fire at any token when `model` runs on `tokens` (int64 [batch, context], on its device).

    Without gradients, in the mode the model is in. Returns bool [d_ff] for each layer, on the model's device.
    """
    with collect_fired(model) as fired, torch.no_grad():
        model(tokens)
        return fired()


def reinitialise(
    layer: FeedForward,
    dead: Tensor,
    strength: float = STRENGTH,
    sigma: float = SIGMA,
    generator: torch.Generator | None = None,
) -> int:
    """Move the gate rows of dead neurons towards fresh ones, in place; returns how many rows that were.

    Waits for the device, to know which rows are dead.

    Args:
        layer: the rows of its gate are changed, or of the up projection in a plain layer. As in the paper, the other
            projections, and the optimizer's state of these rows, stay as they are.
        dead: which rows, bool [d_ff].
        strength: lambda above. A bias, which the paper's layers lack, is multiplied by 1 - strength: it began at zero.
        sigma: the deviation of the fresh row's numbers.
        generator: draws the fresh rows in float32, on its device, for the dead rows alone and in their order, so that
            the same generator gives the same rows. None: torch's global CPU generator. With a weight that FSDP2
            sharded, every process must call with the same `dead` and a generator in the same state.

    Raises:
        InputError: for a mask of another shape or dtype, a strength outside [0, 1], and a sigma that is negative or
            not finite.
    """
    weight, bias = layer.pattern.weight, layer.pattern.bias
    if dead.dtype != torch.bool or dead.shape != weight.shape[:1]:
        raise InputError(f"dead is {dead.dtype} {list(dead.shape)}; accepted: torch.bool {list(weight.shape[:1])}")
    if not 0 <= strength <= 1:
        raise InputError(f"strength is {strength!r}; accepted: a number from 0 to 1")
    if not 0 <= sigma < math.inf:
        raise InputError(f"sigma is {sigma!r}; accepted: a finite number from 0 up")
    rows = dead.nonzero().flatten()
    if not len(rows) or not strength:
        return len(rows)
    device = "cpu" if generator is None else generator.device
    noise = torch.randn(len(rows), weight.shape[1], generator=generator, device=device).to(dead.device)
    with torch.no_grad():
        _move(weight, rows, strength, noise * sigma)
        if bias is not None:
            _move(bias, rows, strength, noise.new_zeros(len(rows)))
    return len(rows)


def _move(parameter: Tensor, rows: Tensor, strength: float, towards: Tensor) -> None:
    """parameter[rows] <- (1 - strength) parameter[rows] + strength towards, computed in float32, in place."""
    whole = parallel.whole(parameter)  # which shares its memory, unless FSDP2 sharded it
    rows, towards = rows.to(whole.device), towards.to(whole.device)
    whole[rows] = ((1 - strength) * whole[rows].float() + strength * towards).to(whole.dtype)
    parallel.put(parameter, whole)
