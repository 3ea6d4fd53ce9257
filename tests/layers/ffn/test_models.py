"""Whole models made sparse and dense again: what they compute, hold, save, and are left as."""

import copy
import io

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend

from twell_lab.core import InputError
from twell_lab.layers.anatomy import feed_forwards
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import densify, sparsify
from twell_lab.ops.reference import GatedFeedForward


def close(a, b):
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4 * b.abs().max().item())


def sparse_layers(model):
    return [m for m in model.modules() if isinstance(m, SparseFFN)]


def parameters(model):
    return [(name, id(p)) for name, p in model.named_parameters()]


# ---- what is found ----


def test_layers_are_found_in_order_dense_and_sparse(make):
    model = make()
    dense = feed_forwards(model)
    sparse = feed_forwards(sparsify(model, "twell"))
    assert len(dense) == len(sparse) == 2
    names = dict(model.named_modules())
    for number, (before, after) in enumerate(zip(dense, sparse)):
        assert f".{number}" in before.name and before.name in names
        assert after.name == before.name and isinstance(after.module, SparseFFN)
        assert after.gate is before.gate and after.up is before.up and after.down is before.down
        assert before.pattern is (before.up if before.gate is None else before.gate)
        assert before.down.weight.shape == (16, 40)


def test_a_bare_feed_forward_is_a_model(models):
    mlp = models["course"]().layers[0].mlp
    x = torch.randn(3, 16)
    expected = mlp(x)
    (found,) = feed_forwards(mlp)
    assert found.name == "" and found.module is mlp
    sparse = sparsify(mlp, "twell")
    assert isinstance(sparse, SparseFFN) and feed_forwards(sparse)[0].module is sparse
    close(sparse(x), expected)
    assert densify(sparse) is mlp and torch.equal(mlp(x), expected)


def test_a_decoder_layer_alone(models):
    layer = models["opt"]().eval().model.decoder.layers[0]
    (found,) = feed_forwards(layer)
    assert found.name == "" and found.up is layer.fc1
    assert sparsify(layer, "twell") is layer and feed_forwards(layer)[0].name == ""
    sparse = SparseFFN.from_module(densify(layer))
    x = torch.randn(2, 3, 16)
    close(sparse(x), layer.fc2(torch.relu(layer.fc1(x))))


# ---- what is computed ----


def test_a_sparse_model_computes_what_the_dense_one_does(make, tokens, logits):
    model = make()
    expected = logits(model, tokens)
    assert sparsify(model, "twell") is model and len(sparse_layers(model)) == 2
    close(logits(model, tokens), expected)
    assert logits(model, tokens[:1, :1]).shape == (1, 1, 64)


def test_a_sparse_model_really_runs_its_sparse_layers(make, tokens, logits):
    model = sparsify(make(), "twell")
    before = logits(model, tokens)
    for sparse in sparse_layers(model):
        sparse.down_t.mul_(2)  # what the weight does not know of: only the entries' path reads it
    assert not torch.allclose(logits(model, tokens), before, rtol=1e-2)


def test_a_sparse_model_learns_what_the_dense_one_does(make, tokens, logits):
    one, other = make().train(), sparsify(make().train(), "twell")
    for model in (one, other):
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for _ in range(3):
            optimizer.zero_grad()
            scores = logits(model, tokens)
            nn.functional.cross_entropy(scores[:, :-1].flatten(0, 1), tokens[:, 1:].flatten()).backward()
            optimizer.step()
    for (name, a), (_, b) in zip(one.named_parameters(), other.named_parameters(), strict=True):
        assert (a.grad is None) == (b.grad is None), name
        close(b.detach(), a.detach())


def test_generation(models, tokens):
    for name in ("llama", "opt"):
        torch.manual_seed(0)
        model = models[name]().eval()
        settings = dict(max_new_tokens=12, do_sample=False, attention_mask=torch.ones_like(tokens))
        expected = model.generate(tokens, **settings)
        assert expected.shape == (2, 21)
        assert torch.equal(sparsify(model, "twell").generate(tokens, **settings), expected)


