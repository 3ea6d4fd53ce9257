"""Draws the README's picture from the newest records: data/pictures/speedup.png.

    python docs/picture.py

Needs the course's packages, and kaleido with a Chrome or Chromium. What was drawn stands in the picture itself, where
a test holds it against the records.
"""

from __future__ import annotations

import json
import re
import struct
import zlib
from pathlib import Path

from twell_lab import records
from twell_lab.app import tables

PICTURE = Path(__file__).resolve().parents[1] / "data" / "pictures" / "speedup.png"
WIDTH, HEIGHT, FONT = 640, 900, 17  # so that words can be read where a telephone shows it 400 points wide
KEY = b"drawn"
HEAD = 8 + 25  # bytes of a PNG before which no text may stand: its signature and its first chunk


def points(recorded: list[records.Record]) -> dict:
    """What is drawn: how many times as fast as torch's own a layer and a whole model are, by what is done; and plain
    calls of a layer with 16,384 tokens, by how many neurons fire. {where: device and days, done, firing: by name}."""
    where, done = tables.beside_layer(recorded)
    _, rows = tables.rows_of(recorded, "inference", kind="inference", **tables.MANY_TOKENS)

    def curve(path: str) -> list[list[float]]:
        found = [row for row in rows if re.fullmatch(rf"{path}( \d+)?", row["path"])]
        return sorted([round(row["nnz"]), round(row["dense_wall_ms"] / row["wall_ms"], 2)] for row in found)

    return {
        "where": where,
        "done": {name: [round(times, 2) for times in both] for name, both in done.items()},
        "firing": {
            "only those that fire (TwELL)": curve("forced twell"),
            "busy ones for all tokens (hot/cold)": curve("forced hot_cold"),
            "all of them, by torch.compile": curve("dense compiled"),
        },
    }


def draw(drawn: dict) -> bytes:
    """The picture as PNG, with its points as a text inside."""
    from plotly.subplots import make_subplots

    from twell_lab import plots

    figure = plots.styled(make_subplots(rows=2, row_heights=[0.66, 0.34], vertical_spacing=0.21), "", HEIGHT)
    names = [name.replace("`", "") for name in drawn["done"]]
    bars = {"y": names, "orientation": "h", "textposition": "outside", "cliponaxis": False, "constraintext": "none"}
    figure.add_bar(
        x=[0] * len(names), text=names, showlegend=False, **bars
    )  # a bar's place, for the name above the others
    for what, (label, colour) in enumerate((("one layer", plots.SKY), ("a whole model", plots.BLUE))):
        x = [both[what] for both in drawn["done"].values()]
        figure.add_bar(x=x, text=[f"{times:.2f}" for times in x], name=label, marker={"color": colour}, **bars)
    for (name, curve), colour in zip(drawn["firing"].items(), (plots.PURPLE, plots.GREEN, plots.RED)):
        x, y = [f"{at:,}" for at, _ in curve], [times for _, times in curve]
        figure.add_scatter(
            x=x, y=y, name=name, row=2, col=1, mode="lines+markers", legend="legend2",
            line={"color": colour, "dash": "dot"}, marker={"size": 10},
        )  # fmt: skip
    figure.add_vline(1, line={"color": plots.GREY, "width": 2}, layer="below", row=1, col=1)
    figure.add_hline(1, line={"color": plots.INK, "width": 2}, row=2, col=1)
    figure.update_xaxes(range=[0, 1.15 * max(map(max, drawn["done"].values()))], dtick=1, row=1, col=1)
    figure.update_yaxes(autorange="reversed", showticklabels=False, row=1, col=1)
    figure.update_xaxes(type="category", tickangle=0, row=2, col=1)
    figure.update_xaxes(title="neurons firing for a token, of 5,632", row=2, col=1)
    figure.update_yaxes(rangemode="tozero", dtick=1, row=2, col=1)
    figure.update_layout(
        font={"size": FONT}, bargap=0.15, margin={"t": 120, "b": 70, "l": 40, "r": 20},
        legend={"y": figure.layout.yaxis.domain[1], "font": {"size": FONT}, "traceorder": "normal"},
        legend2={"y": figure.layout.yaxis2.domain[1], "font": {"size": FONT}, "yanchor": "bottom", "x": 0,
                 "title": {"text": "One layer reads 16,384 tokens. It computes"}},
        title={"font": {"size": 20}, "y": 0.97, "text": f"Times as fast as torch's own<br><sub>{drawn['where']}</sub>"},
    )  # fmt: skip
    return with_text(figure.to_image("png", width=WIDTH, height=HEIGHT, scale=2), json.dumps(drawn))


def with_text(png: bytes, text: str) -> bytes:
    """The picture with that text in it, which no viewer shows."""
    body = b"tEXt" + KEY + b"\0" + text.encode("latin-1")
    return png[:HEAD] + struct.pack(">I", len(body) - 4) + body + struct.pack(">I", zlib.crc32(body)) + png[HEAD:]


def text_in(png: bytes) -> str:
    """What `with_text` put there."""
    (length,) = struct.unpack(">I", png[HEAD : HEAD + 4])
    return png[HEAD + 8 : HEAD + 8 + length].removeprefix(KEY + b"\0").decode("latin-1")


if __name__ == "__main__":
    PICTURE.write_bytes(draw(points(records.load_all())))
    print(f"{PICTURE.name}: {PICTURE.stat().st_size / 1e3:.0f} kB")
