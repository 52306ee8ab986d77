"""The client on sockets where nobody, or something odd, answers."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from rlhfd.cli import client
from rlhfd.cli.client import Daemon, Where, find, refusal
from rlhfd.errors import DeadlineError, JobFileError, NoDaemonError, NotPermittedError, RlhfdError, UsageError


@contextmanager
def answering(path: Path, answer: bytes | None) -> Iterator[None]:
    """A socket that answers each request with the same bytes; None: it takes the connection and says nothing."""
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()
    held: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            held.append(connection)
            if answer is not None:
                connection.recv(65536)
                connection.sendall(answer)
                connection.close()

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield
    finally:
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(10)
        for connection in held:
            connection.close()


def test_a_daemon_that_hangs_is_named_with_the_time_waited(tmp_path):
    with answering(tmp_path / "s", None), pytest.raises(DeadlineError, match=r"did not answer /ping within 0.05 s"):
        Daemon(tmp_path / "s").get("/ping", timeout=0.05)


def test_an_answer_that_breaks_off_is_no_daemon(tmp_path):
    cut = b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\n{"
    with answering(tmp_path / "s", cut), pytest.raises(NoDaemonError, match="broke off"):
        Daemon(tmp_path / "s").get("/ping")


def test_something_else_on_the_socket_is_no_daemon(tmp_path):
    with answering(tmp_path / "s", b"220 smtp ready\r\n"), pytest.raises(NoDaemonError, match="broke off"):
        Daemon(tmp_path / "s").get("/ping")


def test_a_refusal_without_a_reason_still_ends_in_a_sentence(tmp_path):
    plain = b"HTTP/1.1 502 Bad Gateway\r\nContent-Length: 4\r\n\r\noops"
    with answering(tmp_path / "s", plain), pytest.raises(RlhfdError, match="502 Bad Gateway without a reason"):
        Daemon(tmp_path / "s").get("/ping")


def test_a_socket_that_is_closed_to_us_is_77(tmp_path, monkeypatch):
    def closed(*_):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(client.socket.socket, "connect", closed)
    with pytest.raises(NotPermittedError, match="join the group"):
        find(Where(socket=tmp_path / "s"))


def test_the_first_that_answers_is_taken(tmp_path, monkeypatch):
    monkeypatch.delenv("RLHFD_SOCKET", raising=False)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setattr("rlhfd.core.places.SYSTEM_SOCKET", tmp_path / "system")
    pong = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}"
    with answering(tmp_path / "system", pong):
        assert find(Where()).path == tmp_path / "system"


@pytest.mark.parametrize(("status", "kind"), [(64, UsageError), (78, JobFileError), (1, RlhfdError), (99, RlhfdError)])
def test_an_exit_status_leads_back_to_its_error(status, kind):
    error = refusal("a sentence", status)
    assert type(error) is kind
    assert str(error) == "a sentence"
