"""The puzzles' pictures: what is asked agrees with what the answers do, and the reader's kernel is drawn."""

import pytest

from tests.course.puzzles.notebook_kernels import in_the_notebook, needs_a_compiler
from twell_lab.course import puzzles
from twell_lab.course.puzzles import figures, pictures


def panel_of(name: str, word: str) -> list[int | None]:
    """The owners of the cells of the panel whose caption has this word."""
    panel = next(panel for panel in pictures.picture(name)[1] if word in panel.caption)
    return [cell.owner for line in panel.lines for cell in line]


@needs_a_compiler
@pytest.mark.parametrize("name, word, array", [("map", "written by", "out"), ("vector_loads", "read by", "x")])
def test_the_picture_shows_what_the_answer_does(name, word, array, tmp_path):
    file = tmp_path / f"{name}.cu"
    file.write_text(in_the_notebook()[name][1])
    trace = puzzles.trace_of(name, file)
    touched = trace.writes(array) if "written" in word else trace.reads(array)
    assert [(owner,) for owner in panel_of(name, word)] == [
        touched[place] for place in range(len(panel_of(name, word)))
    ]


def test_the_prefix_sums_drawn_are_prefix_sums():
    panel = pictures.picture("prefix_sum")[1][0]
    first, last = ([int(cell.text) for cell in panel.lines[end]] for end in (0, -1))
    assert last == [sum(first[: lane + 1]) for lane in range(32)]
    assert [int(cell.text) for cell in pictures.picture("prefix_sum")[1][1].lines[0]] == last  # what is written


@needs_a_compiler
@pytest.mark.parametrize("name", pictures.PICTURES)
def test_the_answer_is_drawn_and_what_is_handed_out_touches_nothing(name, tmp_path):
    file = tmp_path / f"{name}.cu"
    given, answer = in_the_notebook()[name]
    file.write_text(answer)
    figure = figures.yours(name, file)
    assert figure.layout.title.text.startswith("Yours: ") and len(figure.data) >= 4
    file.write_text(given)
    assert figures.yours(name, file) is None
