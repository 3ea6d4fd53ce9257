"""A small set that touches every kernel, version and branch once: what runs under compute-sanitizer."""

import pytest
import torch

from tests.formats.pools import pool_used
from tests.ops.block_linear import cases as block_cases
from tests.ops.int8_products import cases as int8_cases
from tests.ops.kept_inputs import cases as kept_cases
from tests.ops.listed.cases import Case as ListedCase
from tests.ops.spmm import cases as spmm_cases
from tests.ops.train_lost.cases import Case as LostCase
from tests.simulator import quantise_cases
from tests.simulator.int8_cases import Int8Layer
from tests.simulator.pooled_cases import Pooled, adversarial
from twell_lab import ops
from twell_lab.cuda import launcher, macros, registry
from twell_lab.formats import TwELL, packed_and_pool
from twell_lab.ops import (
    ampere,
    block_linear,
    differentiable,
    hopper_pack,
    int8_products,
    kept_inputs,
    microtiles,
    portable,
    quantise_rows,
    reference,
    train_columns,
    train_dense,
    train_lost,
    train_rows,
    transpose,
)

pytestmark = pytest.mark.gpu
NO_TAIL = (None, None, None)


def gate_with_everything(rows, columns, dtype):
    """Silent rows, full tiles, overflowing tiles and odd values in one matrix."""
    generator = torch.Generator().manual_seed(3)
    gate = torch.where(torch.rand(rows, columns, generator=generator) < 0.03, 1.0, -1.0)
    gate *= torch.rand(rows, columns, generator=generator) + 0.1
    gate[0], gate[1] = -1.0, 1.0
    gate[2, : min(columns, 40)] = 0.5
    return gate.to(dtype).cuda()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("columns", [264, 517])
def test_pack(columns, dtype):
    gate = gate_with_everything(5, columns, dtype)
    for version in (1, 2) if columns % 8 else (1, 2, 3, 4):
        packed = portable.pack(gate, 256, 32, version)
        assert torch.equal(packed[..., 0], TwELL.from_gate(gate).counts)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [5, 300])
def test_listed(tokens, gated):
    ListedCase.draw([3] * (tokens - 2) + [700, 530], 264, 1504, gated, biases=True, device="cuda").check()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("d_model", [64, 1100, 2048])
def test_down_and_gated(d_model, dtype):
    gate = gate_with_everything(5, 300, dtype)
    generator = torch.Generator().manual_seed(4)
    up = torch.randn(300, d_model, generator=generator).to(dtype).cuda()
    down_t = torch.randn(300, d_model, generator=generator).to(dtype).cuda()
    x = torch.randn(5, d_model, generator=generator).to(dtype).cuda()
    x[4, 0] = torch.inf
    bias, up_bias = down_t[7].clone(), down_t[:, 3].contiguous()
    packed = TwELL.from_gate(gate)
    tail = (packed.tail_pointer, packed.tail_column, packed.tail_value)
    every = (1, 2, 3, 4) if portable.specialisation(dtype, d_model) else (1,)
    wide = [t.double().cpu() for t in (x, gate, up, down_t.t(), up_bias, bias)]
    exact = reference.gated(*wide)
    plain = reference.relu(wide[1]) @ wide[3].t() + wide[5]
    for version in every:
        for source, rest in ((gate, NO_TAIL), (None, tail)):
            y = portable.gated(x, packed.packed, source, rest, up, down_t, up_bias, bias, 256, version)
            assert torch.allclose(
                y.double().cpu(), exact, rtol=0.02, atol=0.02 * float(exact[:4].abs().max()), equal_nan=True
            )
            if version < 4:
                y = portable.down(packed.packed, source, rest, down_t, bias, 300, 256, version)
                assert torch.allclose(y.double().cpu(), plain, rtol=0.02, atol=0.02 * float(plain.abs().max()))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("d_model", [77, 264, 2048])
def test_gated_int8(d_model, dtype):
    case = Int8Layer.draw(gate_with_everything(5, 300, dtype).cpu(), d_model).cuda()
    for version in (1, 2, 3, 4):
        case.check(256, 32, version)
        case.check(256, 32, version, plain=True)
    case.check(256, 32, signed=True)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("kind", quantise_rows.KINDS)
def test_quantise_rows(kind, dtype):
    for columns, versions in ((77, (1,)), (264, (1, 2)), (8264, (1, 2))):
        x = quantise_cases.draw(columns, dtype)
        quantise_cases.check(x.cuda(), kind, versions)


@pytest.mark.parametrize("tile", macros.INT8_TILES)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_int8(dtype, tile):
    if torch.cuda.get_device_capability() < int8_products.OLDEST:
        pytest.skip("needs compute capability 8.0")
    int8_cases.check(130, 720, 272, dtype, tile)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("shape, versions", [((77, 301), (1,)), ((264, 8264), (1, 2))])
