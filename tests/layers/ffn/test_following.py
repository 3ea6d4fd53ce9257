"""One layer and its weights: whatever becomes of the down projection, the transposed copy follows; who shares what."""

import copy
import pickle
import subprocess
import sys
import threading
import weakref

import pytest
import torch
from torch import nn
from torch._dynamo.testing import CompileCounterWithBackend
from torch._subclasses import FakeTensorMode
from torch.distributed import _composable_state
from torch.func import functional_call
from torch.nn.utils import parametrizations, parametrize
from torch.utils.dlpack import from_dlpack

from tests.layers.ffn.follows import assert_follows
from twell_lab.core import InputError
from twell_lab.layers.anatomy import feed_forwards
from twell_lab.layers.choice import Choice
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import densify, sparsify
from twell_lab.ops import copies
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward

D_MODEL, D_FF = 16, 64


@pytest.fixture(params=[GatedFeedForward, PlainFeedForward], ids=["gated", "plain"])
def dense(request):
    torch.manual_seed(0)
    return request.param(D_MODEL, D_FF)


@pytest.fixture
def x():
    return torch.randn(5, D_MODEL, generator=torch.Generator().manual_seed(1))


# ---- what may happen to a parameter ----


def add_in_place(dense):
    with torch.no_grad():
        dense.down_proj.weight.add_(1)


def write_one_value(dense):
    with torch.no_grad():
        dense.down_proj.weight[0, 0] = 100


def replace_data(dense):
    dense.down_proj.weight.data = torch.randn(D_MODEL, D_FF)


def replace_parameter(dense):
    dense.down_proj.weight = nn.Parameter(torch.randn(D_MODEL, D_FF))


def replace_projection(dense):
    dense.down_proj = nn.Linear(D_FF, D_MODEL, bias=False)


def load_state(dense):
    dense.down_proj.load_state_dict({"weight": torch.randn(D_MODEL, D_FF)})


def load_state_assigning(dense):
    dense.load_state_dict({k: torch.randn_like(v) for k, v in dense.state_dict().items()}, assign=True)


def step(optimizer, **options):
    def take(dense):
        for parameter in dense.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer(dense.parameters(), lr=0.1, **options).step()

    take.__name__ = f"{optimizer.__name__} {options}"
    return take


def replace_data_twice(dense):
    # The second one tends to lie where the first one lay, at the same version.
    weight = dense.down_proj.weight
    weight.data = weight.data * 1.5
    weight.data = weight.data * 1.1


def offload_and_fetch(dense):
    weight = dense.down_proj.weight
    fetched = weight.data * 1.5
    weight.data = torch.empty(0)
    weight.data = fetched.clone()


def average_in_place(dense):
    with torch.no_grad():
        torch._foreach_lerp_(list(dense.parameters()), [torch.ones_like(p) for p in dense.parameters()], 0.5)


def add_inside_inference_mode(dense):
    with torch.inference_mode():
        dense.down_proj.weight.add_(1)


CHANGES = [
    add_in_place,
    write_one_value,
    replace_data,
    replace_data_twice,
    offload_and_fetch,
    average_in_place,
    add_inside_inference_mode,
    replace_parameter,
    load_state,
    load_state_assigning,
    step(torch.optim.SGD),
    step(torch.optim.AdamW, foreach=True),
    step(torch.optim.AdamW, fused=True),
    step(torch.optim.SGD, fused=True),  # these leave the version as it is
]


@pytest.mark.parametrize("change", CHANGES, ids=lambda change: change.__name__)
def test_the_layer_follows_its_weights(change, dense, x):
    sparse = SparseFFN.from_module(dense)
    assert_follows(sparse, dense, x)
    before = sparse(x)
    for _ in range(5):
        change(dense)
        assert_follows(sparse, dense, x)
    assert not torch.allclose(sparse(x), before)


HOOKED = """
import torch
from torch.nn.modules import module
from torch.optim import optimizer

def hooks():
    tables = [t for of in (module, optimizer) for name, t in vars(of).items() if name.startswith("_global_")]
    return sum(len(table) for table in tables if hasattr(table, "__len__"))

import twell_lab
for name in twell_lab.__all__:
    getattr(twell_lab, name)
from twell_lab.ops.reference import GatedFeedForward
dense = GatedFeedForward(16, 64)
sparse = twell_lab.SparseFFN(dense)
before, x = hooks(), torch.randn(5, 16)
for _ in range(3):
    y = sparse(x)
    assert torch.allclose(y, dense(x), atol=1e-5)
    y.square().sum().backward()
    torch.optim.SGD(dense.parameters(), lr=0.1, fused=True).step()  # which leaves every version as it is
print(before, hooks())
"""


