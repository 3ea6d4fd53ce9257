"""What the notebooks hand out for the puzzles, and the folded answers."""

from tests.course.handed_out import handed_out
from twell_lab.course.puzzles import PUZZLES


def in_the_notebook() -> dict[str, tuple[str, str]]:
    """name -> (what is handed out, the folded answer)."""
    return {name: texts[:2] for name, texts in handed_out(kernels=True).items() if name in PUZZLES}
