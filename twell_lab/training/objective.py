"""What training minimises, measured in one pass: cross-entropy, and the L1 of what enters each down projection, times a
coefficient that has a schedule (`l1_coefficient`); which neurons this kills, and the remedy (`Silence`). The same for
those who train with transformers is a callback of its Trainer."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ..analysis.running import vocabulary_of
from ..core import InputError
from ..layers.find import FeedForward, firing_layers
from ..layers.parts import gradient_of, stored_by
from ..layers.terms import LayerTerm, layer_terms
from ..models.tiny import check_whole
from . import parallel

EVAL_BATCH = 64  # windows read at a time where nothing is learned from them
SIGMA = 0.02  # the deviation of fresh gate rows
EVAL_SCORES = 2**28  # the most scores of next tokens that they may have: 1 GiB in float32


def l1_coefficient(l1: float, delay: int, warmup: int, step: int) -> float:
    """Return the penalty's coefficient at a step, counted from 1: 0 for `delay` steps, a ramp of `warmup`, then l1."""
    return l1 * min(1.0, max(0, step - delay) / max(1, warmup))


def cross_entropy(model: nn.Module, windows: Tensor, *, of_scores=F.cross_entropy) -> Tensor:
    """Return the mean cross-entropy of each next token, in nats: int64 windows [batch, context + 1] -> a scalar.

    model: gives scores [batch, context, vocabulary], or has them as `logits` of its output, as in transformers.
    of_scores: computes it from the scores [tokens, vocabulary] and the tokens that followed [tokens]."""
    output = model(windows[:, :-1])
    scores = output if isinstance(output, Tensor) else output.logits
    return of_scores(scores.flatten(0, 1), windows[:, 1:].flatten())