def test_half_precision(make, tokens, logits):
    for dtype in (torch.bfloat16, torch.float16):
        dense = make().to(dtype)
        sparse = sparsify(make(), "twell").to(dtype)
        assert all(s.down_t.dtype == dtype for s in sparse_layers(sparse))
        exact = logits(make().double(), tokens)
        error, allowed = (logits(m, tokens).double().sub(exact).norm().item() for m in (sparse, dense))
        assert error <= 2 * allowed + 1e-2 * exact.norm().item()
    close(logits(sparsify(make(), "twell").to(torch.float64).to(torch.float32), tokens), logits(make(), tokens))


def test_float64_is_refused_by_name(make, tokens, logits):
    with pytest.raises(InputError, match="x is torch.float64"):
        logits(sparsify(make(), "twell").double(), tokens)


@pytest.mark.parametrize("path", [None, "twell", "dense", "auto"])
def test_an_input_of_another_type_is_refused_by_name_on_every_path(path):
    layer, x = sparsify(GatedFeedForward(24, 72).eval(), path), torch.randn(3, 24)
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            with pytest.raises(InputError, match="is torch.float32 but the input is torch.float16; one dtype"):
                layer(x.half())
            with torch.autocast("cpu", torch.bfloat16):  # casts both
                assert layer(x.half()).dtype == torch.bfloat16


def test_autocast(make_either, tokens, logits):
    model = make_either()
    with torch.autocast("cpu", torch.bfloat16):
        expected = logits(model, tokens)
        found = logits(sparsify(model, "twell"), tokens)
    assert found.dtype == expected.dtype
    assert (found - expected).float().norm() < 0.05 * expected.float().norm()


def test_inference_mode(make_either, tokens, logits):
    expected = logits(make_either(), tokens).detach()
    with torch.inference_mode():
        model = sparsify(make_either(), "twell")  # its weights are inference tensors
        close(logits(model, tokens), expected)
        with torch.no_grad():
            for sparse in sparse_layers(model):
                sparse.down.weight.mul_(2)
    model = sparsify(make_either(), "twell")
    with torch.inference_mode():
        close(logits(model, tokens), expected)
        model.to(torch.bfloat16)
    with torch.no_grad():  # what was made inside inference mode must serve outside of it
        assert logits(model, tokens).dtype == torch.bfloat16
        close(logits(model.float(), tokens).bfloat16().float(), logits(densify(model), tokens).bfloat16().float())


@pytest.mark.parametrize("gated", [True, False])
def test_compiled_whole(models, tokens, gated):
    def graphs_for(model):
        torch._dynamo.reset()
        counter = CompileCounterWithBackend("eager")
        run = torch.compile(model, fullgraph=True, backend=counter, dynamic=True)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for length in (9, 4, 7):
            some = tokens[:, :length].contiguous()
            found = run(some)
            close(found, model(some))
            found.square().mean().backward()
            optimizer.step()  # and the compiled model follows its weights
        torch._dynamo.reset()
        return counter.frame_count

    torch.manual_seed(0)
    model = models["course"](gated, layers=1)
    assert graphs_for(sparsify(copy.deepcopy(model), "twell")) <= graphs_for(model)


# ---- what is held ----


def test_parameters_and_state_stay_what_they_were(make):
    model = make()
    names, ids, state = (
        parameters(model),
        {k: id(v) for k, v in model.state_dict(keep_vars=True).items()},
        {k: v.clone() for k, v in model.state_dict().items()},
    )
    sparsify(model, "twell")
    assert parameters(model) == names
    assert list(model.state_dict()) == list(state)
    assert all(torch.equal(v, state[k]) for k, v in model.state_dict().items())
    assert {k: id(v) for k, v in model.state_dict(keep_vars=True).items() if k in dict(names)} == {
        k: v for k, v in ids.items() if k in dict(names)
    }
    assert all(p.is_contiguous() for p in model.parameters())
    assert parameters(densify(model)) == names


