"""A daemon of our own, for one `rlhfd run`: started beside us, out of reach of Ctrl-C, and drained at the end."""

import os
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from rlhfd.cli.client import PING_SECONDS, Daemon, Where, refusal
from rlhfd.cli.printing import harmless
from rlhfd.core.places import server_socket, state_dir
from rlhfd.errors import AlreadyRunningError, DeadlineError, NoDaemonError

READY_SECONDS = 120.0
DRAIN_SECONDS = 600.0  # its children get a checkpoint written first
POLL_SECONDS = 0.05
TAIL_LINES = 8
PROGRAM = (sys.executable, "-m", "rlhfd")


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnDaemon:
    """A `rlhfd serve` that is our child; `log` holds what it said on stderr."""

    process: subprocess.Popen[bytes]
    socket: Path
    log: IO[bytes]

    def wait_ready(self) -> Daemon:
        """Wait until a daemon answers: this one, or the one that won the race for the state directory.

        Raises what it ended with, or DeadlineError; both show the end of its log.
        """
        daemon = Daemon(self.socket)
        until = time.monotonic() + READY_SECONDS
        while time.monotonic() < until:
            if not self.lost_the_race:
                self.check()
            try:
                daemon.get("/ping", timeout=PING_SECONDS)
            except NoDaemonError:
                time.sleep(POLL_SECONDS)
            else:
                return daemon
        raise DeadlineError(f"the daemon did not answer on {self.socket} within {READY_SECONDS:g} s{self.tail()}")

    @property
    def lost_the_race(self) -> bool:
        """Another daemon has the state directory; it may still be starting."""
        return self.process.poll() == AlreadyRunningError.exit_status

    def check(self) -> None:
        """Raise what the daemon ended with, if it did: the error of its exit status."""
        status = self.process.poll()
        if status is not None:
            raise refusal(f"the daemon ended with status {status}{self.tail()}", status)

    def stop(self) -> None:
        """Let it drain and end. Raises DeadlineError where it does not within DRAIN_SECONDS; it is not killed."""
        self.process.terminate()
        try:
            self.process.wait(DRAIN_SECONDS)
        except subprocess.TimeoutExpired as error:
            pid = self.process.pid
            raise DeadlineError(f"the daemon (process {pid}) did not drain within {DRAIN_SECONDS:g} s") from error
        finally:
            self.log.close()

    def tail(self) -> str:
        """The last lines of its log, to stand behind a sentence."""
        self.log.seek(0)
        lines = self.log.read().decode(errors="replace").splitlines()[-TAIL_LINES:]
        return ": it said\n" + "\n".join(f"  {harmless(line)}" for line in lines) if lines else " and said nothing"


def start(where: Where) -> OwnDaemon:
    """Start `rlhfd serve` for the state directory of this line, in a session of its own."""
    state = state_dir(os.environ, given=where.state_dir)
    socket = server_socket(os.environ, given=where.socket, state_given=where.state_dir, state=state)
    log = tempfile.TemporaryFile(prefix="rlhfd-run-")  # noqa: SIM115 - closed by `stop`
    command = [*PROGRAM, "--state-dir", str(state), "--socket", str(socket), "serve"]
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    return OwnDaemon(process=process, socket=socket, log=log)
