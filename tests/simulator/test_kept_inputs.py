"""Products that read the weights of kept inputs alone, in the simulator, with C++ in the place of their PTX: beside
float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.ops.kept_inputs.cases import Case
from tests.simulator.without_ptx import without_ptx
from twell_lab import simulator
from twell_lab.cuda import macros, sources
from twell_lab.ops.kept_inputs import FILE, KINDS

pytestmark = pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")


@pytest.fixture(scope="module")
def source():
    return without_ptx(FILE)


def product(source, version, x, first, second, first_bias, second_bias, threshold, kind):
    """What ops.kept_inputs.product launches."""
    defines = macros.kept_inputs(x.dtype, len(x), second is not None, kind)
    number = lambda name: sources.number(FILE, name, defines)  # noqa: E731
    (tokens, inputs), outputs = x.shape, first.shape[1]
    y = torch.full((tokens, outputs), torch.nan, dtype=x.dtype)
    threads, columns = (number("V1_THREADS"),) * 2 if version == 1 else (number("THREADS"), number("SLAB"))
    bound = torch.tensor(threshold, dtype=x.dtype).item()
    given = (x, first, second, first_bias, second_bias, y, tokens, inputs, outputs, bound)
    program = simulator.compile(source, dict(defines))
    program.launch(f"kept_inputs_v{version}", (-(-outputs // columns), tokens if version == 1 else 1), threads, given)
    return y


def layer(source, version, case):
    """h before its threshold, and y, as ops.kept_inputs.layer has them."""
    gate, up, down, gate_bias, up_bias, down_bias = case.turned()
    first = (up, None, up_bias, None) if gate is None else (gate, up, gate_bias, up_bias)
    h = product(source, version, case.x, *first, case.kept.inputs, case.kept.kind)
    return h, product(source, version, h, down, None, down_bias, None, case.kept.hidden, None)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@given(
    tokens=st.integers(1, 4),
    d_model=st.integers(1, 30),
    d_ff=st.integers(1, 60),
    zeros=st.sampled_from([0.0, 0.3, 0.9, 1.0]),
    dtype=st.sampled_from([torch.bfloat16, torch.float16]),
    biases=st.booleans(),
)
@settings(max_examples=5, deadline=None)
def test_layers(source, kind, gated, tokens, d_model, d_ff, zeros, dtype, biases):
    for version, by in ((1, 1), (2, 8)):
        case = Case.draw(tokens, by * d_model, by * d_ff, kind, gated, biases, zeros, dtype)
        if tokens > 2:
            case.x[1, -1], case.x[2, -1] = torch.inf, torch.nan
        case.check(*layer(source, version, case))


@pytest.mark.parametrize("tokens", [1, 3])
def test_more_inputs_than_one_list_holds(source, tokens):
    """And not a whole number of lists, with inputs that no warp has."""
    case = Case.draw(tokens, 8, 8192 + 40, dtype=torch.float16)
    h, y = layer(source, 2, case)
    case.check(h, y)
    assert torch.equal(y, layer(source, 2, case)[1])


def test_what_is_not_kept_is_not_read(source):
    """Rows of NaN in the weights change nothing; of what one token keeps and another does not, neither."""
    case = Case.draw(2, 40, 16, zeros=0.6)
    gate, up, *_ = case.turned()
    silent = (case.x.abs() < case.kept.inputs).all(0) | (case.x == 0).all(0)
    assert silent.any()
    expected = product(source, 2, case.x, gate, up, None, None, case.kept.inputs, "silu")
    gate[silent], up[silent] = torch.nan, torch.nan
    for version in (1, 2):
        found = product(source, version, case.x, gate, up, None, None, case.kept.inputs, "silu")
        assert torch.allclose(found.float(), expected.float(), rtol=0.02, atol=1e-3)
