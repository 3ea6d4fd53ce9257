"""Relufication: which activations change, what is saved, and that training on brings the loss back."""

from functools import partial

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from tests.layers.models_of import build
from tests.models.tiny import test_model
from tests.threads import one_thread  # noqa: F401
from twell_lab.core import InputError
from twell_lab.layers.find import feed_forwards
from twell_lab.layers.terms import layer_terms
from twell_lab.models.relufy import relufy
from twell_lab.models.swap import sparsify
from twell_lab.models.tiny import LanguageModel
from twell_lab.ops.reference import GatedFeedForward, SquaredReLU
from twell_lab.training.text.source import random_windows, standard_library


def llama(**changes):
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(vocab_size=256, hidden_size=48, intermediate_size=96, num_hidden_layers=2, num_attention_heads=2)
    sizes |= dict(num_key_value_heads=2, max_position_embeddings=32, bos_token_id=1, eos_token_id=None, pad_token_id=0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes | changes)).train()


def gemma3():
    """A model that reads pictures too."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = dict(hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2)
    text = dict(vocab_size=64, num_key_value_heads=2, max_position_embeddings=32, head_dim=8, sliding_window=8)
    text |= dict(bos_token_id=1, eos_token_id=None, pad_token_id=0)
    vision = sizes | dict(image_size=8, patch_size=4)
    config = transformers.Gemma3Config(text_config=sizes | text, vision_config=vision, mm_tokens_per_image=4)
    return transformers.Gemma3ForConditionalGeneration(config).eval()


course = partial(test_model.model, d_model=16, heads=2, d_ff=24)


class Scaled(GatedFeedForward):
    def forward(self, x):
        return 3 * super().forward(x)


def relus(model):
    return {name for name, module in model.named_modules() if type(module) is nn.ReLU}


def changed(model, **how):
    before = relus(model)
    return len(relus(relufy(model, **how)) - before)


def train_on(model, steps, lr=3e-3, l1=0.0):
    """The docstring's loop; returns the neurons firing in the last five steps."""
    data, order = standard_library().tokens[:300_000], torch.Generator().manual_seed(1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.1)
    fired = []
    for step in range(1, steps + 1):
        tokens = random_windows(data, 8, 31, order)
        if relus(model):
            with layer_terms(model) as terms:
                loss = model(tokens, labels=tokens).loss
            fired.append(sum(term.nnz.item() for term in terms) / len(terms))
            loss = loss + l1 * min(1.0, step / 20) * sum(term.l1 for term in terms) / len(terms)
        else:
            loss = model(tokens, labels=tokens).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    return sum(fired[-5:]) / 5  # none while it has no ReLU


def loss_of(model):
    tokens = random_windows(standard_library().tokens[:300_000], 64, 31, torch.Generator().manual_seed(2))
    with torch.no_grad():
        return model(tokens, labels=tokens).loss.item()