def eval_batch(model: nn.Module, windows: Tensor) -> int:
    """Return how many of the windows [n, context + 1] to read at a time: EVAL_BATCH, or fewer where the scores of a
    large vocabulary would take more memory than training does."""
    return max(1, min(EVAL_BATCH, EVAL_SCORES // (vocabulary_of(model) * windows.shape[1])))


def bits_per_byte(model: nn.Module, windows: Tensor, lengths: Tensor | None = None) -> float:
    """Return the cross-entropy in bits a byte on int64 windows [n, context + 1]; each is read with nothing before it.

    lengths: bytes that each token stands for, int [vocabulary]; None where a token is a byte. Only the bytes of the
    predicted tokens count: in these windows a token may stand for more or fewer bytes than in the whole text."""
    with torch.no_grad():
        nats = sum(cross_entropy(model, some) * len(some) for some in windows.split(eval_batch(model, windows)))
    bits = (nats / len(windows)).item() / math.log(2)
    return bits if lengths is None else bits / lengths.to(windows.device)[windows[:, 1:]].double().mean().item()


class Objective(nn.Module):
    """Model, cross-entropy and penalty as one module, which torch.compile and DDP take as a whole.

    The model's layers report to it for good, because torch.compile looks at hooks only once: who calls the model alone
    has to clear `terms` (layers.terms). All numbers stay on the device: whoever needs one reads it."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.of_scores = model, F.cross_entropy
        self._reporting = ExitStack()
        self.terms = self._reporting.enter_context(layer_terms(model))
        self.told = [*self.terms.told.values()]

    def forward(self, windows: Tensor, l1: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the loss of int64 windows [batch, context + 1], a scalar with gradient; and float32 [3 + 5 layers]
        without: loss, cross-entropy and penalty; then l1, nnz, lost, light and heavy (see layers.terms.LayerTerm), each
        by layer. l1: the coefficient, a scalar; None for no penalty."""
        ce = cross_entropy(self.model, windows, of_scores=self.of_scores)
        terms = [LayerTerm("", *told.pop()) for told in self.told]
        penalty = ce.new_zeros(()) if l1 is None else l1 * (sum(term.l1 for term in terms) / len(terms))
        none, rows, loss = torch.zeros_like(terms[0].nnz), [], ce + penalty
        for term in terms:
            # Of what only sparse layers report: nothing was lost, and no token was heavy.
            usual = zip((term.lost, term.light, term.heavy), (none, term.nnz, none))
            rows.append((term.l1, term.nnz, *(other if own is None else own for own, other in usual)))
        facts = [loss, ce, penalty, *(fact for column in zip(*rows) for fact in column)]
        return loss, torch.stack([fact.detach() for fact in facts])


class Silence:
    """For how long each neuron of some layers has not fired. A neuron fires at a token where its gate's output, or in a
    plain layer its up projection's, is positive; the row of these weights then has a gradient.

    The paper (arXiv 2603.23198, appendix D.1) calls one dead that fired at no token of a training step, just above a
    million: at the L1 it recommends, more than 30% are. Its remedy (appendix C.3, equation 6) is, after every step,

        Wg[j] <- (1 - lambda) Wg[j] + lambda N(0, sigma^2)      lambda 0.1, sigma 0.02 (as the weights were initialised)

    which leaves almost no neuron dead. The other projections, and the optimizer's state of these rows, stay as they
    are. A bias, which the paper's layers lack, moves towards zero, where it began.

    silent: int64 [d_ff] of each layer, on its device. generator: draws the fresh rows in float32, on the CPU."""

    def __init__(self, layers: list[FeedForward], generator: torch.Generator) -> None:
        self.layers, self.generator = layers, generator
        weights = [layer.pattern.weight for layer in layers]
        self.silent = [torch.zeros(len(weight), dtype=torch.int64, device=weight.device) for weight in weights]

    def count(self, passed: int) -> None:
        """Add tokens or steps that have passed for the neurons without a gradient; begin anew for the others."""
        for layer, silent in zip(self.layers, self.silent):
            silent.add_(passed)
            if (gradient := gradient_of(layer.pattern)) is not None:
                silent.masked_fill_(parallel.whole((gradient != 0).any(1)), 0)

    def dead(self, window: int) -> list[Tensor]:
        """Return for each layer, bool [d_ff], which neurons have been silent for the whole window."""
        return [silent >= window for silent in self.silent]

    @torch.no_grad()
    def revive(self, window: int, strength: float) -> None:
        """Apply the remedy to the dead, in place, with lambda = strength; wait for the device, to know which they are.
        With weights that FSDP2 sharded, every process calls it with a generator in the same state."""
        for layer, dead in zip(self.layers, self.dead(window)):
            weight, bias, rows = layer.pattern.weight, layer.pattern.bias, dead.nonzero().flatten()
            noise = SIGMA * torch.randn(len(rows), weight.shape[1], generator=self.generator)
            for parameter, towards in ((weight, noise), (bias, torch.zeros(len(rows)))):
                if parameter is not None and len(rows):
                    whole = parallel.whole(parameter)  # which shares its memory, unless FSDP2 sharded it
                    moved = (1 - strength) * whole[rows].float() + strength * towards.to(whole.device)
                    whole[rows] = moved.to(whole.dtype)
                    parallel.put(parameter, whole)


class SparsityCallback:
    """Add an L1 penalty on hidden activations to the loss that transformers' Trainer minimises, and log what fires.

        model = tl.relufy(transformers.AutoModelForCausalLM.from_pretrained(name))
        Trainer(model, args, train_dataset=texts, callbacks=[tl.SparsityCallback(l1=2e-5, warmup=500)]).train()

    The penalty is that of the published code of arXiv 2603.23198 (twell_lab.layers.terms), the remedy for dead neurons
    that of its appendix C.3 (`Silence`).

    Args:
        l1: the coefficient; 2e-5 is the paper's for large models, small ones take 1e-4 to 1e-3.
        delay: steps before the penalty begins.
        warmup: steps over which it then grows to l1.
        reinit: how far the gate rows of dead neurons move towards fresh ones (0.1 in the paper); 0 leaves them.
        window: steps; a neuron that fired in none of them is dead, and is then moved.

    Every log of the Trainer (state.log_history, and what is printed), whose `loss` has the penalty in it, also has
    `l1_penalty`, `mean_nnz`, how many neurons fire for a token, `density`, their share, and with `reinit` `dead`, how
    many were dead when the last window ended.
    The layers may be dense or swapped. InputError for wrong arguments, and, when training begins, for a model without
    ReLU layers, for label smoothing, which leaves out the model's own loss, and with `reinit` for frozen gates."""

    def __init__(self, l1: float, *, delay: int = 0, warmup: int = 0, reinit: float = 0.0, window: int = 100) -> None:
        for name, value in (("l1", l1), ("reinit", reinit)):
            if not isinstance(value, (int, float)) or not 0 <= value < math.inf or name == "reinit" and value > 1:
                raise InputError(f"{name} is {value!r}; accepted: a finite number from 0 up, of reinit to 1")
        for name, steps, least in (("delay", delay, 0), ("warmup", warmup, 0), ("window", window, 1)):
            check_whole(name, steps, least)
        self.l1, self.delay, self.warmup, self.reinit, self.window = l1, delay, warmup, reinit, window
        self._hooks = ExitStack()

    def __getattr__(self, event: str) -> Any:
        # The Trainer asks for every event. Its base class is not inherited: importing it changes torch.manual_seed.
        if event.startswith("on_"):
            return lambda *arguments, **more: None
        raise AttributeError(event)

    def on_train_begin(self, args: Any, state: Any, control: Any, *, model: nn.Module, **_: Any) -> None:
        """Put hooks on the model until training ends."""
        if args.label_smoothing_factor:
            raise InputError(
                f"label_smoothing_factor is {args.label_smoothing_factor}; accepted: 0, with which the Trainer "
                "minimises the model's own loss"
            )
        if args.n_gpu > 1:
            raise InputError(f"one process trains on {args.n_gpu} GPUs; accepted: a process for each (torchrun)")
        layers = firing_layers(model)
        for name, (weight, _) in ((layer.name, stored_by(layer.pattern)) for layer in layers if self.reinit):
            if weight is None or not weight.requires_grad:
                what = f"reinit is {self.reinit} and the gate of {name} is frozen, or made of other parameters"
                raise InputError(f"{what}; accepted: gates that learn")
        self._hooks.close()  # of a training that was interrupted
        self._step, self._parts = state.global_step, args.gradient_accumulation_steps
        if args.average_tokens_across_devices:  # which has the Trainer multiply what each process adds to the mean
            self._parts *= args.world_size
        self._sums: Tensor | None = None  # of penalty, nnz and 1, over the forward passes since the last log
        self._dead: dict[str, int] = {}
        self._width = sum(layer.up.weight.shape[0] for layer in layers) / len(layers)
        generator = torch.Generator().manual_seed(args.seed + state.global_step)
        self._silence = Silence(layers if self.reinit else [], generator)
        self._terms = self._hooks.enter_context(layer_terms(model))
        # Under gradient checkpointing layers report once more in the backward pass.
        self._hooks.callback(model.register_forward_pre_hook(lambda *_: self._terms.clear()).remove)
        self._hooks.callback(model.register_forward_hook(self._penalise, with_kwargs=True).remove)

    def _penalise(self, model: nn.Module, args: tuple, kwargs: dict, output: Any) -> Any:
        """Add the penalty to the loss of a forward pass that is learned from."""
        terms = [*self._terms]
        self._terms.clear()
        if not model.training or not terms or not isinstance(output, dict) or output.get("loss") is None:
            return None
        coefficient = l1_coefficient(self.l1, self.delay, self.warmup, self._step + 1)
        penalty = coefficient * sum(term.l1 for term in terms) / len(terms)
        # Where the loss is divided by the tokens of all parts of a step, the Trainer adds the parts up.
        share = 1 / self._parts if kwargs.get("num_items_in_batch") is not None else 1.0
        output["loss"] = output["loss"] + share * penalty.to(output["loss"].dtype)
        nnz = sum(term.nnz for term in terms) / len(terms)
        numbers = torch.stack([penalty.detach(), nnz, torch.ones_like(nnz)])
        self._sums = numbers if self._sums is None else self._sums + numbers
        return output

    def on_optimizer_step(self, *_: Any, **__: Any) -> None:
        """Note who fired, while the step's gradients are there."""
        self._silence.count(1)

    def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
        """Count the step, and move the rows of dead neurons where a window ends."""
        if self._sums is None:
            raise InputError(
                "no forward pass of the step had a loss to add the penalty to; accepted: a model that is given labels "
                "and returns its loss by name, and a Trainer without compute_loss_func"
            )
        self._step = state.global_step
        if self.reinit and self._step % self.window == 0:
            self._dead = {"dead": sum(int(dead.sum()) for dead in self._silence.dead(self.window))}
            self._silence.revive(self.window, self.reinit)

    def on_log(self, args: Any, state: Any, control: Any, *, logs: dict | None = None, **_: Any) -> None:
        """Add what fires to what the Trainer logs."""
        if self._sums is None or logs is None or "loss" not in logs:
            return
        penalty, nnz, _ = (self._sums / self._sums[2]).tolist()
        self._sums = None
        more = {"l1_penalty": penalty, "mean_nnz": nnz, "density": nnz / self._width, **self._dead}
        logs.update(more)
        state.log_history[-1].update(more)

    def on_train_end(self, *_: Any, **__: Any) -> None:
        """Take the hooks off."""
        self._hooks.close()
