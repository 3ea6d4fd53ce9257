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
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from functools import cache
from pathlib import Path
from typing import Any

from . import core
from .core import WHOLE, RecordError, read_json, write_atomically

SCHEMA = 2
UNVERIFIED = "UNVERIFIED.json"
TOLD = "H100"  # in the name of the GPU that pages and figures tell of where they tell of one
FLAT_KEYS = (
    "record",
    "kind",
    "device",
    "dtype",
    "tokens",
    "d_model",
    "d_ff",
    "nnz",
    "workload",
    "path",
    "ms",
    "dense_ms",
    "x_dense",
    "spread",
    "wall_ms",
    "dense_wall_ms",
    "host_us",
    "date",
    "commit",
    "stale",
)

COLUMNS = {  # what is printed of a measurement, and its heading
    "device": "device",
    "dtype": "dtype",
    "tokens": "tokens",
    "d_model": "d_model",
    "d_ff": "d_ff",
    "nnz": "mean nnz",
    "path": "path",
    "ms": "ms",
    "spread": "spread",
    "x_dense": "x dense",
    "wall_ms": "wall ms",
}


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
        commit: the commit that the code came from; None outside a checkout.
        dirty: whether the code differed from that commit.
        machine: what `core.describe_machine` returns.
        notes: anything else that JSON can hold.
        kernels: the hash of each kernel that ran on a GPU, by name; None in schema 1, which does not say it.
        kernel_hash: one hash over all kernel sources and launch code with their file names, in schema 1; None in
            schema 2.
        schema: the version of the file format, 1 or 2.

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
    kernels: dict[str, str] | None = field(default=None, repr=False)
    kernel_hash: str | None = None
    schema: int = SCHEMA

    def __post_init__(self):
        _check(self)

    def __str__(self) -> str:
        """Return what was measured, a line for each measurement. Where there are several workloads, or a model was also
        measured without its head, a line says which."""
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
        """A record of what was just measured on this machine, with date, commit, hashes and machine filled in.

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
        order = (
            "schema",
            "name",
            "purpose",
            "date",
            "commit",
            "dirty",
            "kernels",
            "kernel_hash",
            "machine",
            "notes",
            "rows",
        )
        try:
            data = asdict(self)
            return json.dumps({key: data[key] for key in order}, indent=1, allow_nan=False) + "\n"
        except (TypeError, ValueError, RecursionError) as error:
            raise RecordError(
                f"record {self.name!r} cannot be written as JSON: {error}; rows and notes take "
                "strings, finite numbers, booleans, None, lists and dicts"
            ) from None

    def save(self, folder: str | Path | None = None) -> Path:
        """Write `name-date.json` into a folder, whole or not at all. Another record is never overwritten.

        Args:
            folder: by default data/records of this checkout or, where the package is installed, the working folder.
                It is made where it is missing.

        Returns:
            The path of the file.

        Raises:
            RecordError: for a folder that cannot be written.
        """
        target = self.free_path(core.new_records_dir() if folder is None else Path(folder))
        write_atomically(target, self.to_json())
        return target

    def free_path(self, folder: Path, ending: str = ".json") -> Path:
        """A path in this folder, `name-date` with this ending, that no file has yet."""
        stem = f"{self.name}-{re.sub('[-:]', '', self.date)}"
        target, again = folder / f"{stem}{ending}", 2
        while target.exists():
            target, again = folder / f"{stem}-{again}{ending}", again + 1
        return target


# ---- what a record may hold


def _matches(pattern: str) -> Callable[[Any], bool]:
    return lambda value: isinstance(value, str) and re.fullmatch(pattern, value) is not None


def _is_number(value) -> bool:
    """Return whether it is a number that can be measured: finite, and below the bound of what tensors hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < WHOLE


def _or_none(holds: Callable[[Any], bool]) -> Callable[[Any], bool]:
    return lambda value: value is None or holds(value)


