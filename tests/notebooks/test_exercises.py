"""The exercises: every folded answer passes its check, what is handed out does not, and wrong answers are told."""

import json
import re
from pathlib import Path

import pytest
import torch

import twell_lab
from twell_lab.course import exercises
from twell_lab.course.measure import without_multiplying
from twell_lab.formats import TwELL

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
CALL = re.compile(r'exercises\.check\("(\w+)", (\w+)\)')
ANSWER = re.compile(r"<details>.*?```python\n(.*?)```.*?</details>", re.DOTALL)


def handed_out() -> dict[str, tuple[str, str, str]]:
    """name -> (the cell as handed out, the folded answer right after it, the function's name)."""
    found = {}
    for path in sorted(FOLDER.glob("*.ipynb")):
        cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
        for cell, after in zip(cells, cells[1:], strict=False):
            call = CALL.search("".join(cell["source"])) if cell["cell_type"] == "code" else None
            if call:
                answer = ANSWER.search("".join(after["source"]))
                assert answer, f"{path.name}: no folded answer right after the exercise {call[1]}"
                found[call[1]] = "".join(cell["source"]), answer[1], call[2]
    return found


def verdict(capsys) -> str:
    return capsys.readouterr().out


def test_every_check_belongs_to_an_exercise_and_back():
    assert sorted(handed_out()) == sorted(exercises.CHECKS)


@pytest.mark.parametrize("name", handed_out())
def test_the_folded_answer_passes_and_what_is_handed_out_does_not(name, capsys):
    given, answer, function = handed_out()[name]
    space = {"torch": torch, "tl": twell_lab, "exercises": exercises}
    exec(given, space)
    assert verdict(capsys).startswith("Not yet: ")
    exec(answer, space)
    exercises.check(name, space[function])
    assert verdict(capsys).startswith(exercises.RIGHT)


def pack_tile(gate: torch.Tensor, words: int) -> list[int]:
    """The words of one tile that are used, as whole numbers."""
    count, *stored = TwELL.from_gate(gate[None], len(gate), words).packed[0, 0].tolist()
    return [count, *(word % 2**32 for word in stored[:count])]


WRONG = {
    "weights_read": [lambda nnz, d_model: nnz * d_model, lambda nnz, d_model: 2 * 29 * 2048],
    "one_token": [
        lambda x, gate, up, down: down @ ((gate @ x).relu() * (up @ x)),  # reads the silent neurons
        lambda x, gate, up, down: torch.zeros_like(x),
        lambda x, gate, up, down: (gate @ x).relu(),
    ],
    "csr_bytes": [lambda rows, nnz, value_bytes: 8 * rows + nnz * (4 + value_bytes)],
    "csr_times_dense": [without_multiplying, lambda csr, b: None, lambda csr, b: csr.to_dense() @ b + 1e-2],
    "formula_l1": [
        lambda hidden, l1: l1 * sum(h.abs().sum(-1).mean() for h in hidden) / len(hidden),  # the other convention
        lambda hidden, l1: l1 * sum(h.mean() for h in hidden) / len(hidden),
    ],
    "firing_share": [
        lambda counts, share: share,
        lambda counts, share: (int((counts.cumsum(0) >= share * counts.sum()).int().argmax()) + 1) / len(counts),
    ],
    "pack_tile": [
        lambda gate, words: [],
        lambda gate, words: TwELL.from_gate(gate[None].nan_to_num(0.0), len(gate), words).packed[0, 0].tolist(),
        lambda gate, words: [min(int((~(gate <= 0)).sum()), words - 1)] + pack_tile(gate, words)[1:],
        lambda gate, words: pack_tile(gate, len(gate) + 1),  # as if there were always slots enough
    ],
    "fewest_words": [
        lambda counts, share: int(counts.max()) + 1,
        lambda counts, share: int(counts.double().quantile(1 - share)) + 1,  # of the tiles, not of the rows
    ],
}


@pytest.mark.parametrize(("name", "answer"), [(name, answer) for name, answers in WRONG.items() for answer in answers])
def test_wrong_answers_are_told(name, answer, capsys):
    exercises.check(name, answer)
    assert verdict(capsys).startswith("Not yet: ")


def test_a_function_that_raises_is_told_what_it_raised(capsys):
    exercises.check("weights_read", lambda nnz, d_model: nnz / 0)
    assert "ZeroDivisionError" in verdict(capsys)


def test_an_unknown_exercise_is_named():
    with pytest.raises(KeyError, match="weights_read"):
        exercises.check("nothing", len)
