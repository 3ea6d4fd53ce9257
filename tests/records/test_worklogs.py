"""The tables of the kernels' worklogs are those of the records that the pages name."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
SHORT = {
    "portable": "portable-20261121T143453Z",
    "counters": "gpu-counters-20261121T143417Z",
    "inference": "inference-20261121T143853Z",
    "comparison": "comparison-20261123T155948Z",
    "heavy": "inference-20261122T195301Z",
}
BIG = "16,384 tokens, d_model 2048, d_ff 5632, mean nnz 29, bf16"
MANY = "independent, lognormal"


def rows(short: str, **wanted: object) -> list[dict]:
    """Rows of the record of that short name that have these values, in the record's order."""
    found = json.loads((ROOT / "data" / "records" / f"{SHORT[short]}.json").read_text())["rows"]
    return [row for row in found if all(row.get(key) == value for key, value in wanted.items())]


def ms(short: str, path: str, tokens: int, nnz: int = 29, **wanted: object) -> float:
    """The first such row's milliseconds: the record's own shape of a layer comes first."""
    return next(r["ms"] for r in rows(short, path=path, tokens=tokens, **wanted) if abs(r["nnz"] - nnz) < 4)


def us(path: str, pattern: str, zeros: str) -> float:
    (row,) = rows("comparison", path=path, workload=f"{pattern}, {zeros} zeros")
    return 1e3 * row["ms"]


def line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def versions() -> Iterator[tuple[str, str]]:
    """Times of each version at 16,384 tokens, and what the hardware's counters say of it; then of few tokens."""
    busy = {
        "smxx_pack": ("device_memory_percent", "issue_slots_percent", "l1_data_pipe_percent"),
        "smxx_down": ("l2_percent", "issue_slots_percent", "l1_hits_percent"),
        "smxx_gated": ("l2_percent", "issue_slots_percent", "l1_hits_percent"),
    }
    for page, shares in busy.items():
        for counted in rows("counters", case=BIG):
            name = counted["kernel"]
            if name.startswith(page.removeprefix("smxx_")):
                yield (
                    page,
                    line(name, f"{ms('portable', name, 16384):.3f}", *(f"{counted[key]:.0f}%" for key in shares)),
                )
    for name in ("pack_v3", "pack_v4", "down_v2", "down_v3", "gated_v2", "gated_v3", "gated_v4"):
        few = [1e3 * ms("portable", name, tokens) for tokens in (1, 8, 64, 256)]
        yield f"smxx_{name.partition('_')[0]}", line(f"{name}, us", *(f"{each:.1f}" for each in few))


def gates() -> Iterator[tuple[str, str]]:
    ways = {
        ("sm90_gate_pack", "torch's product alone, ms"): "gate GEMM (torch)",
        ("sm90_gate_pack", "torch's product, then pack"): "gate GEMM (torch), then pack",
        ("sm80_gate_pack", "torch's product, then pack, ms"): "gate GEMM (torch), then pack",
        ("sm80_gate_pack", "sm80 gate_pack (v4), ms"): "sm80 gate_pack",
        **{("sm90_gate_pack", f"gate_pack_v{n}"): f"sm90 gate_pack v{n}" for n in (1, 2, 3)},
    }
    for (page, name), path in ways.items():
        few = [ms("inference", path, 16384, nnz, kind="gate") for nnz in (8, 29, 60)]
        many = ms("inference", path, 131072, 29, kind="gate")
        yield page, line(name, *(f"{each:.3f}" for each in few), f"{many:.2f}")


def layers() -> Iterator[tuple[str, str]]:
    """What whole layers take: of many tokens in one product, of few in graphs."""
    named = {
        "dense eager: two linears, relu, mul, linear": "dense eager",
        "dense compiled": "dense compiled",
        "forced dense: gate_up, linear": "forced dense",
    }
    for name, path in named.items():
        yield "sm90_gate_up", line(name, f"{ms('inference', path, 16384, workload=MANY):.3f}")
    few = {
        "in a graph of eight layers: forced twell": "forced twell (graph of 8 layers)",
        "torch's dense layer": "dense eager (graph of 8 layers)",
        "torch's product of the gate alone": "gate GEMM (torch) (graph of 8 layers)",
        "one layer in a graph: forced twell": "forced twell (graph)",
        "torch's dense layer ": "dense eager (graph)",
    }
    for name, path in few.items():
        times = [1e3 * ms("inference", path, tokens, d_model=2048) for tokens in (1, 4, 16, 64)]
        yield "sm80_decode", line(name.strip(), *(f"{each:.1f}" for each in times))


def heavy() -> Iterator[tuple[str, str]]:
    took = {
        row["workload"].removeprefix("heavy rows: "): f"{1e3 * row['ms']:,.0f}"
        for row in rows("heavy", path="forced twell")
        if row["workload"].startswith("heavy rows: ")
    }
    counts = ("1", "8", "64", "512")
    some, every = [took[count] for count in ("0", *counts)], [took[f"{count}, all neurons"] for count in counts]
    yield (
        "sm90_down_rows",
        f"{', '.join(some[:-1])} and {some[-1]} us, and where all 5,632 neurons fire in those rows "
        f"{', '.join(every[:-1])} and {every[-1]} for k = 1, 8, 64 and 512",
    )


