"""Published ReLU models that transformers does not know: what their layers compute, on models of transformers.

- "llama_sparse_relu", of the method's paper (arXiv 2603.23198, SakanaAI/SparseLM0.5B to 2B): a Llama whose hidden_act
  says silu while its layers compute a ReLU. Entries that begin with "sparsity_" say whether they have a gate (without
  one it is an Arcee), and how wide they are.
- "sparsellama", ProSparse (arXiv 2402.13516, SparseLLM/prosparse-llama-2-7b and 13b): a Llama whose hidden_act is
  "fatrelu", a ReLU that keeps what reaches hidden_act_param.
- "minicpm", MiniCPM-S (openbmb/MiniCPM-S-1B-sft): the same activation in a MiniCPM (arXiv 2404.06395), which scales its
  embeddings, residuals and logits as a Granite does. Its config.json names it in `architectures` alone. With a plain
  ReLU: Sparsing Law (arXiv 2411.02335, SparseLLM/sparsing-law-0.1b-relu to 2.4b).
- "bamboo", Bamboo (PowerInfer/Bamboo-base-v0_1 and DPO-v0_1): a Mistral with a ReLU on gate and up (dReLU).

Their weights have the names of the models that they are built on. Saved, the last three say what they are, so that
`load` reads them back and a plain transformers refuses them. Imported when one is loaded, since it needs transformers.
"""

from __future__ import annotations

from math import sqrt
from typing import Any

import torch
import transformers
from torch import Tensor, nn
from transformers.models.mistral.modeling_mistral import MistralMLP

from ..core import InputError


class FATReLU(nn.Module):
    """Keeps values from `threshold` up, that one included, and sets the others to zero."""

    def __init__(self, threshold: float):
        super().__init__()
        self.threshold = threshold

    def forward(self, x: Tensor) -> Tensor:
        return torch.where(x >= self.threshold, x, 0.0)

    def extra_repr(self) -> str:
        return f"threshold={self.threshold:g}"


class _WithFATReLU:
    """Has a model of transformers made with a ReLU, and then puts in what its configuration says."""

    model: Any

    def __init__(self, config):
        own, config.hidden_act = config.hidden_act, "relu"
        super().__init__(config)  # type: ignore[call-arg]
        config.hidden_act = own
        for layer in self.model.layers if own == "fatrelu" else ():
            layer.mlp.act_fn = FATReLU(float(config.hidden_act_param))


class SparseLlamaConfig(transformers.LlamaConfig):
    model_type = "sparsellama"


class SparseLlamaForCausalLM(_WithFATReLU, transformers.LlamaForCausalLM):
    config_class = SparseLlamaConfig


class MiniCPMConfig(transformers.GraniteConfig):
    model_type = "minicpm"


class MiniCPMForCausalLM(_WithFATReLU, transformers.GraniteForCausalLM):
    config_class = MiniCPMConfig

    def __init__(self, config):
        config.embedding_multiplier = config.scale_emb
        config.residual_multiplier = config.scale_depth / sqrt(config.num_hidden_layers)
        config.logits_scaling = config.hidden_size / config.dim_model_base
        config.attention_multiplier = (config.hidden_size // config.num_attention_heads) ** -0.5
        super().__init__(config)


class BambooConfig(transformers.MistralConfig):
    model_type = "bamboo"


class BambooMLP(MistralMLP):
    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.act_fn(self.up_proj(x)))


class BambooForCausalLM(transformers.MistralForCausalLM):
    config_class = BambooConfig

    def __init__(self, config):
        super().__init__(config)
        for layer in self.model.layers:
            layer.mlp = BambooMLP(config)


MODELS = {"sparsellama": SparseLlamaForCausalLM, "minicpm": MiniCPMForCausalLM, "bamboo": BambooForCausalLM}


def configured(kind: str, entries: dict) -> tuple[type, Any]:
    """Return the class and the configuration that these entries of a config.json stand for. InputError where they are
    those of a model that none above computes."""
    own = ("model_type", "auto_map", "architectures")
    theirs = {name: value for name, value in entries.items() if name not in own and not name.startswith("sparsity_")}
    if kind == "llama_sparse_relu":
        gated, wide = entries.get("sparsity_gated_mlp", True), entries.get("sparsity_new_intermediate_size")
        model = transformers.LlamaForCausalLM if gated else transformers.ArceeForCausalLM
        theirs |= {"hidden_act": "relu"} | ({} if wide is None else {"intermediate_size": wide})
        return model, model.config_class.from_dict(theirs)
    known = ("relu",) if kind == "bamboo" else ("relu", "fatrelu")
    if entries.get("hidden_act") not in known:
        raise InputError(f"hidden_act is {entries.get('hidden_act')!r:.80}; accepted in a {kind}: {', '.join(known)}")
    numbers = ["hidden_act_param"] if entries["hidden_act"] == "fatrelu" else []
    numbers += ["scale_emb", "scale_depth", "dim_model_base"] if kind == "minicpm" else []
    for name in numbers:
        if type(value := entries.get(name)) not in (int, float):
            raise InputError(f"{name} is {value!r:.80}; a number is accepted")
    for name in ("rope_scaling", "num_experts", "sparse_config") if kind == "minicpm" else ():
        if entries.get(name):
            raise InputError(f"{name} is {entries[name]!r:.80}; none is accepted in a minicpm")
    tied = {"tie_word_embeddings": kind == "minicpm"}  # where it does not say
    return MODELS[kind], MODELS[kind].config_class.from_dict(tied | theirs)