def test_kept_inputs(shape, versions, tokens, gated):
    """The second width of down needs more than one list of inputs. Compared on the CPU: racecheck complains of torch's
    products."""
    case = kept_cases.Case.draw(tokens, *shape, "silu", gated, device="cuda")
    gate, up, down, *biases = case.turned()
    first = (up, None, biases[1], None) if gate is None else (gate, up, *biases[:2])
    for version in versions:
        h = kept_inputs.product(case.x, *first, threshold=case.kept.inputs, kind="silu", version=version)
        y = kept_inputs.product(h, down, None, biases[2], threshold=case.kept.hidden, version=version)
        moved = {name: t.cpu() for name, t in zip(case._fields, case) if isinstance(t, torch.Tensor)}
        case._replace(**moved).check(h.cpu(), y.cpu())


@pytest.mark.parametrize("path, hot", [("dense", 0), ("twell", 0), ("hot_cold", 256)])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [20, 2060])
def test_infer(tokens, gated, path, hot):
    """The decode kernels at 20 tokens, the GEMMs with packing, the pool and the recomputed rows at 2,060."""
    generator = torch.Generator().manual_seed(5)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    x, first, up, down = normal(tokens, 136), normal(776, 136) / 12, normal(776, 136) / 12, normal(136, 776) / 4
    x[:, 0], first[:, 0] = 1.0, -2.0
    x[3, 0], x[5:21, 0], x[7, 4] = -8.0, 0.5, torch.inf  # everything fires; 16 rows overflow together; not finite
    bias = normal(136)
    wide = [t.bfloat16() for t in (x, first, up, down, bias)]
    x, first, up, down, bias = (t.cuda() for t in wide)
    weights = (first, up) if gated else (None, first)
    stats = torch.zeros(4, dtype=torch.int64, device="cuda")
    y = ops.infer(x, *weights, down, down_bias=bias, path=path, hot=hot, stats=stats).double().cpu()
    x, first, up, down, bias = (t.double() for t in wide)
    gate = x @ first.t()
    exact = reference.gated(x, gate, up, down, None, bias) if gated else reference.relu(gate) @ down.t() + bias
    finite = exact.isfinite().all(1)
    assert torch.allclose(y[finite], exact[finite], rtol=0.03, atol=0.03 * float(exact[finite].abs().max()))
    assert torch.equal(y.isfinite().all(1), finite)


@pytest.mark.parametrize("gated", [True, False])
def test_few_heavy_rows(gated):
    """Two rows with more kept values than one warp should walk."""
    generator = torch.Generator().manual_seed(11)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    x, first, up, down = normal(2060, 136), normal(776, 136) / 12, normal(776, 136) / 12, normal(136, 776) / 4
    x[:, 0], first[:, 0] = 1.0, -2.5
    x[9, 0] = x[2040, 0] = 0.2
    wide = [t.bfloat16() for t in (x, first, up, down)]
    stats = torch.zeros(4, dtype=torch.int64, device="cuda")
    x, first, up, down = (t.cuda() for t in wide)
    y = ops.infer(x, *((first, up) if gated else (None, first)), down, stats=stats).double().cpu()
    x, first, up, down = (t.double() for t in wide)
    gate = x @ first.t()
    exact = reference.gated(x, gate, up, down, None, None) if gated else reference.relu(gate) @ down.t()
    assert torch.allclose(y, exact, rtol=0.03, atol=0.03 * float(exact.abs().max()))
    if torch.cuda.get_device_capability() == (9, 0):
        assert stats[3] == 2


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0), reason="needs compute capability 9.0"
)
@pytest.mark.parametrize(
    "tokens, d_ff", [(20, 24), (530, 6120)]
)  # the second: more tiles than blocks, the last one narrow
@pytest.mark.parametrize("version", [0, 1, 2, 3])
def test_sm90_gate_pack(version, tokens, d_ff):
    generator = torch.Generator().manual_seed(6)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    x, weight, bias = normal(tokens, 136), normal(d_ff, 136) / 12, normal(d_ff) / 8
    x[:, 0], weight[:, 0] = 1.0, -2.0
    x[3, 0], x[9:13, 0] = -8.0, 0.5  # everything fires; some tiles overflow into the pool
    for dtype, with_bias in ((torch.bfloat16, False), (torch.float16, True)):
        arguments = [t.to(dtype).cuda() for t in (x, weight)] + [bias.to(dtype).cuda() if with_bias else None]
        gate = hopper_pack.dense_gate(*arguments)
        exact = torch.nn.functional.linear(*(t if t is None else t.double().cpu() for t in arguments))
        assert torch.allclose(gate.double().cpu(), exact, rtol=0.02, atol=0.02)
        if not version:
            continue
        packed, pool, _ = packed_and_pool(gate)
        found, spilled = hopper_pack.gate_pack(*arguments, None, version)
        used = torch.arange(32, device="cuda") <= packed[..., :1]
        assert torch.equal(found[..., 0], packed[..., 0]) and torch.equal(found[used], packed[used])
        used = torch.arange(64, device="cuda") < pool_used(packed)[..., None]
        assert torch.equal(spilled[used], pool[used])


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="needs compute capability 8.0"
)
@pytest.mark.parametrize("tokens, d_ff", [(20, 24), (300, 520)])
def test_sm80_gate_pack(tokens, d_ff):
    """Whole numbers, so that every order of summing gives the same gate."""
    generator = torch.Generator().manual_seed(7)
    x, weight = (torch.randint(-3, 4, (n, 136), generator=generator).bfloat16().cuda() for n in (tokens, d_ff))
    x[:, 0], weight[:, 0] = 4.0, -16.0
    x[3, 0] = -16.0  # everything fires
    packed, pool, _ = packed_and_pool(torch.nn.functional.linear(x, weight))
    found, spilled = ampere.gate_pack(x, weight)
    used = torch.arange(32, device="cuda") <= packed[..., :1]
    assert torch.equal(found[..., 0], packed[..., 0]) and torch.equal(found[used], packed[used])
    used = torch.arange(64, device="cuda") < pool_used(packed)[..., None]
    assert torch.equal(spilled[used], pool[used])


