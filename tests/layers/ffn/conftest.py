"""Small models of every kind that holds feed-forward layers, and the CPU path that reads the transposed weights."""

from __future__ import annotations

import pytest
import torch

from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops import cpu

VOCABULARY = 64


def course(gated=True, layers=2):
    sizes = dict(vocabulary=VOCABULARY, d_model=16, layers=layers, heads=2, d_ff=40, context=32)
    return LanguageModel(ModelConfig(gated=gated, **sizes))


def llama(**changes):
    transformers = pytest.importorskip("transformers")
    config = dict(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        hidden_act="relu",
        max_position_embeddings=32,
        initializer_range=0.5,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**{**config, **changes}))


def opt(**changes):
    transformers = pytest.importorskip("transformers")
    config = dict(
        vocab_size=VOCABULARY,
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=40,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=32,
        activation_function="relu",
        dropout=0.0,
        init_std=0.5,
        bos_token_id=1,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = transformers.OPTForCausalLM(transformers.OPTConfig(**{**config, **changes}))
    with torch.no_grad():  # OPT starts its biases at zero, where they would not be missed
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                parameter.normal_()
    return model


MODELS = {
    "course, gated": course,
    "course, plain": lambda: course(gated=False),
    "Llama": llama,
    "Llama with biases": lambda: llama(mlp_bias=True),
    "OPT": opt,
    "OPT, embedding of another width": lambda: opt(word_embed_proj_dim=8, do_layer_norm_before=False),
    "OPT without biases": lambda: opt(enable_bias=False),
}


@pytest.fixture(autouse=True, scope="module")
def one_thread():
    """Such small tensors gain nothing from a second thread, and on a busy machine they wait for it."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture(autouse=True)
def over_the_entries(monkeypatch):
    """Small layers would take the dense path, which never looks at down_t."""
    monkeypatch.setattr(cpu, "_pays", lambda gate, entries: True)


@pytest.fixture(params=MODELS)
def make(request):
    """make(): the same model each time, in evaluation mode."""

    def build(seed=0):
        torch.manual_seed(seed)
        return MODELS[request.param]().eval()

    return build


@pytest.fixture(params=["course, gated", "OPT"])
def make_either(request):
    """make_either(): a model whose layers are swapped, or one whose layers are taken apart in place."""

    def build(seed=0):
        torch.manual_seed(seed)
        return MODELS[request.param]().eval()

    return build


@pytest.fixture
def models():
    """models[name](): any of the models, for tests that need a certain one."""
    return {"llama": llama, "opt": opt, "course": course}


@pytest.fixture
def tokens():
    return torch.randint(2, VOCABULARY, (2, 9), generator=torch.Generator().manual_seed(5))


@pytest.fixture
def logits():
    """logits(model, tokens), whatever the model returns them in."""

    def run(model, tokens):
        found = model(tokens)
        return found if isinstance(found, torch.Tensor) else found.logits

    return run
