"""Whole models of transformers on a GPU: swapped and back, planned from batches, generating, and turned into others."""

import copy

import pytest
import torch

import twell_lab as tl
from tests.layers import models_of
from tests.models.swapping.spread import off
from twell_lab.layers.sparse_ffn import SparseFFN

pytestmark = pytest.mark.gpu
FAMILIES = ("Llama", "OPT", "GPT-2", "Falcon", "gated T5", "Mixtral", "Phi-3")  # one of each way to store weights


def logits(model):
    return model(**{name: value.cuda() for name, value in models_of.given(model).items()}).logits


def build(name, dtype=torch.float32):
    """On the GPU, and twice: as it is, and in float64 on the CPU."""
    pytest.importorskip("transformers")
    model = models_of.build(name, dtype)
    exact = models_of.build(name, torch.float64)
    exact.load_state_dict(model.state_dict())
    with torch.no_grad():
        return model.cuda(), models_of.logits(exact)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", FAMILIES)
@torch.no_grad()
def test_swapped_and_back(name, dtype):
    """Its logits are as near to those of float64 as with dense layers, but for a tenth and an ulp; then the same bits."""
    model, exact = build(name, dtype)
    dense, before = logits(model), copy.deepcopy(model.state_dict())
    tl.sparsify(model, "twell")
    assert any(isinstance(module, SparseFFN) for module in model.modules())
    for _ in range(2):
        assert off(logits(model), exact) <= 1.1 * off(dense, exact) + torch.finfo(dtype).eps
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())
    assert torch.equal(logits(tl.densify(model)), dense)


@pytest.mark.parametrize("name", ["Llama", "OPT", "GPT-2"])
@torch.no_grad()
def test_the_same_tokens_are_generated(name):
    """Greedily, in float32."""
    model, _ = build(name)
    tokens = models_of.given(model)["input_ids"].cuda()
    how = dict(max_new_tokens=12, do_sample=False)
    expected = model.generate(tokens, **how)
    tl.sparsify(model, "twell")
    assert torch.equal(model.generate(tokens, **how), expected)


@torch.no_grad()
def test_from_batches(capsys):
    """Profiled, planned and swapped in one call, which says what it did; not further off than dense by more than 2x."""
    model, exact = build("Llama", torch.bfloat16)
    dense = logits(model)
    batches = [torch.randint(2, models_of.VOCABULARY, (4, 24), device="cuda") for _ in range(4)]
    assert tl.sparsify(model, batches, tokens=(1, 64)) is model
    assert "fires: " in capsys.readouterr().out
    assert off(logits(model), exact) <= 2 * off(dense, exact)


def test_an_adapter_on_a_swapped_model_is_trained_and_merged():
    """Its projections are modules again, so what they compute is the dense layer's with the adapter."""
    peft = pytest.importorskip("peft")
    dense, _ = build("Llama")
    sparse = tl.sparsify(copy.deepcopy(dense), "twell")
    config = peft.LoraConfig(r=4, target_modules=["up_proj", "down_proj"], init_lora_weights=False)
    models = []
    for model in (dense, sparse):
        torch.manual_seed(1)
        models.append(peft.get_peft_model(model, config))
    for model in models:
        logits(model).float().square().mean().backward()
    wanted, found = ({n: p.grad for n, p in model.named_parameters() if p.grad is not None} for model in models)
    assert wanted.keys() == found.keys() and wanted
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=1e-3, atol=1e-4 * float(gradient.abs().max()))
    with torch.no_grad():
        a, b = (logits(model.merge_and_unload()) for model in models)
        torch.testing.assert_close(b, a, rtol=1e-3, atol=1e-3)
