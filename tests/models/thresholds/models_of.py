"""Small models with random weights whose feed-forward layers are not sparse, for the tests of thresholds."""

from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops.reference import SquaredReLU

SIZES = dict(vocab_size=64, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, pad_token_id=0)
LLAMA = SIZES | dict(hidden_size=16, intermediate_size=40, max_position_embeddings=32, initializer_range=0.2)


def _of(family: str, **sizes):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = getattr(transformers, f"{family}Config")(**sizes, bos_token_id=1, eos_token_id=2)
    kind = "GPT2LMHeadModel" if family == "GPT2" else f"{family}ForCausalLM"
    return getattr(transformers, kind)(config).eval()


def llama(**changes):
    return _of("Llama", **{**LLAMA, "hidden_act": "silu", **changes})


def gpt2():
    small = dict(n_embd=16, n_inner=40, n_layer=2, n_head=2, n_positions=32, initializer_range=0.2)
    return _of("GPT2", vocab_size=64, **small)


def opt():
    small = dict(hidden_size=16, ffn_dim=40, word_embed_proj_dim=16, activation_function="gelu", init_std=0.2)
    return _of("OPT", **SIZES | small, max_position_embeddings=32)


def phi3():
    return _of("Phi3", **LLAMA)


def ours(activation: Callable | None = None, **changes):
    """This project's own model, with another activation in its layers."""
    torch.manual_seed(0)
    sizes = dict(vocabulary=64, d_model=16, layers=2, heads=2, d_ff=40, context=32)
    model = LanguageModel(ModelConfig(**{**sizes, **changes})).eval()
    for block in model.layers if activation is not None else ():
        del block.mlp.act_fn  # torch would not have a function in a module's place
        block.mlp.act_fn = activation
    return model


MODELS = {
    "Llama": llama,
    "GPT-2": gpt2,
    "OPT": opt,
    "Phi-3": phi3,
    "ours, SiLU": lambda: ours(nn.SiLU()),
    "ours, SiLU in place": lambda: ours(nn.SiLU(inplace=True)),
    "ours, a function": lambda: ours(F.silu),
    "ours, plain GELU": lambda: ours(nn.GELU(), gated=False),
    "ours, ReLU": ours,
    "ours, squared ReLU": lambda: ours(SquaredReLU()),
}


def tokens(rows: int = 12, length: int = 16, seed: int = 1) -> torch.Tensor:
    return torch.randint(3, 64, (rows, length), generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def answer(model) -> torch.Tensor:
    found = model(tokens(3, 9, seed=5))
    return getattr(found, "logits", found)
