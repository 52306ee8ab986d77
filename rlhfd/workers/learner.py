"""The learner process: `python -m rlhfd.workers.learner`, one call at a time until shutdown.

    hello -> Load -> {Learn, Publish, Checkpoint, LogProbs, Export, Load}* -> Shutdown (status 0)

A call answers with its result or with a Fault, and the process goes on; Progress frames in between are its heartbeat.
torch is imported at the first Load, which says how many threads it may have.
"""

import os
import sys
import traceback
from typing import TYPE_CHECKING, TypeAlias

from rlhfd.core import wire
from rlhfd.core.faults import fault_of
from rlhfd.workers.channel import Channel

if TYPE_CHECKING:
    from rlhfd.workers.session import Session

Call: TypeAlias = wire.Load | wire.Learn | wire.Publish | wire.Checkpoint | wire.LogProbs | wire.Export


class Learner:
    """Answers the frames of one channel."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._loaded: Session | None = None

    def serve(self) -> None:
        """Until a Shutdown frame. Raises EOFError where the daemon is gone, ValueError where it breaks the protocol."""
        while True:
            match frame := self._channel.receive():
                case wire.Shutdown():
                    return
                case wire.Load() | wire.Learn() | wire.Publish() | wire.Checkpoint() | wire.LogProbs() | wire.Export():
                    self._channel.send(self._supervised(frame, self._groups_of(frame)))
                case _:
                    raise ValueError(f"a learner is not asked for {type(frame).__name__}")

    def _groups_of(self, frame: Call) -> list[wire.GroupFrame]:
        """The group frames that belong to the call: read whatever becomes of it, or the next call would find them."""
        if not isinstance(frame, wire.Learn | wire.LogProbs):
            return []
        groups: list[wire.GroupFrame] = []
        for _ in range(frame.groups):
            group = self._channel.receive()
            if not isinstance(group, wire.GroupFrame):
                raise ValueError(f"{type(group).__name__} came where a group was due")  # noqa: TRY004 (not a type bug)
            groups.append(group)
        return groups

    def _supervised(self, frame: Call, groups: list[wire.GroupFrame]) -> wire.Frame:
        """The answer, or the fault that takes its place: this process's one supervisor."""
        try:
            return self._answer(frame, groups)
        except Exception as error:  # noqa: BLE001 (whatever it is, the daemon must hear of it, and the weights are kept)
            traceback.print_exc()
            fault = fault_of(error, traceback.format_exc())
        if self._loaded is not None:
            self._loaded.after_fault()
        return fault

    def _answer(self, frame: Call, groups: list[wire.GroupFrame]) -> wire.Frame:
        if isinstance(frame, wire.Load):
            return self._load(frame)
        session = self._session()
        match frame:
            case wire.Learn():
                return session.learn(frame, groups)
            case wire.Publish():
                return session.publish(frame)
            case wire.Checkpoint():
                return session.checkpoint(frame)
            case wire.LogProbs():
                return session.logprobs(frame, groups)
            case wire.Export():
                return session.export(frame)

    def _load(self, frame: wire.Load) -> wire.Loaded:
        self._loaded = None  # its memory is needed
        if "torch" not in sys.modules:  # both are read once
            os.environ["OMP_NUM_THREADS"] = os.environ["MKL_NUM_THREADS"] = str(frame.threads)
        from rlhfd.workers.session import Session

        self._loaded = Session(frame, self._heartbeat)
        return self._loaded.loaded()

    def _session(self) -> "Session":
        if self._loaded is None:
            raise RuntimeError("no model is loaded")
        return self._loaded

    def _heartbeat(self, phase: str, done: int, total: int) -> None:
        self._channel.send(wire.Progress(phase=phase, done=done, total=total))


def main() -> int:
    """Exit status: 0 after Shutdown, 1 where the daemon is gone."""
    channel = Channel.from_environment()
    try:
        Learner(channel).serve()
    except EOFError:
        return 1
    finally:
        channel.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
