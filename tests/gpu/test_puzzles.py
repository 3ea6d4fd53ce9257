"""The answers to the CUDA puzzles on a GPU: judged there too, with the same result as in the simulator."""

import pytest
import torch

pytest.importorskip("plotly")  # the course draws
pytest.importorskip("cupy")

from tests.course.puzzles.notebook_kernels import in_the_notebook  # noqa: E402
from twell_lab.course.puzzles import PUZZLES  # noqa: E402
from twell_lab.course.puzzles.data import on_gpu  # noqa: E402

pytestmark = pytest.mark.gpu


@pytest.fixture(scope="module")
def answers() -> dict[str, str]:
    return {name: answer for name, (_, answer) in in_the_notebook().items()}


@pytest.mark.parametrize("name", [name for name, puzzle in PUZZLES.items() if puzzle.notebook != "08"])
def test_the_answer_gives_what_is_wanted(name, answers):
    cases = PUZZLES[name].cases()
    for case, got in zip(cases, on_gpu(answers[name], name, cases), strict=True):
        for output, want in case.wanted.items():
            used = case.used.get(output, want == want)
            mine = case.read.get(output, torch.clone)(got[output])
            assert torch.equal(mine[used].to(want.dtype), want[used]), f"{output} with {case.said}"


def test_an_edited_kernel_is_the_one_that_runs(answers):
    name = next(iter(PUZZLES))
    cases = PUZZLES[name].cases()
    first = on_gpu(answers[name], name, cases)
    emptied = on_gpu(answers[name][: answers[name].index("{")] + "{}", name, cases)
    assert any(not torch.equal(a[key], b[key]) for a, b in zip(first, emptied, strict=True) for key in a)
