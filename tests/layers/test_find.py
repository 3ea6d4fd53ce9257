"""Which layers are found, why others stay dense, and that a layer whose parts were hooked, wrapped, replaced or moved
since it was swapped computes what the dense one does."""

import copy
import re
from fnmatch import fnmatch
from types import MethodType

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, weight_norm

import twell_lab as tl
from tests.layers.models_of import build, given, logits, sparse_layers
from tests.models.swapping.spread import MODELS, spread
from twell_lab.core import InputError
from twell_lab.layers.find import examine, feed_forwards, is_plain, survey
from twell_lab.layers.parts import part_at
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import densify, sparsify
from twell_lab.ops.reference import GatedFeedForward, SquaredReLU

pytest.importorskip("transformers")


def source_of(model):
    """The first feed-forward layer as the dense module, swapped or not."""
    module = feed_forwards(model)[0].module
    return module.source if isinstance(module, SparseFFN) else module


def obstacle(module):
    return examine(module)[0]


def near(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


class Doubling(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


def set_part(place, part):
    return lambda layer: setattr(layer, place, part)


def double_forward(layer):
    layer.up_proj.forward = lambda x: 2 * nn.Linear.forward(layer.up_proj, x)


def quantised(layer):
    layer.up_proj.weight = nn.Parameter(layer.up_proj.weight.detach().as_subclass(type("Other", (torch.Tensor,), {})))


REASONS = {
    "another activation": (set_part("act_fn", nn.GELU()), "uses GELU; a ReLU is accepted"),
    "a squared ReLU in a gated layer": (set_part("act_fn", SquaredReLU()), "uses SquaredReLU; a ReLU is accepted"),
    "a ReLU of one's own": (set_part("act_fn", type("OtherReLU", (nn.ReLU,), {"forward": torch.tanh})()), "OtherReLU"),
    "another class": (set_part("up_proj", Doubling(16, 40)), r"up_proj is a .*Doubling; accepted: a plain torch.nn"),
    "other widths": (set_part("down_proj", nn.Linear(40, 32)), r"of shapes .*\(32, 40\)"),
    "another dtype": (lambda layer: layer.double(), "has weights of torch.float64"),
    "several devices": (lambda layer: layer.down_proj.to("meta"), "on cpu .* on meta"),
    "a hook": (lambda layer: layer.gate_proj.register_forward_hook(print), "gate_proj has hooks"),
    "a pre-hook": (lambda layer: layer.up_proj.register_forward_pre_hook(print), "up_proj has hooks"),
    "a backward hook": (lambda layer: layer.up_proj.register_full_backward_hook(print), "up_proj has hooks"),
    "a forward": (double_forward, "up_proj has had its forward replaced"),
    "parametrized": (lambda layer: parametrizations.weight_norm(layer.up_proj), "ParametrizedLinear; accepted"),
    "weight_norm": (lambda layer: weight_norm(layer.up_proj), "nor parametrized"),
    "other weights": (quantised, r"\(Other\)"),
    "extra state": (
        lambda layer: setattr(layer, "__class__", type("Extra", (GatedFeedForward,), {"get_extra_state": print})),
        "keeps extra state",
    ),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm")
@pytest.mark.parametrize("name", REASONS)
def test_what_stays_dense_says_why(name):
    change, said = REASONS[name]
    model = nn.ModuleDict({"plain": GatedFeedForward(16, 40), "odd": GatedFeedForward(16, 40)})
    change(model["odd"])
    assert re.search(said, obstacle(model["odd"]))
    layers, reasons = survey(model)
    assert [layer.name for layer in layers] == ["plain"] and [*reasons] == ["odd"]
    before = model["odd"]
    sparsify(model, "twell")
    assert model["odd"] is before and isinstance(model["plain"], SparseFFN)
    with pytest.raises(InputError, match=said):
        SparseFFN.from_module(before)


def test_a_layer_that_is_compiled_by_itself():
    model = nn.Sequential(torch.compile(GatedFeedForward(16, 40)))
    assert "swap first" in survey(model)[1]["0._orig_mod"]
    assert [layer.name for layer in survey(torch.compile(nn.Sequential(GatedFeedForward(16, 40))))[0]] == ["0"]


@pytest.mark.parametrize("name", ["GPT-2", "BERT", "T5", "Phi-3", "GPT-NeoX"])
def test_another_activation_is_named_with_what_to_do(name):
    model = build(name, act="gelu")
    with pytest.raises(
        InputError, match="uses .*GELU.*; .*twell_lab.relufy .*thresholds.*Llama.*GPT-2.*BERT.*register_family"
    ):
        feed_forwards(model)
    assert all("uses" in reason for reason in survey(model)[1].values())


@pytest.mark.parametrize(
    "model, only, said",
    [
        ("gpt2", None, r"got str; accepted: .*tl.load\('gpt2'"),
        (None, None, "got NoneType"),
        (GatedFeedForward(16, 40), "layers.0", "only is 'layers.0'; a function"),
        (GatedFeedForward(16, 40), lambda name, module: False, "`only` leaves none of the 1"),
    ],
)
def test_wrong_arguments(model, only, said):
    with pytest.raises(InputError, match=said):
        feed_forwards(model, only=only)


def test_inside_a_block():
    model = build("BERT")
    layers = model.bert.encoder.layer
    layers[0].chunk_size_feed_forward = 1
    layers[1].intermediate.register_forward_hook(lambda *_: None)
    reasons = survey(model)[1]
    assert [*reasons] == ["bert.encoder.layer.1"] and "has hooks" in reasons["bert.encoder.layer.1"]
    expected = logits(model)  # of which the first layer computes one token after the other
    near(logits(sparsify(model, "twell")), expected)
    assert len(sparse_layers(model)) == 1
    wide = build("OPT")
    block = wide.model.decoder.layers[0]
    block.fc1, block.fc2 = nn.Linear(16, 16), nn.Linear(16, 16)
    assert "as wide inside as outside" in obstacle(block)
    fused = build("Phi-3").model.layers[0].mlp
    fused.gate_up_proj = nn.Linear(16, 81)
    assert "raised" in obstacle(fused)


@pytest.mark.parametrize("name, place", [("OPT", "fc1"), ("GPT-2", "c_fc")])
@torch.no_grad()
def test_a_block_whose_inputs_have_thresholds_stays_dense(name, place):
    """What its projections hand on would be cut instead: the layer's output by the threshold of its hidden values."""
    model = build(name)
    tl.thresholds(model, [given(model)["input_ids"]], 0.5, method="teal").apply(model)
    expected, reasons = logits(model), survey(model)[1]
    assert len(reasons) == 2 and all(f"{place} has hooks" in reason for reason in reasons.values())
    assert torch.equal(logits(sparsify(model, "twell")), expected)


CHANGED = {"OPT": ["fc1", "fc2"], "BERT": ["intermediate.dense"], "GPT-2": ["c_proj"], "Phi-3": ["gate_up_proj"]}
PLACES = [(name, place) for name, places in CHANGED.items() for place in places]


def hooked(block, place):
    part_at(block, place).register_forward_hook(lambda _, args, y: 1.5 * y)


def adapted(block, place):
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(target_modules=[place], init_lora_weights=False, r=2)
    peft.inject_adapter_in_model(config, block)


def own_forward(block, place):
    part = part_at(block, place)
    part.forward = MethodType(lambda self, x: 2 * type(self).forward(self, x), part)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("change", [hooked, adapted, own_forward])
@pytest.mark.parametrize("name, place", PLACES)
def test_what_was_put_on_a_projection_is_computed(name, place, change):
    dense = build(name)
    sparse = sparsify(copy.deepcopy(dense), "twell")
    plain = logits(dense)
    near(logits(sparse), plain)
    for model in (dense, sparse):
        change(source_of(model), place)
    assert [is_plain(layer) for layer in sparse_layers(sparse)] == [False, True]
    expected = logits(dense)
    assert (expected - plain).abs().max() > 1e-3
    near(logits(sparse), expected)
    near(logits(copy.deepcopy(sparse)), expected)
    for model in (dense, sparse):
        logits(model).sum().backward()
    for (key, p), q in zip(dense.named_parameters(), sparse.parameters(), strict=True):
        assert (p.grad is None) == (q.grad is None), key
        if p.grad is not None:
            torch.testing.assert_close(p.grad, q.grad, rtol=1e-3, atol=1e-5 * p.grad.abs().max().item(), msg=key)
    near(logits(densify(sparse)), expected)


def test_a_hook_that_comes_and_goes():
    model, place = sparsify(build("OPT"), "twell"), "fc2"
    expected = logits(model)
    gradients = []
    handle = part_at(source_of(model), place).register_full_backward_hook(lambda *args: gradients.append(args[2][0]))
    logits(model).sum().backward()
    assert len(gradients) == 1 and not is_plain(sparse_layers(model)[0])
    handle.remove()
    assert all(map(is_plain, sparse_layers(model)))
    near(logits(model), expected)


def test_another_activation_in_the_place_of_the_sparse_layer():
    dense = build("OPT")
    sparse = sparsify(copy.deepcopy(dense), "twell")
    for model in (dense, sparse):
        model.model.decoder.layers[1].activation_fn = nn.GELU()
    near(logits(sparse), logits(dense))
    assert isinstance(densify(sparse).model.decoder.layers[1].activation_fn, nn.GELU)
    near(logits(sparse), logits(dense))


@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_device_map(name):
    accelerate = pytest.importorskip("accelerate")
    torch.manual_seed(0)
    model, tokens = spread(MODELS[name](), "cpu", "cpu"), torch.arange(18).view(2, 9)
    expected, names = model(tokens).logits, list(model.state_dict())
    sparsify(model, "twell")
    assert len(sparse_layers(model)) == 2 and all(map(is_plain, sparse_layers(model)))
    for net in (model, copy.deepcopy(model), torch.compile(model, backend="eager")):
        near(net(tokens).logits, expected)
    assert list(model.state_dict()) == names
    accelerate.hooks.remove_hook_from_submodules(model)
    near(model(tokens).logits, expected)
    assert torch.equal(densify(model)(tokens).logits, expected)
    spread(sparsify(model, "twell"), "cpu", "cpu")
    near(model(tokens).logits, expected)
    assert torch.equal(densify(model)(tokens).logits, expected) and not sparse_layers(model)


@torch.no_grad()
def test_what_accelerate_does_more_than_move_inputs(tmp_path):
    hooks = pytest.importorskip("accelerate").hooks
    tokens = torch.arange(18).view(2, 9)
    model = spread(MODELS["llama"](), "cpu", "disk", main_device="cpu", offload_dir=tmp_path)
    expected = model(tokens).logits
    layers, reasons = survey(model)
    assert len(layers) == 1 and "as offloading does" in reasons["model.layers.1.mlp"]
    near(sparsify(model, "twell")(tokens).logits, expected)
    for hook in (hooks.CpuOffload(), hooks.SequentialHook(hooks.ModelHook())):
        layer = GatedFeedForward(16, 40)
        hooks.add_hook_to_module(layer.up_proj, hook)
        assert f"{type(hook).__name__}) that does more" in obstacle(layer)
    later = sparsify(MODELS["llama"](), "twell")
    expected = later(tokens).logits
    spread(later, "cpu", "disk", main_device="cpu", offload_dir=tmp_path / "later")
    near(later(tokens).logits, expected)


@torch.no_grad()
def test_a_model_that_transformers_split_over_processes_goes_on_as_it_is():
    """By tp_plan; here over one process, which holds all."""
    from torch.distributed.device_mesh import init_device_mesh

    parallel = pytest.importorskip("transformers.distributed.tensor_parallel")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh, model, tokens = init_device_mesh("cpu", (1,)), MODELS["llama"](), torch.arange(18).view(2, 9)
        expected = model(tokens).logits
        for pattern, kind in model.tp_plan.items():
            style = parallel.ALL_PARALLEL_STYLES[kind]
            for name, module in model.named_modules():
                if ".mlp." in pattern and fnmatch(name, f"*{pattern}"):
                    style.shard_param(module, "weight", mesh)
                    style.install_forward(module, mesh)
        layers, reasons = survey(model)
        assert not layers and all(
            "gate_proj has had its forward replaced" in reason or "(DTensor)" in reason for reason in reasons.values()
        )
        near(sparsify(model, "twell")(tokens).logits, expected)
        assert len(reasons) == 2 and not sparse_layers(model)
    finally:
        dist.destroy_process_group()
