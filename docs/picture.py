"""Draws the README's picture from the newest record of inference: data/pictures/speedup.png.

    python docs/picture.py

Needs the course's packages, and kaleido with a Chrome or Chromium. What was drawn stands in the picture itself, where
a test holds it against the records.
"""

from __future__ import annotations

import json
import struct
import zlib
from pathlib import Path

from twell_lab import records
from twell_lab.app import tables

PICTURE = Path(__file__).resolve().parents[1] / "data" / "pictures" / "speedup.png"
WIDTH, HEIGHT = 840, 460  # as wide as a page's text, so that words in it are as large as those beside it
KEY = b"drawn"
HEAD = 8 + 25  # bytes of a PNG before which no text may stand: its signature and its first chunk


def points(recorded: list[records.Record]) -> dict:
    """What is drawn: how many times as fast as torch's layer plain calls are, by tokens at once with 29 of 5,632
    neurons firing, and by how many fire with 16,384 tokens; {where: device and day, tokens, firing: curves by name}."""
    record, by_tokens = tables.calls_of_a_layer(
        recorded, "inference", lambda row: tables.is_drawn(row) and 25 < row["nnz"] < 33
    )
    _, by_firing = tables.calls_of_a_layer(
        [record], "inference", lambda row: tables.is_drawn(row) and row["tokens"] == 16384
    )

    def curve(rows: list[dict], path: str, along: str) -> list[list[float]]:
        found = [
            row for row in rows if row["path"].startswith(path) and "compiled" not in row["path"].removeprefix(path)
        ]
        times = [[round(row[along]), round(row["dense_wall_ms"] / row["wall_ms"], 2)] for row in found]
        return sorted(times)

    return {
        "where": f"{by_tokens[0]['device']}, {record.date[:10]}",
        "tokens": {
            "the fastest, picked by measuring": curve(by_tokens, "planned", "tokens"),
            "all neurons, torch.compile": curve(by_tokens, "dense compiled", "tokens"),
        },
        "firing": {
            "only the neurons that fire": curve(by_firing, "forced twell", "nnz"),
            "busy neurons for all tokens, others where they fire": curve(by_firing, "forced hot_cold", "nnz"),
            "all neurons, torch.compile": curve(by_firing, "dense compiled", "nnz"),
        },
    }


def draw(drawn: dict) -> bytes:
    """The picture as PNG, with its points as a text inside."""
    from plotly.subplots import make_subplots

    from twell_lab import plots

    colours = dict(
        zip(
            dict.fromkeys((*drawn["firing"], *drawn["tokens"])),
            (plots.BLUE, plots.GREEN, plots.RED, plots.PURPLE),
        )
    )
    titles = ("29 of 5,632 neurons firing", "16,384 tokens at once")
    panels = make_subplots(
        cols=2, subplot_titles=titles, shared_yaxes=True, horizontal_spacing=0.05, column_widths=[0.58, 0.42]
    )
    figure = plots.styled(panels, f"One layer, recorded on {drawn['where']}", HEIGHT)
    for column, of in enumerate(("tokens", "firing"), 1):
        for name, curve in drawn[of].items():
            x, y = [f"{at:,}" for at, _ in curve], [times for _, times in curve]
            figure.add_scatter(
                x=x, y=y, name=name, col=column, row=1, mode="lines+markers", legendgroup=name,
                line={"color": colours[name], "dash": "dot"}, marker={"size": 9},
                showlegend=column == 1 or name not in drawn["tokens"],
            )  # fmt: skip
    figure.add_hline(1, line={"color": plots.INK, "width": 2})
    figure.add_annotation(
        x=0, y=0.9, text="torch's own layer", xref="x2 domain", yref="y2", showarrow=False, xanchor="left"
    )
    figure.update_xaxes(type="category", tickangle=0)
    figure.update_xaxes(title="tokens at once", col=1)
    figure.update_xaxes(title="neurons firing for a token, mean", col=2)
    figure.update_yaxes(rangemode="tozero")
    figure.update_yaxes(title="times as fast, plain calls", col=1)
    figure.update_layout(legend={"y": -0.22, "yanchor": "top", "entrywidth": 330}, margin={"t": 80, "b": 120})
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
