"""A learner in a process of its own, at the other end of a socket pair."""

import asyncio
import os
import signal
import socket
import sys
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager
from pathlib import Path

from rlhfd.engines.channel import Channel
from rlhfd.engines.learner import LearnerClient

REPOSITORY = Path(__file__).parents[2]
EPOCH = 7


class Running:
    """A learner that has said hello."""

    def __init__(self, client: LearnerClient, process: asyncio.subprocess.Process) -> None:
        self.client = client
        self.process = process
        self.progress: list[str] = []

    async def kill(self) -> None:
        self.process.send_signal(signal.SIGKILL)
        await self.process.wait()


@asynccontextmanager
async def running_learner(log: Path) -> AsyncGenerator[Running]:
    ours, theirs = socket.socketpair()
    env = os.environ | {
        "PYTHONPATH": str(REPOSITORY),
        "RLHFD_CHANNEL_FD": str(theirs.fileno()),
        "RLHFD_EPOCH": str(EPOCH),
        "HF_HUB_OFFLINE": "1",
    }
    with log.open("ab") as output:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "rlhfd.workers.learner",
            env=env,
            pass_fds=[theirs.fileno()],
            stdout=output,
            stderr=asyncio.subprocess.STDOUT,
        )
    theirs.close()
    channel = Channel(ours)
    hello = await channel.handshake(EPOCH, who="the learner")
    assert hello.pid == process.pid
    seen: list[str] = []
    learner = Running(LearnerClient(channel, on_progress=lambda p: seen.append(p.phase)), process)
    learner.progress = seen
    try:
        yield learner
    finally:
        channel.close()
        if process.returncode is None:
            await learner.kill()
