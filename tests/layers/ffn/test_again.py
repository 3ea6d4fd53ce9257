"""Calls like an earlier one: computed without looking at the layer anew, until anything about it is otherwise."""

import copy
import gc
import weakref

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils.flop_counter import FlopCounterMode
from transformers import Phi3Config
from transformers.models.phi3.modeling_phi3 import Phi3MLP

from tests.layers.ffn.follows import other_data, replace, write
from tests.ops.calls.pretended import pretend
from twell_lab.core import InputError
from twell_lab.layers import again
from twell_lab.layers.choice import DENSE, Choice
from twell_lab.layers.paths import PATHS
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.ops import copies, inference
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward

D_MODEL, D_FF = 16, 40


def module(gated=True, bias=True):
    torch.manual_seed(0)
    made = (GatedFeedForward if gated else PlainFeedForward)(D_MODEL, D_FF)
    for part in made.children():
        if bias and isinstance(part, nn.Linear):
            part.bias = nn.Parameter(torch.randn(part.out_features))
    return made.eval().requires_grad_(False)


class Scaled(nn.Linear):
    def forward(self, x):
        return super().forward(x) * 2


class Watched:
    """A dense layer, swapped; `looked` counts the calls in which it looked at everything."""

    def __init__(self, monkeypatch, **kinds):
        self.dense = module(**kinds)
        self.sparse = SparseFFN(self.dense, plan=DENSE)
        self.looked, real = 0, SparseFFN._forward

        def forward(layer, x):
            self.looked += 1
            return real(layer, x)

        monkeypatch.setattr(SparseFFN, "_forward", forward)

    def looks(self, x, layer=None) -> bool:
        """Whether this call looked; its result is the dense layer's, bit for bit."""
        before, layer = self.looked, layer or self.sparse
        y = layer(x)
        assert torch.equal(y, self.dense(x))
        return self.looked > before


@pytest.fixture(params=[True, False], ids=["gated", "plain"])
def layer(request, monkeypatch):
    return Watched(monkeypatch, gated=request.param)


@pytest.fixture
def x():
    return torch.randn(3, D_MODEL)


def test_the_second_call_does_not_look(layer, x):
    assert layer.looks(x)
    assert not layer.looks(x) and not layer.looks(torch.randn(3, D_MODEL))
    for other in (torch.randn(4, D_MODEL), torch.randn(1, 3, D_MODEL), torch.randn(D_MODEL), x.t().contiguous().t()):
        assert layer.looks(other) and not layer.looks(other)
    assert not layer.looks(x)


def other_data_there(part):
    """Other data at the same address, as offloading may give it: the old memory was freed in between."""
    twin, at = torch.randn_like(part.weight), part.weight.data_ptr()
    part.weight.data = torch.empty(0)
    held = []
    for _ in range(100):
        held.append(torch.empty_like(twin))
        if held[-1].data_ptr() == at:
            break
    part.weight.data = held[-1].copy_(twin)


def other_bias(part):
    part.bias = nn.Parameter(torch.randn_like(part.bias), requires_grad=False)


def no_bias(part):
    part.bias = None


def other_strides(part):
    part.weight.data = part.weight.data.t().contiguous().t()


CHANGES = (replace, write, other_data, other_data_there, other_bias, no_bias, other_strides)


@pytest.mark.parametrize("which", ["up_proj", "down_proj"])
@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_changed_weights_are_noticed(layer, x, change, which):
    layer.looks(x)
    assert not layer.looks(x)
    change(getattr(layer.dense, which))
    assert layer.looks(x) and not layer.looks(x)


def test_a_bias_that_comes_later(monkeypatch, x):
    layer = Watched(monkeypatch, bias=False)
    layer.looks(x)
    layer.dense.gate_proj.bias = nn.Parameter(torch.randn(D_FF), requires_grad=False)
    assert layer.looks(x) and not layer.looks(x)


CALLS = {
    "follow": lambda sparse: sparse.follow(DENSE),
    "refresh": lambda sparse: sparse.refresh(),
    "learn": lambda sparse: sparse.learn("dense"),
    "train and eval": lambda sparse: sparse.train().eval(),
    "to": lambda sparse: sparse.to(torch.float64).to(torch.float32),
    "load": lambda sparse: sparse.load_state_dict(sparse.state_dict()),
    "an attribute": lambda sparse: setattr(sparse, "tile", sparse.tile),
}


@pytest.mark.parametrize("call", CALLS.values(), ids=CALLS.keys())
def test_what_is_done_to_the_layer_is_noticed(layer, x, call):
    layer.looks(x)
    call(layer.sparse)
    assert layer.looks(x) and not layer.looks(x)