def test_a_state_is_loaded_strictly_and_followed(make, tokens, logits):
    sparse, other = sparsify(make(), "twell"), make(seed=1)
    before, expected = logits(sparse, tokens), logits(other, tokens)
    assert not torch.allclose(before, expected, rtol=0.1)
    sparse.load_state_dict(other.state_dict(), strict=True)
    close(logits(sparse, tokens), expected)
    dense = make()
    dense.load_state_dict(sparse.state_dict(), strict=True)
    assert torch.equal(logits(dense, tokens), expected)


def test_a_state_goes_through_a_file(make, tokens, logits):
    sparse, file = sparsify(make(seed=2), "twell"), io.BytesIO()
    torch.save(sparse.state_dict(), file)
    file.seek(0)
    loaded = sparsify(make(), "twell")
    loaded.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(logits(loaded, tokens), logits(sparse, tokens))


def test_a_whole_model_goes_through_a_file(make_either, tokens, logits):
    sparse, file = sparsify(make_either(seed=2), "twell"), io.BytesIO()
    expected = logits(sparse, tokens)
    torch.save(sparse, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=False)
    assert torch.equal(logits(loaded, tokens), expected)
    with torch.no_grad():
        for layer in feed_forwards(loaded):
            layer.down.weight.neg_()
    assert torch.equal(logits(densify(copy.deepcopy(loaded)), tokens), logits(densify(loaded), tokens))
    assert not sparse_layers(loaded)


def test_a_copy_goes_its_own_way(make, tokens, logits):
    sparse = sparsify(make(), "twell")
    expected = logits(sparse, tokens)
    twin = copy.deepcopy(sparse)
    assert not set(map(id, sparse.parameters())) & set(map(id, twin.parameters()))
    with torch.no_grad():
        for layer in feed_forwards(twin):
            layer.down.weight.neg_()
    changed = logits(twin, tokens)
    assert torch.equal(logits(sparse, tokens), expected) and not torch.allclose(changed, expected, rtol=0.1)
    close(logits(densify(twin), tokens), changed)
    assert len(sparse_layers(sparse)) == 2 and not sparse_layers(twin)
    assert torch.equal(logits(sparse, tokens), expected)


def test_extra_bytes(make):
    for sparse in sparse_layers(sparsify(make(), "twell")):
        assert sparse.extra_bytes == 16 * 40 * 4 + 32  # and its counters
        assert sparse.to(torch.bfloat16).extra_bytes == 16 * 40 * 2 + 32


# ---- there and back ----


def test_densify_leaves_the_model_as_it_was(make, tokens, logits):
    model = make()
    modules, shown, expected = list(model.named_modules()), repr(model), logits(model, tokens)
    assert densify(model) is model  # nothing to undo yet
    assert repr(sparsify(model, "twell")) != shown
    assert densify(model) is model and repr(model) == shown
    assert [(n, id(m), type(m)) for n, m in model.named_modules()] == [(n, id(m), type(m)) for n, m in modules]
    assert not any("forward" in vars(m) for m in model.modules())
    assert torch.equal(logits(model, tokens), expected)


def test_sparsify_twice_changes_nothing(make, tokens, logits):
    model = sparsify(make(), "twell", tile=128, words=16)
    layers, expected = sparse_layers(model), logits(model, tokens)
    assert sparsify(model, "twell") is model
    assert list(map(id, sparse_layers(model))) == list(map(id, layers))
    assert [(s.tile, s.words) for s in layers] == [(128, 16)] * 2
    assert torch.equal(logits(model, tokens), expected)


def test_there_and_back_again_with_training_between(make, tokens, logits):
    model = make()
    for _ in range(2):
        sparsify(model, "twell")
        logits(model, tokens)
        with torch.no_grad():
            for layer in feed_forwards(model):
                layer.down.weight.add_(0.1), layer.up.weight.mul_(1.1)
        found = logits(model, tokens)
        close(found, logits(densify(model), tokens))


