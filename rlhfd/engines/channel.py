"""The daemon's side of the wire: frames to and from one child over a socket, every wait with a deadline.

One call is in flight at a time. A call that ran out of time, was cancelled, or met nonsense leaves the channel out of
step: the late answer would be taken for the next one. Such a channel is broken for good, and its child must go.
"""

import asyncio
import socket
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import TypeAlias

import msgspec

from rlhfd.core import wire
from rlhfd.engines.process import Child
from rlhfd.errors import DeadlineError, EngineDiedError, EngineError, EngineStartError

HELLO_LIMIT = 60.0  # seconds until a child says hello: it imports nothing heavy before
READ_SIZE = 1 << 18

OnProgress: TypeAlias = Callable[[wire.Progress], None]


class Channel:
    """Takes over a connected socket. `broken` says why no further call is possible, and is empty while one is."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._socket = sock
        self._received = bytearray()
        self.broken = ""

    @classmethod
    async def open(cls, child: Child, epoch: int | None = None) -> "Channel":
        """The channel of a spawned child, once it has said hello in this epoch. Raises EngineStartError."""
        if child.channel_socket is None:
            raise EngineStartError(f"the {child.spec.role} was started without a channel")
        channel = cls(child.channel_socket)
        try:
            await channel.handshake(child.spec.epoch if epoch is None else epoch, who=f"the {child.spec.role}")
        except EngineError:
            channel.close()
            raise
        return channel

    async def handshake(self, epoch: int, *, who: str, deadline: float = HELLO_LIMIT) -> wire.Hello:
        """The child's hello. Raises EngineStartError unless it speaks this protocol and was started in this epoch."""
        try:
            async with self._in_step(deadline, f"the hello of {who}"):
                hello = await self._next()
        except (DeadlineError, EngineDiedError) as error:
            raise EngineStartError(f"{who} did not say hello: {error}") from error
        if not isinstance(hello, wire.Hello) or (hello.protocol, hello.epoch) != (wire.PROTOCOL, epoch):
            self.broken = f"{who} is of another protocol or epoch"
            raise EngineStartError(f"{self.broken}: expected protocol {wire.PROTOCOL} and epoch {epoch}, got {hello}")
        return hello

    async def call(
        self,
        frame: wire.Frame,
        *followers: wire.Frame,
        deadline: float,
        what: str,
        on_progress: OnProgress | None = None,
    ) -> wire.AnyFrame:
        """Send the frame and those that belong to it, and wait for the answer, which may be a Fault.

        `deadline`: seconds without any frame from the child; a Progress frame starts them anew. Raises DeadlineError
        naming `what`, EngineDiedError.
        """
        await self._send((frame, *followers), deadline, what)
        while True:
            async with self._in_step(deadline, what):
                reply = await self._next()
            if not isinstance(reply, wire.Progress):
                return reply
            if on_progress is not None:
                on_progress(reply)

    async def shut_down(self, *, deadline: float) -> None:
        """Ask the child to end, and wait until it has closed its side."""
        await self._send((wire.Shutdown(),), deadline, "shutdown")
        try:
            async with self._in_step(deadline, "shutdown"):
                await self._next()
        except EngineDiedError:
            return
        finally:
            self.close()

    def close(self) -> None:
        """Give the socket back; a call in flight fails."""
        self.broken = self.broken or "it is closed"
        self._socket.close()

    async def _send(self, frames: Sequence[wire.Frame], deadline: float, what: str) -> None:
        for frame in frames:
            data = wire.encode(frame)
            async with self._in_step(deadline, f"{what} to be taken"):
                await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def _next(self) -> wire.AnyFrame:
        (length,) = wire.HEADER.unpack(await self._read(wire.HEADER.size))
        if length > wire.MAX_FRAME:
            raise EngineDiedError(f"the child announced a frame of {length} bytes")
        body = await self._read(length)
        try:
            return wire.decode(body)
        except msgspec.MsgspecError as error:
            raise EngineDiedError(f"the child sent what is no frame: {error}") from error

    async def _read(self, count: int) -> bytes:
        loop = asyncio.get_running_loop()
        while len(self._received) < count:
            data = await loop.sock_recv(self._socket, READ_SIZE)
            if not data:
                raise EngineDiedError("the child closed its channel")
            self._received += data
        found = bytes(self._received[:count])
        del self._received[:count]
        return found

    @asynccontextmanager
    async def _in_step(self, deadline: float, what: str) -> AsyncGenerator[None]:
        """One wait. Whatever ends it early breaks the channel."""
        if self.broken:
            raise EngineDiedError(f"the channel can't be used for {what}: {self.broken}")
        self.broken = f"{what} is in flight, or was given up"
        try:
            async with asyncio.timeout(deadline):
                yield
        except TimeoutError:
            self.broken = f"{what} got no answer"
            raise DeadlineError(f"no frame came for {deadline:g} s while waiting for {what}") from None
        except EngineDiedError as error:
            self.broken = str(error)
            raise EngineDiedError(f"{error} while waiting for {what}") from error
        except OSError as error:
            self.broken = f"the child is gone ({error})"
            raise EngineDiedError(f"the child is gone ({error}) while waiting for {what}") from error
        self.broken = ""
