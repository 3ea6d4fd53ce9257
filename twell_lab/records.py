"""Records: JSON files that say where, when and with which software something was measured, and what was measured.

`data/records` holds those of the project; `Record.save` writes new ones. A record holds a hash of each kernel that ran,
which shows whether the kernel has changed since: a SHA-256 over its `.cu` with its headers, without comments, and over
the syntax tree of the file of ops/ that declares and launches it, without docstrings (`kernel_hashes`). A record is
stale when a hash of a kernel that ran for it is no longer the present one. `verify()` fails for a kernel whose present
hash is not in the newest report of the GPU tests, unless `UNVERIFIED.json` names the kernel with that hash and says why
it has not run on a GPU yet."""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import subprocess
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

from . import core
from .core import WHOLE, RecordError, read_json, write_atomically

SCHEMA = 2
UNVERIFIED = "UNVERIFIED.json"
ENDING = ".json.unfinished"
TOLD = "H100"  # in the name of the GPU that pages and figures tell of where they tell of one
FLAT_KEYS = tuple(
    "record kind device dtype tokens d_model d_ff nnz workload path ms dense_ms x_dense spread wall_ms dense_wall_ms "
    "host_us date commit stale".split()
)
# What is printed of a measurement, and its heading.
COLUMNS = {key: key for key in "device dtype tokens d_model d_ff nnz path ms spread x_dense wall_ms".split()}
COLUMNS |= {"nnz": "mean nnz", "x_dense": "x dense", "wall_ms": "wall ms"}


@dataclass
class Record:
    """What was measured in one run, and where it was measured; `str` gives a table of it. Times in rows are in
    milliseconds, memory in bytes.

    Attributes:
        name: how the names of its files begin: lower-case letters, digits, "-", "_" and ".".
        purpose: what was measured, as a sentence.
        rows: dicts. A row with a `kind` is a measurement, and must also have its `device`, its `path` (see
            twell_lab.layers.paths) and its median time `ms`. `error` says how far its result is from the exact one, as
            a share of the norm of that (`layer_error` a layer's within a model); `loss` what a model's cross-entropy
            is, in nats a token. Other rows, such as those of test reports, may hold anything.
        date: UTC, as "2026-11-22T10:53:58Z".
        commit, dirty: the commit that the code came from, and whether the code differed from it; None outside a
            checkout.
        machine: what `core.describe_machine` returns.
        notes: anything else that JSON can hold.
        kernels: the hash of each kernel that ran on a GPU, by name.
        schema: the version of the file format.

    Raises:
        RecordError: naming a field with a value that it may not have.
    """

    name: str
    purpose: str
    rows: list[dict] = field(repr=False)  # which may hold thousands of samples
    date: str
    commit: str | None
    dirty: bool | None
    machine: dict = field(repr=False)
    notes: dict = field(default_factory=dict, repr=False)
    kernels: dict[str, str] = field(default_factory=dict, repr=False)
    schema: int = SCHEMA

    def __post_init__(self):
        _check(self)

    def __str__(self) -> str:
        """Return what was measured, a line for each measurement; where workloads or heads differ, a line says which."""
        measured = [row for row in self.rows if "kind" in row]
        told = f"{self.name}, {self.date}: {self.purpose}"
        more = {"head": "LM head", "workload": "workload"}
        columns = COLUMNS | {key: more[key] for key in more if len({str(row.get(key)) for row in measured}) > 1}
        return f"{told}\n{table(measured, columns)}" if measured else told

    @classmethod
    def new(
        cls,
        name: str,
        purpose: str,
        rows: list[dict],
        notes: dict | None = None,
        *,
        kernels: Iterable[str] | None = None,
        described: dict | None = None,
    ) -> Record:
        """Return a record of what was just measured on this machine, with date, commit, hashes and machine filled in.

        Args:
            name, purpose, rows, notes: as in Record.
            kernels: names of the kernels that ran, where other processes ran them; by default those that this process
                has loaded.
            described: the machine of a record that this process made before; by default the machine is described anew,
                which asks nvidia-smi.

        Raises:
            RecordError: as Record does, and where the sources of a kernel are missing.
        """
        from .cuda import launch

        commit, dirty = source_commit()
        ran = launch.loaded() if kernels is None else set(kernels)
        hashes = kernel_hashes() if ran else {}
        return cls(
            name=name,
            purpose=purpose,
            rows=rows,
            notes=notes or {},
            commit=commit,
            dirty=dirty,
            date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            kernels={each: hashes[each] for each in sorted(ran)},
            machine=core.describe_machine() if described is None else described,
        )

    def to_json(self) -> str:
        """The record as JSON text. Raises RecordError for a value that JSON cannot hold, such as NaN."""
        data = {key: getattr(self, key) for key in ("schema", *_FIELDS)}
        data["rows"] = data.pop("rows")  # the longest comes last
        try:
            return json.dumps(data, indent=1, allow_nan=False) + "\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise RecordError(
                f"record {self.name!r} cannot be written as JSON: {error}; rows and notes take "
                "strings, finite numbers, booleans, None, lists and dicts"
            ) from None

    def save(self, folder: str | Path | None = None) -> Path:
        """Write `name-date.json` into a folder, whole or not at all, and return its path. No other record is replaced.

        folder: by default data/records of this checkout or, where the package is installed, the working folder. It is
        made where it is missing. Raises RecordError for a folder that cannot be written."""
        target = self.free_path(core.new_records_dir() if folder is None else Path(folder))
        write_atomically(target, self.to_json())
        return target

    def free_path(self, folder: Path, ending: str = ".json") -> Path:
        """A path in this folder, `name-date` with this ending, that no file has yet."""
        stem = f"{self.name}-{re.sub('[-:]', '', self.date)}"
        names = (stem if number == 1 else f"{stem}-{number}" for number in count(1))
        return next(path for name in names if not (path := folder / f"{name}{ending}").exists())


