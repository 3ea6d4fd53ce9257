"""What pages say in words was measured: each figure in a sentence is computed here from the record it comes from.

Tables that are printed from records are held in test_readme.py. A new figure in the prose of these pages belongs into
MEASURED with its record, or into GIVEN if nobody measured it, or its paragraph says that it has no record.
"""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest

from twell_lab import records
from twell_lab.course import sparsity_map

ROOT = Path(__file__).resolve().parents[2]
UNIT = r"(?:us|ms|s|TB/s|GB/s|%|times|MB|GB|MiB|GiB|KB|seconds?|of torch's time)(?!\w)"
NUMBER = r"\d[\d,.]*\d|\d"
FIGURE = re.compile(rf"(?<![\w.])(?:{NUMBER})(?:(?:,? (?:to|and|or) |, | against )(?:{NUMBER}))*[ -]?{UNIT}")
PRINTED = re.compile(r'<!-- python -c ".*?-->\n(?:\|[^\n]*\n)*|```.*?```', re.S)
DENSE = "dense eager"
HOST, DRAWN = "host-time-202611{}Z.json", {"workload": "independent, lognormal", "kind": "inference"}


def rows(name: str, **wanted: object) -> list[dict]:
    """Rows of a record that have these values, in the record's order."""
    found = json.loads((ROOT / "data" / "records" / name).read_text())["rows"]
    return [row for row in found if all(row.get(key) == value for key, value in wanted.items())]


def row(name: str, **wanted: object) -> dict:
    (found,) = rows(name, **wanted)
    return found


def returned(day: str, path: str) -> float:
    """Microseconds until a call of 16 tokens returns."""
    return 1e3 * row(HOST.format(day), path=path, tokens=16, workload="forward")["ms"]


def in_a_row(path: str, few: int) -> list[float]:
    """Microseconds of the host for calls one after another, for up to so many tokens."""
    found = [each for each in rows("inference-20261123T052831Z.json", path=path, **DRAWN) if each["tokens"] <= few]
    return sorted(each["host_us"] for each in found if each["nnz"] < 33)


def compiled(name: str, path: str, tokens: int) -> float:
    found = rows(name, path=f"{path} compiled", tokens=tokens, **DRAWN)
    return next(1e3 * each["wall_ms"] for each in found if 25 < each["nnz"] < 33)


def slower_compiled(name: str) -> list[float]:
    counts = (1, 16, 64, 256, 2048)
    return [compiled(name, "planned", tokens) / compiled(name, "dense", tokens) for tokens in counts]


def both_ways() -> list[float]:
    found = rows(HOST.format("23T091823"), workload="forward and backward")
    times = [1e3 * each["ms"] for each in found if each["tokens"] <= 2048 and each["path"] in ("dense eager", "twell")]
    return [min(times), max(times)]


def decoding(path: str) -> float:
    return row("model-20261123T021307Z.json", workload="Llama, decode step, batch 1", path=path)["wall_ms"]


def on_two_gpus() -> list[float]:
    step = lambda path: row("two-gpus-20261121T173536Z.json", path=path)["ms"]  # noqa: E731
    runs = ("2 GPUs, ddp", "2 GPUs, fsdp", "1 GPU")
    return [step(f"{run}, {kernels}") for run in runs for kernels in ("auto", "dense")]


def swept() -> list[float]:
    """Percent of zeros, and percent by which two seeds' losses are above those without L1; then for stronger L1."""
    runs = {each["label"]: each for each in rows("sweep-20261121T145100Z.json")}
    bits = lambda label: runs[label]["validation_bits_per_byte"]  # noqa: E731
    found = []
    for label in ("L1 0.0001", "L1 0.0002"):
        pairs = ((label, "lr 0.0012"), (f"{label}, seed 1", "seed 1"))
        found += [100 * runs[label]["zeros"], *(100 * (bits(ours) / bits(dense) - 1) for ours, dense in pairs)]
    return found


def line_of_calls(day: str) -> Callable[[], list[float]]:
    return lambda: [returned(day, "dense eager"), returned(day, "twell")]


def lost_row() -> float:
    """Microseconds more for each row of a training step that does not fit the compact form: 1% of 16,384 tokens."""
    name = "training-20261126T021907Z.json"
    works = ("overflow: 1% of rows with a tile of 200", "heavy rows: 0")
    some, none = (row(name, workload=work, path="forced twell")["ms"] for work in works)
    return 1e3 * (some - none) / 164


