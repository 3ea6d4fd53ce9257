"""Relufication: make a model with smooth gates (SiLU, GELU) a ReLU model, so that its neurons can be silent.

A recipe after Mirzadeh et al., "ReLU Strikes Back" (arXiv 2310.04564), and ProSparse (arXiv 2402.13516):

1. `relufy(model)` puts a ReLU in the place of each activation. The weights stay; the loss jumps, since what the small
   negative outputs of a SiLU carried is gone.
2. Train on, on text like that of the first training, with a learning rate well below its peak (a tenth to a third) and
   a warm-up. Most of the loss comes back early.
3. Then, or along with it after a delay, add L1 on the hidden activations, grown linearly from 0
   (twell_lab.training.objective.l1_penalty; TrainConfig's l1_delay and l1_warmup). ReLU alone leaves many more neurons
   firing than L1 does.
4. `twell_lab.profile` says how sparse the layers are, `twell_lab.sparsify` swaps them.

In code, for a Hugging Face model and batches of its token numbers [batch, context]:

    relufy(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.1)
    for step, tokens in enumerate(batches, start=1):
        with hidden_activations(model) as hidden:                  # twell_lab.training.objective
            loss = model(tokens, labels=tokens).loss
        loss = loss + l1 * max(0.0, min(1.0, (step - 500) / 500)) * l1_penalty(hidden)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()

What quality is left after it depends on how long it is trained on; the papers spend some percent of the first training.
"""

from __future__ import annotations

import copy
import types
import warnings
from collections.abc import Iterator
from contextlib import suppress

import torch
from torch import nn

from ..core import InputError
from ..layers.activations import is_relu, kind_of
from ..layers.experts import ACTIVATION, stored
from ..layers.families import accepted
from ..layers.find import Only, check_model, other_layers, selected
from ..layers.lossy import ThresholdedActivation
from ..layers.parts import part_at, parts_of, put
from ..layers.probe import check_all
from ..layers.sparse_ffn import SparseFFN
from .tiny import LanguageModel, ModelConfig

# Parts of the names of what a ReLU can follow: smooth ones shaped like it, and its square.
_LIKE_RELU = ("silu", "swish", "gelu", "mish", "squaredrelu", "relusquared")
# Where configurations keep the name of the activation, by family.
_FIELDS = (
    "hidden_act",
    "hidden_activation",
    "mlp_hidden_act",
    "activation_function",
    "activation",
    "dense_act_fn",
    "feed_forward_proj",  # T5's also says whether there is a gate: "gated-gelu"
)


def relufy(model: nn.Module, *, only: Only | None = None) -> nn.Module:
    """Replace the activation of each feed-forward layer with a ReLU, in place; returns the model.

    Routed experts, which share one activation, are changed with it. Layers that have a ReLU already stay as they are,
    and so do the activations of other modules. Of a model of several parts the text model alone is changed: not the
    vision tower of a Gemma3. The configuration is changed with the layers (`hidden_act` and the like become "relu"), so
    that what is saved is loaded as the same ReLU model.

    Args:
        model: of transformers (of a family in twell_lab.layers.families) or of this project.
        only: change the layers for which only(name, module) is true, in whichever part of the model, as `sparsify` is
            told which to swap. Where no configuration says which layers those are, the configuration stays as it was,
            with a warning: what is saved then is loaded with the old activations, to be changed once more.

    Raises:
        InputError: with nothing changed, for a model without feed-forward layers known here; for a layer that, with
            the activation it has, computes something else than down(act(gate(x)) * up(x)) or down(act(up(x))), since
            a ReLU would not silence its neurons; for an activation that a ReLU cannot stand in for (tanh, sigmoid,
            ...); and, without `only`, where the configuration's field also governs modules that keep their activation,
            as the head of BERT.
    """
    check_model(model)
    layers = [
        (name, module, ACTIVATION if stored(module) else parts.family.activation)
        for name, module in model.named_modules()
        if not isinstance(module, SparseFFN) and (stored(module) or (parts := parts_of(module)))
    ]
    if not layers and not any(isinstance(module, SparseFFN) for module in model.modules()):
        raise InputError(f"no feed-forward layer in {type(model).__name__}: {other_layers(model)}; {accepted()}")
    layers = [
        (name, module, at)
        for name, module, at in layers
        if not is_relu(part := part_at(module, at))
        and not isinstance(part, SparseFFN)  # in OPT's place of the activation
        and (_of_text(model, name) if only is None else selected(only, name, module))
    ]
    for name, module, at in layers:
        kind = kind_of(part_at(module, at))
        if not any(part in kind.lower() for part in _LIKE_RELU):
            off = " (thresholds come off by tl.Thresholds.remove)" if kind == ThresholdedActivation.__name__ else ""
            raise InputError(
                f"{name or type(module).__name__} uses {kind}{off}; accepted: SiLU (Swish), GELU, Mish, squared ReLU"
            )
    check_all((name, module) for name, module, _ in layers)
    before = [(module, at, part_at(module, at)) for _, module, at in layers]
    for _, module, at in layers:
        put(module, at, nn.ReLU().train(module.training))
    try:
        for name, saved in _saved(model):
            _say_relu(
                saved,
                {
                    f"{place}.{at}".removeprefix(f"{name}.").lstrip(".")
                    for place, _, at in layers
                    if _within(place, name)
                },
            )
    except InputError as error:
        if only is not None:
            warnings.warn(
                f"{error}. The configuration stays as it was: what is saved with it is loaded with the old activations",
                stacklevel=2,
            )
        else:
            for module, at, activation in before:
                put(module, at, activation)
            raise InputError(f"{error}; accepted: an `only`, which leaves the configuration as it was") from error
    return model


