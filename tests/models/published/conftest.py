"""What all tests of loading share."""

import socket

import pytest


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    """No network."""

    def refuse(*_, **__):
        raise OSError("no network in tests")

    monkeypatch.setattr(socket, "getaddrinfo", refuse)
    monkeypatch.setattr(socket.socket, "connect", refuse)
