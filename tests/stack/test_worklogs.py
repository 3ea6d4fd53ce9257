"""docs/kernels/: every operation has its page, each page is in the index, and the records that pages name are there."""

import re
from pathlib import Path

import pytest

from twell_lab import core

PAGES = Path(__file__).resolve().parents[2] / "docs" / "kernels"
KERNELS = sorted(core.kernels_dir().glob("*.cu"))
MOST_LINES = 15  # of a source's header


def test_every_operation_has_a_page_and_every_page_is_in_the_index():
    stems = {file.stem for file in KERNELS}
    index = (PAGES / "README.md").read_text(encoding="utf-8")
    assert {page.stem for page in PAGES.glob("*.md")} == stems | {"README"}
    assert set(re.findall(r"\]\((\w+)\.md\)", index)) == stems


@pytest.mark.parametrize("page", sorted(PAGES.glob("*.md")), ids=lambda page: page.stem)
def test_what_a_page_names_is_there(page):
    text = page.read_text(encoding="utf-8")
    for record in re.findall(r"[\w-]+\.json", text.replace("data/gpus.json", "")):
        assert (core.records_dir() / record).is_file(), record
    for link in re.findall(r"\]\(([^)]+)\)", text):
        assert (page.parent / link).is_file(), link
    for file in re.findall(r"`(kernels/[\w.]+)`", text):
        assert (core.kernels_dir().parent / file).is_file(), file


@pytest.mark.parametrize("file", KERNELS, ids=lambda file: file.stem)
def test_a_header_is_short_and_leads_to_the_page(file):
    lines = file.read_text(encoding="utf-8").splitlines()
    header = lines[: next(i for i, line in enumerate(lines) if not line.startswith("//"))]
    assert len(header) <= MOST_LINES and f"docs/kernels/{file.stem}.md" in " ".join(header)
