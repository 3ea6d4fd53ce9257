"""A model that accelerate spread over devices, as a device_map does, is swapped like another one."""

import copy

import pytest
import torch

from tests.models.swapping.spread import MODELS, spread
from twell_lab.core import InputError
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import densify, sparsify

accelerate = pytest.importorskip("accelerate")
hooks = accelerate.hooks


@pytest.fixture(params=MODELS)
def model(request):
    """A model whose every module with weights has a hook of accelerate's."""
    torch.manual_seed(0)
    return spread(MODELS[request.param](), "cpu", "cpu")


@pytest.fixture
def tokens():
    return torch.randint(64, (2, 9), generator=torch.Generator().manual_seed(1))


@torch.no_grad()
def logits(model, tokens):
    return model(tokens).logits


def sparse_layers(model):
    return [each for each in model.modules() if isinstance(each, SparseFFN)]


def feed_forward(model):
    """Its first feed-forward layer; inside OPT the block that holds it."""
    layers = getattr(model.model, "decoder", model.model).layers
    return getattr(layers[0], "mlp", layers[0])


def test_it_computes_and_saves_what_it_did_and_can_be_undone(model, tokens):
    expected, names = logits(model, tokens), list(model.state_dict())
    sparsify(model, "twell")
    assert len(sparse_layers(model)) == 2
    torch.testing.assert_close(logits(model, tokens), expected)
    torch.testing.assert_close(logits(copy.deepcopy(model), tokens), expected)
    torch.testing.assert_close(logits(torch.compile(model, backend="eager"), tokens), expected)
    assert list(model.state_dict()) == names
    model(tokens).logits.sum().backward()
    assert all(p.grad is not None for layer in sparse_layers(model) for p in layer.up.parameters())
    densify(model)
    assert torch.equal(logits(model, tokens), expected) and not sparse_layers(model)
    assert all(hasattr(each, "_hf_hook") for each in model.modules() if each._parameters)


def test_each_layer_that_plans_itself_has_its_input_moved(model, tokens, monkeypatch):
    expected, moved = logits(model, tokens), []
    sparsify(model)
    layers = sparse_layers(model)
    send = hooks.send_to_device

    def seen(tensors, device, **how):
        moved.append(device)
        return send(tensors, device, **how)

    for layer in layers:
        monkeypatch.setattr(hooks, "send_to_device", seen)
        moved.clear()
        layer(torch.zeros(1, 3, layer.up.in_features))
        assert moved == [layer._hf_hook.execution_device] * 2 == ["cpu"] * 2  # its input, and what else it is given
    torch.testing.assert_close(logits(model, tokens), expected)


def test_hooks_may_be_taken_off_and_put_on_while_it_is_swapped(model, tokens):
    expected = logits(model, tokens)
    sparsify(model, "twell")
    hooks.remove_hook_from_submodules(model)
    torch.testing.assert_close(logits(model, tokens), expected)
    densify(model)
    assert torch.equal(logits(model, tokens), expected)
    assert not any(hasattr(each, "_hf_hook") for each in feed_forward(model).modules())
    spread(sparsify(model, "twell"), "cpu", "cpu")
    torch.testing.assert_close(logits(model, tokens), expected)
    assert torch.equal(logits(densify(model), tokens), expected)
    assert hasattr(feed_forward(model), "_hf_hook")


def test_experts_are_swapped_beneath_the_hook(tokens):
    transformers = pytest.importorskip("transformers")
    sizes = dict(vocab_size=64, hidden_size=16, intermediate_size=40, num_hidden_layers=2, num_attention_heads=2)
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=3, hidden_act="relu")
    torch.manual_seed(0)
    model = spread(transformers.MixtralForCausalLM(config).eval(), "cpu", "cpu")
    expected = logits(model, tokens)
    sparsify(model, "twell")
    assert len(sparse_layers(model)) == 6
    torch.testing.assert_close(logits(model, tokens), expected)
    assert sum(layer.status()["classes"][0]["rows"] is not None for layer in sparse_layers(model)) > 0
    assert torch.equal(logits(densify(model), tokens), expected)


def test_offloaded_weights_are_refused_with_what_to_do(tmp_path):
    model = spread(MODELS["llama"](), "cpu", "disk", main_device="cpu", offload_dir=tmp_path)
    with pytest.raises(InputError, match=r"layers\.1\.mlp .*gate_proj has its weights offloaded.*without 'disk'"):
        sparsify(model)
    assert not sparse_layers(model)
    sparsify(model, only=lambda name, module: "layers.0" in name)
    assert len(sparse_layers(model)) == 1


def test_weights_that_are_offloaded_later_are_noticed(tokens, tmp_path):
    model = sparsify(MODELS["llama"](), "twell")
    spread(model, "cpu", "disk", main_device="cpu", offload_dir=tmp_path)
    with pytest.raises(InputError, match="of a SparseFFN has its weights offloaded"):
        logits(model, tokens)


@pytest.mark.parametrize(
    "hook, said",
    [
        (lambda: hooks.CpuOffload(), "CpuOffload.*may do more"),
        (lambda: hooks.SequentialHook(hooks.ModelHook()), "SequentialHook.*may do more"),
        (lambda: hooks.AlignDevicesHook("cpu", io_same_device=True), "up_proj hands its result back"),
    ],
)
def test_other_hooks_are_refused(hook, said):
    model = MODELS["llama"]()
    hooks.add_hook_to_module(feed_forward(model).up_proj, hook())
    with pytest.raises(InputError, match=f"{said}.*remove_hook_from_submodules"):
        sparsify(model)


def test_a_forward_over_the_hook_is_refused(model):
    part = feed_forward(model).get_submodule("fc1" if "OPT" in type(model).__name__ else "up_proj")
    hooked = part.forward
    part.forward = lambda x: 2 * hooked(x)
    with pytest.raises(InputError, match="has a forward over a hook of accelerate's"):
        sparsify(model)


def test_projections_on_several_devices_are_refused():
    model = MODELS["llama"]()
    feed_forward(model).down_proj.to("meta")
    with pytest.raises(InputError, match=r"mlp .*has its projections on several devices \(cpu, meta\)"):
        sparsify(model)
