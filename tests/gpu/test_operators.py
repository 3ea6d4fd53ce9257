"""The operators as torch sees them on a GPU: streams, graphs, compile, autograd, no waiting for the device."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

import twell_lab as tl
from twell_lab import bench
from twell_lab.cuda import cubins, launcher
from twell_lab.cuda.launch import run
from twell_lab.ops import accuracy, reference
from twell_lab.ops.pack import pack
from twell_lab.ops.reference import GatedFeedForward, PlainFeedForward

pytestmark = pytest.mark.gpu


def layer(kind=GatedFeedForward, d_model=256, d_ff=1000, dtype=torch.bfloat16, seed=0) -> nn.Module:
    torch.manual_seed(seed)
    module = kind(d_model, d_ff).cuda()
    pattern = module.gate_proj if hasattr(module, "gate_proj") else module.up_proj
    pattern.weight.data[:, 0] -= 1.0  # with x[:, 0] = 1 below: a threshold, so that few neurons fire
    return module.to(dtype)


def inputs(tokens, d_model=256, dtype=torch.bfloat16, seed=1) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    x = torch.randn(tokens, d_model, generator=generator, device="cuda")
    x[:, 0] = 1.0
    return x.to(dtype)


def exact_of(module, x) -> torch.Tensor:
    """float64 result from the gate that torch computed."""
    weights = {name: p.double() for name, p in module.named_parameters()}
    up, down = weights["up_proj.weight"], weights["down_proj.weight"]
    if "gate_proj.weight" not in weights:
        return linear(reference.relu(linear(x, module.up_proj.weight)).double(), down)
    gate = linear(x, module.gate_proj.weight).double()
    return reference.gated(x.double(), gate, up, down)


@pytest.mark.parametrize("kind", [GatedFeedForward, PlainFeedForward])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("tokens", [1, 2, 17, 300])
def test_sparse_ffn_keeps_the_error_promise(tokens, dtype, kind):
    module, x = layer(kind, dtype=dtype), inputs(tokens, dtype=dtype)
    with torch.no_grad():
        y, dense = tl.SparseFFN.from_module(module)(x), module(x)
        assert accuracy.worst_row(y, dense, exact_of(module, x))[0] <= 1.0


def test_zero_tokens():
    module = layer()
    assert tl.SparseFFN.from_module(module)(inputs(0)).shape == (0, 256)


def test_overflowing_rows_stay_exact():
    """Row 0 fires half the layer, row 1 nothing at all, row 2 one tile with 40."""
    tokens, d_ff = 300, 1000
    module = layer(d_ff=d_ff)
    with torch.no_grad():
        x = inputs(tokens)
        x[0, 0], x[1, 0], x[2] = -1.0, 30.0, 0.0
        x[2, 5] = 1.0
        module.gate_proj.weight[:, 5] = -1.0
        module.gate_proj.weight[256:296, 5] = 1.0
        counts = tl.pack(linear(x, module.gate_proj.weight)).counts
        assert counts[0].sum() > 300 and counts[1].sum() == 0 and counts[2].tolist() == [0, 40, 0, 0]
        y = tl.SparseFFN.from_module(module)(x)
        assert accuracy.worst_row(y, module(x), exact_of(module, x))[0] <= 1.0


def test_pack_is_exact_with_its_tail():
    gate = torch.randn(50, 1000, device="cuda", dtype=torch.bfloat16)
    gate[10] = -1
    packed = tl.pack(gate)
    assert torch.equal(packed.to_dense(), reference.relu(gate))
    assert len(packed.overflow_rows) == 49
    weight = torch.randn(64, 1000, device="cuda", dtype=torch.bfloat16)
    exact = linear(reference.relu(gate).double(), weight.double())
    assert accuracy.worst_row(tl.ops.packed_down(packed, weight), linear(torch.relu(gate), weight), exact)[0] <= 1.0
    x, up = inputs(50, 64), torch.randn(1000, 64, device="cuda", dtype=torch.bfloat16)
    exact = reference.gated(x.double(), gate.double(), up.double(), weight.double())
    dense = linear(torch.relu(gate) * linear(x, up), weight)
    assert accuracy.worst_row(tl.ops.packed_gated(x, packed, up, weight), dense, exact)[0] <= 1.0


@pytest.mark.parametrize("kind", [GatedFeedForward, PlainFeedForward])
def test_nothing_waits_for_the_gpu(kind):
    module, x = layer(kind), inputs(300)
    x[0, 0] = -1.0  # an overflowing row is no reason either
    sparse = tl.SparseFFN.from_module(module)
    with torch.no_grad():
        sparse(x)
        torch.cuda.set_sync_debug_mode("error")
        try:
            sparse(x)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_side_stream():
    module, x = layer(), inputs(4096)
    sparse = tl.SparseFFN.from_module(module)
    with torch.no_grad():
        expected = sparse(x)
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            late = x * 1  # produced on the side stream: a kernel on another one would read it too early
            torch.cuda._sleep(20_000_000)
            late = late + 0
            y = sparse(late)
        torch.cuda.current_stream().wait_stream(stream)
        assert torch.equal(y, expected)


def test_cuda_graph():
    module = layer()
    sparse = tl.SparseFFN.from_module(module)
    x = inputs(64)
    with torch.no_grad():
        sparse(x)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = sparse(x)
        for seed in (5, 6):
            x.copy_(inputs(64, seed=seed))
            graph.replay()
            assert torch.equal(y, sparse(x))


@pytest.mark.parametrize("kind", [GatedFeedForward, PlainFeedForward])
def test_compile_fullgraph(kind):
    module, x = layer(kind), inputs(100)
    sparse = tl.SparseFFN.from_module(module)
    compiled = torch.compile(sparse, fullgraph=True)
    with torch.no_grad():
        assert torch.equal(compiled(x), sparse(x))
        module.down_proj.weight.mul_(2)
        assert torch.equal(compiled(x), sparse(x))
        assert torch.allclose(sparse(x).float(), module(x).float(), rtol=0.1, atol=0.05)
    compiled(x).sum().backward()
    assert module.down_proj.weight.grad is not None


@pytest.mark.parametrize("kind", [GatedFeedForward, PlainFeedForward])
def test_gradients_match_the_dense_layer(kind):
    dense = layer(kind, dtype=torch.float32)
    twin = copy.deepcopy(dense)
    sparse = tl.SparseFFN.from_module(twin)
    x = inputs(100, dtype=torch.float32).requires_grad_()
    z = x.detach().clone().requires_grad_()
    upstream = torch.randn(100, 256, device="cuda")
    dense(x).backward(upstream)
    sparse(z).backward(upstream)
    torch.testing.assert_close(z.grad, x.grad, rtol=1e-4, atol=1e-5)
    for (name, p), q in zip(dense.named_parameters(), twin.parameters()):
        torch.testing.assert_close(q.grad, p.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_two_models_never_meet():
    a, b = layer(seed=1), layer(seed=2, d_ff=640)
    sa, sb = tl.SparseFFN.from_module(a), tl.SparseFFN.from_module(b)
    x = inputs(33)
    with torch.no_grad():
        ya, yb = sa(x), sb(x)
        for _ in range(3):
            assert torch.equal(sa(x), ya) and torch.equal(sb(x), yb)


def test_weights_that_change_are_followed():
    module, x = layer(), inputs(20)
    sparse = tl.SparseFFN.from_module(module)
    with torch.no_grad():
        sparse(x)
        module.down_proj.weight.add_(0.1)
        fresh = tl.SparseFFN.from_module(copy.deepcopy(module))
        assert torch.equal(sparse(x), fresh(x))
        moved = copy.deepcopy(sparse).cpu().cuda()
        assert torch.equal(moved(x), sparse(x))


def test_autocast_computes_in_its_dtype():
    module, x = layer(dtype=torch.float32), inputs(20, dtype=torch.float32)
    with torch.no_grad(), torch.autocast("cuda", dtype=torch.bfloat16):
        y, dense = tl.SparseFFN.from_module(module)(x), module(x)
    assert y.dtype == dense.dtype == torch.bfloat16
    assert (y - dense).norm() / dense.norm() < 0.02


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_gpu_from_the_first():
    module = layer().to("cuda:1")
    x = inputs(20).to("cuda:1")
    with torch.no_grad():
        assert torch.allclose(tl.SparseFFN.from_module(module)(x).float(), module(x).float(), rtol=0.1, atol=0.05)


def test_sparsify_opt_and_llama():
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    llama = transformers.LlamaForCausalLM(
        transformers.LlamaConfig(
            vocab_size=200,
            hidden_size=128,
            intermediate_size=520,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            hidden_act="relu",
        )
    )
    opt = transformers.OPTForCausalLM(
        transformers.OPTConfig(
            vocab_size=200,
            hidden_size=128,
            ffn_dim=520,
            num_hidden_layers=2,
            num_attention_heads=4,
            max_position_embeddings=64,
            word_embed_proj_dim=128,
        )
    )
    ids = torch.randint(0, 200, (2, 19), device="cuda")
    for model in (llama, opt):
        model = model.cuda().eval()
        with torch.no_grad():
            expected = model(ids).logits
            got = tl.sparsify(model, "twell")(ids).logits
            assert (got - expected).norm() / expected.norm() < 1e-4
            assert torch.equal(tl.densify(model)(ids).logits, expected)


def test_bench_checks_then_times():
    record = bench.ffn(300, 256, 1000, 10, compiled=False)
    paths = {row["path"]: row for row in record.rows}
    assert {"dense eager", "twell", "part: gate GEMM", "part: pack", "part: sparse"} <= set(paths)
    assert all(row["ms"] > 0 for row in record.rows)
    assert paths["twell"]["error_over_allowed"] <= 1.0


def test_cubins_compiled_elsewhere_are_used(monkeypatch, tmp_path):
    """What a CPU machine compiled ahead is loaded as it is: nothing is compiled here."""
    arch = cubins.architecture(torch.cuda.get_device_capability(), "smxx_pack.cu")
    defines = {"VALUE_BF16": True}
    cubins.compile("smxx_pack.cu", arch, defines, cache_in=tmp_path)
    monkeypatch.setenv("TWELL_LAB_CUBINS", str(tmp_path))
    monkeypatch.setattr(cubins, "_run_nvrtc", lambda *a: pytest.fail("compiled although a cubin was there"))
    monkeypatch.setattr(launcher, "_loaded", {})
    monkeypatch.setattr(launcher, "own", launcher._Own())
    gate = torch.randn(5, 600, device="cuda", dtype=torch.bfloat16)
    packed = run(pack, gate, 256, 32)
    assert torch.equal(packed[..., 0], tl.formats.TwELL.from_gate(gate).counts)