@pytest.mark.parametrize("training", [True, False])
def test_training_mode_is_carried_over(make, training):
    model = sparsify(make().train(training), "twell")
    assert all(m.training is training for m in model.modules())
    model.train(not training)
    assert all(s.training is not training for s in sparse_layers(model))
    densify(model)
    assert all(m.training is not training for m in model.modules())


def test_the_geometry_is_passed_on_and_a_wrong_one_changes_nothing(make):
    model = make()
    shown = repr(model)
    with pytest.raises(InputError, match="words is 300"):
        sparsify(model, "twell", words=300)
    assert repr(model) == shown
    assert "tile=64, words=8" in repr(sparsify(model, "twell", tile=64, words=8))


# ---- what is refused ----


def test_other_activations_are_named(models):
    with pytest.raises(InputError, match="LlamaForCausalLM.*use SiLU"):
        sparsify(models["llama"](hidden_act="silu"), "twell")
    with pytest.raises(InputError, match="use GELU"):
        sparsify(models["opt"](activation_function="gelu"), "twell")
    mlp = models["llama"](hidden_act="silu").model.layers[0].mlp
    with pytest.raises(InputError, match="LlamaMLP uses SiLU"):
        SparseFFN.from_module(mlp)


def test_what_holds_no_feed_forward():
    for model in (nn.Linear(3, 4), nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 3))):
        with pytest.raises(InputError, match=f"no ReLU feed-forward layer in {type(model).__name__}"):
            sparsify(model, "twell")
        with pytest.raises(InputError, match=f"{type(model).__name__} is no feed-forward layer"):
            SparseFFN.from_module(model)
        assert densify(model) is model
    for wrong in (None, "model", torch.zeros(3)):
        for function in (feed_forwards, sparsify, densify):
            with pytest.raises(InputError, match=type(wrong).__name__):
                function(wrong)


class Adapter(nn.Module):
    """What an adapter library puts in a projection's place."""

    def __init__(self, base):
        super().__init__()
        self.base = base

    def forward(self, x):
        return 2 * self.base(x)


class DoublingLinear(nn.Linear):
    def forward(self, x):
        return 2 * super().forward(x)


@pytest.mark.parametrize("name", ["gate_proj", "up_proj", "down_proj"])
def test_a_projection_that_is_more_than_a_linear_is_not_taken_for_one(models, name):
    # Without its gate, a gated layer would look like a plain one.
    mlp = models["course"]().layers[0].mlp
    linear = getattr(mlp, name)
    doubling = DoublingLinear(linear.in_features, linear.out_features, bias=False)
    for other in (Adapter(linear), doubling):
        setattr(mlp, name, other)
        with pytest.raises(InputError, match="each a plain torch.nn.Linear"):
            SparseFFN.from_module(mlp)
        with pytest.raises(InputError, match="no ReLU feed-forward"):
            sparsify(mlp, "twell")
    setattr(mlp, name, linear)
    linear.forward = lambda x: x  # as offloading hooks do
    with pytest.raises(InputError, match="each a plain torch.nn.Linear"):
        SparseFFN.from_module(mlp)


def test_a_layer_whose_gate_is_none_is_plain(models):
    mlp = models["course"](gated=False).layers[0].mlp
    mlp.gate_proj = None
    x = torch.randn(3, 16)
    close(SparseFFN.from_module(mlp)(x), mlp(x))


def test_relus_of_every_spelling(models):
    mlp = models["course"]().layers[0].mlp
    x = torch.randn(3, 16)
    expected = mlp(x)
    for activation in (nn.ReLU(inplace=True), torch.relu, nn.functional.relu):
        mlp.act_fn = None
        del mlp.act_fn
        mlp.act_fn = activation
        close(SparseFFN.from_module(mlp)(x), expected)
    del mlp.act_fn
    mlp.act_fn = nn.ReLU6()
    with pytest.raises(InputError, match="ReLU6"):
        SparseFFN.from_module(mlp)
