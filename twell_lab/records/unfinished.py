"""What a recording has before it ends, in a file that outlives its process: `name-date.json.unfinished`.

It holds a whole Record, but no reader of records takes it for one, as its name does not end with ".json". Renamed
without ".unfinished" it is a record like any other. Its notes say under "unfinished" that the recording was cut off.
"""

from __future__ import annotations

from pathlib import Path

from .. import core
from ..core import write_atomically
from .record import Record

ENDING = ".json.unfinished"


class Unfinished:
    """The file of one recording that goes on. There is none until something is written.

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