# ---- what a record may hold


Rule = tuple[Callable[[Any], bool], str]  # what holds for a value, and what is accepted, in words


def _matches(pattern: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _is(kind: type) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, kind)


def _is_number(value) -> bool:
    """Return whether it is a number that can be measured: finite, and below the bound of what tensors hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < WHOLE


def _or_none(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


_is_hash = _matches("[0-9a-f]{64}")


_FIELDS: dict[str, Rule] = {
    "schema": (lambda value: type(value) is int and value == SCHEMA, f"{SCHEMA}"),
    "name": (_matches("[a-z0-9][a-z0-9_.-]*"), "lower-case letters, digits, '-', '_' and '.'"),
    "purpose": (lambda value: isinstance(value, str) and bool(value.strip()), "a sentence"),
    "date": (_matches(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"), "UTC as YYYY-MM-DDTHH:MM:SSZ"),
    "commit": (_or_none(_is(str)), "a commit's hexadecimal name, or null"),
    "dirty": (_or_none(_is(bool)), "true, false or null"),
    "kernels": (
        lambda value: isinstance(value, dict) and all(map(_is_hash, value.values())),
        "an object of kernel names and hashes",
    ),
    "machine": (_is(dict), "an object"),
    "notes": (_is(dict), "an object"),
    "rows": (lambda value: isinstance(value, list) and all(map(_is(dict), value)), "objects"),
}
_NUMBERS = ("tokens", "d_model", "d_ff", "nnz", "dense_ms", "x_dense", "spread", "wall_ms", "dense_wall_ms", "host_us")
_SHARES = ("error", "layer_error", "loss")
_MEASUREMENT: dict[str, Rule] = {  # of the fields of a row with a `kind`
    **dict.fromkeys(("kind", "device", "path"), (lambda value: isinstance(value, str) and value != "", "a name")),
    "ms": (lambda value: _is_number(value) and value > 0, "a time in milliseconds above zero"),
    **dict.fromkeys(_NUMBERS, (_or_none(_is_number), "a finite number, or null")),
    **dict.fromkeys(_SHARES, (_or_none(lambda value: _is_number(value) and value >= 0), "a number from 0 up, or null")),
    **dict.fromkeys(("dtype", "workload"), (_or_none(_is(str)), "a name, or null")),
}


def _check(record: Record) -> None:
    """Raise RecordError that names the first field with a value that it may not have."""

    def check(name: str, value, holds: Callable[[Any], bool], accepted: str) -> None:
        if not holds(value):
            raise RecordError(f"record {record.name!r}: {name} is {value!r:.120}; accepted: {accepted}")

    for name, rule in _FIELDS.items():
        check(name, getattr(record, name), *rule)
    for i, row in enumerate(record.rows):
        for key, rule in _MEASUREMENT.items() if "kind" in row else ():
            check(f"rows[{i}].{key}", row.get(key), *rule)


# ---- which kernels and which commit


@cache
def kernel_hashes() -> dict[str, str]:
    """Return the hash of every kernel as it is now, 64 hexadecimal digits, by the kernel's name.

    Raises RecordError for a source of kernels/ that no file of ops/ declares."""
    from .cuda.compile import with_headers

    hashes = {}
    for path in sorted(Path(__file__).with_name("ops").glob("*.py")):
        tree = ast.parse(path.read_bytes())
        names = _declared(tree)
        code = _without_docstrings(tree) if names else ""
        for name in names:
            texts = [_code_only(text) for _, text in sorted(with_headers(f"{name}.cu").items())]
            digest = hashlib.sha256()
            for part in (*texts, code):
                digest.update(len(part).to_bytes(8, "little") + part.encode())
            hashes[name] = digest.hexdigest()
    undeclared = {path.stem for path in core.kernels_dir().glob("*.cu")} - set(hashes)
    if undeclared:
        raise RecordError(f"{min(undeclared)}.cu is in kernels/, and no file of ops/ declares it")
    return hashes


def _declared(tree: ast.Module) -> list[str]:
    """List the kernels that a file declares: its top-level `NAME = Source("kernel", ...)`. The file is read and not
    imported, so that records can be drawn where torch is not installed."""
    calls = [node.value for node in tree.body if isinstance(node, ast.Assign) and isinstance(node.value, ast.Call)]
    return [
        str(ast.literal_eval(call.args[0]))
        for call in calls
        if isinstance(call.func, ast.Name) and call.func.id == "Source"
    ]


def _code_only(text: str) -> str:
    """A CUDA source without comments, its white space folded."""
    return " ".join(re.sub(r"//[^\n]*|/\*.*?\*/", " ", text, flags=re.S).split())


def _without_docstrings(tree: ast.Module) -> str:
    """Write out a syntax tree but its docstrings, the same in every version of Python: `ast.dump` writes empty lists in
    some versions only, newer ones have more of them, and 3.12 puts empty strings into f-strings."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            node.values = [part for part in node.values if getattr(part, "value", None) != ""]
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return _written(tree)