def comparison() -> str:
    """The file of the comparison that the tables beside the words are printed from."""
    found = records.newest(records.load_all(), "comparison")
    return f"comparison-{re.sub('[-:]', '', found.date)}.json"


def two_four(path: str) -> dict:
    return row(comparison(), pattern="2:4", path=path)


def unpadded() -> list[float]:
    """MB of x; milliseconds for what gathering and putting back a quarter of the tokens move, at 3.0 TB/s; and those of
    one layer beyond a quarter of the dense layer's."""
    found = rows(comparison(), kind="padding", layers=1)
    removed = [each for each in found if each["path"] == "padding removed"]
    (took,) = (each["ms"] for each in removed if each["real"] * 4 == each["tokens"])
    dense = [each["ms"] for each in found if each["path"] == DENSE]
    whole, share = 2.0 * found[0]["tokens"] * found[0]["d_model"], 0.25
    return [whole / 1e6, 1e3 * whole * (1 + 4 * share) / 3.0e12, took - share * sum(dense) / len(dense)]


def without_launches() -> list[float]:
    """How many times as fast one token is as a CUDA graph and compiled, by the newest record of layers."""
    name = max(path.name for path in (ROOT / "data" / "records").glob("inference-*.json"))
    found = [each for each in rows(name, tokens=1, **DRAWN) if 25 < each["nnz"] < 33 and each["d_ff"] == 5632]
    at = {each["path"]: each for each in found if each["gated"]}
    replayed = next(path for path in ("planned for graphs (graph)", "planned (graph)") if path in at)
    ways = (("dense eager (graph)", replayed, "ms"), ("dense compiled", "planned compiled", "wall_ms"))
    return [at[dense][clock] / at[ours][clock] for dense, ours, clock in ways]


MEASURED: list[tuple[str, str, Callable[[], list[float]]]] = [
    (
        "README.md",
        "with 1 token it is {:.2f} times where a CUDA graph launches all of them as one, and {:.2f} times with both layers "
        "under `torch.compile`",
        without_launches,
    ),
    *(
        ("docs/calls.md", f"| {{:.0f}} | {{:.0f}} | `{HOST.format(day)}` |", line_of_calls(day))
        for day in ("22T114203", "22T134932", "22T232407", "23T021122", "23T091823")
    ),
    ("docs/calls.md", "take {:.0f} to {:.0f} us up to 2,048 tokens, dense or sparse", both_ways),
    (
        "docs/calls.md",
        "TwELL takes {:.0f} to {:.0f}, dense {:.0f} to {:.0f}, for up to 64 tokens (`inference-20261123T052831Z.json`)",
        lambda: [
            end for path in ("forced twell", "dense eager") for end in (in_a_row(path, 64)[0], in_a_row(path, 64)[-1])
        ],
    ),
    (
        "docs/calls.md",
        "the layer that took {:.0f} where the dense one took {:.0f} lost in a Llama",
        lambda: [in_a_row("forced twell", 1)[0], in_a_row("dense eager", 1)[0]],
    ),
    (
        "docs/calls.md",
        "(`model-20261123T021307Z.json`: decoding {:.1f} ms against {:.1f})",
        lambda: [decoding("planned"), decoding("dense eager")],
    ),
    (
        "docs/calls.md",
        "a layer alone took {:.0f} at one token where the compiled dense layer took {:.0f}",
        lambda: [compiled("inference-20261123T022028Z.json", path, 1) for path in ("planned", "dense")],
    ),
    (
        "docs/calls.md",
        "{:.2f}, {:.2f}, {:.2f}, {:.2f} and {:.2f} (`inference-20261123T052831Z.json`; before "
        "{:.2f}, {:.2f}, {:.2f}, {:.2f} and {:.2f})",
        lambda: [x for at in ("052831", "022028") for x in slower_compiled(f"inference-20261123T{at}Z.json")],
    ),
    ("docs/measured.md", "the dense product takes {:.1f} ms whatever the values are", lambda: [two_four(DENSE)["ms"]]),
    (
        "docs/measured.md",
        "by counted bytes (`two_four.bound`) this product can be {:.2f} times as fast at most",
        lambda: [sparsity_map.row_products(4096, d_in=4096, d_out=4096)["y = x W^T"]],
    ),
    (
        "docs/measured.md",
        "a plain call takes {:.1f} ms, most of it on the host",
        lambda: [two_four("2:4 (torch: cuSPARSELt, searched)")["wall_ms"]],
    ),
    (
        "docs/measured.md",
        "With a quarter of {:.0f} MB real that is {:.2f} ms at 3.0 TB/s, of the {:.2f} ms that the layer takes beyond a "
        "quarter of the dense one's time",
        unpadded,
    ),
    (
        "docs/status.md",
        "with one of a hundred {:.0f} us more for each, `training-20261126T021907Z.json`",
        lambda: [lost_row()],
    ),
    (
        "docs/status.md",
        "takes {:.0f} ms instead of {:.0f} ms with DDP, {:.0f} instead of {:.0f} with FSDP2, and {:.0f} instead of "
        "{:.0f} on one of them (`two-gpus-20261121T173536Z.json`",
        on_two_gpus,
    ),
    (
        "docs/status.md",
        "{:.1f}% zeros raised the validation loss by {:.1f}% and {:.1f}% with two seeds, and {:.1f}% zeros by {:.1f}% "
        "and {:.1f}% (`sweep-20261121T145100Z.json`)",
        swept,
    ),
]
# What nobody here measured: shapes, rates that floors assume, rules of plans, what others report.
GIVEN = {
    "README.md": (),
    "docs/measured.md": (
        "never have more than 99.2% zeros",
        "PIT up to 88.7, 5.8, 17.5 and 5.7 times as fast as",
        "2:4 about 1.6 times in practice; blocks 3.4 times at 90% in a layer",
        "pay from 99% on",
        "1.4 GB at 99%",
        "of which 90% of the blocks of 32 x 32 are empty",
        "and its change with a 95% interval",
    ),
    "docs/status.md": (
        "another path was measured to be 3% faster than the layer was before (5% where",
        "is predicted to be 10% faster",
        "(57 million parameters, 39 MB of novels)",
    ),
    "docs/calls.md": (),
}


