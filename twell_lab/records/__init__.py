"""A measurement as JSON, what ran for it, and whether that is still what is here. May import ops and all below."""

from .record import (
    FLAT_KEYS,
    SCHEMA,
    UNVERIFIED,
    Record,
    flat_rows,
    is_cpu,
    load,
    load_all,
    stale,
    table,
    verify,
)

__all__ = [
    "FLAT_KEYS",
    "SCHEMA",
    "UNVERIFIED",
    "Record",
    "flat_rows",
    "is_cpu",
    "load",
    "load_all",
    "stale",
    "table",
    "verify",
]
