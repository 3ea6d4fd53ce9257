"""The student's edition: valid notebooks without outputs or answers, which run to their end as they are."""

import json
import re
from importlib import metadata

import nbformat
import pytest

from twell_lab import core
from twell_lab.core import InputError
from twell_lab.course import edition, exercises, notebook

GITHUB = "https://github.com/somebody/twell-lab"
SOURCES = {
    path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(core.notebooks_dir().glob("*.ipynb"))
}
QUICK = "07-pack-it.ipynb"
LINK = re.compile(r"\]\(([^)#]+)")


def texts(cells, kind=("code", "markdown")) -> str:
    return "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] in kind)


@pytest.mark.parametrize("name", SOURCES)
def test_a_students_notebook_is_valid_and_has_no_output_no_guess_and_no_answer(name):
    source = texts(SOURCES[name]["cells"])
    notebook, answers = edition.student(SOURCES[name], name)
    nbformat.reads(json.dumps(notebook), as_version=4)  # validates
    cells, whole = notebook["cells"], texts(notebook["cells"])
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)
    folded = re.findall(r"<summary>Answer.*?```\w+\n(.*?)```", source, re.DOTALL)
    assert len(folded) == source.count("<summary>Answer") and not [code for code in folded if code in whole]
    assert all(code in answers for code in folded) and answers.startswith("# Answers to ") == bool(folded)
    guesses = re.findall(r"(?m)^guess(?:es)?\b.* = .*", whole)
    assert len(guesses) == len(re.findall(r"(?m)^guess(?:es)?\b.* = ", source))
    assert all(edition.DOTS in guess.partition("#")[0] and guess.partition("#")[2] for guess in guesses)
    headings = [bool(re.search(r"(?m)^#{1,3} ", texts([cell], "markdown"))) for cell in cells]
    assert [cell["metadata"].get("slideshow") is not None for cell in cells] == headings and headings[0]
    for exercise in set(re.findall(r'exercises\.check\("(\w+)"', source)):
        assert f'exercises.hint("{exercise}")' in whole or "<summary>Hint 1" in whole  # folded, if not asked for
        assert f"## {exercise}" in answers


def test_what_is_accepted_stands_beside_the_dots():
    lines = {
        "guess = 2  # percent": "guess = ...  # a number: percent",
        "guess, found = 2, []": "guess, found = ..., []  # a number",
        'guess = "as many"  # or "more"': 'guess = ...  # "as many" or "more"',
        "guess = [64]": "guess = ...  # a list of numbers",
        'guess = "ELL"': "guess = ...  # a word, in quotes",
        "guesses = {0.5: 5.0, 0.9: 50.0}  # percent": "guesses = {0.5: ..., 0.9: ...}  # percent",
    }
    title = {"cell_type": "markdown", "source": ["# A title"]}
    cell = {"cell_type": "code", "source": [line + "\n" for line in lines]}
    got = edition.student({"cells": [title, cell]}, "a.ipynb")[0]["cells"][1]["source"]
    assert "".join(got).splitlines() == [*lines.values()]


@pytest.mark.parametrize("name", SOURCES)
def test_links_lead_to_files_of_the_folder_or_where_all_is_alone_to_the_repository(name):
    files = {*SOURCES, *(f"solutions/{name.removesuffix('.ipynb')}.md" for name in SOURCES)}
    cells, answers = edition.student(SOURCES[name], name)
    for link in LINK.findall(texts(cells["cells"], ["markdown"])):
        assert link in files or link.startswith("https:")
    assert {link.removeprefix("../") for link in LINK.findall(answers)} <= files
    cells, answers = edition.student(SOURCES[name], name, GITHUB, alone=True)
    for link in LINK.findall(texts(cells["cells"], ["markdown"]) + answers):
        assert link.startswith("https:")
        if link.startswith(GITHUB):
            branch, _, file = link.removeprefix(f"{GITHUB}/blob/").partition("/")
            assert file in files if branch == edition.BRANCH else (core.notebooks_dir().parent / file).exists()


def test_notebooks_for_colab_need_the_repositorys_address(tmp_path, monkeypatch):
    project = metadata.metadata("twell-lab")
    monkeypatch.setattr(metadata, "metadata", lambda name: project)
    with pytest.raises(InputError, match="names one"):
        edition.write(tmp_path, alone=True)
    project["Project-URL"] = f"Repository, {GITHUB}/"
    assert edition.repository() == GITHUB
    edition.write(tmp_path, alone=True)
    assert f"({GITHUB}/blob/student/glossary.ipynb" in (tmp_path / sorted(SOURCES)[0]).read_text()


