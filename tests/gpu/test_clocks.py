"""The notebook on clocks on a GPU: calls return before their work is done, and the verdict finds the same faults."""

import pytest
import torch
from torch.nn.functional import linear

pytest.importorskip("plotly")  # the course draws

from twell_lab.bench.comparison import scattered  # noqa: E402
from twell_lab.course import notebook  # noqa: E402
from twell_lab.course.checks.speed import without_multiplying  # noqa: E402
from twell_lab.course.clocks import data as clocks  # noqa: E402
from twell_lab.formats import CSR  # noqa: E402
from twell_lab.sparsities.weights import SparseLinear  # noqa: E402

pytestmark = [pytest.mark.gpu, pytest.mark.filterwarnings("ignore:Sparse CSR")]


@pytest.fixture(scope="module")
def case():
    """(W [4096, 4096] of which 5% are not zero, x [1024, 4096])."""
    weight = scattered(4096, 4096, 204, dtype=notebook.dtype_for("cuda"), device="cuda")
    return weight, torch.randn(1024, 4096, device="cuda").to(weight.dtype)


def test_a_launched_product_is_not_waited_for(case):
    weight, x = case
    queue, stored, b = clocks.Queue("cuda"), CSR.from_dense(weight), x.T.contiguous()
    side = torch.randn(8192, 8192, device="cuda")
    asked, done = clocks.asked_and_done(lambda: side @ side, queue, 3)
    assert asked < done / 2
    asked, done = clocks.asked_and_done(lambda: without_multiplying(stored, b), queue, 3)
    assert 0 < asked <= done


def test_the_verdict_finds_the_faults_of_each_step(case):
    weight, x = case
    stored, left = CSR.from_dense(weight), weight.float().cpu()
    exact, dense = (lambda x: linear(x, weight.double())), (lambda x: linear(x, weight))
    left_behind = lambda x: linear(x.float().cpu(), left)  # noqa: E731
    plain = torch.nn.Linear(4096, 4096, bias=False, device="cuda")
    plain.weight = torch.nn.Parameter(weight, requires_grad=False)
    sparse = SparseLinear.from_linear(plain, product="csr")
    for layer, baseline, faults in (
        (lambda x: without_multiplying(stored, x.T).T, left_behind, ["right"]),
        (lambda x: linear(x, weight * (weight != 0)), dense, ["sparse"]),
        (sparse, left_behind, ["same terms"]),
        (sparse, dense, []),
    ):
        found = clocks.verdict(layer, baseline, x, exact, rounds=3)
        named = {asked for asked, (holds, _) in found.items() if not holds}
        assert set(faults) <= named <= {*faults, "same terms", "clear"}, found
        assert ("same terms" in named) == (baseline is not dense)


def test_the_machine_is_made_busy_and_left_in_peace(case):
    weight, x = case
    found = clocks.same_call_twice(lambda: weight @ x.T, "cuda", 6)
    assert all(value > 0 for samples in found.values() for times in samples.values() for value in times)