def _written(node: object) -> str:
    if isinstance(node, list):
        return f"[{', '.join(map(_written, node))}]"
    if not isinstance(node, ast.AST):
        return repr(node)
    fields = (f"{name}={_written(value)}" for name, value in ast.iter_fields(node) if value is not None and value != [])
    return f"{type(node).__name__}({', '.join(fields)})"


def source_commit() -> tuple[str | None, bool | None]:
    """Return the commit of the checkout that this package runs from, and whether files differ from it; (None, None)
    outside a checkout.

    For a copy without `.git`, the environment variable TWELL_LAB_COMMIT can say it, in the form of
    `git describe --always --abbrev=40 --dirty --exclude='*'`."""
    if given := os.environ.get("TWELL_LAB_COMMIT", "").strip():
        return given.removesuffix("-dirty"), given.endswith("-dirty")
    top = Path(__file__).resolve().parents[1]

    def git(*words: str) -> str:
        command = ["git", "--no-optional-locks", "-C", str(top), *words]
        return subprocess.run(command, capture_output=True, text=True, check=True, timeout=20).stdout.strip()

    try:
        # An installed package may lie in the checkout of another project, whose commit says nothing about it.
        if Path(git("rev-parse", "--show-toplevel")).resolve() != top:
            return None, None
        return git("rev-parse", "HEAD"), bool(git("status", "--porcelain"))
    except (OSError, subprocess.SubprocessError):
        return None, None


