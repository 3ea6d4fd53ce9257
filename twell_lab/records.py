"""Records: JSON files that say where, when and with which software something was measured, and what was measured.

`data/records` holds those of the project. A record holds a hash of each kernel that ran for it, and is stale when one
of them is no longer the present one. `verify()` wants each kernel as it is to be in a report of the GPU tests."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
import textwrap
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field, fields
from datetime import UTC, datetime
from functools import cache
from itertools import count, zip_longest
from pathlib import Path
from typing import Self

from . import core
from .core import WHOLE, RecordError, read_json, write_atomically

SCHEMA = 2
UNVERIFIED = "UNVERIFIED.json"
TOLD = "H100"  # in the name of the GPU that pages and figures tell of where they tell of one
_FLAT = "record kind device dtype tokens d_model d_ff nnz workload path ms dense_ms x_dense spread wall_ms "
FLAT_KEYS = tuple((_FLAT + "dense_wall_ms host_us date commit stale").split())
# What is printed of a measurement, and its heading.
COLUMNS = {key: key for key in "device dtype tokens d_model d_ff nnz path ms spread x_dense wall_ms".split()}
COLUMNS |= {"nnz": "mean nnz", "x_dense": "x dense", "wall_ms": "wall ms"}
WIDTH = 80  # columns that a printed table tries to fit
# What a measurement may say: names, and numbers; all but the needed ones may be missing.
_NAMES, _NEEDED = ("kind", "device", "path", "dtype", "workload"), ("kind", "device", "path", "ms")
_NUMBERS = "ms tokens d_model d_ff nnz dense_ms x_dense spread wall_ms dense_wall_ms host_us error layer_error loss"
_machine = cache(core.describe_machine)  # it asks nvidia-smi


@dataclass
class Record:
    """What was measured in one run, and where; times are in milliseconds, memory in bytes; `str` gives a table.

    A row with a `kind` is a measurement, with a `device`, a `path` (twell_lab.layers.paths) and its median time `ms`;
    `error`: how far its result is off, as a share of the exact one's norm; `loss`: nats a token. Other rows may hold
    anything. RecordError names a field that readers rely on and could not take."""

    name: str  # how the names of its files begin: lower-case letters, digits, "-", "_" and "."
    purpose: str  # what was measured, as a sentence
    rows: list[dict] = field(repr=False)  # which may hold thousands of samples
    date: str  # UTC, as "2026-11-22T10:53:58Z"
    commit: str | None  # of the code; None outside a checkout
    dirty: bool | None  # whether the code differed from it
    machine: dict = field(repr=False)  # what `core.describe_machine` returns
    notes: dict = field(default_factory=dict, repr=False)  # anything else that JSON can hold
    kernels: dict[str, str] = field(default_factory=dict, repr=False)  # the hash of each that ran on a GPU, by name
    schema: int = SCHEMA  # the version of the file format

    def __post_init__(self) -> None:
        def check(where: str, value: object, holds: bool, accepted: str) -> None:
            if not holds:
                raise RecordError(f"record {self.name!r}: {where} is {value!r:.120}; accepted: {accepted}")

        for name, kind in (("purpose", str), ("kernels", dict), ("machine", dict), ("notes", dict), ("rows", list)):
            check(name, value := getattr(self, name), isinstance(value, kind), f"a {kind.__name__}")
        date = r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"
        for name, pattern in {"schema": str(SCHEMA), "name": "[a-z0-9][a-z0-9_.-]*", "date": date}.items():
            check(name, value := getattr(self, name), re.fullmatch(pattern, str(value)) is not None, f"/{pattern}/")
        for i, row in enumerate(self.rows):
            check(f"rows[{i}]", row, isinstance(row, dict), "an object")
            for key in (*_NAMES, *_NUMBERS.split()) if "kind" in row else ():
                value = row.get(key)
                number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < WHOLE
                holds, accepted = number and (key != "ms" or value > 0), "a finite number, of ms above 0"
                if key in _NAMES:
                    holds, accepted = isinstance(value, str) and value != "", "a name"
                check(f"rows[{i}].{key}", value, holds or value is None and key not in _NEEDED, accepted)

    def __str__(self) -> str:
        measured = [row for row in self.rows if "kind" in row]
        said = lambda row: (
            f"{key} {_shown(value)}" for key, value in row.items() if not isinstance(value, (list, dict))
        )
        lines = [textwrap.fill(", ".join(said(row)), WIDTH) for row in self.rows if not measured]  # of tests, say
        lines += [table(measured, COLUMNS | {"head": "LM head", "workload": "workload"})] if measured else []
        return "\n".join([f"{self.name}, {self.date}: {self.purpose}", *lines])

    @classmethod
    def new(
        cls, name: str, purpose: str, rows: list[dict], notes=None, *, kernels: Iterable[str] | None = None
    ) -> Self:
        """Return a record of what was just measured on this machine, with date, commit, hashes and machine filled in.
        kernels: names of those that ran; by default those that this process has loaded. RecordError without sources."""
        from .cuda import launch

        ran = launch.loaded() if kernels is None else set(kernels)
        hashes = {kernel: kernel_hashes()[kernel] for kernel in sorted(ran)}
        date = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return cls(name, purpose, rows, date, *source_commit(), _machine(), notes or {}, hashes)

    def to_json(self) -> str:
        """Return the record as JSON text. RecordError for a value that JSON cannot hold, such as NaN."""
        try:
            data = {**vars(self)}
            data["rows"] = data.pop("rows")  # the longest comes last
            return json.dumps(data, indent=1, allow_nan=False) + "\n"
        except (TypeError, ValueError, RecursionError) as error:
            accepted = "strings, finite numbers, booleans, None, lists and dicts"
            raise RecordError(f"record {self.name!r} is no JSON: {error}; rows and notes take {accepted}") from None

    def save(self, folder: str | Path | None = None) -> Path:
        """Write the record into a file of its own, whole or not at all, and return its path; by default into
        `core.new_records_dir()`. RecordError if that cannot be."""
        target = self.free_path(core.new_records_dir() if folder is None else Path(folder))
        write_atomically(target, self.to_json())
        return target

    def free_path(self, folder: Path) -> Path:
        """Return `name-date.json` in this folder, with a number if there is such a file."""
        stem = f"{self.name}-{re.sub('[-:]', '', self.date)}"
        paths = (folder / f"{stem}{f'-{number}' if number > 1 else ''}.json" for number in count(1))
        return next(path for path in paths if not path.exists())


@cache
def kernel_hashes() -> dict[str, str]:
    """Return the hash of every kernel as it is now, by name: a SHA-256 over its `.cu` with its headers, without
    comments, and over the syntax tree of the file of ops/ that declares and launches it, without docstrings.
    RecordError for a source of kernels/ that no file of ops/ declares."""
    from .cuda.compile import with_headers

    hashes = {}
    for path in sorted(Path(__file__).with_name("ops").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        # What it declares is read and not imported, so that records can be drawn where torch is not installed.
        for name in re.findall(r'^\w+ = Source\(\s*"(\w+)"', text, re.M):
            sources = (source for _, source in sorted(with_headers(f"{name}.cu").items()))
            bare = (" ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", source, flags=re.S).split()) for source in sources)
            digest = hashlib.sha256()
            for part in (*bare, _without_docstrings(ast.parse(text))):
                digest.update(len(part).to_bytes(8, "little") + part.encode())
            hashes[name] = digest.hexdigest()
    if undeclared := {path.stem for path in core.kernels_dir().glob("*.cu")} - set(hashes):
        raise RecordError(f"{min(undeclared)}.cu is in kernels/, and no file of ops/ declares it")
    return hashes


def _without_docstrings(node: object) -> str:
    """Write out a syntax tree but its docstrings, the same in every version of Python: `ast.dump` writes empty lists in
    some versions only, newer ones have more of them, and 3.12 puts empty strings into f-strings."""
    if isinstance(node, list):
        return f"[{', '.join(map(_without_docstrings, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    if isinstance(node, ast.JoinedStr):
        node.values = [part for part in node.values if getattr(part, "value", None) != ""]
    if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
        node.body = node.body[1:] or [ast.Pass()]
    there = ((name, value) for name, value in ast.iter_fields(node) if value is not None and value != [])
    return f"{type(node).__name__}({', '.join(f'{name}={_without_docstrings(value)}' for name, value in there)})"


def source_commit() -> tuple[str | None, bool | None]:
    """Return the commit of the checkout that this package runs from, and whether files of it differ; (None, None)
    outside one. TWELL_LAB_COMMIT says it for a copy without `.git`, in the words of git describe as below."""
    said, top = os.environ.get("TWELL_LAB_COMMIT", "").strip(), Path(__file__).resolve().parents[1]
    # An installed package may lie in the checkout of another project, whose commit says nothing about it.
    if not said and (top / ".git").exists():
        command = "git --no-optional-locks describe --always --abbrev=40 --dirty --exclude=*".split()
        with suppress(OSError, subprocess.SubprocessError):
            said = subprocess.run(command, cwd=top, capture_output=True, text=True, timeout=20).stdout.strip()
    return (said.removesuffix("-dirty"), said.endswith("-dirty")) if said else (None, None)


def load(path: str | Path) -> Record:
    """Read one record. RecordError names the file, and the field that is missing, unknown or not as it may be."""
    data, names = _read_object(path), [entry.name for entry in fields(Record)]
    try:
        if wrong := sorted({*names} ^ data.keys()):
            raise RecordError(f"{wrong[0]} is missing, or unknown; a record has {', '.join(names)}")
        return Record(**data)
    except RecordError as error:
        raise RecordError(f"{Path(path).name}: {error}") from None


def load_all(folder: str | Path | None = None) -> list[Record]:
    """Return every record of a folder, by default the project's, oldest first; RecordError as of `load`."""
    paths = sorted((core.records_dir() if folder is None else Path(folder)).glob("*.json"))
    return sorted((load(path) for path in paths if path.name != UNVERIFIED), key=lambda record: record.date)