_HASH = _matches("[0-9a-f]{64}")
_HASHES = lambda value: isinstance(value, dict) and all(map(_HASH, value.values()))  # noqa: E731
# Of each field, and of each field of a row with a `kind`: what holds for its value, and what is accepted, in words.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "schema": (lambda value: type(value) is int and 1 <= value <= SCHEMA, f"1 to {SCHEMA}"),
    "name": (_matches("[a-z0-9][a-z0-9_.-]*"), "lower-case letters, digits, '-', '_' and '.'"),
    "purpose": (lambda value: isinstance(value, str) and bool(value.strip()), "a sentence"),
    "date": (_matches(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ"), "UTC as YYYY-MM-DDTHH:MM:SSZ"),
    "commit": (_or_none(lambda value: isinstance(value, str)), "a commit's hexadecimal name, or null"),
    "dirty": (_or_none(lambda value: isinstance(value, bool)), "true, false or null"),
    "machine": (lambda value: isinstance(value, dict), "an object"),
    "notes": (lambda value: isinstance(value, dict), "an object"),
    "rows": (lambda value: isinstance(value, list) and all(isinstance(row, dict) for row in value), "objects"),
    "kernel_hash": (_or_none(_HASH), "64 hexadecimal digits, or null"),
    "kernels": (_or_none(_HASHES), "an object of kernel names and hashes"),
}
_NAME = (lambda value: isinstance(value, str) and value != "", "a name")
_MEASUREMENT: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("kind", "device", "path"), _NAME),
    "ms": (lambda value: _is_number(value) and value > 0, "a time in milliseconds above zero"),
    **dict.fromkeys(
        ("tokens", "d_model", "d_ff", "nnz", "dense_ms", "x_dense", "spread", "wall_ms", "dense_wall_ms", "host_us"),
        (_or_none(_is_number), "a finite number, or null"),
    ),
    **dict.fromkeys(
        ("error", "layer_error", "loss"),
        (_or_none(lambda value: _is_number(value) and value >= 0), "a number from 0 up, or null"),
    ),
    **dict.fromkeys(("dtype", "workload"), (_or_none(lambda value: isinstance(value, str)), "a name, or null")),
}


def _check(record: Record) -> None:
    """Raise RecordError that names the first field with a value that it may not have."""

    def check(name: str, value, holds: Callable[[Any], bool], accepted: str) -> None:
        if not holds(value):
            raise RecordError(f"record {record.name!r}: {name} is {value!r:.120}; accepted: {accepted}")

    for name, rule in _FIELDS.items():
        check(name, getattr(record, name), *rule)
    check("kernels", record.kernels, lambda value: value is not None or record.schema == 1, "null in schema 1 alone")
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
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and ast.get_docstring(node) is not None:
            node.body = node.body[1:] or [ast.Pass()]
    return ast.dump(tree)


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
    known = [f.name for f in fields(Record)]
    for name in known:
        if name not in data and not (name == "kernels" and data.get("schema") == 1):
            raise RecordError(f"{path.name}: {name} is missing; a record has {', '.join(known)}")
    unknown = sorted(set(data) - set(known))
    if unknown:
        raise RecordError(f"{path.name}: unknown field {unknown[0]!r}; a record has {', '.join(known)}")
    try:
        return Record(**data)
    except RecordError as error:
        raise RecordError(f"{path.name}: {error}") from None


def load_all(folder: str | Path | None = None) -> list[Record]:
    """Every record of a folder, oldest first.

    Args:
        folder: by default the project's records. A folder that does not exist holds none.

    Raises:
        RecordError: as `load` does.
    """
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
    """The newest record of this name with rows of a GPU that has `gpu` in its name; without one the newest of the name,
    None where there is none. records: oldest first.

    Pages and figures that tell of one GPU take their record by this, so that one of another GPU does not change them.
    """
    return (told(records, name, gpu) or [None])[-1]


