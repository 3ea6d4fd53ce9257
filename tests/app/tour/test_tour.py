"""The tour end to end, small: its record, its page, its sentences, and what an interruption leaves behind."""

import copy
import dataclasses
import html
import re
from pathlib import Path

import pytest
import torch

from tests.app.conftest import ROOT, spawn
from twell_lab import formats, records
from twell_lab.app import page, tour
from twell_lab.app.terminal import said_fast, verdict
from twell_lab.core import TwellError
from twell_lab.plots import share

TEXT = str(ROOT / "twell_lab")  # small, and there in every checkout
FIGURES = {"training", "firing", "frequency", "tile", "bytes", "own", "large", "recorded"}
# What a tour on a CPU has no use for; so has it for any compiler, be it for CUDA or C++.
UNUSED = (
    "cupy cupy_backends cupyx nvidia plotly pandas scipy transformers datasets tokenizers ipywidgets anywidget IPython"
)


@pytest.fixture(scope="module")
def taken(tmp_path_factory):
    """One quick tour, in a process of its own on a CPU: (record, folder, what it wrote to stdout and stderr)."""
    folder = tmp_path_factory.mktemp("tour") / "build" / "tour"
    asked = ("tour", "--quick", "--text", TEXT, "--out", folder)
    done = spawn(*asked, without=UNUSED, PATH="", CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 0, done.stderr
    return records.load(folder / "tour.json"), folder, done


def files(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()} if folder.is_dir() else set()


def test_a_tour_leaves_a_page_and_a_record_and_says_what_it_does(taken):
    record, folder, done = taken
    assert files(folder) == {"index.html", "tour.json"} and str(ROOT) not in record.to_json()
    runs = record.notes["tour"]["runs"]
    without, sparse = runs["without L1"]["config"], runs["with L1"]["config"]
    assert without["l1"] == 0 < sparse["l1"] and {**without, "l1": 0} == {**sparse, "l1": 0}
    assert done.stderr.startswith("tour: about three minutes") and "%|" not in done.stderr  # a bar is for a terminal
    assert re.findall(r"^\[(\d)/8\]", done.stderr, re.M) == [*"12345678"]
    assert max(len(line) for line in done.stdout.splitlines() if str(folder) not in line) <= 80
    assert record.notes["tour"]["text"]["sha256"] in done.stdout and "done in" in done.stdout
    timed = sum("twell" in row["path"] for row in record.rows)
    assert sum("  twell" in line for line in done.stdout.splitlines()) == timed


def test_every_layer_is_timed_and_every_flat_row_is_whole(taken):
    record = taken[0]
    assert all(tuple(row) == records.FLAT_KEYS for row in records.flat_rows([record]))
    own, large = ([row for row in record.rows if ("label" in row) == ours] for ours in (True, False))
    sizes = {(f"layer {i}", tokens) for i in range(2) for tokens in (1, 8, 64)}
    assert {(row["label"], row["tokens"]) for row in own if row["path"] == "twell"} >= sizes
    assert {row["tokens"] for row in large if row["path"] == "twell"} >= {1, 8, 64}
    assert all(row["samples"] for row in record.rows)


def test_what_was_packed_adds_up(taken):
    notes = taken[0].notes["tour"]
    for packed, layer in zip(notes["packing"]["layers"], notes["profile"]["layers"], strict=True):
        assert packed["slots_used"] + packed["tail"] == packed["nnz"]
        tiles = -(-packed["d_ff"] // packed["tile"])
        assert packed["slots"] == packed["tokens"] * tiles * (packed["words"] - 1)
        assert packed["bytes"]["dense"] == 2 * packed["tokens"] * packed["d_ff"]
        # The profile ran in other batches, where a gate that is almost zero may fall on the other side.
        assert packed["nnz"] == pytest.approx(layer["mean_nnz"] * layer["tokens"], rel=1e-3)
        assert packed["overflow_rows"] == pytest.approx(layer["overflow_rows"] * layer["tokens"], abs=3)


def test_a_value_that_does_not_come_back_stops_the_tour():
    gate = torch.randn(3, 40).to(torch.bfloat16)
    packed = formats.TwELL.from_gate(gate)
    tour.check_packing("layers.0", gate, packed)
    packed.packed[1, 0, 1] ^= 1 << 16
    with pytest.raises(TwellError, match="layers.0: 1 of 120 values"):
        tour.check_packing("layers.0", gate, packed)


@pytest.mark.parametrize("step", ["load", "train"])
def test_an_interrupted_tour_leaves_nothing_behind(monkeypatch, ask, tmp_path, step):
    def stop(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(tour, step, stop)
    said = ask("tour", "--quick", "--text", TEXT, "--out", tmp_path / "out", status=130).err
    assert files(tmp_path / "out") == set() and said.splitlines()[-1] == "twell-lab: interrupted"


def test_the_page_is_small_needs_no_network_and_tells_each_figure(taken):
    text = (taken[1] / "index.html").read_text(encoding="utf-8")
    assert len(text) < 1_500_000 and text.count("<script") == 2  # one of them is data
    assert not re.search(r"<[a-z][^>]*\s(src|srcset|href|data)=", text)
    style = "".join(re.findall("<style>(.*?)</style>", text, re.DOTALL))
    assert "url(" not in style and "@import" not in style
    assert "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'\">" in text
    assert set(re.findall(r"<figure[^>]*id='figure-(\w+)'", text)) == FIGURES
    told = page.render(taken[0], [recorded(RECORDED)])
    for name, figure in re.findall(r"<figure id='figure-(\w+)'(.*?)</figure>", told, re.DOTALL):
        assert re.search(r"role='img' aria-label='[^']{25}|<caption", figure), name


def test_figures_on_the_page_are_those_of_the_record(taken):
    notes = taken[0].notes["tour"]
    text = page.render(taken[0])
    for run in notes["runs"].values():
        assert f"{run['validation_bits_per_byte']:.3f}" in text
    assert notes["text"]["sha256"] in text
    for row in page.layer_table(notes):
        for label, fires, dead in row["runs"]:
            cells = f"{row['layer']}</th><td>{label}</td><td>{share(fires)}</td><td.*</span></td><td>{dead}</td>"
            assert re.search(cells, text)
        assert f"{row['layer']}</th><td>{row['used']}</td><td>{row['overflow']}</td>" in text
        for kind in ("dense", "CSR", "ELL", "TwELL"):
            assert f"{row['layer']}</th><td>{kind}</td><td>{row['bytes'][kind]:,.0f}</td>" in text


RECORDED = {
    **{"kind": "inference", "device": "NVIDIA Example", "dtype": "bfloat16", "workload": "independent, lognormal"},
    **{"tokens": 16384, "d_model": 2048, "d_ff": 5632, "nnz": 29.0, "gated": True, "path": "planned"},
    **{"ms": 1.0, "dense_ms": 2.0, "x_dense": 2.0, "spread": 0.1},
}


def recorded(*rows: dict, kernels: dict | None = None, day: int = 2) -> records.Record:
    date = f"2026-01-0{day}T03:04:05Z"
    return records.Record("inference", "a test's own", [*rows], date, None, None, {}, kernels=kernels or {})


def test_of_recorded_times_the_newest_current_and_alike_are_drawn(taken):
    changes = [{"device": "CPU"}, {"d_ff": 8192}, {"kind": "plan"}, {"workload": "uniform"}, {"gated": False}]
    others = [RECORDED | change for change in [*changes, {"path": "planned (graph)"}]]
    slow = RECORDED | {"nnz": 310.0, "ms": 6.0, "x_dense": 2 / 6}
    (first, second) = page.comparable([recorded(RECORDED), recorded(RECORDED, slow, *others, day=3)])
    assert first == RECORDED | {"date": "2026-01-03T03:04:05Z"} and second["nnz"] == 310.0
    others = [change | {"tokens": 1} for change in ({"nnz": 23.0}, {"path": "dense eager"}, {"path": "dense compiled"})]
    drawn = page.draw_speeds("recorded", [first, second, *(first | change for change in others)])
    names = {line["name"]: len(line["marked"]) for line in drawn["lines"]}
    assert names == {
        "bfloat16, planned, 29 firing": 2,
        "bfloat16, planned, 300 firing": 1,
        "bfloat16, dense compiled": 1,
    }
    said = page.see_recorded([first, second])
    assert "Recorded on NVIDIA Example (2026-01-03), not here" in said
    assert "slower at 1 (at worst 0.33 times as fast: 16,384 tokens in bfloat16, 310 neurons firing" in said
    stale = recorded(RECORDED, kernels={"smxx_pack": 64 * "0"}, day=4)
    assert page.comparable([stale]) == [] and "No measurement of such a layer" in page.render(taken[0], [stale])
    assert page.comparable([recorded(RECORDED), stale])[0]["date"].startswith("2026-01-02")


def test_what_a_record_says_cannot_become_markup(taken):
    notes = copy.deepcopy(taken[0].notes)
    notes["tour"]["text"]["name"] = name = "<b>&amp;.txt"
    drawn = page.render(dataclasses.replace(taken[0], notes=notes))
    assert html.escape(name) in drawn and "<b>&amp;" not in drawn


def places(drawn: dict) -> list[tuple[float, float]]:
    (line,) = drawn["lines"]
    return [tuple(map(float, place.split())) for place in line["path"].removeprefix("M").split("L")]


@pytest.mark.parametrize("log", [False, True])
def test_equal_steps_or_ratios_have_equal_distances(log):
    points = [(1, 1), (8, 10), (64, 100)] if log else [(0, 0), (5, 10), (10, 20)]
    drawn = page.chart("t", {"a": points}, page.Axis("tokens", log=log), page.Axis("ms", log=log))
    (left, low), (middle, half), (right, top) = places(drawn)  # an SVG counts downwards
    assert middle - left == pytest.approx(right - middle, abs=0.2) and right > left
    assert low - half == pytest.approx(half - top, abs=0.2) and low > top
    assert drawn["label"].endswith(f"a: {points[0][1]} at {points[0][0]}, {points[2][1]} at {points[2][0]}.")


@pytest.mark.parametrize("log", [False, True])
def test_one_point_alone_has_a_place_and_a_mark(log):
    drawn = page.chart("t", {"a": [(3, 7)]}, page.Axis("step", log=log), page.Axis("loss", log=log))
    assert len(places(drawn)) == len(drawn["lines"][0]["marked"]) == 1 and "nan" not in str(drawn)


@pytest.mark.parametrize(
    "ratios, said",
    [
        ([(1.5, 1.4, 1.6), (3.0, 2.0, 4.0)], "faster at 2 (at best 3.00 times as fast: b)"),
        ([(3.0, 2.0, 4.0), (0.8, 0.7, 0.9)], "faster at 1 (at best 3.00 times as fast: a), slower at 1 (at worst 0.80"),
        ([(0.5, 0.5, 0.5), (0.8, 0.8, 0.8)], "slower at 2 (at worst 0.50 times as fast: a)"),
        ([(1.2, 0.9, 1.3)], "neither at 1, where the difference lies within the spread of the samples"),
    ],
)
def test_the_verdict_on_speed_follows_the_numbers_beyond_their_spread(ratios, said):
    assert verdict([(*ratio, what) for ratio, what in zip(ratios, "ab")]).startswith(said)


@pytest.mark.parametrize("spread, said", [(0.0, "faster at 1"), (0.2, "neither at 1")])
def test_both_spreads_count_on_the_page(spread, said):
    sparse = {"path": "twell", "dtype": "float32", "tokens": 1, "ms": 1.0, "dense_ms": 1.2, "x_dense": 1.2}
    dense = sparse | {"path": "dense eager", "ms": 1.2, "x_dense": 1.0, "spread": 0.3}
    assert f"Of 1 point the sparse layer was, beside torch's dense one, {said}" in page.see_speed(
        [sparse | {"spread": spread}, dense]
    )
    assert page.see_speed([]) == "No sparse path was timed."


def test_what_was_said_fast_is_compared_where_a_layer_is_sparse():
    """The page once said "91 tokens a second, 151 with dense layers" of a model all of whose layers were dense."""
    texts = {"tokens_per_s": 91.0, "dense_tokens_per_s": 151.0, "same": True, "ratios": [0.5, 0.7]}
    assert "151" not in said_fast(texts | {"layers": [{"choice": "dense"}] * 2})
    said = said_fast(texts | {"layers": [{"choice": "dense"}, {"choice": "twell"}]})
    assert said.startswith("91 tokens a second, 151 with dense layers (0.50 to 0.70 times as fast from turn to turn)")


@pytest.mark.parametrize(
    "bits, nnz, said",
    [
        ((2.0, 2.5), (200.0, 10.0), "fell from 200.0 to 10.0 .* 0.500 bits per byte worse than"),
        ((2.5, 2.0), (200.0, 10.0), "0.500 bits per byte better than"),
        ((2.0, 2.0), (10.0, 200.0), "did not fall from 10.0 .* that model is as good as without it"),
    ],
)
def test_the_verdict_on_the_loss_follows_the_numbers(taken, bits, nnz, said):
    notes = copy.deepcopy(taken[0].notes)
    for run, loss, mean in zip(notes["tour"]["runs"].values(), bits, nnz, strict=True):
        run |= {"validation_bits_per_byte": loss, "mean_nnz": mean}
    assert re.search(said, " ".join(page.render(dataclasses.replace(taken[0], notes=notes)).split()))