def test_a_notebook_runs_to_its_end_before_anything_is_written(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    made = nbformat.reads(json.dumps(edition.student(SOURCES[QUICK], QUICK)[0]), as_version=4)
    nbclient.NotebookClient(
        made, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    asked = 0
    for cell in made.cells:
        said = "".join(output.get("text", "") for output in cell.get("outputs", []))
        if cell.cell_type == "code" and "exercises.check" in cell.source:
            assert said.startswith("Not yet: ")
        if cell.cell_type == "code" and "\nguess = ..." in cell.source:
            asked += said.startswith("Predict first") and len(cell.outputs) == 1
    assert asked == 1


def test_a_guess_in_dots_hides_what_came_out_and_nothing_after_it(tmp_path):
    nbclient = pytest.importorskip("nbclient")
    cells = [
        "from twell_lab.course import notebook\nnotebook.setup()",
        "guess, x = ..., 7  # a number\nprint(f'{guess:g}')\ndisplay(8)\n9",
        "guesses = {1: ..., 2: ...}\nprint(f'{guesses[2]:+.1f}')\n1 / 0",
        "guess = 3  # ...\nprint(guess)\nx",
    ]
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    place = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(made, timeout=120, kernel_name="python3", allow_errors=True, resources=place).execute()
    hidden, failed, shown = (cell.outputs for cell in made.cells[1:])
    assert [output.get("text", "")[:13] for output in hidden] == ["Predict first"]
    assert [output.get("ename", output.get("text", ""))[:17] for output in failed] == [
        "ZeroDivisionError",
        "Predict first: wr",
    ]
    assert shown[0].text == "3\n" and shown[1].data["text/plain"] == "7"


def test_each_exercise_has_two_hints_and_none_is_a_line_of_its_answer():
    assert sorted(exercises.hints()) == sorted(exercises.CHECKS)
    answers = "".join(edition.student(source, name)[1] for name, source in SOURCES.items())
    lines = {line.strip() for line in answers.splitlines() if len(line.strip()) > 12}
    for two in exercises.hints().values():
        assert len(two) == 2 and two[0] != two[1]
        for hint in two:
            assert len(hint.split()) > 4 and not lines & {*re.findall("`(.*?)`", hint)}


def test_a_hint_that_a_notebook_folds_is_the_one_that_its_exercise_gives():
    hints = exercises.hints()
    for source in SOURCES.values():
        exercise = ""
        for cell in source["cells"]:
            text = "".join(cell["source"])
            exercise = ([exercise] + re.findall(r'exercises\.check\("(\w+)"', text))[-1]
            for number, folded in re.findall(r"<summary>Hint (\d)</summary>\n(.*?)</details>", text, re.DOTALL):
                assert folded.split() == hints[exercise][int(number) - 1].split(), exercise


def test_hints_come_one_after_the_other_and_are_named_from_the_second_refusal_on(capsys, monkeypatch):
    monkeypatch.setattr(exercises, "_shown", exercises.Counter())
    monkeypatch.setattr(exercises, "_refusals", exercises.Counter())
    for _ in range(2):
        exercises.check("amdahl", lambda share, times: 1)
    assert capsys.readouterr().out.count('exercises.hint("amdahl")') == 1
    for number in (1, 2, 2):
        exercises.hint("amdahl")
        assert exercises.hints()["amdahl"][number - 1] in capsys.readouterr().out
    with pytest.raises(KeyError, match="no exercise"):
        exercises.hint("nobody")


@pytest.fixture
def on_colab(tmp_path, monkeypatch):
    """(the working folder, Drive's folder for it)"""
    (tmp_path / "content").mkdir()
    (tmp_path / "MyDrive").mkdir()
    monkeypatch.chdir(tmp_path / "content")
    monkeypatch.setattr(notebook, "DRIVE", tmp_path / "MyDrive")
    return tmp_path / "content", tmp_path / "MyDrive" / "twell-lab" / "my-kernels"


@pytest.mark.parametrize("before", [None, "an empty folder"])
def test_what_is_written_lies_in_drive_and_is_there_in_the_next_session(before, on_colab):
    here, there = on_colab
    if before:
        (here / "my-kernels").mkdir()
    assert str(there) in notebook.keep_in_drive() and str(there) in notebook.keep_in_drive()
    (here / "my-kernels" / "map.cu").write_text("mine")
    assert (there / "map.cu").read_text() == "mine"
    (here / "my-kernels").unlink()  # the session ends
    notebook.keep_in_drive()
    assert (here / "my-kernels" / "map.cu").read_text() == "mine"


def test_files_that_are_there_already_stay_and_without_drive_nothing_happens(on_colab, monkeypatch):
    here, there = on_colab
    (here / "my-kernels").mkdir()
    (here / "my-kernels" / "map.cu").write_text("mine")
    assert "not kept in Drive" in notebook.keep_in_drive()
    assert (here / "my-kernels" / "map.cu").read_text() == "mine" and not [*there.iterdir()]
    monkeypatch.setattr(notebook, "DRIVE", here / "no drive")
    assert notebook.keep_in_drive() == ""