def products() -> Iterator[tuple[str, str]]:
    blocks = "blocks 32 x 32"
    for zeros, shown in (("99.9%", "99.2%"), ("95.0%", "95%"), ("90.0%", "90%"), ("75.0%", "75%"), ("50.0%", "50%")):
        old = rows("comparison", path="blocks_v1", workload=f"{blocks}, {zeros} zeros")
        first = f"{us('blocks_v1', blocks, zeros):.0f}" if old else ""
        others = [us(path, blocks, zeros) for path in ("blocks_v2", "BSR 32 x 32 (torch)", "dense eager")]
        yield "sm80_blocks", line(shown, first, *(f"{each:.0f}" for each in others)).replace("|  |", "| |")
    tiles = {
        "v2, us": "micro-tiles 32 x 1",
        "dense, us": "dense eager",
        "what finds the tiles, us": "part: micro-tiles 32 x 1, conversion",
    }
    zeros = ("50.0%", "75.0%", "90.0%", "95.0%", "99.0%", "99.9%")
    for name, path in tiles.items():
        times = [us(path, "tiles 32 x 1", each) for each in zeros]
        yield "sm80_microtiles", line(name, *(f"{each:.0f}" for each in times))


def scattered() -> Iterator[tuple[str, str]]:
    """The products of CSR and ELL at 99% zeros; a version's prediction stands between its name and its time."""
    page = (ROOT / "docs" / "kernels" / "smxx_spmm.md").read_text(encoding="utf-8").splitlines()
    for version in ("v1", "v2", "v3", "v4"):
        (predicted,) = [text.split(" | ")[1] for text in page if text.startswith(f"| {version} | ")]
        times = [us(f"{kind}_{version}", "scattered", "99.0%") for kind in ("csr", "ell")]
        yield "smxx_spmm", line(version, predicted, *(f"{each:,.0f}" for each in times))
    for name, path in (("dense, torch", "dense eager"), ("CSR, torch (cuSPARSE)", "CSR (torch)")):
        yield "smxx_spmm", f"| {name} | | {us(path, 'scattered', '99.0%'):.0f} | |"


def one_by_one() -> Iterator[tuple[str, str]]:
    """What the pages say in sentences of zeros that lie one by one, and of COO."""
    took = lambda path, zeros: us(path, "scattered", zeros) / 1e3  # noqa: E731
    tiles = [took("micro-tiles 32 x 1", zeros) for zeros in ("90.0%", "99.0%", "99.9%")]
    said = "Zeros that lie one by one: {:.2f} ms at 90%, {:.2f} at 99%, {:.3f} at 99.9%."
    yield "sm80_microtiles", said.format(*tiles)
    yield "sm80_blocks", f"no block empty, and cost {took('blocks_v2', '99.0%'):.2f} ms."
    finds = [
        us("part: micro-tiles 32 x 1, conversion", *at) for at in (("tiles 32 x 1", "50.0%"), ("scattered", "50.0%"))
    ]
    yield "smxx_find_microtiles", "less is found, {:.0f} where half is, and {:.0f} where nearly all are".format(*finds)
    few = [us(path, "scattered", "99.9%") for path in ("csr_v3", "dense eager", "CSR (torch)")]
    more = [took("csr_v3", zeros) for zeros in ("95.0%", "90.0%")]
    said = "At 99.9% it is {:.0f} us (dense {:.0f}, cuSPARSE {:.0f}), at 95% {:.2f} ms, at 90% {:.2f}."
    yield "smxx_spmm", said.format(*few, *more)
    first, second, third, fourth = (took(f"coo_v{version}", "99.0%") for version in (1, 2, 3, 4))
    beside = [mine / took(path, "99.0%") for mine, path in ((first, "csr_v1"), (second, "csr_v2"))]
    yield "smxx_spmm_coo", "Measured: {:.1f} and {:.2f} ms, {:.1f} and {:.1f} times,".format(first, second, *beside)
    yield "smxx_spmm_coo", f"Measured: {third:.3f} ms, and"
    yield "smxx_spmm_coo", f"Measured: v3 plus {1e3 * (fourth - third):.0f} us,"


def two_passes() -> Iterator[tuple[str, str]]:
    for nnz in (8, 29, 60):
        whole = ms("inference", "forced twell", 16384, nnz, workload=MANY)
        gate = ms("inference", "sm90 gate_pack v3", 16384, nnz, kind="gate")
        yield "smxx_up", line(str(nnz), f"{whole:.3f}", f"{gate:.3f}", f"{whole - gate:.3f}")


SAID = [
    said for table in (versions, gates, layers, heavy, products, scattered, one_by_one, two_passes) for said in table()
]


@pytest.mark.parametrize(("page", "text"), SAID, ids=[f"{page}-{i}" for i, (page, _) in enumerate(SAID)])
def test_a_worklog_says_what_was_recorded(page, text):
    words = " ".join((ROOT / "docs" / "kernels" / f"{page}.md").read_text(encoding="utf-8").split())
    assert text in words


SINGLE = [page for page in sorted((ROOT / "docs" / "kernels").glob("*.md")) if page.stem != "README"]


@pytest.mark.parametrize("page", SINGLE, ids=lambda page: page.stem)
def test_what_has_no_record_says_where_and_when_it_was_measured(page):
    words = " ".join(page.read_text(encoding="utf-8").split())
    for at in re.finditer("without a record", words):
        before = words[max(0, at.start() - 200) : at.end() + 120]
        assert re.search(r"H100.*20\d\d-\d\d-\d\d|20\d\d-\d\d-\d\d.*H100", before), before
    assert not re.search(r"\(one run\b|in the same run\b", words)


def test_the_short_names_are_those_of_the_first_page():
    first = (ROOT / "docs" / "kernels" / "README.md").read_text(encoding="utf-8")
    for short, name in SHORT.items():
        assert f"`{name}.json`" in first, short
