"""Recorded measurements with their provenance.

A record is one JSON file: where, when and with which software something was measured, the rows that were
measured, and notes. `data/records` holds the project's own; `Record.save` writes a reader's.

Kernels and their GPU evidence must not drift apart. So each record carries a hash of each kernel that ran, over its
sources and launch code (twell_lab.records.provenance). `verify()` fails for a kernel whose present hash is not in the
newest GPU test report, unless `UNVERIFIED.json` names the kernel with its hash and says why it has not run on a GPU
yet.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path

from ..core import folders, machine
from ..core.errors import RecordError
from ..core.files import WHOLE, read_json, write_atomically
from . import provenance

SCHEMA = 2
UNVERIFIED = "UNVERIFIED.json"
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
    "date",
    "commit",
    "stale",
)


@dataclass
class Record:
    """One measurement, as it is kept. Times in rows are in milliseconds, memory in bytes.

    Attributes:
        name: of the file: lower-case letters, digits, "-", "_" and ".".
        purpose: what was measured, a sentence.
        rows: a row with a `kind` is a measurement, and must also name its `device`, its `path` and its median time
            `ms`; other rows (those of test reports, for one) are free in form.
        date: UTC, as "2026-11-22T10:53:58Z".
        commit: the commit that the code came from; None outside a checkout.
        dirty: whether the code differed from that commit.
        machine: what `core.machine.describe` says.
        notes: anything more, JSON-able.
        kernels: the hash of each kernel that ran on a GPU, by name; None in a file of schema 1, which does not say.
        kernel_hash: one hash over all kernel sources and launch code with their file names, as schema 1 had it; None
            in records made since.
        schema: of the file: 1 or 2.

    Raises:
        RecordError: for a field that is of another type, naming it.
    """

    name: str
    purpose: str
    rows: list[dict]
    date: str
    commit: str | None
    dirty: bool | None
    machine: dict
    notes: dict = field(default_factory=dict)
    kernels: dict[str, str] | None = None
    kernel_hash: str | None = None
    schema: int = SCHEMA

    def __post_init__(self):
        _check(self)

    @classmethod
    def new(
        cls,
        name: str,
        purpose: str,
        rows: list[dict],
        notes: dict | None = None,
        *,
        kernels: Iterable[str] | None = None,
    ) -> Record:
        """A record of what was just measured here: date, commit, hashes and machine are filled in.

        Args:
            name, purpose, rows, notes: see Record.
            kernels: names of those that ran, where other processes ran them; by default those that this process
                loaded.

        Raises:
            RecordError: for rows that are none, and kernels whose sources are not there.
        """
        from ..cuda import launcher

        commit, dirty = provenance.source_commit()
        ran = launcher.loaded_kernels() if kernels is None else set(kernels)
        hashes = provenance.kernel_hashes() if ran else {}
        return cls(
            name=name,
            purpose=purpose,
            rows=rows,
            notes=notes or {},
            commit=commit,
            dirty=dirty,
            date=datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ"),
            kernels={each: hashes[each] for each in sorted(ran)},
            machine=machine.describe(),
        )

    def to_json(self) -> str:
        """The record as JSON text. Raises RecordError for a value JSON has no form for, NaN included."""
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
        """Write `name-date.json` into a folder, whole or not at all; an older record is never overwritten.

        Args:
            folder: by default the records of this checkout, or, where the package is installed, the working folder;
                made if need be.

        Returns:
            The path of the file.

        Raises:
            RecordError: for a folder that cannot be written.
        """
        folder = folders.new_records_dir() if folder is None else Path(folder)
        stem = f"{self.name}-{re.sub('[-:]', '', self.date)}"
        target, again = folder / f"{stem}.json", 2
        while target.exists():
            target, again = folder / f"{stem}-{again}.json", again + 1
        write_atomically(target, self.to_json())
        return target


def _check(record: Record) -> None:
    """Raise RecordError naming the first field that is of the wrong type."""

    def refuse(name: str, value, accepted: str):
        raise RecordError(f"record {record.name!r}: {name} is {value!r:.120}; accepted: {accepted}")

    if type(record.schema) is not int or not 1 <= record.schema <= SCHEMA:
        refuse("schema", record.schema, f"1 to {SCHEMA} (a newer file needs a newer twell-lab)")
    if not (isinstance(record.name, str) and re.fullmatch(r"[a-z0-9][a-z0-9_.-]*", record.name)):
        refuse("name", record.name, "lower-case letters, digits, '-', '_' and '.'")
    if not (isinstance(record.purpose, str) and record.purpose.strip()):
        refuse("purpose", record.purpose, "a sentence")
    try:
        datetime.strptime(record.date, "%Y-%m-%dT%H:%M:%SZ")
    except (TypeError, ValueError):
        refuse("date", record.date, "UTC as YYYY-MM-DDTHH:MM:SSZ")
    if not (record.commit is None or isinstance(record.commit, str)):
        refuse("commit", record.commit, "a commit's hexadecimal name, or null")
    if not (record.dirty is None or isinstance(record.dirty, bool)):
        refuse("dirty", record.dirty, "true, false or null")
    if not (record.kernel_hash is None and record.schema > 1 or _is_hash(record.kernel_hash)):
        refuse("kernel_hash", record.kernel_hash, "64 hexadecimal digits" + ", or null" * (record.schema > 1))
    if not (record.kernels is None and record.schema == 1):
        if not isinstance(record.kernels, dict):
            refuse("kernels", record.kernels, "an object of kernel names and hashes")
        for name, value in record.kernels.items():
            if not _is_hash(value):
                refuse(f"kernels[{name!r}]", value, "64 hexadecimal digits")
    for name in ("machine", "notes"):
        if not isinstance(getattr(record, name), dict):
            refuse(name, getattr(record, name), "an object")
    if not isinstance(record.rows, list):
        refuse("rows", record.rows, "a list of objects")
    for i, row in enumerate(record.rows):
        if not isinstance(row, dict):
            refuse(f"rows[{i}]", row, "an object")
        if "kind" not in row:
            continue
        for key in ("kind", "device", "path"):
            if not (isinstance(row.get(key), str) and row[key]):
                refuse(f"rows[{i}].{key}", row.get(key), "a name")
        ms = row.get("ms")
        if not _is_number(ms) or ms <= 0:
            refuse(f"rows[{i}].ms", ms, "a time in milliseconds above zero")
        for key in ("tokens", "d_model", "d_ff", "nnz", "dense_ms", "x_dense", "spread"):
            if row.get(key) is not None and not _is_number(row[key]):
                refuse(f"rows[{i}].{key}", row[key], "a finite number, or null")
        for key in ("dtype", "workload"):
            if not isinstance(row.get(key), (str, type(None))):
                refuse(f"rows[{i}].{key}", row[key], "a name, or null")


def _is_hash(value) -> bool:
    return isinstance(value, str) and re.fullmatch(r"[0-9a-f]{64}", value) is not None


def _is_number(value) -> bool:
    """Whether it is a number as one is measured: finite, and within what tensors hold."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) < WHOLE