def test_nothing_is_registered_on_torch_until_there_is_a_copy():
    done = subprocess.run([sys.executable, "-c", HOOKED], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["0", "1"]


def test_a_replaced_projection_belongs_to_the_module_it_was_put_in(dense, x):
    sparse = SparseFFN.from_module(dense)
    assert_follows(sparse, dense, x)
    sparse.down_proj = dense.down_proj = nn.Linear(D_FF, D_MODEL, bias=True)
    assert_follows(sparse, dense, x)


def test_another_parameter_at_the_same_address(dense, x):
    # Freed and allocated anew, the weight tends to lie where the last one lay, at the same version.
    sparse, places = SparseFFN.from_module(dense), set()
    for _ in range(30):
        dense.down_proj.weight = None
        dense.down_proj.weight = nn.Parameter(torch.randn(D_MODEL, D_FF))
        places.add(dense.down_proj.weight.data_ptr())
        assert_follows(sparse, dense, x)
    if len(places) == 30:
        pytest.skip("this allocator never used an address twice")


def test_a_parametrized_weight_is_new_each_time(dense, x):
    class Scaled(nn.Module):
        factor = 1.0

        def forward(self, weight):
            return self.factor * weight

    scaled = Scaled()
    parametrize.register_parametrization(dense.down_proj, "weight", scaled)
    sparse = SparseFFN.from_module(dense)
    for scaled.factor in range(20):
        assert_follows(sparse, dense, x)


def test_weight_norm_learns_and_copies(dense, x):
    parametrizations.weight_norm(dense.down_proj)
    sparse = SparseFFN.from_module(dense)
    optimizer = torch.optim.SGD(sparse.parameters(), lr=0.1)
    for _ in range(3):
        sparse(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_follows(sparse, dense, x)
    assert_follows(copy.deepcopy(sparse), dense, x)


def test_functional_call_with_other_weights(dense, x):
    sparse = SparseFFN.from_module(dense)
    for seed in range(10):
        torch.manual_seed(seed)
        other = {name: torch.randn_like(p) for name, p in dense.named_parameters()}
        found, expected = functional_call(sparse, other, (x,)), functional_call(dense, other, (x,))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-4 * expected.abs().max().item())
        del other, found, expected
    assert_follows(sparse, dense, x)


def test_an_unchanged_weight_is_not_copied_again(dense, x):
    sparse = SparseFFN.from_module(dense)
    sparse(x)
    sparse.down_t.zero_()
    for _ in range(3):
        assert not sparse(x).any()
    add_in_place(dense)
    assert_follows(sparse, dense, x)


# ---- dtype, device, shape ----


def test_another_dtype_follows(dense, x):
    sparse = SparseFFN.from_module(dense)
    assert_follows(sparse, dense, x)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        sparse.to(dtype)
        assert sparse.down_t.dtype == dtype and sparse(x.to(dtype)).dtype == dtype
    sparse.down_proj.to(torch.bfloat16)  # only one of the projections
    with pytest.raises(InputError, match="down is torch.bfloat16 but the input is torch.float32"):
        sparse(x)
    for projection in sparse.children():
        projection.to(torch.bfloat16)
    assert sparse(x.bfloat16()).dtype == sparse.down_t.dtype == torch.bfloat16


def test_weights_that_arrive_after_the_model(dense, x):
    with torch.device("meta"):
        empty = type(dense)(D_MODEL, D_FF)
    for assign in (True, False):
        sparse = SparseFFN.from_module(copy.deepcopy(empty))
        if not assign:
            sparse.to_empty(device="cpu")
        sparse.load_state_dict(dense.state_dict(), assign=assign)
        assert_follows(sparse, dense, x)
    for valueless in (empty, copy.deepcopy(empty).eval()):
        for given in (x, x.to("meta")):
            with pytest.raises(InputError, match="is on meta"):
                SparseFFN.from_module(valueless)(given)


def test_fewer_neurons(dense, x):
    sparse = SparseFFN.from_module(dense)
    assert_follows(sparse, dense, x)
    for d_ff in (40, 1, 64):
        for projection in sparse.children():
            shape = (D_MODEL, d_ff) if projection is sparse.down else (d_ff, D_MODEL)
            projection.weight = nn.Parameter(torch.randn(shape))
        assert_follows(sparse, dense, x)
        assert sparse.extra_bytes == d_ff * D_MODEL * 4 + 32  # and its counters


@pytest.mark.parametrize("shape", [(D_MODEL,), (0, D_MODEL), (2, 3, D_MODEL), (2, 0, D_MODEL)], ids=str)
def test_any_leading_shape(dense, shape):
    x = torch.randn(shape)
    assert SparseFFN.from_module(dense)(x).shape == shape
    assert_follows(SparseFFN.from_module(dense), dense, x)


def test_a_wrong_input_names_itself(dense):
    sparse = SparseFFN.from_module(dense)
    with pytest.raises(InputError, match=r"(gate|up) has shape .*accepted"):
        sparse(torch.randn(3, D_MODEL + 1))
    with pytest.raises(InputError, match="x is torch.float64"):
        sparse(torch.randn(3, D_MODEL, dtype=torch.float64))
    with pytest.raises(InputError, match="x is a list"):
        sparse([1.0])


# ---- who shares what ----


def test_two_layers_over_the_same_weights(dense, x):
    one, other = SparseFFN.from_module(dense), SparseFFN.from_module(dense, tile=16, words=3)
    for _ in range(3):
        add_in_place(dense)
        assert_follows(one, dense, x)
        replace_data(dense)
        assert_follows(other, dense, x)
        assert_follows(one, dense, x)


def test_two_models_never_meet(make, logits, tokens):
    one, other = make(seed=1), make(seed=2)
    expected = logits(one, tokens), logits(other, tokens)
    sparsify(one, "twell"), sparsify(other, "twell")
    for _ in range(2):
        for model, wanted in zip((one, other), expected):
            torch.testing.assert_close(logits(model, tokens), wanted, rtol=1e-3, atol=1e-3 * wanted.abs().max().item())
    with torch.no_grad():
        for layer in feed_forwards(one):
            layer.down.weight.zero_()
    torch.testing.assert_close(
        logits(other, tokens), expected[1], rtol=1e-3, atol=1e-3 * expected[1].abs().max().item()
    )
    del one
    densify(other)
    assert torch.equal(logits(other, tokens), expected[1])


def test_one_module_in_several_seats(dense, x):
    class Both(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = self.second = dense
            self.others = nn.ModuleList([dense, nn.Sequential(nn.LayerNorm(D_MODEL), dense)])

        def forward(self, x):
            return self.first(x) + self.second(2 * x) + self.others[0](3 * x) + self.others[1](x)

    model = Both()
    expected, names = model(x), [n for n, _ in model.named_parameters(remove_duplicate=False)]
    sparsify(model, "twell")
    seats = (model.first, model.second, model.others[0], model.others[1][1])
    assert isinstance(model.first, SparseFFN) and all(seat is model.first for seat in seats)
    assert [n for n, _ in model.named_parameters(remove_duplicate=False)] == names
    assert len(feed_forwards(model)) == 1
    torch.testing.assert_close(model(x), expected, rtol=1e-4, atol=1e-4)
    densify(model)
    assert all(seat is dense for seat in (model.first, model.second, model.others[0], model.others[1][1]))
    assert torch.equal(model(x), expected)


def test_the_source_is_no_child_but_still_works(dense, x):
    sparse = SparseFFN.from_module(dense)
    assert dense not in list(sparse.modules())
    assert {id(p) for p in sparse.parameters()} == {id(p) for p in dense.parameters()}
    assert list(sparse.state_dict()) == list(dense.state_dict())
    assert_follows(sparse, dense, x)


def test_threads_calling_one_layer_at_once(dense):
    sparse = SparseFFN.from_module(dense)
    inputs = [torch.randn(7, D_MODEL, generator=torch.Generator().manual_seed(i)) for i in range(4)]
    for _ in range(6):
        replace_data(dense)  # the first forward after it, made by all of them together, has to copy
        found, barrier = [None] * 4, threading.Barrier(4)

        def work(i):
            barrier.wait()
            found[i] = sparse(inputs[i]).detach()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for i in range(4):
            # Not the same bits: torch's own GEMM rounds otherwise in a thread that has other threads to help it.
            torch.testing.assert_close(found[i], dense(inputs[i]).detach(), rtol=1e-4, atol=1e-3)


# ---- inside torch ----


@pytest.mark.parametrize("change", [add_in_place, replace_data, replace_parameter], ids=lambda change: change.__name__)
def test_a_compiled_layer_follows(change, dense, x):
    torch._dynamo.reset()
    sparse = SparseFFN.from_module(dense)
    counter = CompileCounterWithBackend("aot_eager")
    run = torch.compile(sparse, fullgraph=True, backend=counter)
    assert_follows(run, dense, x)
    assert_follows(run, dense, torch.randn(9, D_MODEL))
    graphs = counter.frame_count
    for _ in range(3):
        change(dense)
        assert_follows(run, dense, x)
    assert graphs <= 2 and (change is not add_in_place or counter.frame_count == graphs)
    run(x).square().sum().backward()
    found = [p.grad.clone() for p in dense.parameters()]
    dense.zero_grad()
    dense(x).square().sum().backward()
    for gradient, p in zip(found, dense.parameters(), strict=True):
        torch.testing.assert_close(gradient, p.grad, rtol=1e-4, atol=1e-4 * p.grad.abs().max().item())
    torch._dynamo.reset()


def test_fake_tensors_pass_through(dense):
    with FakeTensorMode():
        sparse = SparseFFN.from_module(type(dense)(D_MODEL, D_FF))
        y = sparse(torch.randn(3, D_MODEL))
    assert y.shape == (3, D_MODEL) and y.dtype == torch.float32


def test_checkpointed(dense, x):
    sparse = SparseFFN.from_module(dense)
    x = x.requires_grad_()
    torch.utils.checkpoint.checkpoint(sparse, x, use_reentrant=False).square().sum().backward()
    found = x.grad.clone()
    x.grad = None
    dense(x).square().sum().backward()
    torch.testing.assert_close(found, x.grad, rtol=1e-4, atol=1e-3)


@pytest.mark.parametrize("to", [torch.bfloat16, torch.float16])
def test_under_autocast(dense, x, to):
    sparse = SparseFFN.from_module(dense)
    with torch.autocast("cpu", to):
        y, expected = sparse(x), dense(x)
    assert y.dtype == expected.dtype == to and sparse.down_t.dtype == torch.float32
    torch.testing.assert_close(y, expected, rtol=0.05, atol=0.02)
    y.float().sum().backward()
    assert dense.down_proj.weight.grad.dtype == torch.float32


def test_weights_changed_inside_inference_mode(dense, x):
    sparse = SparseFFN.from_module(dense)
    assert_follows(sparse, dense, x)
    with torch.inference_mode():
        replace_parameter(dense)
        assert_follows(sparse, dense, x)
        add_in_place(dense)  # not an inference tensor if made outside; one here
    replace_parameter(dense)
    assert_follows(sparse, dense, x)
    assert sparse(x).requires_grad


@pytest.mark.parametrize("choice", [None, Choice("hot_cold", 256)], ids=["twell", "hot and cold"])
def test_inference_tensors_changed_in_place(choice, x):
    with torch.inference_mode():
        dense = GatedFeedForward(D_MODEL, 300)
        sparse = SparseFFN.from_module(dense, plan=choice)
        for _ in range(3):
            assert_follows(sparse, dense, x)
            for weight in dense.parameters():
                weight.mul_(1.5)


@pytest.mark.parametrize("choice", [None, Choice("hot_cold", 256)], ids=["twell", "hot and cold"])
def test_memory_that_another_process_writes_to(choice, x):
    dense = GatedFeedForward(D_MODEL, 300).requires_grad_(False)
    sparse = SparseFFN.from_module(dense, plan=choice)
    sparse(x)
    dense.share_memory()
    sparse(x)
    process = torch.multiprocessing.get_context("spawn").Process(target=_double, args=(dense.down_proj.weight,))
    process.start()
    process.join()
    assert process.exitcode == 0
    assert_follows(sparse, dense, x)


def _double(weight):
    weight.mul_(2)


def test_gathered_weights_are_copied_each_time(dense, x, monkeypatch):
    """FSDP writes into a gathered weight and keeps its version."""
    sparse = SparseFFN.from_module(dense.requires_grad_(False))
    sparse(x)
    somebody = nn.Linear(1, 1)
    monkeypatch.setitem(_composable_state._module_state_mapping, somebody, weakref.ref(somebody))
    for _ in range(2):
        with torch.autograd._unsafe_preserve_version_counter(dense.down_proj.weight):
            dense.down_proj.weight.mul_(2)
        assert_follows(sparse, dense, x)


@pytest.mark.parametrize("choice", [None, Choice("hot_cold", 256)], ids=["twell", "hot and cold"])
def test_compiled_and_eager_calls_in_turn(choice, x):
    """aot_eager works on clones of the copies, and writes them back."""
    torch._dynamo.reset()
    dense = GatedFeedForward(D_MODEL, 300).requires_grad_(False)
    sparse = SparseFFN.from_module(dense, plan=choice)
    run, weights = torch.compile(sparse, backend="aot_eager", fullgraph=True), [p.data for p in dense.parameters()]
    for factor in (1.0, -0.5, 1.0, 2.0):
        for p, data in zip(dense.parameters(), weights):
            p.data = data if factor == 1.0 else data * factor
        assert_follows(run if factor in (-0.5, 2.0) else sparse, dense, x)
    torch._dynamo.reset()


@pytest.mark.parametrize("choice", [None, Choice("hot_cold", 256)], ids=["twell", "hot and cold"])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_a_compiled_layer_with_parametrized_weights(choice, backend, x):
    torch._dynamo.reset()
    dense = GatedFeedForward(D_MODEL, 300)
    for projection in (dense.up_proj, dense.down_proj):
        parametrizations.weight_norm(projection)
    sparse = SparseFFN.from_module(dense.requires_grad_(False), plan=choice)
    run = torch.compile(sparse, backend=backend, fullgraph=True)
    for _ in range(3):
        assert_follows(run, dense, x)
        for p in dense.parameters():
            p.data = p.data * 0.9
    torch._dynamo.reset()


@pytest.mark.parametrize("choice", [None, Choice("hot_cold", 256)], ids=["twell", "hot and cold"])
def test_a_refresh_that_is_interrupted_midway(choice, x, monkeypatch):
    dense = GatedFeedForward(D_MODEL, 300).requires_grad_(False)
    sparse = SparseFFN.from_module(dense, plan=choice)
    assert_follows(sparse, dense, x)
    kept = [p.data for p in dense.parameters()]
    for p in dense.parameters():
        p.data = p.data * -2

    def interrupt(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(copies, "Note", interrupt)  # once everything is written
        sparse(x)
    for p, data in zip(dense.parameters(), kept):
        p.data = data
    assert_follows(sparse, dense, x)


def test_forgetting_while_others_look(dense):
    sparse = SparseFFN.from_module(dense.requires_grad_(False))
    x, errors = torch.randn(2, D_MODEL), []

    def work():
        try:
            for _ in range(150):
                sparse.refresh()
                assert_follows(sparse, dense, x)
        except Exception as error:
            errors.append(error)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert not errors


def test_a_pickled_and_a_copied_layer_begin_anew(dense, x):
    sparse = SparseFFN.from_module(dense)
    sparse(x)
    for twin in (copy.deepcopy(sparse), pickle.loads(pickle.dumps(sparse))):
        with torch.no_grad():
            for p in twin.parameters():
                p.mul_(1.5)
        assert_follows(twin, densify(copy.deepcopy(twin)), x)
    assert_follows(sparse, dense, x)


# ---- weights that are not finite ----


@pytest.mark.parametrize("choice", [None, Choice("hot_cold", 256)], ids=["twell", "hot and cold"])
@pytest.mark.parametrize(
    "where", ["gate_proj.weight", "up_proj.weight", "down_proj.weight", "up_proj.bias", "down_proj.bias"]
)
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_not_finite_are_refused(choice, where, value, x):
    dense = GatedFeedForward(D_MODEL, 300)
    for name in ("gate_proj", "up_proj", "down_proj"):
        getattr(dense, name).bias = nn.Parameter(torch.randn(getattr(dense, name).out_features))
    sparse = SparseFFN.from_module(dense.requires_grad_(False), plan=choice)
    sparse(x)
    before = dense.get_parameter(where).clone()
    dense.get_parameter(where).flatten()[-1] = value
    if where != "down_proj.bias" or choice is None:  # which hot/cold reads in place, and the dense layer shows
        for _ in range(2):
            with pytest.raises(InputError, match=rf"{where.split('_')[0]}.* has 1 values that are not finite"):
                sparse(x)
    with pytest.raises(InputError, match="not finite"):
        SparseFFN.from_module(dense, plan=choice)
    if choice is None:  # with gradients on, but not in training
        with pytest.raises(InputError, match="not finite"):
            sparse.requires_grad_(True).eval()(x)
        sparse.requires_grad_(False)
    dense.get_parameter(where).copy_(before)
    assert_follows(sparse, dense, x)


@pytest.mark.parametrize(
    "write",
    [lambda w: w.data.mul_(2), lambda w: w.numpy().__imul__(2), lambda w: from_dlpack(w).mul_(2)],
    ids=["data", "NumPy", "DLPack"],
)
def test_a_change_past_the_version_counter_is_followed_after_refresh(write):
    """torch raises no version for these changes, so `refresh` has to be called."""
    layer = GatedFeedForward(16, 32).requires_grad_(False)
    sparse = SparseFFN.from_module(layer)
    x = torch.randn(3, 16)
    sparse(x)
    write(layer.down_proj.weight)
    sparse.refresh()
    assert torch.allclose(sparse(x), layer(x), rtol=1e-4, atol=1e-6)
