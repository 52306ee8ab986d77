"""Who is at the other end of a connection: the kernel says so, by SO_PEERCRED.

uvicorn hides the socket from the app; its connection class (`Config.http`) is where it can be asked, once a connection.
"""

import asyncio
import grp
import os
import pwd
import socket
from array import array
from dataclasses import dataclass
from pathlib import Path
from struct import Struct
from typing import Any

from starlette.requests import Request
from uvicorn.protocols.http.h11_impl import H11Protocol

from rlhfd.errors import NotPermittedError

UCRED = Struct("3i")  # pid, uid, gid: struct ucredential of unix(7)
SO_PEERGROUPS = 59
MAX_GROUPS = 65536  # NGROUPS_MAX


@dataclass(frozen=True, kw_only=True, slots=True)
class Peer:
    """A process that asks, and the socket's group. `socket_gid` is None where the socket's file is gone."""

    pid: int
    uid: int
    gids: frozenset[int]
    socket_gid: int | None

    @property
    def may_change(self) -> bool:
        """The peer rule: uid 0, the daemon's own, or a member of the socket's group."""
        return self.uid in {0, os.geteuid()} or self.socket_gid in self.gids


def peer_of(sock: Any) -> Peer:
    """The peer of a connected unix socket (a socket, or a transport's view of one)."""
    pid, uid, gid = UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, UCRED.size))
    return Peer(pid=pid, uid=uid, gids=_groups(sock, uid, gid) | {gid}, socket_gid=_group_of(sock.getsockname()))


def _groups(sock: Any, uid: int, gid: int) -> frozenset[int]:
    """The peer's supplementary groups; from the user database on a kernel that does not tell."""
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 4 * MAX_GROUPS)
    except OSError:
        return _groups_by_name(uid, gid)
    return frozenset(array("I", raw))


def _groups_by_name(uid: int, gid: int) -> frozenset[int]:
    try:
        return frozenset(os.getgrouplist(pwd.getpwuid(uid).pw_name, gid))
    except KeyError:  # a uid without a name
        return frozenset()


def _group_of(path: str) -> int | None:
    try:
        return Path(path).stat().st_gid
    except OSError:
        return None


class PeerProtocol(H11Protocol):
    """uvicorn's connection, which tells the app its peer in `request.state.peer`."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Ask the kernel once; every request of the connection carries the answer."""
        super().connection_made(transport)
        self.app_state = {**self.app_state, "peer": peer_of(transport.get_extra_info("socket"))}


def permit(request: Request) -> None:
    """Let a changing call pass. Raises NotPermittedError for anyone else, also where there is no peer to name."""
    peer: Peer | None = getattr(request.state, "peer", None)
    if peer is None:
        raise NotPermittedError("this connection may only look; changes go over the daemon's unix socket")
    if not peer.may_change:
        raise NotPermittedError(
            f"user {_user(peer.uid)} may not change anything here; "
            f"only root, the daemon's user and members of the group {_group(peer.socket_gid)} may"
        )


def _user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int | None) -> str:
    try:
        return "of the socket" if gid is None else grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
