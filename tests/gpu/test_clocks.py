"""The notebook on clocks on a GPU: calls return before their work is done, and the verdict finds the same faults."""

import pytest
import torch
from torch.nn.functional import linear

pytest.importorskip("plotly")  # the course draws

from twell_lab.course import clocks, notebook  # noqa: E402
from twell_lab.sparsities.weights import SparseLinear  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Sparse CSR")]


@pytest.fixture(scope="module")
def case():
    return clocks.case("cuda", notebook.dtype_for("cuda"))


def test_a_launched_product_is_not_waited_for(case):
    queue = clocks.Queue("cuda")
    side = torch.randn(8192, 8192, device="cuda")
    asked, done = clocks.asked_and_done(lambda: side @ side, queue, 3)
    assert asked < done / 2
    asked, done = clocks.asked_and_done(lambda: clocks.without_multiplying(case.stored, case.b), queue, 3)
    assert 0 < asked <= done


def test_the_verdict_finds_the_faults_of_each_step(case):
    def exact(x):
        return linear(x, case.weight.double())

    def dense(x):
        return linear(x, case.weight)

    plain = torch.nn.Linear(*case.weight.T.shape, bias=False, device="cuda")
    plain.weight = torch.nn.Parameter(case.weight, requires_grad=False)
    sparse = SparseLinear.from_linear(plain, product="csr")
    for layer, baseline, faults in (
        (lambda x: clocks.without_multiplying(case.stored, x.T).T, clocks.left_behind(case.weight), ["right"]),
        (lambda x: linear(x, case.weight * (case.weight != 0)), dense, ["sparse"]),
        (sparse, clocks.left_behind(case.weight), ["same terms"]),
        (sparse, dense, []),
    ):
        found = clocks.verdict(layer, baseline, case.x, exact, rounds=3)
        named = [line.asked for line in found.lines if not line.holds]
        assert set(faults) <= set(named), str(found)
        assert set(named) <= {*faults, "same terms", "clear"} and ("same terms" in named) == (baseline is not dense)


def test_the_machine_is_made_busy_and_left_in_peace(case):
    found = clocks.same_call_twice(lambda: case.weight @ case.b, "cuda", 6)
    assert all(value > 0 for samples in found.values() for times in samples.values() for value in times)
    assert clocks.small_calls(lambda: case.weight @ case.x[0])["wall_ms"] > 0
    assert min(map(min, clocks.warm_and_cold(lambda: case.weight @ case.x[0], "cuda", 3).values())) > 0
