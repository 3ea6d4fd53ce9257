"""Words of the course are explained: where a notebook first uses one in its prose, it links to the glossary."""

import json
import re
from pathlib import Path

import pytest

FOLDER = Path(__file__).resolve().parents[2] / "notebooks"
GLOSSARY = "glossary.ipynb"
# Words that mean one thing wherever they stand, by the heading that explains them.
WORDS = {
    "nnz": r"nnz",
    "density": r"density",
    "dead-neuron": r"dead neurons?",
    "COO": r"COO",
    "CSR": r"CSR",
    "ELL": r"ELL",
    "TwELL": r"TwELL",
    "GEMM": r"GEMMs?",
    "epilogue": r"epilogues?",
    "warp": r"warps?",
    "lane": r"lanes?",
    "cluster": r"clusters?",
    "warpgroup": r"warpgroups?",
    "multiprocessor": r"multiprocessors?",
    "tensor-core": r"tensor cores?",
    "register": r"registers?",
    "shared-memory": r"shared memory",
    "L2-cache": r"L2 cache",
    "device-memory": r"device memory",
    "sector": r"sectors?",
    "barrier": r"barriers?",
    "ballot": r"ballots?",
    "atomic": r"atomics?",
    "TMA": r"TMA",
    "wgmma": r"wgmma",
    "bf16": r"bf16",
    "CUDA-graph": r"CUDA graphs?",
    "ReLUfication": r"ReLUfication",
    "lossy": r"lossy",
}
# Not prose: code, formulas, headings, folded answers, links to elsewhere, and the targets of those to the glossary.
BESIDE = re.compile(
    r"```.*?```|`[^`\n]*`|\$\$.*?\$\$|\$[^$\n]*\$|<details>.*?</details>|^#+ .*?$"
    r"|\[[^\[\]]*\]\((?!glossary)[^)]*\)|\]\(glossary[^)]*\)",
    re.DOTALL | re.MULTILINE,
)
NOTEBOOKS = sorted(path.name for path in FOLDER.glob("*.ipynb") if path.name != GLOSSARY)


def markdown(name: str) -> list[str]:
    cells = json.loads((FOLDER / name).read_text(encoding="utf-8"))["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown"]


def first_use(texts: list[str], word: str) -> tuple[int, int, int] | None:
    """The cell in which the word stands first in the prose, and from where to where."""
    for at, text in enumerate(texts):
        prose = BESIDE.sub(lambda beside: "\0" * len(beside[0]), text)
        if found := re.search(rf"(?<![\w-])(?:{word})(?![\w-])", prose):
            return at, *found.span()
    return None


def headings() -> set[str]:
    return {
        line[4:].replace(" ", "-") for text in markdown(GLOSSARY) for line in text.splitlines() if line[:4] == "### "
    }


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_the_first_use_of_a_word_leads_to_what_it_means(name):
    texts = markdown(name)
    missing = []
    for heading, word in WORDS.items():
        if use := first_use(texts, word):
            at, start, end = use
            if not texts[at][:start].endswith("[") or not texts[at][end:].startswith(f"]({GLOSSARY}#{heading})"):
                missing.append(f"{texts[at][max(0, start - 30) : end + 20]!r}")
    assert not missing


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_links_lead_to_a_word_that_is_explained(name):
    linked = {link for text in markdown(name) for link in re.findall(rf"\]\({GLOSSARY}#([^)]*)\)", text)}
    assert linked <= headings()


def test_every_word_is_explained_once():
    found = [line for text in markdown(GLOSSARY) for line in text.splitlines() if line[:4] == "### "]
    assert len(found) == len(set(found)) and headings() >= WORDS.keys()