def told(records: Iterable[Record], name: str, gpu: str = TOLD) -> list[Record]:
    """Return the records of this name with rows of a GPU that has `gpu` in its name; without one all of the name."""
    named = [record for record in records if record.name == name]
    return [record for record in named if any(gpu in (row.get("device") or "") for row in record.rows)] or named


def newest(records: Iterable[Record], name: str, gpu: str = TOLD) -> Record | None:
    """Return the newest of these records, oldest first, that `told` picks, or None."""
    return (told(records, name, gpu) or [None])[-1]


def flat_rows(records: list[Record]) -> list[dict]:
    """Return the measurements of these records, dicts with the keys of FLAT_KEYS; what a row does not say is None.
    `stale` is True for a time on a GPU with kernels that have changed since."""
    flat = []
    for record in records:
        shared, outdated = {"record": record.name, "date": record.date, "commit": record.commit}, stale(record)
        for row in [row for row in record.rows if "kind" in row]:
            known = {**row, **shared, "stale": outdated and not is_cpu(row["device"])}
            flat.append({key: known.get(key) for key in FLAT_KEYS})
    return flat


def table(rows: list[dict], columns: dict[str, str] | None = None) -> str:
    """Return rows as lines of aligned text: numbers flush right, floats with four digits, None as a dash. What would be
    wider than WIDTH says once, above the table, what all rows have in common; then headings and the widest text wrap.

    columns: the headings, in their order, by the key in a row; by default the keys. One that no row has is left out."""
    columns = columns or {key: key for key in rows[0]}
    said = {key for row in rows for key, value in row.items() if value is not None}
    cells = {key: [columns[key], *(_shown(row.get(key)) for row in rows)] for key in columns if key in said}
    numeric = {key for key in cells if any(isinstance(row.get(key), (int, float)) for row in rows)}
    widths = {key: max(map(len, texts)) for key, texts in cells.items()}
    excess, common = lambda: sum(widths.values()) + 2 * (len(widths) - 1) - WIDTH, []
    for key in sorted(cells, key=lambda key: -widths[key]):
        if excess() > 0 and len(widths) > 1 and len(set(cells[key][1:])) == 1:
            common.append(": ".join(cells[key][:2]))
            del widths[key]
    if excess() > 0:
        widths = {key: max(map(len, [*cells[key][0].split(), *cells[key][1:]])) for key in widths}
    for key in sorted(widths.keys() - numeric, key=lambda key: -widths[key]):
        longest_word = max(map(len, " ".join(cells[key]).split()))
        widths[key] = max(longest_word, min(widths[key], widths[key] - excess()))
    lines = [textwrap.fill("; ".join(common), WIDTH)] if common else []
    for line in zip(*(cells[key] for key in widths), strict=True):
        wrapped = (textwrap.wrap(text, width) for text, width in zip(line, widths.values(), strict=True))
        for parts in zip_longest(*wrapped, fillvalue=""):
            beside = zip(parts, widths.items(), strict=True)
            shown = (text.rjust(width) if key in numeric else text.ljust(width) for text, (key, width) in beside)
            lines.append("  ".join(shown).rstrip())
    return "\n".join(lines)


