"""The puzzles' pictures: of the course's answer and of the reader's kernel, drawn alike."""

import pytest
import torch

from tests.course.handed_out import needs_a_compiler
from tests.course.puzzles.notebook_kernels import in_the_notebook
from twell_lab.course.puzzles import PUZZLES, figures


@needs_a_compiler
@pytest.mark.parametrize("name", [name for name, puzzle in PUZZLES.items() if puzzle.notebook == "06"])
def test_the_answer_is_drawn_and_what_is_handed_out_touches_nothing(name, tmp_path):
    file = tmp_path / f"{name}.cu"
    given, answer = in_the_notebook()[name]
    file.write_text(answer)
    torch.manual_seed(0)  # inputs are drawn
    figure = figures.yours(name, file)
    assert figure.layout.title.text.startswith("Yours: ") and len(figure.data) >= 4
    torch.manual_seed(0)
    asked = figures.asked(name)
    assert asked.layout.title.text == figure.layout.title.text.replace("Yours", "Asked")
    assert [cells.text for cells in asked.data] == [cells.text for cells in figure.data]
    file.write_text(given)
    assert figures.yours(name, file) is None
