"""Repeated calls of a layer on a GPU: computed without looking at the layer anew, until anything about it is otherwise."""

import copy
import threading

import pytest
import torch
from torch import nn

from tests.layers.ffn.follows import other_data, replace, write
from twell_lab.layers.choice import Choice
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.models.swap import densify, sparsify
from twell_lab.ops.reference import GatedFeedForward

D_MODEL, D_FF = 256, 1024
TOKENS = (1, 40, 200, 2500)
CHOICES = {"dense": Choice("dense"), "twell": Choice("twell"), "hot_cold": Choice("hot_cold", 256)}


def made(device):
    dense = GatedFeedForward(D_MODEL, D_FF).to(device, torch.bfloat16).eval().requires_grad_(False)
    bias = torch.full((D_FF,), -1.0, device=device, dtype=torch.bfloat16)
    dense.gate_proj.bias = nn.Parameter(bias, requires_grad=False)
    return dense


def x_of(tokens, device):
    return torch.randn(tokens, D_MODEL, device=device, dtype=torch.bfloat16)


@pytest.fixture(params=CHOICES)
def choice(request):
    return CHOICES[request.param]


@pytest.fixture
def looked(monkeypatch):
    """A list that gets an entry for each call in which a layer looks at everything."""
    calls, real = [], SparseFFN._forward

    def forward(layer, x):
        calls.append(1)
        return real(layer, x)

    monkeypatch.setattr(SparseFFN, "_forward", forward)
    return calls


def settle(sparse, x):
    """Call the layer until it need not look any more: the first call's look for values that are not finite may still be
    under way in the second."""
    sparse(x)
    torch.cuda.synchronize()
    sparse(x)
    return sparse(x)


def fresh(sparse, choice, x):
    """The result of a layer that was made just now."""
    dense = densify(copy.deepcopy(nn.Sequential(sparse)))[0]
    return SparseFFN.from_module(dense, plan=choice)(x)


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("turned", [False, True])
def test_repeated_calls_do_not_look_and_give_the_same_bits(tokens, turned, choice, looked, gpu):
    torch.manual_seed(0)
    dense = made(gpu)
    if turned:
        sparse = sparsify(
            nn.Sequential(copy.deepcopy(dense)).eval(), choice.path if choice.path != "hot_cold" else "twell"
        )[0]
    else:
        sparse = SparseFFN.from_module(dense, plan=choice)
    x, other = x_of(tokens, gpu), x_of(tokens, gpu)
    first = sparse(x)
    assert torch.equal(settle(sparse, x), first)
    expected = sparse._forward(other)
    looked.clear()
    for _ in range(3):
        assert torch.equal(sparse(x), first) and torch.equal(sparse(other[None]), expected[None])
        looked_once = len(looked)
    assert looked_once <= 1  # inputs of three dimensions are of another kind
    assert torch.equal(sparse(x), first) and len(looked) == looked_once


def other_data_there(part):
    """At the same address: torch's allocator hands out what was freed last."""
    values = (part.weight * 3).cpu()
    part.weight.data = torch.empty(0, device="cuda", dtype=torch.bfloat16)
    part.weight.data = values.to("cuda")


@pytest.mark.parametrize("tokens", TOKENS)
@pytest.mark.parametrize("which", ["gate_proj", "up_proj", "down_proj"])
@pytest.mark.parametrize("change", [replace, write, other_data, other_data_there], ids=lambda change: change.__name__)
def test_changed_weights_are_noticed(change, which, tokens, choice, gpu):
    torch.manual_seed(0)
    sparse, x = SparseFFN.from_module(made(gpu), plan=choice), x_of(tokens, gpu)
    before = settle(sparse, x)
    for _ in range(2):
        change(getattr(sparse, which))
        assert torch.equal(sparse(x), fresh(sparse, choice, x))
        assert torch.equal(settle(sparse, x), fresh(sparse, choice, x))
    assert not torch.equal(sparse(x), before)


def test_a_weight_that_is_not_finite_is_refused_after_repeated_calls(choice, gpu):
    sparse, x = SparseFFN.from_module(made(gpu), plan=choice), x_of(40, gpu)
    settle(sparse, x)
    sparse.down_proj.weight[3, 5] = torch.nan
    if choice.path == "dense":
        assert sparse(x)[:, 3].isnan().all()
        return
    sparse(x)
    torch.cuda.synchronize()
    with pytest.raises(Exception, match="not finite"):
        sparse(x)


@pytest.mark.parametrize("tokens", TOKENS)
def test_other_streams_and_late_inputs(tokens, choice, looked, gpu):
    torch.manual_seed(0)
    sparse, x = SparseFFN.from_module(made(gpu), plan=choice), x_of(tokens, gpu)
    expected = settle(sparse, x)
    late, stream = torch.full_like(x, torch.nan), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    looked.clear()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(3_000_000)
        late.copy_(x)
        y = sparse(late)
    stream.synchronize()
    assert torch.equal(y, expected) and not looked


def test_what_is_counted(gpu, looked):
    torch.manual_seed(0)
    sparse = SparseFFN.from_module(made(gpu), plan=Choice("twell"))
    x = x_of(2500, gpu)
    settle(sparse, x)
    before = sparse.status()["classes"][0]
    looked.clear()
    for _ in range(4):
        sparse(x)
    after = sparse.status()["classes"][0]
    assert not looked and after["rows"] == before["rows"] + 4 * 2500
    assert after["mean_nnz"] == pytest.approx(before["mean_nnz"])


@pytest.mark.parametrize("tokens", TOKENS)
def test_a_captured_graph(tokens, choice, gpu):
    torch.manual_seed(0)
    sparse, x = SparseFFN.from_module(made(gpu), plan=choice), x_of(tokens, gpu)
    expected = settle(sparse, x)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sparse(x)
    sparse(x_of(tokens + 1, gpu))
    for _ in range(3):
        y.fill_(torch.nan)
        graph.replay()
        assert torch.equal(y, expected)


def test_threads_with_streams_of_their_own(choice, gpu):
    torch.manual_seed(0)
    sparse = SparseFFN.from_module(made(gpu), plan=choice)
    inputs = [x_of(tokens, gpu) for tokens in TOKENS]
    expected, wrong = [settle(sparse, x) for x in inputs], []

    def work(number):
        with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
            for turn in range(50):
                at = (turn + number) % len(inputs)
                y = sparse(inputs[at])
                torch.cuda.current_stream().synchronize()
                if not torch.equal(y, expected[at]):
                    wrong.append((number, turn))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    torch.cuda.synchronize()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_reordered_weights_that_were_changed_are_refused(gpu):
    torch.manual_seed(0)
    sparse = SparseFFN(made(gpu), plan=Choice("hot_cold", 256), _turns=True, _reorders=True)
    x = x_of(40, gpu)
    settle(sparse, x)
    sparse.up_proj.weight.mul_(2)
    with pytest.raises(Exception, match="reorder" if sparse.reordered else "never"):
        sparse(x)
    sparse.accept_changes()
    assert sparse(x).isfinite().all()