def _shown(value: object) -> str:
    """Return a value as a table shows it: without the control characters that a terminal would obey."""
    if value is None or value == "":
        return "-"
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
    text = f"{value:,}" if type(value) is int else str(value)
    return text if text.isprintable() else repr(text)[1:-1]


def is_cpu(device: str) -> bool:
    """Return whether a row's device name means the CPU."""
    return device.lower().startswith("cpu")


def stale(record: Record) -> bool:
    """Return whether the sources or launch code of a kernel that ran for this record are different now, or gone."""
    return bool(record.kernels) and not set(record.kernels.values()) <= set(kernel_hashes().values())


def verify(folder: str | Path | None = None) -> str:
    """Check that each kernel as it is was tested on a GPU, or is named as not tested yet; return a sentence on that.

    The newest record of the folder, by default the project's, with `gpu_tests` in its notes must report no failure, and
    hold the present hash of each kernel that is not in `UNVERIFIED.json` beside it: {"kernels": {name: hash}, "why": a
    reason}. Otherwise RecordError says what is wrong."""
    folder, now, tested = Path(folder or core.records_dir()), kernel_hashes(), set[str]()
    when = "there is no GPU test report"
    for report in [record for record in load_all(folder) if "gpu_tests" in record.notes][-1:]:
        tested, when, tests = {*report.kernels.values()}, f"tested on a GPU on {report.date}", report.notes["gpu_tests"]
        passed, failed = (tests.get(key) if isinstance(tests, dict) else None for key in ("passed", "failed"))
        if not (type(passed) is type(failed) is int and passed > 0 and failed == 0):
            said = f"notes.gpu_tests of {report.name} of {report.date} is {tests!r:.200}, which is no evidence"
            raise RecordError(f"{said}; accepted: passed above 0 and failed 0")
    untested = {name: value for name, value in now.items() if value not in tested}
    if not untested:
        return f"all {len(now)} kernels as they are were {when}"
    entry = _read_object(folder / UNVERIFIED) if (folder / UNVERIFIED).exists() else {}
    named, why = entry.get("kernels"), str(entry.get("why") or "").strip()
    unnamed = [name for name in untested if not isinstance(named, dict) or named.get(name) != untested[name]]
    if unnamed or not why:
        lacks = f"{UNVERIFIED} {'does not name them' if unnamed else 'gives no reason'}"
        raise RecordError(
            f"kernels with code that no GPU test report carries: {', '.join(unnamed or untested)}; {when}, and {lacks}."
            " Keep a report of the GPU tests in data/records, or name each kernel with its hash, and the reason, in "
            "that file there (`twell-lab records --verify --json` prints the hashes)"
        )
    return f"{len(untested)} of {len(now)} kernels have no GPU test report yet ({', '.join(untested)}): {why}"


def _read_object(path: str | Path) -> dict:
    if not isinstance(data := read_json(path, "record"), dict):
        raise RecordError(f"record {str(path)!r} holds a {type(data).__name__}; a record is an object")
    return data