# ---- reading, listing, and whether a record still holds ----


def load(path: str | Path) -> Record:
    """Read one record.

    Raises:
        RecordError: naming the file, and the field that is missing, unknown or has a value that it may not have.
    """
    path = Path(path)
    data = _read_object(path)
    data.pop("kernel_hash", None)  # of before a record had a hash of each kernel
    try:
        if wrong := sorted(_FIELDS.keys() ^ data.keys()):
            what = "is missing" if wrong[0] in _FIELDS else "is unknown"
            raise RecordError(f"{wrong[0]} {what}; a record has {', '.join(_FIELDS)}")
        return Record(**data)
    except RecordError as error:
        raise RecordError(f"{path.name}: {error}") from None


def load_all(folder: str | Path | None = None) -> list[Record]:
    """Return every record of a folder, by default the project's, oldest first; none of a folder that does not exist.

    Raises RecordError as `load` does."""
    folder = core.records_dir() if folder is None else Path(folder)
    if not folder.is_dir():
        return []
    records = [load(path) for path in sorted(folder.glob("*.json")) if path.name != UNVERIFIED]
    return sorted(records, key=lambda record: record.date)


def told(records: Iterable[Record], name: str, gpu: str = TOLD) -> list[Record]:
    """Those of these records that have this name and rows of a GPU that has `gpu` in its name; without one all of the
    name."""
    named = [record for record in records if record.name == name]
    return [record for record in named if any(gpu in (row.get("device") or "") for row in record.rows)] or named


def newest(records: Iterable[Record], name: str, gpu: str = TOLD) -> Record | None:
    """Return the newest of these records, oldest first, that `told` picks, so that a record of another GPU does not
    change the pages and figures that tell of one; None where there is none."""
    return (told(records, name, gpu) or [None])[-1]


def flat_rows(records: list[Record]) -> list[dict]:
    """Return the measurements of these records, one dict each, with exactly the keys of FLAT_KEYS; what a row does not
    say is None. `stale` is True for a time on a GPU with kernels that have changed since."""
    flat = []
    for record in records:
        outdated = stale(record)
        shared = {"record": record.name, "date": record.date, "commit": record.commit}
        for row in record.rows:
            if "kind" in row:
                known = {**row, **shared, "stale": outdated and not is_cpu(row["device"])}
                flat.append({key: known.get(key) for key in FLAT_KEYS})
    return flat


def table(rows: list[dict], columns: dict[str, str]) -> str:
    """Return rows as lines of aligned text: numbers flush right, floats with four digits, None as a dash. columns: the
    headings, in their order, by the key in a row; a missing key counts as None."""

    def shown(value) -> str:
        if value is None or value == "":
            return "-"
        if isinstance(value, str):  # it may come from a file, and a terminal would obey control characters in it
            return value if value.isprintable() else repr(value)[1:-1]
        if isinstance(value, float):
            return f"{value:.4g}" if abs(value) < 1e4 else f"{value:,.0f}"
        return f"{value:,}" if type(value) is int else str(value)

    cells = [list(columns.values())] + [[shown(row.get(key)) for key in columns] for row in rows]
    numeric = [any(isinstance(row.get(key), (int, float)) for row in rows) for key in columns]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    sides = [(str.rjust if right else str.ljust, width) for right, width in zip(numeric, widths, strict=True)]
    lines = ("  ".join(to(text, width) for text, (to, width) in zip(line, sides, strict=True)) for line in cells)
    return "\n".join(map(str.rstrip, lines))


def is_cpu(device: str) -> bool:
    """Return whether a row's device name means the CPU."""
    return device.lower().startswith("cpu")


def stale(record: Record) -> bool:
    """Return whether the sources or launch code of a kernel that ran for this record are different now, or gone."""
    return bool(record.kernels) and not set(record.kernels.values()) <= set(kernel_hashes().values())


