"""Recorded measurements as JSON, which kernels ran for them, and whether those have changed since. May import ops and
all below."""

from .record import (
    COLUMNS,
    FLAT_KEYS,
    SCHEMA,
    TOLD,
    UNVERIFIED,
    Record,
    flat_rows,
    is_cpu,
    load,
    load_all,
    newest,
    stale,
    table,
    verify,
)
from .unfinished import Unfinished, unfinished

__all__ = [
    "COLUMNS",
    "FLAT_KEYS",
    "SCHEMA",
    "TOLD",
    "UNVERIFIED",
    "Record",
    "Unfinished",
    "flat_rows",
    "is_cpu",
    "load",
    "load_all",
    "newest",
    "stale",
    "table",
    "unfinished",
    "verify",
]