REFUSED = {
    "forward hook": lambda dense: dense.up_proj.register_forward_hook(lambda *_: None),
    "forward pre hook": lambda dense: dense.down_proj.register_forward_pre_hook(lambda *_: None),
    "backward hook": lambda dense: dense.up_proj.register_full_backward_hook(lambda *_: None),
    "another forward": lambda dense: setattr(dense.up_proj, "forward", lambda x: x),
    "another class": lambda dense: setattr(dense.down_proj, "__class__", Scaled),
}


@pytest.mark.parametrize("put", REFUSED.values(), ids=REFUSED.keys())
def test_what_is_put_on_a_part_is_refused_after_calls_too(layer, x, put):
    layer.looks(x)
    assert not layer.looks(x)
    put(layer.dense)
    with pytest.raises(InputError, match="of a SparseFFN"):
        layer.sparse(x)


def test_what_is_put_in_a_place_is_noticed(layer, x):
    layer.looks(x)
    layer.sparse.register_module("act_fn", nn.GELU())
    with pytest.raises(InputError, match="act_fn was set"):
        layer.sparse(x)
    del layer.sparse._modules["act_fn"]
    assert not layer.looks(x)
    layer.sparse.up_proj = layer.dense.up_proj = nn.Linear(D_MODEL, D_FF).requires_grad_(False)
    assert layer.looks(x)
    parametrizations.weight_norm(layer.dense.up_proj)
    layer.dense.requires_grad_(False)
    assert layer.looks(x) and layer.looks(x)  # such a weight is made anew on each call
    del layer.sparse._modules["down_proj"]
    with pytest.raises(KeyError):
        layer.sparse(x)


def test_inputs_that_do_not_fit_are_refused_after_calls_too(layer, x):
    layer.looks(x)
    for wrong, message in (
        (x[:, :-1], "x has rows of 15 values"),
        (x.double(), "x is torch.float64"),
        (x.half(), "up is torch.float32 but the input is torch.float16"),
        (x.to_sparse(), "x has layout"),
        (torch.tensor(1.0), "x has shape"),
        (None, "x is a NoneType"),
        ([1.0], "x is a list"),
    ):
        with pytest.raises(InputError, match=message):
            layer.sparse(wrong)
    assert not layer.looks(x)


def test_gradients_transforms_and_modes_look(layer, x):
    layer.looks(x)
    assert layer.looks(x.clone().requires_grad_())
    with torch.no_grad():
        assert not layer.looks(x.clone().requires_grad_())
    layer.dense.requires_grad_(True)
    assert layer.looks(x)
    layer.dense.requires_grad_(False)
    layer.looks(x)
    assert torch.allclose(torch.func.vmap(layer.sparse)(x), layer.dense(x), atol=1e-5)
    with FlopCounterMode(display=False) as counted:
        layer.looks(x)
    assert counted.get_total_flops() > 0
    with torch.autocast("cpu", torch.bfloat16):
        assert layer.looks(x) and layer.sparse(x).dtype == torch.bfloat16
    with torch.inference_mode():
        assert not layer.looks(x)
    compiled = torch.compile(layer.sparse, backend="eager", fullgraph=True)  # which sets an attribute
    layer.looks(x)
    assert torch.equal(compiled(x), layer.dense(x)) and not layer.looks(x)


class LikeT5(nn.Module):
    def __init__(self):
        super().__init__()
        self.wi, self.act, self.dropout = nn.Linear(D_MODEL, D_FF, bias=False), nn.ReLU(), nn.Dropout(0.5)
        self.wo = nn.Linear(D_FF, D_MODEL, bias=False)

    def forward(self, x):
        return self.wo(self.dropout(self.act(self.wi(x))))


def test_in_training_mode_it_looks_only_where_there_is_dropout(layer, x):
    layer.sparse.train()
    layer.looks(x)
    assert not layer.looks(x)
    sparse = SparseFFN(LikeT5().requires_grad_(False), plan=DENSE)
    assert sparse._dropout is not None
    assert not torch.equal(sparse(x), sparse(x))
    sparse.eval()
    first = sparse(x)
    assert torch.equal(sparse(x), first) and sparse._again is not None
    sparse.train()
    assert not torch.equal(sparse(x), sparse(x)) and sparse._again is None


def test_copies_begin_anew(layer, x):
    layer.looks(x)
    twin = copy.deepcopy(layer.sparse)
    with torch.no_grad():
        twin.down_proj.weight.neg_()
        twin.down_proj.bias.neg_()
    assert torch.equal(twin(x), -layer.dense(x)) and not layer.looks(x)


