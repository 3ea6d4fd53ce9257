"""The clocks of the course, on calls whose times are known, and the verdict, on benchmarks whose faults are."""

import math
import threading
import time

import pytest
import torch
from torch import nn
from torch.nn.functional import linear

from twell_lab.core import InputError
from twell_lab.course.clocks import data as clocks
from twell_lab.sparsities.weights import SparseLinear

pytestmark = pytest.mark.filterwarnings("ignore:Sparse CSR")


@pytest.fixture(scope="module")
def case():
    torch.manual_seed(0)
    return clocks.case("cpu", torch.float32, (96, 80, 24))


def layers(case):
    """(dense, exact) of the case."""
    return (lambda x: linear(x, case.weight)), (lambda x: linear(x, case.weight.double()))


# ---- the number ----


def test_claims_keep_the_steps_and_name_the_largest_repair():
    claims = clocks.Claims()
    assert claims.add("claimed", 50.0, 0.01) == "claimed: 5,000x"
    with pytest.raises(InputError, match="1 steps"):
        claims.largest()
    claims.add("waits", 50.0, 5.0)
    claims.add("fair", 20.0, 100.0)
    assert claims.largest() == ("waits", 500.0)
    claims.add("waits", 50.0, 0.02)  # the cell again
    assert list(claims.steps) == ["claimed", "waits", "fair"] and claims.largest()[0] == "fair"


@pytest.mark.parametrize("given", [(0.0, 1.0), (1.0, 0.0), (math.nan, 1.0)])
def test_claims_refuse_what_is_no_time(given):
    with pytest.raises(InputError, match="above zero"):
        clocks.Claims().add("claimed", *given)


# ---- clocks ----


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


# ---- what ran ----


def test_a_masked_layer_is_the_dense_one_and_a_sparse_one_is_not(case):
    dense, _ = layers(case)
    whole = 24 * 80 * 96
    names, products = clocks.operations(lambda: linear(case.x, case.weight * (case.weight != 0)))
    assert names[-1] == "mm" and "mul" in names
    assert [(each.name, each.work, each.dense, each.terms) for each in products] == [
        ("mm", whole, True, "float32 on cpu")
    ]
    sparse = sparse_layer(case)
    assert clocks.dense_work(lambda: sparse(case.x)) == 0 < len(clocks.operations(lambda: sparse(case.x))[1])
    with torch.inference_mode():
        assert clocks.dense_work(lambda: dense(case.x)) == whole


def sparse_layer(case, bias=False):
    plain = nn.Linear(80, 96, bias=bias).requires_grad_(False)
    plain.weight.copy_(case.weight)
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


# ---- the verdict ----


def failing(verdict) -> list[str]:
    return [each for each in verdict.fails.split(", ") if each != "nothing"]


def test_a_sound_benchmark_has_nothing_against_it(case):
    dense, exact = layers(case)
    found = clocks.verdict(sparse_layer(case), dense, case.x, exact, rounds=3)
    assert set(failing(found)) <= {"clear"}  # what the clock says here is not ours to say
    assert len(str(found).splitlines()) == 5 and found.x > 0


def test_the_kernel_that_does_not_multiply_is_wrong_and_the_masked_layer_dense(case):
    dense, exact = layers(case)
    kernel = clocks.verdict(lambda x: clocks.without_multiplying(case.stored, x.T).T, dense, case.x, exact, rounds=3)
    assert "right" in failing(kernel) and "sparse" not in failing(kernel)
    masked = clocks.verdict(lambda x: linear(x, case.weight * (case.weight != 0)), dense, case.x, exact, rounds=3)
    assert "sparse" in failing(masked) and "right" not in failing(masked)


@pytest.mark.parametrize(
    ("sparse", "named"),
    [
        (lambda x: torch.full((24, 96), torch.nan), "right"),
        (lambda x: torch.zeros(24, 95), "right"),
        (lambda x: torch.zeros(24, 96), "right"),
        (lambda x: torch.zeros(24, 96, dtype=torch.float64), "same terms"),
        (lambda x: torch.zeros(24, 95), "same terms"),
    ],
)
def test_wrong_results_are_named(case, sparse, named):
    dense, exact = layers(case)
    assert named in failing(clocks.verdict(sparse, dense, case.x, exact, rounds=2))


def test_a_baseline_left_behind_is_named(case):
    _, exact = layers(case)
    for behind in (
        clocks.left_behind(case.weight),
        lambda x: linear(x.double(), case.weight.double()).float(),  # and hides it
    ):
        found = clocks.verdict(sparse_layer(case), behind, case.x, exact, rounds=2)
        assert "same terms" in failing(found) and "float64 on cpu" in str(found)


def test_claims_that_did_not_wait_are_named(case):
    dense, exact = layers(case)
    sparse = sparse_layer(case)
    found = clocks.verdict(sparse, dense, case.x, exact, claimed=(1e3, 1e-6), rounds=2)
    assert {"waited", "clear"} <= set(failing(found)) and "0.001 us claimed" in str(found)
    slow = clocks.verdict(sparse, dense, case.x, exact, claimed=(1e3, 1e3), rounds=2)
    assert "waited" not in failing(slow)
    with pytest.raises(InputError, match="claimed is"):
        clocks.verdict(sparse, dense, case.x, exact, claimed=(0.0, 1.0))
