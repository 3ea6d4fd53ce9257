"""Relufication: make a model with smooth gates (SiLU, GELU) a ReLU model, so that its neurons can be silent.

A recipe after Mirzadeh et al., "ReLU Strikes Back" (arXiv 2310.04564), and ProSparse (arXiv 2402.13516):

1. `relufy(model)` puts a ReLU in the place of each activation. The weights stay; the loss jumps, since what the small
   negative outputs of a SiLU carried is gone.
2. Train on, on text like that of the first training, with a learning rate well below its peak (a tenth to a third) and
   a warm-up. Most of the loss comes back early.
3. Then, or along with it after a delay, add L1 on the hidden activations, grown linearly from 0 (objective.l1_penalty;
   TrainConfig's l1_delay and l1_warmup). ReLU alone leaves many more neurons firing than L1 does.
4. `twell_lab.profile` says how sparse the layers are, `twell_lab.sparsify` swaps them.

In code, for a Hugging Face model and batches of its token numbers [batch, context]:

    names = relufy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    for step, tokens in enumerate(batches, start=1):
        with hidden_activations(model) as hidden:                  # twell_lab.objective
            loss = model(tokens, labels=tokens).loss
        loss = loss + l1 * max(0.0, min(1.0, (step - 500) / 500)) * l1_penalty(hidden)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

What quality is left after it depends on how long it is trained on; the papers spend some percent of the first training.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from .errors import InputError
from .anatomy import ACCEPTED as _ACCEPTED, is_relu as _is_relu, layout_of as _layout
from .ffn import SparseFFN
from .model import ModelConfig

# Parts of the names of what a ReLU can follow: smooth ones shaped like it, and its square.
_LIKE_RELU = ("silu", "swish", "gelu", "mish", "squaredrelu", "relusquared")
# Where transformers' configurations keep the name of the activation, by family.
_FIELDS = ("hidden_act", "hidden_activation", "activation_function")


def relufy(model: nn.Module) -> list[str]:
    """Replace the activation of each feed-forward layer with a ReLU, in place; returns the names of those changed.

    model: of transformers (Llama, Qwen, Mistral, Gemma, OPT: see twell_lab.ffn for the parts that are known) or of this
    project. Layers that have a ReLU already stay as they are. Configurations are changed with it (`hidden_act` and the
    like become "relu"), so that what is saved is loaded as a ReLU model. Other modules keep their activations.

    Raises InputError, with nothing changed, for a model without feed-forward layers known here, and for an activation
    that a ReLU is no stand-in for (tanh, sigmoid, ...).
    """
    if not isinstance(model, nn.Module):
        raise InputError(f"expected a torch.nn.Module, got {type(model).__name__}")
    layers = [(name, module, layout[3]) for name, module in model.named_modules()
              if not isinstance(module, SparseFFN) and (layout := _layout(module))]
    if not layers and not any(isinstance(module, SparseFFN) for module in model.modules()):
        raise InputError(f"no feed-forward layer in {type(model).__name__}; {_ACCEPTED} and an activation")
    layers = [(name, module, at) for name, module, at in layers if not _is_relu(getattr(module, at))]
    for name, module, at in layers:
        kind = _name(getattr(module, at))
        if not any(part in kind.lower() for part in _LIKE_RELU):
            raise InputError(f"{name or type(module).__name__} uses {kind}; accepted: SiLU (Swish), GELU, Mish, squared ReLU")
    for _, module, at in layers:
        setattr(module, at, nn.ReLU())
    for module in (model, *(module for _, module, _ in layers)) if layers else ():
        _rename(module)
    return [name for name, _, _ in layers]


def _name(activation) -> str:
    return getattr(activation, "__name__", type(activation).__name__)


def _rename(module: nn.Module) -> None:
    """Have the module's configuration, if it has one, say ReLU where it named an activation."""
    config = getattr(module, "config", None)
    if isinstance(config, ModelConfig):
        module.config = replace(config, activation="relu")
        return
    for field in _FIELDS:
        if isinstance(getattr(config, field, None), str):
            setattr(config, field, "relu")
