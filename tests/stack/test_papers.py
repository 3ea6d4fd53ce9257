"""CONTRIBUTING and CHANGELOG name what is there, and the lists of the former are short."""

import re
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import yaml

import twell_lab as tl

ROOT = Path(__file__).resolve().parents[2]
TASKS = {"kernel", "path", "family of models", "benchmark and its record", "notebook"}


def lists(text: str) -> dict[str, list[str]]:
    """What is added -> the numbered entries below its heading."""
    found = {}
    for heading, body in re.findall(r"^## Add a (.+)\n((?:(?!^## ).*\n)*)", text, re.M):
        found[heading] = re.findall(r"^\d+\. (.*(?:\n {3}.*)*)", body, re.M)
    return found


def test_each_list_is_at_most_four_files_and_begins_with_one():
    found = lists((ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8"))
    assert set(found) == TASKS
    for entries in found.values():
        assert 3 <= len(entries) <= 4
        assert all(re.match(r"`[\w./-]+`: ", entry) for entry in entries)


def test_files_that_are_named_are_there():
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`((?:twell_lab|tests|docs|data|kernels|notebooks)/[\w./-]*)`", text))
    # UNVERIFIED.json is there only while a kernel waits for a GPU.
    real = [name for name in sorted(named) if not re.search("NAME|SUBJECT|PREFIX|UNVERIFIED", name)]
    assert len(real) >= 8
    assert [name for name in real if not (ROOT / name).exists()] == []


def test_the_citation_is_of_this_version_and_names_the_paper():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert citation["version"] == tl.__version__ and citation["license"] == project["license"]
    assert citation["title"] == project["name"] and citation["authors"] == project["authors"]
    assert citation.get("repository-code") == project["urls"].get("Repository")
    assert [paper["url"] for paper in citation["references"]] == [project["urls"]["Paper"]]


def moved() -> list[str]:
    """Full names of the right column of the changelog's table: ".terms" stands beside the one before it."""
    found = []
    for line in re.findall(r"^\| `.*\| (.*) \|$", (ROOT / "CHANGELOG.md").read_text(encoding="utf-8"), re.M):
        for name in re.findall(r"`([\w.]+)`", line):
            if name.startswith("."):
                name = found[-1].rpartition(".")[0] + name
            found.append(name)
    return [name for name in found if name.startswith("twell_lab.")]


@pytest.mark.parametrize("name", moved())
def test_what_moved_is_where_the_changelog_says(name):
    assert import_module(name).__doc__


def test_what_left_the_face_is_in_the_changelog_and_gone():
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    left = {name for cell in re.findall(r"^\| (`tl\..*?) \|", text, re.M) for name in re.findall(r"`tl\.(\w+)`", cell)}
    assert len(left) > 10 and not left & set(tl.__all__)
