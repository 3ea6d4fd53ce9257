"""What the tests of several widgets share."""

import pytest

from twell_lab.course import widgets


@pytest.fixture(params=["in place", "drawn anew"])
def draws(request, monkeypatch) -> str:
    """Both ways of drawing; the explorer made afterwards takes this one."""
    if request.param == "drawn anew":
        monkeypatch.setattr(widgets, "on_colab", lambda: True)
    else:
        pytest.importorskip("anywidget")
    return request.param
