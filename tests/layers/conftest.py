"""Such small layers gain nothing from a second thread, and on a busy machine they wait for it."""

from tests.threads import one_thread  # noqa: F401
