"""The clocks of the course, on calls whose times are known, and the verdict, on benchmarks whose faults are."""

import threading
import time

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from twell_lab.bench.comparison import scattered
from twell_lab.course.checks.speed import without_multiplying
from twell_lab.course.clocks import data as clocks
from twell_lab.formats import CSR
from twell_lab.sparsities.weights import SparseLinear

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR")


@pytest.fixture(scope="module")
def case():
    """A weight [96, 80] of which 5% are not zero, and x [24, 80]."""
    torch.manual_seed(0)
    return scattered(96, 80, 4, dtype=torch.float32, device="cpu"), torch.randn(24, 80)


def layers(case):
    """(dense, exact) of the case."""
    weight, _ = case
    return (lambda x: linear(x, weight)), (lambda x: linear(x, weight.double()))


def test_the_queue_returns_before_its_work_is_done_and_waits_when_asked():
    queue, log = clocks.Queue("cpu"), []
    gate = threading.Event()
    queue.launch(lambda: (gate.wait(5), log.append("done")))
    assert log == []
    gate.set()
    queue.synchronize()
    assert log == ["done"] and "simulated" in queue.name


def test_the_stop_watch_separates_asking_from_doing():
    queue = clocks.Queue("cpu")
    for asked, done in (
        clocks.stop_watch(lambda: time.sleep(0.05), queue),
        clocks.asked_and_done(lambda: time.sleep(0.05), queue, 2),
    ):
        assert asked < 40 < 50 <= done


def test_an_error_in_the_queue_is_not_lost():
    queue = clocks.Queue("cpu")
    queue.launch(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        queue.synchronize()


def test_a_masked_layer_is_the_dense_one_and_a_sparse_one_is_not(case):
    (weight, x), (dense, _), sparse = case, layers(case), sparse_layer(case)
    whole = 24 * 80 * 96
    names, products = clocks.operations(lambda: linear(x, weight * (weight != 0)))
    assert names[-1] == "mm" and "mul" in names and products == [("mm", whole, True, "float32 on cpu")]
    assert clocks.dense_work(lambda: sparse(x)) == 0 < len(clocks.operations(lambda: sparse(x))[1])
    with torch.inference_mode():
        assert clocks.dense_work(lambda: dense(x)) == whole


def sparse_layer(case):
    plain = nn.Linear(80, 96, bias=False).requires_grad_(False)
    plain.weight.copy_(case[0])
    return SparseLinear.from_linear(plain, product="csr")


@pytest.mark.parametrize(
    ("call", "work"),
    [
        (lambda: torch.randn(3, 4) @ torch.randn(4), 12),
        (lambda: torch.addmm(torch.zeros(5), torch.randn(3, 4), torch.randn(4, 5)), 60),
        (lambda: torch.bmm(torch.randn(2, 3, 4), torch.randn(2, 4, 5)), 120),
        (lambda: torch.randn(4) @ torch.randn(4), 4),
        (lambda: torch.sparse.mm(torch.randn(3, 4).to_sparse_coo(), torch.randn(4, 5)), 0),
        (lambda: torch.randn(3, 4) * 2, 0),
    ],
)
def test_work_is_counted_for_every_kind_of_product(call, work):
    assert clocks.dense_work(call) == work


def failing(verdict: dict) -> set[str]:
    return {asked for asked, (holds, _) in verdict.items() if not holds}


@pytest.mark.parametrize(
    ("sparse", "faults", "sound"),
    [
        (None, set(), {"right", "sparse", "same terms", "waited"}),  # the sparse layer: what the clock says is not ours
        (lambda weight, x: without_multiplying(CSR.from_dense(weight), x.T).T, {"right"}, {"sparse"}),
        (lambda weight, x: linear(x, weight * (weight != 0)), {"sparse"}, {"right"}),
        (lambda weight, x: torch.full((24, 96), torch.nan), {"right"}, set()),
        (lambda weight, x: torch.zeros(24, 95), {"right", "same terms"}, set()),
        (lambda weight, x: torch.zeros(24, 96, dtype=torch.float64), {"right", "same terms"}, set()),
    ],
)
def test_faults_of_a_layer_are_named(case, sparse, faults, sound):
    (weight, x), (dense, exact) = case, layers(case)
    layer = sparse_layer(case) if sparse is None else lambda x: sparse(weight, x)
    verdict = clocks.verdict(layer, dense, x, exact, rounds=2)
    assert faults <= failing(verdict) and not sound & failing(verdict) and len(verdict) == 5


@pytest.mark.parametrize("hidden", [False, True])
def test_a_baseline_left_behind_is_named(case, hidden):
    (weight, x), (_, exact) = case, layers(case)
    left = lambda x: linear(x.double(), weight.double())  # noqa: E731
    verdict = clocks.verdict(sparse_layer(case), (lambda x: left(x).float()) if hidden else left, x, exact, rounds=2)
    assert "same terms" in failing(verdict) and "float64 on cpu" in verdict["same terms"][1]


def test_claims_that_did_not_wait_are_named(case):
    (_, x), (dense, exact), sparse = case, layers(case), sparse_layer(case)
    quick, slow = (clocks.verdict(sparse, dense, x, exact, claimed=(1e3, ms), rounds=2) for ms in (1e-6, 1e3))
    assert {"waited", "clear"} <= failing(quick) and "0.001 us claimed" in quick["waited"][1]
    assert "waited" not in failing(slow)
