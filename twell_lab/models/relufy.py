"""Relufication: make a model with smooth gates (SiLU, GELU) a ReLU model, so that its neurons can be silent.

A recipe after Mirzadeh et al., "ReLU Strikes Back" (arXiv 2310.04564), and ProSparse (arXiv 2402.13516): `relufy`
puts a ReLU in the place of each activation. The weights stay; the loss jumps. Train on, on text like that of the first
training, with a learning rate well below its peak (a tenth to a third) and a warm-up. Most of the loss comes back
early; the papers spend some percent of the first training. Then, or along with it after a delay, add L1 on the hidden
activations (layers.terms, SparsityCallback), grown linearly from 0, which leaves many fewer neurons firing."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import accumulate

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
from .tiny import ModelConfig

# Parts of the names of what a ReLU can follow: smooth ones shaped like it, and its square.
_LIKE_RELU = ("silu", "swish", "gelu", "mish", "squaredrelu", "relusquared")
# Where configurations keep the name of the activation, by family.
_FIELDS = ("hidden_act", "hidden_activation", "mlp_hidden_act", "activation_function", "activation", "dense_act_fn")
_FIELDS += ("feed_forward_proj",)  # T5's also says whether there is a gate: "gated-gelu"


def relufy(model: nn.Module, *, only: Only | None = None) -> nn.Module:
    """Replace the activation of each feed-forward layer with a ReLU, in place; returns the model.

    Routed experts, which share one activation, are changed with it; of a model of several parts the text model alone is
    changed: not the vision tower of a Gemma3. The configuration is changed with the layers (`hidden_act` and the like
    become "relu"), so that what is saved is loaded as the same ReLU model.

    model: of transformers (of a family in twell_lab.layers.families) or of this project. only: change the layers for
    which only(name, module) is true, in whichever part of the model. Where no configuration says which layers those
    are, it stays as it was, with a warning: what is saved then is loaded with the old activations.

    InputError, with nothing changed, for a model without feed-forward layers known here; for a layer that computes
    something else than down(act(gate(x)) * up(x)) or down(act(up(x))); for an activation that is not like a ReLU; and,
    without `only`, where the configuration's field also governs other modules, as the head of BERT."""
    check_model(model)
    layers, known = [], False
    for name, module in model.named_modules():
        parts = None if isinstance(module, SparseFFN) or stored(module) else parts_of(module)
        if not (parts or stored(module) or isinstance(module, SparseFFN)):
            continue
        known, place = True, parts.family.activation if parts else ACTIVATION
        done = isinstance(module, SparseFFN) or isinstance(part := part_at(module, place), SparseFFN) or is_relu(part)
        if not done and (_of_text(model, name) if only is None else selected(only, name, module)):
            layers.append((name, module, place))
    if not known:
        raise InputError(f"no feed-forward layer in {type(model).__name__}: {other_layers(model)}; {accepted()}")
    for name, module, place in layers:
        kind = kind_of(part_at(module, place))
        if not any(part in kind.lower() for part in _LIKE_RELU):
            off = " (thresholds come off by tl.Thresholds.remove)" if kind == ThresholdedActivation.__name__ else ""
            raise InputError(
                f"{name or type(module).__name__} uses {kind}{off}; accepted: SiLU (Swish), GELU, Mish, squared ReLU"
            )
    check_all((name, module) for name, module, _ in layers)
    changed = {f"{name}.{place}".lstrip(".") for name, _, place in layers}
    saved = []
    try:
        for prefix, module in _saved(model):
            if names := {name.removeprefix(prefix) for name in changed if name.startswith(prefix)}:
                saved.append((module, _governing(module, names)))
    except InputError as error:
        if only is None:
            raise InputError(f"{error}; accepted: an `only`, which leaves the configuration as it was") from error
        stays = "The configuration stays as it was: what is saved with it is loaded with the old activations"
        warnings.warn(f"{error}. {stays}", stacklevel=2)
        saved = []
    for _, module, place in layers:
        put(module, place, nn.ReLU().train(module.training))
    for module, kinds in saved:
        module.config = _with_relu(module.config, kinds)
    return model


def _of_text(model: nn.Module, name: str) -> bool:
    """Return whether the layer belongs to the model that reads and writes text: what its nearest configuration says."""
    configs = [config for config in _configs_above(model, name) if hasattr(config, "get_text_config")]
    kinds = {type(config) for config in configs[:1]}
    for side in ({}, {"decoder": True}, {"encoder": True}) if configs else ():
        with suppress(ValueError):  # of several text models, it asks for the side
            kinds.add(type(configs[0].get_text_config(**side)))
    return not configs or type(configs[-1]) in kinds


def _configs_above(model: nn.Module, name: str) -> list:
    """Return the configurations of the modules on the way to the one of this name, the model's first."""
    way = accumulate(name.split("."), "{}.{}".format) if name else ()
    configs = (getattr(module, "config", None) for module in (model, *map(model.get_submodule, way)))
    return [config for config in configs if config is not None]


def _saved(model: nn.Module, prefix: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Yield the outermost modules that are saved with a configuration, most often the model itself, behind the
    beginning of the names of what is in them."""
    if hasattr(type(model), "save_pretrained"):
        yield prefix, model
        return
    for name, child in model.named_children():
        yield from _saved(child, f"{prefix}{name}.")


def _governing(model: nn.Module, changed: set[str]) -> set[type]:
    """Return the kinds of configurations that say the activations of these names. InputError where, with a ReLU, they
    would say it of others too, or do not say it of these: both are seen by building the model on meta."""
    own = {type(config) for config in _tree(model.config)}
    kinds = {type(_configs_above(model, name.rpartition(".")[0])[-1]) for name in changed}
    kinds = {kind if kind in own else type(model.config) for kind in kinds}
    try:
        with torch.device("meta"), torch.random.fork_rng(devices=[]):
            built = _relus(type(model)(_with_relu(copy.deepcopy(model.config), kinds)))
    except Exception as error:
        raise InputError(f"{type(model).__name__} could not be built anew: {error!r:.200}") from error
    if wrong := sorted(changed - built) + sorted(built - changed - _relus(model)):
        raise InputError(
            f"{type(model.config).__name__} with a ReLU would not be that of the layers that are changed: {wrong[0]} "
            f"({len(wrong)} in all) would differ where the model is loaded again"
        )
    return kinds


def _tree(config) -> Iterator:
    """Yield a configuration and those within it."""
    yield config
    for inner in vars(config).values():
        if hasattr(inner, "get_text_config"):
            yield from _tree(inner)


def _with_relu(config, kinds: set[type]):
    """Return the configuration with a ReLU in the fields of its parts of these kinds: itself, changed in place, but
    where it is a ModelConfig."""
    if isinstance(config, ModelConfig):
        return replace(config, activation="relu")
    for part in _tree(config):
        for field in _FIELDS if type(part) in kinds else ():
            if isinstance(before := getattr(part, field, None), str):
                setattr(part, field, "gated-relu" if before.startswith("gated-") else "relu")
    return config


def _relus(model: nn.Module) -> set[str]:
    """Return the names of what a model has a ReLU in: modules, functions, and words that name one."""
    names = set()
    for name, module in model.named_modules():
        if is_relu(module) or isinstance(module, SparseFFN):
            names.add(name)
        own = {
            key for key, value in vars(module).items() if is_relu(value) or isinstance(value, str) and value == "relu"
        }
        names |= {f"{name}.{key}".lstrip(".") for key in own}
    return names