def verify(folder: str | Path | None = None) -> str:
    """Check that each kernel, as it is now, was tested on a GPU, or is named as not tested yet.

    The newest record of the folder, by default the project's, with `gpu_tests` in its notes must report no failure. The
    present hash of each kernel must be in that record, or in `UNVERIFIED.json` beside it: {"kernels": {name: present
    hash, ...}, "why": a reason, "date": ...}.

    Returns a sentence that says whether all kernels were tested, or else which were not, and why. Raises RecordError
    that names the kernels that were neither tested nor named, or says what is wrong with the report.
    """
    folder, now = Path(folder or core.records_dir()), kernel_hashes()
    tested, said = _tested(folder)
    untested = {name: value for name, value in now.items() if value not in tested}
    if not untested:
        return f"all {len(now)} kernels as they are were {said}"
    entry = _read_object(folder / UNVERIFIED) if (folder / UNVERIFIED).exists() else {}
    named = entry["kernels"] if isinstance(entry.get("kernels"), dict) else {}
    why = entry["why"].strip() if isinstance(entry.get("why"), str) else ""
    unnamed = {name: value for name, value in untested.items() if named.get(name) != value}
    if unnamed or not why:
        lacks = "gives no reason" if named and not unnamed else "does not name them"
        listed = ", ".join(f"{name} ({value[:12]})" for name, value in (unnamed or untested).items())
        raise RecordError(
            f"kernels with code that no GPU test report carries: {listed}; {said}, and {UNVERIFIED} {lacks}. Run the "
            "GPU tests and keep their report in data/records, or name each of these kernels with its hash, and the "
            f"reason, in data/records/{UNVERIFIED} (`twell-lab records --verify --json` prints the hashes)"
        )
    return (
        f"{len(untested)} of {len(now)} kernels have no GPU test report of their own yet ({', '.join(untested)}): {why}"
    )


def _tested(folder: Path) -> tuple[set[str], str]:
    """The hashes of the kernels in the newest report of the GPU tests, and a few words on when those ran. RecordError
    unless all of them passed."""
    report = next((record for record in reversed(load_all(folder)) if "gpu_tests" in record.notes), None)
    if report is None:
        return set(), "there is no GPU test report"
    tests = report.notes["gpu_tests"]
    passed, failed = (tests.get(key) if isinstance(tests, dict) else None for key in ("passed", "failed"))
    if not (type(passed) is type(failed) is int and passed > 0 and failed == 0):
        raise RecordError(
            f"the GPU test report {report.name} of {report.date} is no evidence: "
            f"notes.gpu_tests is {tests!r:.200}; accepted: passed above 0 and failed 0"
        )
    return set(report.kernels.values()), f"tested on a GPU on {report.date}"


def _read_object(path: Path) -> dict:
    data = read_json(path, "record")
    if not isinstance(data, dict):
        raise RecordError(f"record {str(path)!r} holds a {type(data).__name__}; a record is an object")
    return data


# ---- what a recording has before it ends


class Unfinished:
    """Keeps what a recording has before it ends, in a file that outlives its process. There is none until something is
    written. No reader takes it for a record; renamed without ".unfinished" it is one.

    Attributes:
        folder: where it is to lie.
        path: of the file; None where there is none.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path: Path | None = None

    def write(self, record: Record) -> None:
        """Put this record, with a note, in place of what the file holds: whole or not at all. Raises RecordError for a
        folder that cannot be written, and a record that JSON cannot hold."""
        record.notes = {"unfinished": "the recording was cut off", **record.notes}
        path = self.path or record.free_path(self.folder, ENDING)
        write_atomically(path, record.to_json())
        self.path = path

    def remove(self) -> None:
        """Remove the file, if there is one."""
        if self.path is not None:
            self.path.unlink(missing_ok=True)
            self.path = None


def unfinished(folder: str | Path | None = None) -> list[Path]:
    """The files of recordings that were cut off, or go on, in a folder; by default that of the project's records."""
    folder = core.records_dir() if folder is None else Path(folder)
    return sorted(folder.glob(f"*{ENDING}"))
