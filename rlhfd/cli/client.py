"""The daemon, asked over its unix socket.

Decision: http.client and not httpx. With httpx `rlhfd status` costs 320 ms of CPU (its import alone 150), against a
limit of 250; with http.client 70. One client is enough for all commands.
"""

import json
import os
import socket
from collections.abc import Generator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from http.client import HTTPConnection, HTTPException, HTTPResponse
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

from rlhfd import errors
from rlhfd.core.places import client_sockets
from rlhfd.errors import DeadlineError, NoDaemonError, NotPermittedError, RlhfdError

Object: TypeAlias = dict[str, Any]
PING_SECONDS = 5.0
PIECE = 1024 * 1024
ANSWER_SECONDS = 60.0  # an ordinary answer; a daemon whose disk is slow is still given time
BY_STATUS: dict[int, type[RlhfdError]] = {
    kind.exit_status: kind
    for kind in (
        errors.UsageError,
        errors.StateError,
        errors.NoDaemonError,
        errors.StorageError,
        errors.AlreadyRunningError,
        errors.NotPermittedError,
        errors.JobFileError,
    )
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Where:
    """rlhfd's own options: where the daemon is. None where the line does not say."""

    socket: Path | None = None
    state_dir: Path | None = None

    def sockets(self, environ: Mapping[str, str]) -> list[Path]:
        """Where to look for a daemon, in order."""
        return client_sockets(environ, given=self.socket, state_given=self.state_dir)


def refusal(sentence: str, exit_status: int) -> RlhfdError:
    """The error that an answer or a child's exit status stands for."""
    return BY_STATUS.get(exit_status, RlhfdError)(sentence)


class _UnixConnection(HTTPConnection):
    def __init__(self, path: Path, timeout: float) -> None:
        super().__init__("rlhfd", timeout=timeout, blocksize=PIECE)
        self._path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        try:
            self.sock.connect(os.fspath(self._path))
        except OSError:
            self.close()
            raise


class Daemon:
    """Calls of the API. Raise the error that the daemon answers, NoDaemonError, NotPermittedError or DeadlineError."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def get(self, path: str, *, timeout: float = ANSWER_SECONDS, **query: object) -> Any:
        """The JSON at a path under /v1; None leaves a parameter out."""
        with self.stream("GET", path + _query(query), timeout=timeout) as response:
            return json.loads(response.read())

    def post(self, path: str, body: Object | None = None, *, timeout: float = ANSWER_SECONDS) -> Any:
        """The JSON that a change answers."""
        data = b"" if body is None else json.dumps(body).encode()
        with self.stream("POST", path, body=data, timeout=timeout) as response:
            return json.loads(response.read())

    def has_file(self, sha256: str) -> bool:
        """Whether the daemon has the bytes of this hash."""
        with self._answer("HEAD", f"/files/{sha256}", None, {}, ANSWER_SECONDS) as response:
            return response.status == 200

    def put_file(self, sha256: str, file: Path) -> None:
        """Send a file's bytes."""
        with file.open("rb") as source:
            headers = {"Content-Length": str(os.fstat(source.fileno()).st_size)}
            with self.stream("PUT", f"/files/{sha256}", body=source, headers=headers) as response:
                response.read()

    @contextmanager
    def stream(
        self,
        method: str,
        path: str,
        *,
        body: Any = None,
        headers: Mapping[str, str] = MappingProxyType({}),
        timeout: float = ANSWER_SECONDS,
    ) -> Generator[HTTPResponse]:
        """An answer to read while the context is open; `timeout` is the longest silence, seconds."""
        with self._answer(method, path, body, headers, timeout) as response:
            if response.status >= 400:
                raise _refused(response)
            yield response

    @contextmanager
    def _answer(
        self, method: str, path: str, body: Any, headers: Mapping[str, str], timeout: float
    ) -> Generator[HTTPResponse]:
        connection = self._connected(timeout)
        try:
            with suppress(BrokenPipeError, ConnectionResetError):  # refused before it was read: the answer says why
                connection.request(method, "/v1" + path, body, {"Connection": "close", **headers})
            yield connection.getresponse()
        except TimeoutError as error:
            raise DeadlineError(f"the daemon on {self.path} did not answer {path} within {timeout:g} s") from error
        except (ConnectionError, HTTPException) as error:
            raise NoDaemonError(f"the daemon on {self.path} broke off ({_why(error)})") from error
        finally:
            connection.close()

    def _connected(self, timeout: float) -> HTTPConnection:
        connection = _UnixConnection(self.path, timeout)
        try:
            connection.connect()
        except PermissionError as error:
            raise NotPermittedError(f"you may not use {self.path}; join the group of that socket") from error
        except TimeoutError as error:
            raise DeadlineError(f"nobody took the connection to {self.path} within {timeout:g} s") from error
        except OSError as error:
            raise NoDaemonError(f"no daemon answers on {self.path} ({_why(error)})") from error
        return connection


def find(where: Where) -> Daemon:
    """The first daemon that answers. Raises NoDaemonError with the places looked at, NotPermittedError."""
    looked_at = where.sockets(os.environ)
    closed: NotPermittedError | None = None
    for path in looked_at:
        try:
            Daemon(path).get("/ping", timeout=PING_SECONDS)
        except NoDaemonError:
            continue
        except NotPermittedError as error:
            closed = closed or error
        else:
            return Daemon(path)
    if closed:
        raise closed
    places = ", ".join(map(str, looked_at))
    raise NoDaemonError(f"no daemon answers on {places}; start one with `rlhfd serve`, or name its --socket")


def _query(query: Mapping[str, object]) -> str:
    from urllib.parse import urlencode

    given = {name: value for name, value in query.items() if value is not None}
    return f"?{urlencode(given)}" if given else ""


def _refused(response: HTTPResponse) -> RlhfdError:
    try:
        answer = json.loads(response.read())
        return refusal(answer["error"], answer["exit_status"])
    except (ValueError, KeyError, TypeError):
        return RlhfdError(f"the daemon answered {response.status} {response.reason} without a reason; see its log")


def _why(error: Exception) -> str:
    if isinstance(error, OSError) and error.strerror:
        return error.strerror.lower()
    return str(error) or type(error).__name__