def test_so_many_kinds_of_inputs_are_remembered(layer, x, monkeypatch):
    monkeypatch.setattr(again, "_MOST", 3)
    for tokens in (1, 2, 4, 3, 5):
        layer.looks(torch.randn(tokens, D_MODEL))
        assert len(layer.sparse._again._known) <= 3
    assert not layer.looks(x) and layer.looks(x[:1])


def test_no_weight_is_kept_alive(layer, x):
    layer.looks(x)
    assert not layer.looks(x)
    storage = weakref.ref(layer.dense.up_proj.weight.untyped_storage())
    layer.dense.up_proj.weight.data = torch.randn(D_FF, D_MODEL)
    gc.collect()
    assert storage() is None
    layer.looks(x)
    weight, bias = weakref.ref(layer.dense.up_proj.weight), weakref.ref(layer.dense.down_proj.bias)
    replace(layer.dense.up_proj)
    layer.dense.down_proj.bias = None
    gc.collect()
    assert weight() is None and bias() is None
    assert layer.looks(x) and not layer.looks(x)


def test_weights_that_can_change_unseen_are_looked_at(monkeypatch, x):
    layer = Watched(monkeypatch)
    layer.dense.share_memory()
    assert layer.looks(x) and layer.looks(x)


# ---- copies of weights, which a CPU's layers look at on each call


def test_a_settled_copy_is_still_right_until_something_changes():
    weight, beside = nn.Parameter(torch.randn(D_MODEL, D_FF)), nn.Parameter(torch.randn(D_FF, D_MODEL))
    place = copies.place(copies.TRANSPOSED, weight)
    assert copies.settled([place], [weight], None, [beside]) is None
    copies.refresh({"down": weight}, [place], [copies.TRANSPOSED], None, {"up": beside}, training=False)
    note = copies.settled([place], [weight], None, [beside])
    assert note is not None and copies.still(note, [place])
    copies.forget(place)
    assert not copies.still(note, [place])
    copies.refresh({"down": weight}, [place], [copies.TRANSPOSED], None, {"up": beside}, training=False)
    note = copies.settled([place], [weight], None, [beside])
    copies._count_step()  # an optimizer that may not raise versions
    assert not copies.still(note, [place]) and copies.settled([place], [weight], None, [beside]) is None


@pytest.mark.parametrize("choice", [Choice("twell"), Choice("hot_cold", 256)], ids=str)
@pytest.mark.parametrize("gated", [True, False])
def test_copies_are_read_in_the_place_of_their_weights(choice, gated, monkeypatch):
    """On a GPU, as which this input passes."""
    dense = (GatedFeedForward if gated else PlainFeedForward)(D_MODEL, 520).eval().requires_grad_(False)
    sparse, x = SparseFFN(dense, plan=choice), torch.randn(3, D_MODEL)
    sparse(x)
    asked = []
    monkeypatch.setattr(inference, "prepared", lambda x, weights, copied, *_: asked.append((weights, copied)) or "run")
    weights, path = sparse._weights(), PATHS[choice.path]
    known = path.again(sparse, pretend(x), weights, choice.hot, None)
    (given, copied), right = asked[0], path.ready(sparse, weights)
    assert given is weights and known.run == "run" and len(known.places) == len(copied) >= 1
    assert all(copied.get(number, t) is right[number] for number, t in enumerate(weights))
    assert right.down_t is not None and right.down_t.shape == (520, D_MODEL)
    assert copies.still(known.note, known.places)
    dense.down_proj.weight.add_(1)
    assert path.again(sparse, pretend(x), weights, choice.hot, None) is None  # the copies are old
    assert path.again(sparse, x, weights, choice.hot, None) is None  # on a CPU


def test_a_sparse_layer_on_a_cpu_looks(monkeypatch, x):
    layer = Watched(monkeypatch)
    layer.sparse.follow(Choice())
    for _ in range(3):
        before = layer.looked
        layer.sparse(x)
        assert layer.looked == before + 1


def test_a_fused_projection_that_is_trained_alone_gets_gradients(x):
    config = Phi3Config(hidden_size=D_MODEL, intermediate_size=D_FF, hidden_act="relu", pad_token_id=0)
    mlp = Phi3MLP(config).eval()
    sparse = SparseFFN.from_module(mlp, plan=Choice("dense"))
    mlp.down_proj.requires_grad_(False)
    with torch.no_grad():
        right = [sparse(x) for _ in range(2)][1]
    assert sparse._again is not None
    y = sparse(x)
    y.sum().backward()
    assert torch.equal(y, right) and mlp.gate_up_proj.weight.grad.norm() > 0