def flat_rows(records: list[Record]) -> list[dict]:
    """The measurements of these records, one dict each, with exactly the keys of FLAT_KEYS.

    What a row does not say is None. `stale` is True for a time on a GPU with kernels that have changed since. No kernel
    runs for a time on a CPU, which is never stale.
    """
    flat = []
    for record in records:
        outdated = stale(record)
        for row in record.rows:
            if "kind" not in row:
                continue
            known = {
                **row,
                "record": record.name,
                "date": record.date,
                "commit": record.commit,
                "stale": outdated and not is_cpu(row["device"]),
            }
            flat.append({key: known.get(key) for key in FLAT_KEYS})
    return flat


def table(rows: list[dict], columns: dict[str, str]) -> str:
    """Rows as lines of aligned text: numbers flush right, floats with four digits, None as a dash.

    Args:
        rows: dicts. A missing key counts as None.
        columns: the heading of each column by the key in a row, in the order of the columns.
    """

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
    return "\n".join(
        "  ".join(
            text.rjust(width) if right else text.ljust(width)
            for text, width, right in zip(line, widths, numeric, strict=True)
        ).rstrip()
        for line in cells
    )


def is_cpu(device: str) -> bool:
    """Return whether a row's device name means the CPU."""
    return device.lower().startswith("cpu")


def stale(record: Record) -> bool:
    """Return whether the kernels that ran for this record have changed since.

    True where the sources or launch code of a kernel that ran are different now, or are gone. A record of schema 1 does
    not say which kernels ran, so it is stale unless its notes say under "kernels" that they were off.
    """
    if record.kernels is None:
        return not str(record.notes.get("kernels", "")).startswith("off")
    return bool(record.kernels) and not set(record.kernels.values()) <= set(kernel_hashes().values())


def verify(folder: str | Path | None = None) -> str:
    """Check that each kernel, as it is now, was tested on a GPU, or is named as not tested yet.

    The newest record with `gpu_tests` in its notes must report no failure. The present hash of each kernel must be in
    that record, or in `UNVERIFIED.json` in the same folder: {"kernels": {name: present hash, ...}, "why": a reason,
    "date": ...}.

    Args:
        folder: of the records; by default the project's.

    Returns:
        A sentence that says whether all kernels were tested, or else which were not, and why.

    Raises:
        RecordError: naming the kernels that were neither tested nor named, or saying what is wrong with the report.
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
        lacks = (
            f'{UNVERIFIED} gives no reason in "why"' if named and not unnamed else f"{UNVERIFIED} does not name them"
        )
        listed = ", ".join(f"{name} ({value[:12]})" for name, value in (unnamed or untested).items())
        raise RecordError(
            f"kernels with code that no GPU test report carries: {listed}; {said}, and {lacks}. Run the GPU tests and "
            "keep their report in data/records, or name each of these kernels with its hash, and the reason, in "
            f"data/records/{UNVERIFIED} (`twell-lab records --verify --json` prints the hashes)"
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
    return set((report.kernels or {}).values()), f"tested on a GPU on {report.date}"


def _read_object(path: Path) -> dict:
    data = read_json(path, "record")
    if not isinstance(data, dict):
        raise RecordError(f"record {str(path)!r} holds a {type(data).__name__}; a record is an object")
    return data


# ---- what a recording has before it ends


ENDING = ".json.unfinished"


class Unfinished:
    """Holds what a recording has before it ends, in a file that outlives its process. There is none until something is
    written. No reader takes it for a record; renamed without ".unfinished" it is one.

    Args:
        folder: where it is to lie.

    Attributes:
        path: of the file; None where there is none.
    """

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.path: Path | None = None

    def write(self, record: Record) -> None:
        """Put this record, with the note, in place of what the file holds: whole or not at all.

        Raises:
            RecordError: for a folder that cannot be written, and a record that JSON cannot hold.
        """
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
