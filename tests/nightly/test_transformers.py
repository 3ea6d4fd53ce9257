"""Every class of the installed transformers whose parts have the names of a feed-forward layer's, built small and with
ReLU: exact once it is swapped, or dense with a reason."""

from __future__ import annotations

import ast
import importlib
import inspect
import itertools
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from torch import nn

from twell_lab.layers import experts
from twell_lab.layers.activations import is_relu
from twell_lab.layers.families import FAMILIES
from twell_lab.layers.find import survey
from twell_lab.layers.parts import parts_of, put
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import densify, sparsify

pytest.importorskip("transformers")

# What configurations call their widths, by the value that they get here; heads of 8 where they are asked for.
SIZES = {
    16: "hidden_size d_model dim n_embd encoder_hidden_size word_embed_proj_dim embed_dim width hidden_dim",
    24: "intermediate_size ffn_dim encoder_ffn_dim decoder_ffn_dim d_ff ffn_hidden_size moe_intermediate_size "
    "shared_expert_intermediate_size encoder_intermediate_size intermediate_dim mlp_dim inner_dim",
    2: "num_attention_heads encoder_attention_heads decoder_attention_heads num_key_value_heads n_head num_heads",
    8: "head_dim attention_head_dim",
    4: "num_experts num_local_experts n_routed_experts moe_num_experts num_routed_experts",
}


def classes() -> Iterator[tuple[str, str]]:
    """(module, class) for each class, found in the source: their own attributes and those of bases in the same file."""
    import transformers

    root = Path(transformers.__file__).parent / "models"
    wanted = [{place.partition(".")[0] for place in family.places} for family in FAMILIES]
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
    **dict.fromkeys("hidden_size dim in_features out_features input_dim output_size in_dim out_dim".split(), 16),
    **dict.fromkeys("context_dim hidden_features intermediate_size n_state ffn_dim dim_hidden".split(), 24),
    **dict.fromkeys("hidden_act activation_function activation".split(), "relu"),
    **dict.fromkeys("layer_idx layer_id layer_num layer_index stage_idx".split(), 0),
    **{"swiglu_limit": 7.0, "stagger_blocks_this_layer": False},
}


def shrunk(config):
    """The configuration with small widths, and a ReLU wherever it names an activation."""
    from transformers.activations import ACT2FN

    for value, names in SIZES.items():
        for name in names.split():
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
    own = {each for each in vars(home).values() if isinstance(each, type) and issubclass(each, PreTrainedConfig)}
    own.discard(PreTrainedConfig)
    wanted = list(inspect.signature(kind.__init__).parameters.values())[1:]
    said = str(wanted[0].annotation)
    ordered = sorted(own, key=lambda each: (each.__name__ not in said, each.__name__))
    configs = [part for each in ordered for part in _parts(each)]
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
            parts = parts_of(made)
            if parts is None:
                raise TypeError("its projections are no Linear")
            if not is_relu(parts.acts):
                put(made, parts.family.activation, nn.ReLU())
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


def answers(layer, width):
    """What a layer, or a decoder layer whole, gives for a few inputs, in both modes; its random numbers are the same
    each time."""
    wanted = list(inspect.signature(layer.forward).parameters.values())[1:]
    needed = [each.name for each in wanted if each.default is each.empty and each.kind is each.POSITIONAL_OR_KEYWORD]
    given = []
    for mode in (True, False):
        layer.train(mode)
        for scale in (0.1, 5.0, 300.0):
            torch.manual_seed(7)
            x = scale * torch.randn(2, 6, width)
            if (routed := experts.stored(layer)) is not None:
                chosen = torch.rand(12, routed[0]).argsort(1)[:, :2]
                with torch.no_grad():
                    given.append(layer(x.flatten(0, 1), chosen, torch.rand(chosen.shape)))
                continue
            with torch.no_grad():
                try:
                    found = layer(x, *others(needed, x))
                except (ValueError, IndexError, RuntimeError):  # experts take tokens without a batch
                    found = layer(x.flatten(0, 1), *others(needed, x.flatten(0, 1)))
            several = found if isinstance(found, tuple) else [found]
            given += [each for each in several if isinstance(each, torch.Tensor)]
    return given


def others(needed, x):
    """What a forward needs besides x: a residual, or None."""
    return [x.clone() if name == "residual" else None for name in needed]


def outcome(module, name):
    """What becomes of a class that can be built: "exact" or "dense", with why. AssertionError if it computes something
    else once it is swapped."""
    try:
        layer = build(module, name)
    except Exception as error:  # whatever a constructor raises that was given too little
        return f"not built: {error}"
    width = parts_of(experts.experts_of(layer)[0] if experts.stored(layer) else layer).up.weight.shape[1]
    before = {key: id(p) for key, p in layer.named_parameters()}
    (reason,) = survey(layer)[1].values() or [None]
    try:
        expected = answers(layer, width)
    except Exception as error:  # it cannot be run on x alone
        assert reason is not None, name
        return f"dense: {error}"
    sparse = sparsify(layer, "twell")
    assert {key: id(p) for key, p in sparse.named_parameters()} == before, name
    if reason is not None:
        assert sparse is layer and not any(isinstance(each, SparseFFN) for each in layer.modules()), name
        return f"dense: {reason}"
    for a, b in zip(answers(sparse, width), expected, strict=True):
        torch.testing.assert_close(
            a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item(), equal_nan=True, msg=lambda m: f"{name}: {m}"
        )
    assert densify(sparse) is layer
    return "exact"


def test_every_class_is_exact_or_dense_with_a_reason():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = {f"{module}.{name}": outcome(module, name) for module, name in classes()}
    counts = Counter(each.partition(":")[0] for each in found.values())
    unbuilt = {name: each for name, each in found.items() if each.startswith("not built")}
    assert len(found) > 100 and counts["exact"] > 0.7 * len(found), counts
    assert len(unbuilt) < 0.05 * len(found), unbuilt
    by_class = {name.rpartition(".")[2]: each.partition(":")[0] for name, each in found.items()}
    for name in ("BitNetMLP", "DeepseekV4MLP", "Gemma3nTextMLP", "Kosmos2TextFFN", "GptOssExperts"):
        assert by_class.get(name) != "exact", name
    for name in (
        *("LlamaMLP", "Qwen2MLP", "GemmaMLP", "OPTDecoderLayer", "BartEncoderLayer", "CLIPMLP", "ViTMLP", "Phi3MLP"),
        *("GPT2MLP", "Starcoder2MLP", "GPTNeoXMLP", "FalconMLP", "BloomMLP", "MptMLP", "T5DenseActDense", "BertLayer"),
        *("T5DenseGatedActDense", "MixtralExperts", "OlmoeExperts", "Qwen2MoeExperts", "DeepseekV3Experts"),
    ):
        assert by_class[name] == "exact", name
