"""L1 for those who train with transformers: a callback of its `Trainer` that adds the penalty to the loss."""

from __future__ import annotations

import math
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from ..core import InputError
from ..layers.find import firing_layers
from ..layers.terms import layer_terms
from ..models.tiny import check_whole
from .objective import Silence, l1_coefficient


class SparsityCallback:
    """Add an L1 penalty on hidden activations to the loss that transformers' Trainer minimises, and log what fires.

        model = tl.relufy(transformers.AutoModelForCausalLM.from_pretrained(name))
        Trainer(model, args, train_dataset=texts, callbacks=[tl.SparsityCallback(l1=2e-5, warmup=500)]).train()

    The penalty is that of the published code of arXiv 2603.23198 (twell_lab.layers.terms), the remedy for dead neurons
    that of its appendix C.3 (twell_lab.training.objective).

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
        if self.reinit and (frozen := [one.name for one in layers if not one.pattern.weight.requires_grad]):
            raise InputError(
                f"reinit is {self.reinit} and the gate of {frozen[0]} is frozen; accepted: gates that learn"
            )
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
