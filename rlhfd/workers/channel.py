"""The worker's side of the wire: frames over the socket that the daemon left open under a number in the environment."""

import os
import socket

from rlhfd.core import wire
from rlhfd.core.procfs import start_ticks

CHANNEL_FD = "RLHFD_CHANNEL_FD"
EPOCH = "RLHFD_EPOCH"


class Channel:
    """Blocking, without deadlines: the daemon has them, and a worker whose daemon is gone is ended by its guard."""

    def __init__(self, sock: socket.socket) -> None:
        self._socket = sock

    @classmethod
    def from_environment(cls) -> "Channel":
        """The inherited socket, with the hello sent."""
        channel = cls(socket.socket(fileno=int(os.environ[CHANNEL_FD])))
        channel.send(
            wire.Hello(
                protocol=wire.PROTOCOL,
                epoch=int(os.environ[EPOCH]),
                pid=os.getpid(),
                started=start_ticks(os.getpid()) or 0,
            )
        )
        return channel

    def send(self, frame: wire.Frame) -> None:
        """Raises OSError where the daemon is gone, ValueError past wire.MAX_FRAME."""
        self._socket.sendall(wire.encode(frame))

    def receive(self) -> wire.AnyFrame:
        """The next frame. Raises EOFError where the daemon is gone, msgspec.DecodeError on what is no frame."""
        (length,) = wire.HEADER.unpack(self._read(wire.HEADER.size))
        if length > wire.MAX_FRAME:
            raise ValueError(f"the daemon announced a frame of {length} bytes, over the limit of {wire.MAX_FRAME}")
        return wire.decode(self._read(length))

    def close(self) -> None:
        """Give the socket back."""
        self._socket.close()

    def _read(self, count: int) -> bytes:
        buffer = bytearray(count)
        view = memoryview(buffer)
        done = 0
        while done < count:
            received = self._socket.recv_into(view[done:])
            if received == 0:
                raise EOFError("the daemon closed the channel")
            done += received
        return bytes(buffer)