@pytest.mark.parametrize("height", macros.MICROTILE_ROWS)
@pytest.mark.parametrize("width", [200, 201])
def test_microtiles(width, height):
    """Stripes of zeros, of some columns and of all; a last one that is not full. The product from sm_80 on."""
    generator = torch.Generator().manual_seed(10)
    a = torch.randint(-3, 4, (3 * height + 5, width), generator=generator)
    a[:height, torch.rand(width, generator=generator) < 0.5] = 0
    a[height : 2 * height] = 0
    a, b = a.bfloat16().cuda(), torch.randint(-3, 4, (width, 264), generator=generator).bfloat16().cuda()
    for version in (1, 2) if width % 8 == 0 else (1,):
        tiles = microtiles.find(a, height, version)
        assert tiles[0].tolist() == [int((rows != 0).any(0).sum()) for rows in a.split(height)]
        if torch.cuda.get_device_capability() >= macros.TENSOR_CORES_OF_BF16:
            for which in (1, 2):
                c = microtiles.product(*tiles, b, len(a), which)
                assert torch.equal(c, (a.double() @ b.double()).bfloat16())


@pytest.mark.parametrize("path", differentiable.PATHS)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens", [20, 700])
def test_train(tokens, gated, path):
    """Every kernel of a training step: the pool, lost rows, lists of neurons that nearly all and that no token
    fires."""
    generator = torch.Generator().manual_seed(8)
    normal = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    x, first, up, down = normal(tokens, 136), normal(776, 136) / 12, normal(776, 136) / 12, normal(136, 776) / 4
    x[:, 0], first[:, 0] = 1.0, -2.0
    x[3, 0], x[5:17, 0] = -8.0, 0.5  # everything fires; twelve rows overflow together
    first[7], first[8] = 0, 0
    first[8, 0] = 2.0  # never; always but for row 3
    made = [t.bfloat16() for t in (x, first, up, down, normal(776) / 9, normal(776) / 9, normal(136))]
    weights = made[1:3] if gated else [None, made[1]]
    leaves = [
        None if t is None else t.cuda().requires_grad_()
        for t in (made[0], *weights, made[3], made[4] if gated else None, *made[5:])
    ]
    dy, dl1 = normal(tokens, 136).bfloat16(), torch.rand(tokens, generator=generator)
    y, l1, kept = differentiable.train_ffn(*leaves, path=path)
    asked = [t for t in leaves if t is not None]
    found = [y, l1, *torch.autograd.grad([y, l1], asked, [dy.cuda(), dl1.cuda()])]
    wide = [None if t is None else t.detach().cpu().double().requires_grad_() for t in leaves]
    a, g, u, d, bg, bu, bd = wide
    linear = torch.nn.functional.linear
    h = torch.relu(linear(a, g, bg)) * linear(a, u, bu) if gated else torch.relu(linear(a, u, bu))
    y, l1 = linear(h, d, bd), h.abs().sum(1)
    exact = [y, l1, *torch.autograd.grad([y, l1], [t for t in wide if t is not None], [dy.double(), dl1.double()])]
    for ours, right in zip(found, exact):
        assert (ours.detach().cpu().double() - right).norm() <= 0.03 * right.norm()
    assert ((kept.cpu() - (h != 0).sum(1)).abs() <= 2).all()