# In the notebooks' own words, where cells print what is measured: shapes and zeros are theirs to choose, times are not.
TIME = re.compile(rf"(?<![\w.])(?:{NUMBER})(?: (?:to|and|or) (?:{NUMBER}))*[ -]?(?:us|ms|[TG]B/s|times)(?!\w)")
GIVEN_IN_NOTEBOOKS = {
    "04-train-with-l1.ipynb": ("up to 500 times larger", "trained 19 times on English novels"),
    "08-first-kernels.ipynb": ("at the L2's 7.4 TB/s 0.53 ms",),  # a floor
    "11-train-with-the-kernels.ipynb": ("added in float32 200 times",),
    "12-capstone.ipynb": ("at most 1.5 times the floor's sectors", "at most 1.25 times the time of `down_v2`"),
    "glossary.ipynb": ("at up to 7.4 TB/s", "at 3.35 TB/s by its datasheet, of which 3.0 TB/s are reached"),
}


def words(page: str) -> str:
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def said(text: str, values: Callable[[], list[float]]) -> str:
    return text.format(*values())


@pytest.mark.parametrize(
    ("page", "text", "values"), MEASURED, ids=lambda value: value[:30] if isinstance(value, str) else ""
)
def test_what_is_said_is_what_was_recorded(page, text, values):
    assert said(text, values) in words(page), f"{page} does not say: {said(text, values)}"


@pytest.mark.parametrize("page", GIVEN)
def test_every_figure_comes_from_somewhere(page):
    text = PRINTED.sub(" ", (ROOT / page).read_text(encoding="utf-8"))
    sections = [" ".join(section.split()) for section in re.split(r"\n(?=#)", text)]
    known = [*GIVEN[page], *(said(text, values) for at, text, values in MEASURED if at == page)]
    for section in sections:
        for phrase in known:
            section = section.replace(phrase, " ")
        if not re.search(r"(?:in a|runs?) (?:run )?without (?:a record|one)", section):
            assert not FIGURE.findall(section), f"{page} does not say where this comes from: {FIGURE.findall(section)}"


@pytest.mark.parametrize("name", sorted(path.name for path in (ROOT / "notebooks").glob("*.ipynb")))
def test_no_notebook_says_a_time_that_its_cells_do_not_print(name):
    cells = json.loads((ROOT / "notebooks" / name).read_text(encoding="utf-8"))["cells"]
    text = "\n".join("".join(cell["source"]) for cell in cells if cell["cell_type"] == "markdown")
    text = " ".join(re.sub(r"<details.*?</details>|```.*?```", " ", text, flags=re.S).split())
    for phrase in GIVEN_IN_NOTEBOOKS.get(name, ()):
        assert phrase in text, f"{name} does not say {phrase!r} any more"
        text = text.replace(phrase, " ")
    assert not TIME.findall(text), f"{name} does not say where this comes from: {TIME.findall(text)}"
