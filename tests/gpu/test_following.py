"""Copies of weights on a GPU: what they follow, on which stream, and what is said of weights that are not finite,
without waiting."""

import copy
import threading

import pytest
import torch
from torch import nn
from torch.func import jvp, vmap

from twell_lab.core import InputError
from twell_lab.layers.choice import Choice
from twell_lab.layers.sparse_ffn import SparseFFN
from twell_lab.layers.terms import layer_terms
from twell_lab.models.swap import densify
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward

CHOICES = {"twell": None, "hot and cold": Choice("hot_cold", 256)}


@pytest.fixture(params=CHOICES)
def layers(request, gpu):
    """(dense, sparse), the same weights, bfloat16, nothing to be trained."""
    torch.manual_seed(0)
    dense = GatedFeedForward(256, 1024).to(gpu, torch.bfloat16).requires_grad_(False)
    dense.gate_proj.bias = nn.Parameter(
        torch.full((1024,), -1.0, device=gpu, dtype=torch.bfloat16), requires_grad=False
    )
    return dense, SparseFFN.from_module(dense, plan=CHOICES[request.param])


def x_of(tokens, gpu):
    return torch.randn(tokens, 256, device=gpu, dtype=torch.bfloat16)


def close(found, expected):
    torch.testing.assert_close(found.float(), expected.float(), rtol=0.05, atol=0.05 * expected.abs().max().item())


def test_weights_replaced_where_the_last_ones_lay(layers, gpu):
    dense, sparse = layers
    x = x_of(100, gpu)
    for _ in range(5):
        close(sparse(x), dense(x))
        for weight in dense.parameters():
            weight.data = weight.data * 1.5
            weight.data = weight.data * 0.9
    for _ in range(3):
        for weight in dense.parameters():
            kept = weight.data.cpu() * -1
            weight.data = torch.empty(0, device=gpu, dtype=torch.bfloat16)
            weight.data = kept.to(gpu)
        close(sparse(x), dense(x))


@pytest.mark.parametrize("tokens", [1, 100, 3000])
def test_a_copy_made_on_another_stream_is_waited_for(tokens, layers, gpu):
    dense, sparse = layers
    x = x_of(tokens, gpu)
    sparse(x)
    late, side = torch.randn_like(dense.down_proj.weight), torch.cuda.Stream()
    for factor in (1.0, -2.0, 3.0):
        with torch.no_grad():
            for weight in dense.parameters():
                weight.copy_(weight * factor)
        expected = dense(x)
        torch.cuda.synchronize()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(200):  # so that the copy is late
                late @ late.t()
            sparse(x)
        close(sparse(x), expected)  # on the current stream, which nobody had wait for the side one
        torch.cuda.synchronize()


@pytest.mark.parametrize("tokens", [1, 100, 3000])
@pytest.mark.parametrize("leave", ["follow", "follow the same again", "densify"])
def test_what_another_stream_still_reads_stays_in_memory(leave, tokens, layers, gpu):
    """The copies and the counters of a plan that is given up, without anybody waiting for the forwards on it."""
    dense, sparse = layers
    x, late, side, plan = x_of(tokens, gpu), torch.randn(4096, 4096, device=gpu), torch.cuda.Stream(), sparse.plan
    expected = sparse(x)
    torch.cuda.synchronize()
    for _ in range(3):
        sizes = {buffer.nbytes for buffer in sparse.buffers()}
        with torch.cuda.stream(side):
            for _ in range(20):  # so that the forward is late
                late @ late
            y = sparse(x)
        if leave == "densify":
            densify(nn.ModuleList([sparse]))
            sparse = None
        else:
            sparse.follow(Choice("dense") if leave == "follow" else plan)
        # NaN, where the copies lay if that memory was free
        written = [torch.full((size,), 255, dtype=torch.uint8, device=gpu) for size in sizes for _ in range(8)]
        torch.cuda.synchronize()
        assert torch.equal(y, expected) and all((each == 255).all() for each in written)
        if leave == "densify":
            sparse = SparseFFN.from_module(dense, plan=plan)
        sparse.follow(plan)


def test_nothing_waits_for_the_gpu(layers, gpu):
    dense, sparse = layers
    x = x_of(100, gpu)
    for _ in range(2):
        sparse(x)  # kernels are loaded
    torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(3):
            sparse(x)
            for weight in dense.parameters():
                weight.mul_(1.1)
        sparse(x)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("name", ["gate_proj.weight", "up_proj.weight", "down_proj.weight"])
def test_weights_that_are_not_finite_are_refused_by_a_later_call(name, layers, gpu):
    dense, sparse = layers
    x = x_of(100, gpu)
    sparse(x)
    before = dense.get_parameter(name)[3, 7].clone()
    dense.get_parameter(name)[3, 7] = torch.nan
    sparse(x)  # finds out, and does not wait to be told
    torch.cuda.synchronize()
    for _ in range(2):
        with pytest.raises(
            InputError, match=rf"{name.split('_')[0]} has 1 values that are not finite, the first at \[3, 7\]"
        ):
            sparse(x)
    with pytest.raises(InputError, match="not finite"):
        SparseFFN.from_module(dense)
    dense.get_parameter(name)[3, 7] = before
    for _ in range(2):
        close(sparse(x), dense(x))
        torch.cuda.synchronize()