def load(path: str | Path) -> Record:
    """Read one record.

    Raises:
        RecordError: naming the file, and the field that is missing, unknown or of another type.
    """
    path = Path(path)
    data = _read_object(path)
    known = [f.name for f in fields(Record)]
    since_2 = {"kernels"} if data.get("schema") == 1 else set()
    for name in known:
        if name not in data and name not in since_2:
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
        folder: by default the project's records; one that is not there holds none.

    Raises:
        RecordError: as `load`.
    """
    folder = folders.records_dir() if folder is None else Path(folder)
    if not folder.is_dir():
        return []
    records = [load(path) for path in sorted(folder.glob("*.json")) if path.name != UNVERIFIED]
    return sorted(records, key=lambda record: record.date)


def flat_rows(records: list[Record]) -> list[dict]:
    """The measurements of these records, one flat dict each, with exactly the keys of FLAT_KEYS.

    What a row does not say is None. `stale` marks a GPU time taken with kernels other than the present ones; for a CPU
    time no kernel ran, so it is never stale.
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
    """Rows as lines of aligned text, numbers to the right: floats with four digits, None as a dash.

    Args:
        rows: dicts; a key that is missing counts as None.
        columns: key in a row -> heading of its column, in the order shown.
    """

    def shown(value) -> str:
        if value is None or value == "":
            return "-"
        if isinstance(value, str):  # it comes from a file, and a terminal would obey control characters in it
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
    """Whether a row's device name means the CPU."""
    return device.lower().startswith("cpu")


def stale(record: Record) -> bool:
    """Whether this record was made with other kernels than the present ones.

    True where a kernel that ran has other sources or launch code now, or is gone. A record of schema 1 does not say
    which ran: it counts as stale, unless its notes say under "kernels" that they were off.
    """
    if record.kernels is None:
        return not str(record.notes.get("kernels", "")).startswith("off")
    return bool(record.kernels) and not set(record.kernels.values()) <= set(provenance.kernel_hashes().values())


def verify(folder: str | Path | None = None, tree: str | Path | None = None) -> str:
    """Check that each kernel, as it is now, was tested on a GPU or is named as not tested yet.

    The newest record whose notes hold `gpu_tests` must report no failure. The present hash of each kernel must be in
    it, or in `UNVERIFIED.json` in the same folder: {"kernels": {name: present hash, ...}, "why": a reason, "date":
    ...}.

    Args:
        folder: of the records; by default the project's, or those of `tree`.
        tree: the top of another checkout to look at.

    Returns:
        One sentence that says which of the two holds.

    Raises:
        RecordError: naming the kernels for which neither holds.
    """
    if folder is None:
        folder = folders.records_dir() if tree is None else Path(tree) / "data" / "records"
    folder, now = Path(folder), provenance.kernel_hashes(tree)
    reports = [record for record in load_all(folder) if "gpu_tests" in record.notes]
    tested: set[str] = set()
    if reports:
        report = reports[-1]
        tests = report.notes["gpu_tests"]
        passed, failed = (tests.get(key) if isinstance(tests, dict) else None for key in ("passed", "failed"))
        if type(failed) is not int or failed != 0 or type(passed) is not int or passed <= 0:
            raise RecordError(
                f"the GPU test report {report.name} of {report.date} is no evidence: "
                f"notes.gpu_tests is {tests!r:.200}; accepted: passed above 0 and failed 0"
            )
        tested = set((report.kernels or {}).values())
    said = f"tested on a GPU on {reports[-1].date}" if reports else "there is no GPU test report"
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


def _read_object(path: Path) -> dict:
    data = read_json(path, "record")
    if not isinstance(data, dict):
        raise RecordError(f"record {str(path)!r} holds a {type(data).__name__}; a record is an object")
    return data
