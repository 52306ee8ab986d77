"""A program that stands for `rlhfd serve`: the fake service on the socket that it is given.

A job that it gets learns three steps; one whose name begins with `slow` learns one and goes on for ever, with `bad`
fails. Writes `drained` beside the socket when it was asked to end by SIGTERM.
"""

import argparse
import asyncio
import signal
from pathlib import Path

from rlhfd.api import create_app, serve_api
from tests.fake_service import FakeService


async def drive(service: FakeService, job_id: int) -> None:
    name = service.table[job_id]["name"]
    service.move(job_id, "started", state="running")
    service.learn(job_id, 0.1)
    if name.startswith("slow"):
        return
    if name.startswith("bad"):
        service.move(job_id, "failed", state="failed", reason="the engine died at start: no room")
        return
    service.learn(job_id, 0.2, 0.6)
    service.move(job_id, "done", state="done")


class Driven(FakeService):
    async def submit(self, body):
        job = await super().submit(body)
        if job["created"]:
            await drive(self, job["id"])
        return self.table[job["id"]] | {"created": job["created"]}

    async def transition(self, job_id, verb):
        job = await super().transition(job_id, verb)
        if verb == "retry":
            self.learn(job_id, 0.3, 0.5)
            self.move(job_id, "done", state="done", reason=None)
            return self.table[job_id]
        return job


async def serve(socket: Path, state: Path) -> None:
    state.mkdir(parents=True, exist_ok=True)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    async with serve_api(create_app(Driven(state)), socket):
        await stop.wait()
    (socket.parent / "drained").write_text("")


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--state-dir", type=Path)
    parser.add_argument("--socket", type=Path)
    parser.add_argument("command")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.socket, arguments.state_dir))