def test_a_trained_silu_model_is_changed_trained_on_and_swapped():
    model = llama()
    train_on(model, 100)
    smooth = loss_of(model)
    assert relufy(model) is model
    assert loss_of(model) > smooth + 0.005  # a model this small leans little on its feed-forward layers
    many = train_on(model, 40, lr=1e-3)
    assert loss_of(model) < smooth
    assert train_on(model, 50, lr=2e-3, l1=2e-2) < 0.75 * many and loss_of(model) < smooth
    tokens = torch.randint(256, (2, 20))
    expected = model(tokens).logits
    torch.testing.assert_close(sparsify(model, "twell")(tokens).logits, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("activation", ["gelu_new", "quick_gelu", "swish", "relu2"])
def test_smooth_activations_of_transformers_are_known(activation):
    model = llama(hidden_act=activation)
    assert changed(model) == 2 and model.config.hidden_act == "relu"
    assert changed(model) == 0  # done already


def test_functions_and_this_projects_modules_change_too():
    mlp = GatedFeedForward(8, 20)
    del mlp.act_fn
    mlp.act_fn = F.silu
    x = torch.randn(3, 8)
    assert relufy(mlp) is mlp and isinstance(mlp.act_fn, nn.ReLU)
    torch.testing.assert_close(mlp(x), mlp.down_proj(mlp.gate_proj(x).relu() * mlp.up_proj(x)))


def test_a_squared_model_becomes_a_relu_model_and_is_saved_as_one(tmp_path):
    model = course(activation="relu2")
    assert changed(model) == 2 and model.config.activation == "relu"
    assert len(feed_forwards(LanguageModel.load(model.save(tmp_path)))) == 2


def test_layers_with_a_relu_stay_dense_or_swapped():
    model = course()
    before = [layer.mlp.act_fn for layer in model.layers]
    assert changed(model) == 0 and [layer.mlp.act_fn for layer in model.layers] == before
    assert changed(sparsify(model, "twell")) == 0
    model = sparsify(build("OPT"), "twell")  # where a SparseFFN sits in the activation's place
    before = [layer.activation_fn for layer in model.model.decoder.layers]
    assert relufy(model) is model and [layer.activation_fn for layer in model.model.decoder.layers] == before


def test_what_cannot_be_changed_is_left_alone_and_named():
    model, quantised = course(activation="relu2"), course(activation="relu2")
    model.layers[1].mlp.act_fn = nn.Tanh()
    for layer in quantised.layers:
        layer.mlp.up_proj = torch.ao.nn.quantized.dynamic.Linear(16, 24)
    scaled = nn.ModuleList([GatedFeedForward(8, 20, "relu2"), Scaled(8, 20, "relu2")])
    for wrong, said in (
        (model, "layers.1.mlp uses Tanh.*SiLU"),
        (nn.Linear(3, 3), "no feed-forward layer in Linear"),
        (quantised, r"layers\.0\.mlp .* up_proj is a torch\.ao\..*quantised"),
        (scaled, "1 .Scaled. does not compute.*200% off"),
        ("model", "torch.nn.Module"),
    ):
        with pytest.raises(InputError, match=said):
            relufy(wrong)
    assert isinstance(model.layers[0].mlp.act_fn, SquaredReLU) and model.config.activation == "relu2"
    assert not relus(scaled) and relus(relufy(scaled, only=lambda name, module: name == "0")) == {"0.act_fn"}


def answer(model):
    with torch.no_grad():
        return model(torch.randint(2, 60, (2, 9), generator=torch.Generator().manual_seed(3))).logits


def reloaded(model, folder):
    model.save_pretrained(folder)
    return type(model).from_pretrained(folder).eval()


def activations(model):
    return {
        name: type(module).__name__
        for name, module in model.named_modules()
        if name.endswith(("act_fn", "activation_fn"))
    }


def test_of_several_parts_the_text_model_alone_is_changed_and_loaded_again(tmp_path):
    model = gemma3()
    before = answer(model)
    names = list(relus(relufy(model)))
    assert len(names) == 2 and not any("vision" in name for name in names)
    after = answer(model)
    assert not torch.equal(after, before)
    again = reloaded(model, tmp_path)
    assert torch.equal(answer(again), after) and activations(again) == activations(model)


@pytest.mark.parametrize("family", ["Qwen2-MoE", "DeepSeek-V3"])
def test_experts_that_share_the_field_and_are_left_out_are_not_made_relu_behind_ones_back(family, tmp_path):
    model = build(family, act="silu")
    kinds = activations(model)
    without = lambda name, module: not name.endswith(".experts")  # noqa: E731
    with pytest.warns(UserWarning, match="experts"):
        relufy(model, only=without)
    assert relus(model) and model.config.hidden_act == "silu"
    again = reloaded(model, tmp_path)
    assert activations(again) == kinds  # as the documentation says: to be changed once more
    with pytest.warns(UserWarning, match="experts"):
        relufy(again, only=without)
    assert torch.equal(answer(again), answer(model))


def test_a_filter_reaches_the_vision_tower_and_its_own_configuration(tmp_path):
    model = gemma3()
    with pytest.warns(UserWarning, match="vision_tower.head.*configuration stays"):
        names = relus(relufy(model, only=lambda name, module: "vision_tower.encoder" in name))
    assert len(names) == 2 and all("vision_tower" in name for name in names)
    config = model.config
    # The pooling head of the tower keeps its activation, and shares the field.
    assert config.text_config.hidden_activation == config.vision_config.hidden_act == "gelu_pytorch_tanh"
    assert changed(model, only=lambda name, module: "vision_tower" in name) == 1
    assert config.vision_config.hidden_act == "relu"  # now it is true of the whole tower
    assert config.text_config.hidden_activation == "gelu_pytorch_tanh"
    assert type(model.model.language_model.layers[0].mlp.act_fn) is not nn.ReLU
    assert activations(reloaded(model, tmp_path)) == activations(model)
