"""What users and other libraries put on a layer: refused before it is swapped, noticed afterwards; what is put on the
sparse layer acts, and stays."""

import copy
import functools

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, prune

from twell_lab.analysis.profile import profile
from twell_lab.core import InputError
from twell_lab.layers.anatomy import feed_forwards
from twell_lab.layers.choice import Choice
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.layers.terms import layer_terms
from twell_lab.models.swap import densify, sparsify
from twell_lab.models.tiny import LanguageModel, ModelConfig
from twell_lab.ops.reference import GatedFeedForward

SIZES = ModelConfig(vocabulary=50, d_model=16, layers=2, heads=2, d_ff=40, context=12)
PARTS = ("gate_proj", "up_proj", "down_proj", "act_fn")


@pytest.fixture
def model():
    torch.manual_seed(0)
    return LanguageModel(SIZES)


@pytest.fixture
def block():
    """OPT's decoder layer, in which the parts sit beside the attention."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    config = transformers.OPTConfig(
        vocab_size=64,
        hidden_size=16,
        word_embed_proj_dim=16,
        ffn_dim=40,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=32,
        activation_function="relu",
        dropout=0.0,
    )
    return transformers.OPTForCausalLM(config).model.decoder.layers[0]


def double(module, args, output):
    return 2 * output


REGISTERED = {
    "forward hook": lambda module: module.register_forward_hook(double),
    "forward hook with kwargs": lambda module: module.register_forward_hook(lambda m, a, k, y: 2 * y, with_kwargs=True),
    "forward hook always called": lambda module: module.register_forward_hook(double, always_call=True),
    "forward pre hook": lambda module: module.register_forward_pre_hook(lambda m, args: (2 * args[0],)),
    "backward hook": lambda module: module.register_full_backward_hook(lambda m, into, out: (2 * into[0],)),
    "backward pre hook": lambda module: module.register_full_backward_pre_hook(lambda m, out: (2 * out[0],)),
}


# ---- before the swap ----


@pytest.mark.parametrize("kind", REGISTERED)
@pytest.mark.parametrize("seat", ["", *PARTS])
def test_a_hook_is_refused_by_name_and_nothing_is_changed(kind, seat, model):
    mlp = model.layers[1].mlp
    handle = REGISTERED[kind](mlp.get_submodule(seat))
    named = rf"{kind.split(' with')[0].split(' always')[0]} \("
    with pytest.raises(
        InputError, match=rf"layers\.1\.mlp \(GatedFeedForward\): {seat} ?has a {named}.*put it on the SparseFFN"
    ):
        sparsify(model, "twell")
    assert not any(isinstance(each, SparseFFN) for each in model.modules())
    with pytest.raises(InputError, match=named):
        SparseFFN.from_module(mlp)
    sparsify(model, "twell", only=lambda name, module: name == "layers.0.mlp")
    handle.remove()
    assert len(feed_forwards(sparsify(model, "twell"))) == 2 and isinstance(model.layers[1].mlp, SparseFFN)


@pytest.mark.parametrize("seat", ["fc1", "fc2", "activation_fn"])
@pytest.mark.parametrize("kind", REGISTERED)
def test_a_hook_on_a_part_of_a_decoder_layer_is_refused_and_one_on_the_layer_stays(kind, seat, block):
    handle = REGISTERED[kind](getattr(block, seat))
    with pytest.raises(InputError, match=f"OPTDecoderLayer: {seat} has a"):
        sparsify(block, "twell")
    handle.remove()
    seen = []
    block.register_forward_hook(lambda *_: seen.append(1))
    sparsify(block, "twell")(torch.randn(1, 3, 16))
    assert seen == [1]  # and not while it was asked what it computes


@pytest.mark.parametrize("seat", PARTS[:3])
def test_hooks_that_recompute_a_weight_are_named_with_what_to_do(seat, model):
    part = getattr(model.layers[0].mlp, seat)
    for put, named, undo in [
        (nn.utils.weight_norm, "parametrizations.weight_norm", nn.utils.remove_weight_norm),
        (nn.utils.spectral_norm, "parametrizations.spectral_norm", nn.utils.remove_spectral_norm),
        (
            lambda part: prune.l1_unstructured(part, "weight", amount=0.3),
            "prune.remove",
            lambda part: prune.remove(part, "weight"),
        ),
    ]:
        put(part)
        with pytest.raises(InputError, match=rf"layers\.0\.mlp .*{seat} recomputes its weight.*{named}"):
            sparsify(model, "twell")
        undo(part)
    parametrizations.weight_norm(part)  # whose weight is read anew by every forward
    tokens = torch.randint(50, (2, 9))
    expected = model(tokens)
    torch.testing.assert_close(sparsify(model, "twell")(tokens), expected)


def test_hooks_and_state_of_its_own_are_refused(model):
    mlp = model.layers[0].mlp
    handle = mlp.register_state_dict_post_hook(lambda *_: None)
    with pytest.raises(InputError, match="state dict hook"):
        sparsify(model, "twell")
    handle.remove()
    extra = type(
        "Extra", (GatedFeedForward,), {"get_extra_state": lambda self: 1, "set_extra_state": lambda self, state: None}
    )(16, 40)
    model.layers[0].mlp = extra
    with pytest.raises(InputError, match="extra state"):
        sparsify(model, "twell")


def accelerated(module):
    """What accelerate.hooks.add_hook_to_module leaves on a module."""

    class AlignDevicesHook:
        def pre_forward(self, module, x):
            return (x,), {}

    module._hf_hook, module._old_forward = AlignDevicesHook(), module.forward

    def new_forward(module, x):
        (x,), _ = module._hf_hook.pre_forward(module, x)
        return module._old_forward(x)

    module.forward = functools.update_wrapper(functools.partial(new_forward, module), module._old_forward)
    return module


def split_over_processes(module):
    """What transformers.distributed.tensor_parallel leaves on a module."""
    forward = module.forward
    module.forward, module._is_hooked = lambda x: forward(x), True
    return module


def lora(base):
    """A layer as peft.tuners.lora makes them."""
    home = "peft.tuners.lora.layer"
    LoraLayer = type("LoraLayer", (), {"__module__": home})

    def __init__(self, base_layer):
        nn.Module.__init__(self)
        self.base_layer = base_layer
        self.lora_A, self.lora_B = (
            nn.Linear(base_layer.in_features, 2, bias=False),
            nn.Linear(2, base_layer.out_features, bias=False),
        )

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))

    return type("Linear", (nn.Module, LoraLayer), {"__module__": home, "__init__": __init__, "forward": forward})(base)


@pytest.mark.parametrize("seat", PARTS[:3])
def test_other_libraries_are_named_with_what_to_do(seat, model):
    for put, named in [
        (accelerated, "accelerate.*AlignDevicesHook.*device_map"),
        (split_over_processes, "tensor parallelism.*tp_plan"),
        (lora, "PEFT.*merge_and_unload"),
    ]:
        changed = copy.deepcopy(model)
        setattr(changed.layers[1].mlp, seat, put(getattr(changed.layers[1].mlp, seat)))
        with pytest.raises(InputError, match=rf"layers\.1\.mlp .*{seat} .*{named}"):
            sparsify(changed, "twell")
        assert not any(isinstance(each, SparseFFN) for each in changed.modules())
        with pytest.raises(InputError, match=named):
            SparseFFN.from_module(changed.layers[1].mlp)
    accelerated(model.layers[0].mlp)  # the module itself, as a device_map of layers has it
    with pytest.raises(InputError, match="accelerate"):
        sparsify(model, "twell")


def test_a_layer_compiled_by_itself_is_refused(model):
    model.layers[0].mlp = torch.compile(model.layers[0].mlp, backend="eager")
    with pytest.raises(InputError, match="compiled by itself"):
        sparsify(model, "twell")
    model.layers[0].mlp = model.layers[0].mlp._orig_mod
    assert len(feed_forwards(sparsify(torch.compile(model, backend="eager"), "twell"))) == 2
    assert isinstance(model.layers[0].mlp, SparseFFN)


# ---- after it ----


@pytest.mark.parametrize("kind", REGISTERED)
@pytest.mark.parametrize("seat", PARTS[:3])
def test_a_hook_put_on_a_projection_later_is_noticed(kind, seat, model):
    tokens = torch.randint(50, (2, 9))
    expected = sparsify(model, "twell")(tokens)
    handle = REGISTERED[kind](getattr(model.layers[0].mlp, seat))
    for mode in (torch.no_grad(), torch.enable_grad()):
        with mode, pytest.raises(InputError, match=f"{seat} of a SparseFFN has a .*hook.*densify"):
            model(tokens)
    handle.remove()
    assert torch.equal(model(tokens), expected)


@pytest.mark.parametrize(
    "put", [lora, accelerated, split_over_processes, nn.utils.weight_norm, nn.Sequential], ids=lambda f: f.__name__
)
@pytest.mark.parametrize("seat", PARTS[:3])
def test_an_adapter_put_on_a_projection_later_is_noticed(put, seat, model):
    tokens = torch.randint(50, (2, 9))
    mlp = sparsify(model, "twell").layers[0].mlp
    setattr(mlp, seat, put(getattr(mlp, seat)))
    with pytest.raises(InputError, match=f"{seat} of a SparseFFN"):
        model(tokens)


def test_another_activation_is_noticed(model):
    tokens = torch.randint(50, (2, 9))
    for activation in (nn.GELU(), nn.functional.gelu):
        changed = sparsify(copy.deepcopy(model), "twell")
        changed.layers[0].mlp.act_fn = activation
        with pytest.raises(InputError, match="act_fn was set on a SparseFFN"):
            changed(tokens)


def test_a_decoder_layer_notices_too(block):
    x = torch.randn(1, 3, 16)
    expected = sparsify(block, "twell")(x)
    for seat in ("fc1", "fc2"):
        for put in REGISTERED.values():
            handle = put(getattr(block, seat))
            with pytest.raises(InputError, match=f"{seat} of a SparseFFN has a"):
                block(x)
            handle.remove()
        own = getattr(block, seat)
        setattr(block, seat, lora(own))
        with pytest.raises(InputError, match=f"{seat} of a swapped OPTDecoderLayer was replaced"):
            block(x)
        setattr(block, seat, nn.Linear(own.in_features, own.out_features))
        with pytest.raises(InputError, match="replaced"):
            block(x)
        setattr(block, seat, own)
    sparse = block.activation_fn
    block.activation_fn = nn.GELU()
    with pytest.raises(InputError, match="activation_fn of a swapped OPTDecoderLayer was replaced"):
        block(x)
    block.activation_fn = sparse
    assert torch.equal(block(x)[0], expected[0])


def test_densify_leaves_what_was_put_there_where_it_is(model, block):
    tokens, x = torch.randint(50, (2, 9)), torch.randn(1, 3, 16)
    dense = copy.deepcopy(model)
    for net in (dense, sparsify(model, "twell")):
        torch.manual_seed(1)
        net.layers[0].mlp.down_proj = lora(net.layers[0].mlp.down_proj)
        net.layers[1].mlp.act_fn = nn.GELU()
    assert torch.equal(densify(model)(tokens), dense(tokens))
    dense = copy.deepcopy(block)
    for net in (dense, sparsify(block, "twell")):
        torch.manual_seed(1)
        net.fc2, net.activation_fn = lora(net.fc2), nn.GELU()
    assert torch.equal(densify(block)(x)[0], dense(x)[0])


def test_a_filter_that_is_none_is_named(model):
    for function in (sparsify, feed_forwards):
        with pytest.raises(InputError, match="only is 'layers.0'"):
            function(model, only="layers.0")


# ---- what belongs on the sparse layer ----


@pytest.mark.parametrize("kind", REGISTERED)
def test_hooks_on_the_sparse_layer_act_and_outlive_densify(kind, model):
    tokens = torch.randint(50, (2, 9))
    dense = copy.deepcopy(model)

    def gradient(net):
        net.zero_grad()
        y = net(tokens)
        y.square().mean().backward()
        return y.detach(), net.embedding.weight.grad.clone()

    bare = gradient(dense)
    REGISTERED[kind](dense.layers[0].mlp)
    expected = gradient(dense)
    assert not all(map(torch.equal, bare, expected))
    sparsify(model, "twell")
    handle = REGISTERED[kind](model.layers[0].mlp)
    for net in (model, densify(model)):
        for found, wanted in zip(gradient(net), expected, strict=True):
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)
    assert not any(isinstance(each, SparseFFN) for each in model.modules())
    handle.remove()  # a handle from before still takes it off
    for found, wanted in zip(gradient(model), bare, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


def test_what_is_set_on_the_sparse_layer_is_on_the_dense_one_afterwards(model):
    mlp = sparsify(model, "twell").layers[0].mlp
    mlp.tag, mlp.counter = "kept", nn.Parameter(torch.ones(2))
    mlp.register_buffer("seen", torch.zeros(3))
    mlp.register_buffer("passing", torch.zeros(3), persistent=False)
    mlp.side = nn.Linear(2, 2)
    state = list(model.state_dict())
    assert "layers.0.mlp.seen" in state
    model(torch.randint(50, (2, 9)))
    dense = densify(model).layers[0].mlp
    assert (
        isinstance(dense, GatedFeedForward)
        and dense.tag == "kept"
        and dense.counter is mlp.counter
        and dense.side is mlp.side
    )
    assert sorted(model.state_dict()) == sorted(state)
    plain = LanguageModel(SIZES).layers[0].mlp
    assert vars(dense).keys() - vars(plain).keys() == {"tag"}


def test_hooks_in_a_decoder_layers_seat_outlive_densify(block):
    x, seen = torch.randn(1, 3, 16), []
    sparsify(block, "twell").activation_fn.register_forward_hook(lambda *_: seen.append(1))
    block(x)
    densify(block)(x)
    assert seen == [1, 1] and isinstance(block.activation_fn, nn.ReLU)


def test_global_hooks_see_the_sparse_layer(model):
    mlp, seen = sparsify(model, "twell").layers[0].mlp, []
    handle = nn.modules.module.register_module_forward_hook(lambda module, args, output: seen.append(module))
    try:
        mlp(torch.randn(3, 16))
    finally:
        handle.remove()
    assert seen == [mlp]


def test_what_is_set_on_the_layer_that_was_set_aside_waits_for_densify(model):
    tokens, dense = torch.randint(50, (2, 9)), model.layers[0].mlp
    expected = sparsify(model, "twell")(tokens)
    dense.act_fn = nn.GELU()
    assert torch.equal(model(tokens), expected)
    assert not torch.equal(densify(model)(tokens), expected) and isinstance(model.layers[0].mlp.act_fn, nn.GELU)


def test_the_librarys_own_hooks_are_no_strangers(model):
    tokens = torch.randint(50, (2, 9))
    for net in (model, sparsify(copy.deepcopy(model), "twell"), sparsify(copy.deepcopy(model), "auto")):
        assert profile(net, tokens).tokens == 18
        with layer_terms(net) as terms:
            net(tokens)
        assert len(terms) == 2
    with layer_terms(model), pytest.raises(InputError, match="down_proj has a forward pre hook"):
        sparsify(model, "twell")  # whose terms nobody would tell any more


def test_a_copy_and_a_compiled_layer_notice_as_well(model):
    mlp = copy.deepcopy(sparsify(model, "twell")).layers[0].mlp
    mlp.up_proj.register_forward_hook(double)
    with pytest.raises(InputError, match="up_proj of a SparseFFN"):
        mlp(torch.randn(3, 16))
    torch._dynamo.reset()
    with pytest.raises((InputError, torch._dynamo.exc.TorchDynamoException), match="SparseFFN|hook"):
        torch.compile(mlp, backend="eager", fullgraph=True)(torch.randn(3, 16))
    torch._dynamo.reset()


def test_densify_leaves_the_copies_that_a_later_plan_made():
    dense = GatedFeedForward(16, 300)
    (sparse,) = model = sparsify(nn.ModuleList([dense]), "twell")
    for plan in (Choice("hot_cold", 256), Choice("twell"), Choice("hot_cold", 256)):
        sparse.follow(plan)
    densify(model)
    assert model[0] is dense and not list(dense.buffers()) and not dense._non_persistent_buffers_set