def _within(place: str, name: str) -> bool:
    return not name or place == name or place.startswith(f"{name}.")


def _of_text(model: nn.Module, name: str) -> bool:
    """Return whether the layer belongs to the model that reads and writes text: what its nearest configuration says."""
    parts, configs = name.split(".") if name else [], []
    for at in range(len(parts) + 1):
        config = getattr(model.get_submodule(".".join(parts[:at])), "config", None)
        if hasattr(config, "get_text_config"):
            configs.append(config)
    if not configs:
        return True
    kinds = {type(configs[0])}
    for side in ({}, {"decoder": True}, {"encoder": True}):
        with suppress(ValueError):  # of several text models, it asks for the side
            kinds.add(type(configs[0].get_text_config(**side)))
    return type(configs[-1]) in kinds


def _saved(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """The outermost modules that are saved with a configuration: most often the model itself."""
    found: list[str] = []
    for name, module in model.named_modules():
        saves = hasattr(type(module), "save_pretrained") or isinstance(module, LanguageModel)
        if saves and not any(_within(name, each) for each in found):
            found.append(name)
            yield name, module


def _say_relu(model: nn.Module, changed: set[str]) -> None:
    """Have the model's configuration say ReLU for the activations of these names. InputError, with the configuration as
    it was, where it would then say so of others too, or cannot: both are seen by building the model on meta, before and
    after."""
    if not changed:
        return
    wanted, configs = copy.deepcopy(model.config), []
    for name in changed:
        configs += [at for at in _configs_above(model, name) if at not in configs]
    for at in configs:
        _set_relu(wanted, at)
    now, then = _answers(model, copy.deepcopy(model.config)), _answers(model, copy.deepcopy(wanted))
    governed = {name for name in now.keys() | then.keys() if now.get(name) != then.get(name)}
    own = _described(model)
    other = sorted(name for name in governed if own.get(name) != then.get(name) and not _sparse(model, name))
    if missed := sorted(changed - governed):
        raise InputError(
            f"no field of {type(model.config).__name__} makes {missed[0]} a ReLU, so that what is saved would not be "
            "loaded as this model"
        )
    if other:
        raise InputError(
            f"the activation in {type(model.config).__name__} is also that of {', '.join(other[:3])} ({len(other)} in "
            "all), which would become a ReLU where the model is loaded again"
        )
    for at in configs:
        _set_relu(model.config, at)
    if isinstance(model, LanguageModel):
        model.config = wanted


def _configs_above(model: nn.Module, name: str) -> list[tuple[str, ...]]:
    """Where, from the model's configuration, the one lies that the module of this name was built from: its own or of
    what holds it."""
    nearest = model.config
    parts = name.split(".")
    for at in range(len(parts)):
        found = getattr(model.get_submodule(".".join(parts[:at])), "config", None)
        nearest = nearest if found is None else found
    tree = list(_tree(model.config))
    return (
        [path for path, config in tree if config is nearest]
        or [path for path, config in tree if type(config) is type(nearest)]
        or [()]
    )


def _tree(config, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], object]]:
    """A configuration and those within it, each by the way to it."""
    yield path, config
    for name, each in vars(config).items():
        if hasattr(each, "get_text_config"):
            yield from _tree(each, (*path, name))


def _set_relu(config, at: tuple[str, ...]) -> None:
    for name in at:
        config = getattr(config, name)
    for field in _FIELDS:
        if isinstance(getattr(config, field, None), str):  # a ModelConfig is frozen
            value = "gated-relu" if getattr(config, field).startswith("gated-") else "relu"
            (object.__setattr__ if isinstance(config, ModelConfig) else setattr)(config, field, value)


def _answers(model: nn.Module, config) -> dict[str, object]:
    """Return what a model built from this configuration is made of, as `_described` tells it."""
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            return _described(type(model)(config))
    except Exception as error:
        said = (str(error).strip() or repr(error)).splitlines()[0]
        raise InputError(
            f"{type(model).__name__} could not be built from its configuration to see which layers that governs: "
            f"{type(error).__name__}: {said:.200}"
        ) from error


def _described(model: nn.Module) -> dict[str, object]:
    """The kind of every module by name, and every function and string that a module holds: where an activation may be
    named."""
    made: dict[str, object] = {}
    for name, module in model.named_modules():
        made[name] = type(module).__name__
        for key, value in vars(module).items():
            if isinstance(value, (str, types.FunctionType, types.BuiltinFunctionType)):
                made[f"{name}.{key}".lstrip(".")] = value
    return made


def _sparse(model: nn.Module, name: str) -> bool:
    """Return whether the activation of this name went into a SparseFFN, which computes a ReLU."""
    modules = dict(model.named_modules())
    return any(isinstance(modules.get(each), SparseFFN) for each in (name, name.rpartition(".")[0]))