@pytest.mark.parametrize("gated", [True, False])
def test_train_versions(gated):
    """The plain versions of the training kernels and the fast ones give the same, but for the order of their sums."""
    generator = torch.Generator().manual_seed(9)
    normal = lambda *shape: torch.randn(*shape, generator=generator).bfloat16().cuda()  # noqa: E731
    x, first, up, down_t, dy = normal(70, 136), normal(776, 136), normal(776, 136), normal(776, 136), normal(70, 136)
    x[:, 0], first[:, 0] = 1.0, -25.0
    packed, pool = ampere.gate_pack(x, first)
    s = train_rows.survivors(x, packed, pool, up if gated else None, None, 776)
    alive = slice(int(s.spans[:, 1].sum()))
    results = []
    for version in (1, 2):
        dh = train_rows.hidden_gradient(dy, s, down_t, None, version)
        results.append(
            [
                train_rows.weighted_rows(s, down_t, None, version),
                dh[alive],
                train_rows.input_gradient(s, dh, first if gated else None, up, version),
                *train_columns.weight_gradients(x, dy, s, dh, 776, True, version),
                *train_dense.dense_hidden(first, up, version),
                *train_dense.dense_gradients(first, up, down_t.clone(), None, version),
            ]
        )
    assert alive.stop > 0
    for a, b in zip(*results):
        assert a is None or torch.allclose(a.float(), b.float(), rtol=0.02, atol=0.02 * float(b.float().abs().max()))
    assert torch.equal(transpose.transposed(down_t), down_t.t())


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("tokens, lost, room", [(90, 81, 70), (150, 140, 150)])
def test_lost_rows(tokens, lost, room, gated, monkeypatch):
    """Some on tensor cores and the others without; and more than one tile of them, whose columns blocks share."""
    takes = torch.cuda.get_device_capability() >= macros.TENSOR_CORES_OF_BF16
    monkeypatch.setattr(train_lost, "held", lambda x: min(room, len(x)) if takes else 0)
    case = LostCase.draw(tokens, 264, 776, torch.bfloat16, range(5, 5 + lost), gated=gated, biases=True)
    case.x[7, 3] = torch.nan
    case.to("cuda").check()


@pytest.mark.parametrize("each", spmm_cases.FORMATS)
def test_spmm(each):
    """Rows that the warps of a block share, rows cut between warps, and widths of no whole vectors."""
    for dtype in (torch.bfloat16, torch.float32):
        spmm_cases.check(spmm_cases.skewed(dtype).cuda(), 264, (each,))
    spmm_cases.check(spmm_cases.draw(9, 70, 0.2, torch.float16).cuda(), 7, (each,))


@pytest.mark.skipif(
    torch.cuda.is_available() and torch.cuda.get_device_capability() < (8, 0), reason="needs compute capability 8.0"
)
@pytest.mark.parametrize("size", [(16, 16), (16, 32), (32, 32), (64, 64), (128, 32)])
@pytest.mark.filterwarnings("ignore:Sparse BSR")
def test_blocks(size):
    w = block_cases.draw(*size, 4, 6, torch.bfloat16)
    x, bias = (t.cuda() for t in block_cases.inputs(270, w))
    for version in block_linear.VERSIONS:
        y = block_cases.operand(w.cuda(), size)(x, bias, version)
        block_cases.assert_right(y, x, w.cuda(), bias, size)


@pytest.mark.parametrize("name, version", [("gated", 5), ("gated", 6), ("gated", 7), ("down", 4), ("down", 5)])
def test_pooled(name, version):
    """One pass, teams, two passes: whatever the number of tokens would choose."""
    Pooled.draw(adversarial(34, 600, torch.bfloat16), 264, biases=True, start=True).to("cuda").check(name, version)


def test_every_kernel_that_this_gpu_runs_was_launched(request):
    """What is declared in the registry and not touched by the tests above would run unchecked by the sanitizers."""
    here = {item.name for item in request.session.items if item.path == request.path}
    if missing := [
        name for name in globals() if name.startswith("test_") and not any(i.startswith(name) for i in here)
    ]:
        pytest.skip(f"only beside all other tests of this file: {missing[0]} was left out")
    capability = torch.cuda.get_device_capability()
    takes_bf16 = capability >= macros.TENSOR_CORES_OF_BF16
    expected = {kernel.name for kernel in registry.KERNELS.values() if kernel.runs_on(capability)}
    assert expected <= launcher.loaded_kernels() | (set() if takes_bf16 else {"sm80_gate_pack"})
