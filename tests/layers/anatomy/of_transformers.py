"""Every class of the installed transformers whose parts have the names of a feed-forward layer's, built small and with
ReLU."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch
from torch import nn

from twell_lab.layers import anatomy, experts
from twell_lab.layers.families import known
from twell_lab.layers.parts import part_at, put

# What configurations call their widths, by the value that they get here; heads of 8 where they are asked for.
SIZES = {
    16: (
        "hidden_size",
        "d_model",
        "dim",
        "n_embd",
        "encoder_hidden_size",
        "word_embed_proj_dim",
        "embed_dim",
        "width",
        "hidden_dim",
    ),
    24: (
        "intermediate_size",
        "ffn_dim",
        "encoder_ffn_dim",
        "decoder_ffn_dim",
        "d_ff",
        "ffn_hidden_size",
        "moe_intermediate_size",
        "shared_expert_intermediate_size",
        "encoder_intermediate_size",
        "intermediate_dim",
        "mlp_dim",
        "inner_dim",
    ),
    2: (
        "num_attention_heads",
        "encoder_attention_heads",
        "decoder_attention_heads",
        "num_key_value_heads",
        "n_head",
        "num_heads",
    ),
    8: ("head_dim", "attention_head_dim"),
    4: ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "num_routed_experts"),
}


def classes() -> Iterator[tuple[str, str]]:
    """(module, class) for each class, found in the source: their own attributes and those of bases in the same file."""
    import transformers

    root = Path(transformers.__file__).parent / "models"
    wanted = [{seat.partition(".")[0] for seat in family.seats} for family in known()]
    wanted += [{first, experts.DOWN, experts.ACTIVATION} for first in (experts.FUSED, experts.PLAIN)]
    for path in sorted(root.glob("*/modeling_*.py")):
        source = path.read_text(encoding="utf-8")
        if not any(all(f"self.{name} =" in source for name in names) for names in wanted):
            continue
        own, bases = {}, {}
        for node in ast.parse(source).body:
            if isinstance(node, ast.ClassDef):
                targets = [t for n in ast.walk(node) if isinstance(n, ast.Assign) for t in n.targets]
                own[node.name] = {
                    t.attr for t in targets if isinstance(t, ast.Attribute) and getattr(t.value, "id", None) == "self"
                }
                bases[node.name] = [base.id for base in node.bases if isinstance(base, ast.Name)]

        def attributes(name, own=own, bases=bases):
            return own.get(name, set()).union(*map(attributes, bases.get(name, [])))

        for name in own:
            if any(names <= attributes(name) for names in wanted):
                yield f"transformers.models.{path.parent.name}.{path.stem}", name


# What constructors ask for besides a configuration.
GIVEN = {
    "hidden_size": 16,
    "dim": 16,
    "context_dim": 24,
    "in_features": 16,
    "hidden_features": 24,
    "out_features": 16,
    "input_dim": 16,
    "intermediate_size": 24,
    "output_size": 16,
    "hidden_act": "relu",
    "activation_function": "relu",
    "activation": "relu",
    "layer_idx": 0,
    "layer_id": 0,
    "layer_num": 0,
    "layer_index": 0,
    "n_state": 24,
    "ffn_dim": 24,
    "in_dim": 16,
    "dim_hidden": 24,
    "out_dim": 16,
    "stage_idx": 0,
    "swiglu_limit": 7.0,
    "stagger_blocks_this_layer": False,
}


def shrunk(config):
    """The configuration with small widths, and a ReLU wherever it names an activation."""
    from transformers.activations import ACT2FN

    for value, names in SIZES.items():
        for name in names:
            with suppress(Exception):  # not every configuration lets itself be read and written at will
                if isinstance(getattr(config, name, None), int):
                    setattr(config, name, value)
    for name, value in list(vars(config).items()):
        if isinstance(value, str) and "act" in name and value in ACT2FN:
            with suppress(Exception):
                setattr(config, name, "relu")
    config._attn_implementation = config._experts_implementation = "eager"
    return config


def build(module: str, name: str) -> nn.Module:
    """The class, built from whichever configuration of its file fits, its activation made a ReLU where it has none."""
    from transformers import PreTrainedConfig

    home = importlib.import_module(module)
    kind = getattr(home, name)
    own = {each for each in vars(home).values() if isinstance(each, type) and issubclass(each, PreTrainedConfig)} - {
        PreTrainedConfig
    }
    wanted = list(inspect.signature(kind.__init__).parameters.values())[1:]
    said = str(wanted[0].annotation)
    configs = [
        part
        for each in sorted(own, key=lambda each: (each.__name__ not in said, each.__name__))
        for part in _parts(each)
    ]
    tried = []
    for config, whole in itertools.product(configs or [None], (False, True)):
        given = {**GIVEN, "config": config}
        try:
            torch.manual_seed(0)
            asked = [p.name for p in wanted if whole or p.default is p.empty or p.name == "layer_idx"]
            made = kind(**{each: given[each] for each in asked if each in given})
            if experts.stored(made):
                for p in made.parameters():  # which they leave empty
                    nn.init.normal_(p, std=0.2)
                made.act_fn = nn.ReLU()
                return made.eval()
            family = anatomy.family_of(made)
            if family is None:
                raise TypeError("its projections are no Linear")
            if not anatomy.is_relu(part_at(made, family.activation)):
                put(made, family.activation, nn.ReLU())
            return made.eval()
        except Exception as error:
            tried.append(error)
    raise tried[0]


def _parts(kind) -> Iterator:
    """A small configuration of this class, and those within it."""
    try:
        config = kind()
    except Exception:
        return
    yield shrunk(config)
    for name in getattr(config, "sub_configs", {}):
        if getattr(config, name, None) is not None:
            yield shrunk(getattr(config, name))