def test_in_training_terms_say_whether_weights_are_finite(gpu):
    layer = SparseFFN.from_module(GatedFeedForward(256, 1024).to(gpu, torch.bfloat16))
    model = nn.ModuleList([layer])
    for wanted in (True, False):
        with layer_terms(model) as terms:
            layer(x_of(300, gpu)).float().sum().backward()
        assert bool(terms.finite()) is wanted
        with torch.no_grad():
            layer.up_proj.weight[5, 5] = torch.inf


def test_a_captured_graph_and_changes_around_it(layers, gpu):
    dense, sparse = layers
    x = x_of(100, gpu)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            sparse(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sparse(x)
    x.copy_(x_of(100, gpu))
    graph.replay()
    close(y, dense(x))


@pytest.mark.parametrize("kind", [GatedFeedForward, PlainFeedForward])
@pytest.mark.parametrize("choice", [None, Choice("hot_cold", 256), Choice("dense")])
def test_second_derivatives_and_transforms(kind, choice, gpu):
    torch.manual_seed(1)
    dense = kind(64, 512).to(gpu)
    sparse = SparseFFN.from_module(copy.deepcopy(dense), plan=choice)
    x = torch.randn(40, 64, device=gpu)

    def penalty(module, terms):
        y = x.clone().requires_grad_()
        with layer_terms(nn.ModuleList([module])) as told:
            value = module(y).square().sum()
        value = value + (sum(term.l1 for term in told) if terms else 0)
        (gradient,) = torch.autograd.grad(value, y, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), [y, *module.parameters()])

    for terms in (False, True):
        for found, expected in zip(penalty(sparse, terms), penalty(dense, terms)):
            torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2 * expected.abs().max().item())
    torch.testing.assert_close(vmap(sparse)(x), dense(x), rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(jvp(sparse, (x,), (x,)), jvp(dense, (x,), (x,)), rtol=1e-3, atol=1e-3)


def test_second_derivatives_through_the_training_kernels(gpu):
    """bfloat16, so that the forward and the first gradient are the sparse kernels'."""
    torch.manual_seed(2)
    dense = GatedFeedForward(256, 1024).to(gpu, torch.bfloat16)
    sparse = SparseFFN.from_module(copy.deepcopy(dense))
    x = x_of(300, gpu)

    def penalty(module):
        y = x.clone().requires_grad_()
        (gradient,) = torch.autograd.grad(module(y).float().square().sum(), y, create_graph=True)
        return torch.autograd.grad(gradient.float().square().sum(), [y, *module.parameters()])

    for found, expected in zip(penalty(sparse), penalty(dense)):
        error = (found.float() - expected.float()).norm() / expected.float().norm()
        assert error < 0.05


def test_a_cpu_layer_under_a_default_device(gpu):
    dense = GatedFeedForward(64, 512).requires_grad_(False)
    with torch.device(gpu):
        sparse = SparseFFN.from_module(copy.deepcopy(dense), plan=Choice("hot_cold", 256))
        x = torch.randn(5, 64, device="cpu")
        y = sparse(x)
    assert y.device.type == "cpu"
    torch.testing.assert_close(y, dense(x), rtol=1e-4, atol=1e-4)


def test_graphs_that_hold_a_copy_and_eager_calls_around_them(layers, gpu):
    """A graph captured while a copy was out of date writes to it at each replay, from where the weight lay then."""
    dense, sparse = layers
    x = x_of(100, gpu)
    sparse(x)
    torch.cuda.synchronize()
    first = [p.data for p in dense.parameters()]
    for p in dense.parameters():
        p.data = p.data * 1.25
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sparse(x)
    captured = dense(x)
    close(sparse(x), captured)  # before any replay
    graph.replay()
    close(y, captured)
    for p, data in zip(dense.parameters(), first):
        p.data = data
    graph.replay()
    close(sparse(x), dense(x))
    graph.replay()
    close(sparse(x), dense(x))


def test_many_threads_on_streams_of_their_own(layers, gpu):
    dense, sparse = layers
    inputs = [x_of(80, gpu) for _ in range(4)]
    for turn in range(10):
        with torch.no_grad():
            for p in dense.parameters():
                p.mul_(-1.0 if turn % 2 else 0.9)
        expected = [dense(x) for x in inputs]
        torch.cuda.synchronize()
        found, barrier = [None] * 4, threading.Barrier(4)

        def work(i):
            with torch.cuda.stream(torch.cuda.Stream()), torch.no_grad():
                barrier.wait()
                found[i] = sparse(inputs[i])
                torch.cuda.current_stream().synchronize()

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        for y, wanted in zip(found, expected):
            close(y, wanted)


@pytest.mark.parametrize("kind", [GatedFeedForward, PlainFeedForward])
def test_gradients_of_gradients_where_weights_are_used_twice(kind, gpu):
    torch.manual_seed(3)
    dense = kind(256, 1024).to(gpu, torch.bfloat16)
    sparse = SparseFFN.from_module(copy.deepcopy(dense))
    x = x_of(200, gpu)

    def gradients(module, create_graph):
        return torch.autograd.grad(
            module(module(x)).float().square().sum(), [*module.parameters()], create_graph=create_graph
        )

    once, graph, expected = gradients(sparse, False), gradients(sparse, True), gradients(dense, False)
    for a, b, e in zip(once, graph, expected):
        assert (a - e).float().norm() < 0.1 * e.float().norm() and (b - e).float().norm() < 0.1 * e.float().norm()
