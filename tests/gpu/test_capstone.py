"""The capstone on a GPU: its answer is right there, too, and is timed beside the library's versions."""

import pytest
import torch

pytest.importorskip("plotly")  # the course draws
pytest.importorskip("cupy")

from tests.course.capstone.notebook_kernel import changed, in_the_notebook  # noqa: E402
from twell_lab import simulator  # noqa: E402
from twell_lab.course.capstone import data as capstone  # noqa: E402
from twell_lab.course.capstone import gpu  # noqa: E402
from twell_lab.ops import clock  # noqa: E402
from twell_lab.ops.clock import dtype_for  # noqa: E402

pytestmark = pytest.mark.gpu


def test_the_answers_are_right_and_a_mistake_is_named():
    for answer in in_the_notebook()[1:]:
        assert gpu.wrong(gpu.Mine(answer, 256, dtype_for("cuda"))) is None
    mistaken = changed(("down_t + (long long)t * tile * d_model + c", "down_t + c"))
    assert "column within a tile" in gpu.wrong(gpu.Mine(mistaken, 256, dtype_for("cuda")))


@pytest.mark.parametrize("answer", in_the_notebook()[1:], ids=["silver", "gold"])
def test_it_is_timed_beside_the_library(answer):
    mine = gpu.Mine(answer, 256, dtype_for("cuda"))
    rows = gpu.timed(mine, tokens=2048, rounds=5)
    assert [row["path"] for row in rows] == ["yours", "down_v1", "down_v2", "down_v3"]
    assert all(row["ms"] > 0 and 25 < row["nnz"] < 33 for row in rows)


def test_a_result_that_is_not_as_in_float64_is_not_timed():
    zeros = changed(("sum[k] += value * weight[k]", "sum[k] += 1.1f * value * weight[k]"))
    with pytest.raises(clock.WrongResult, match="yours is not as in float64"):
        gpu.timed(gpu.Mine(zeros, 256, dtype_for("cuda")), tokens=512, rounds=2)


@pytest.mark.skipif(not simulator.available(), reason="needs a C++ compiler")
def test_a_submission_holds_times(tmp_path):
    (tmp_path / "down.cu").write_text(in_the_notebook()[1])
    _, on_gpu, record = capstone.submit(tmp_path / "down.cu")
    assert record.notes["medal"] in ("silver", "gold") and len(record.rows) == 5, on_gpu
    assert record.rows[1]["device"] == torch.cuda.get_device_name() and "smxx_down" in record.kernels
