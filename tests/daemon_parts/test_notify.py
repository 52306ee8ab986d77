"""What the service manager is told, over a real datagram socket."""

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from rlhfd.daemon.notify import notify, watchdog_seconds


@pytest.fixture
def manager(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        listening.bind(str(tmp_path / "notify"))
        listening.settimeout(5.0)
        monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "notify"))
        yield listening


def test_lines_arrive_in_one_datagram(manager):
    assert notify("READY=1", "STATUS=epoch 3")
    assert manager.recv(1024) == b"READY=1\nSTATUS=epoch 3"


def test_an_abstract_socket_is_understood(monkeypatch, tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listening:
        name = f"rlhfd-test-{tmp_path.name}-{id(listening)}"
        listening.bind("\0" + name)
        listening.settimeout(5.0)
        monkeypatch.setenv("NOTIFY_SOCKET", "@" + name)
        assert notify("WATCHDOG=1")
        assert listening.recv(64) == b"WATCHDOG=1"


def test_without_a_manager_nothing_is_told(monkeypatch):
    monkeypatch.delenv("NOTIFY_SOCKET", raising=False)
    assert not notify("READY=1")


def test_a_manager_that_does_not_listen_ends_no_daemon(monkeypatch, tmp_path, caplog):
    monkeypatch.setenv("NOTIFY_SOCKET", str(tmp_path / "gone"))
    assert not notify("WATCHDOG=1")
    assert "did not take WATCHDOG=1" in caplog.text


def test_a_manager_that_does_not_read_blocks_no_daemon(manager):
    told = 0
    while told < 100_000 and notify("WATCHDOG=1"):
        told += 1
    assert 0 < told < 100_000


@pytest.mark.parametrize(("usec", "seconds"), [("60000000", 30.0), ("", None), ("soon", None)])
def test_the_watchdog_is_fed_twice_in_its_limit(monkeypatch, usec, seconds):
    monkeypatch.setenv("WATCHDOG_USEC", usec)
    assert watchdog_seconds() == seconds
