"""The daemon's handle on a learner process: one coroutine per call, faults as the errors that they mean.

A call's deadline is silence: a learner that sends Progress may take as long as it likes.
"""

import logging
from collections.abc import Sequence
from typing import TypeVar

from rlhfd.config import Deadlines
from rlhfd.core import wire
from rlhfd.core.faults import error_of
from rlhfd.engines.channel import Channel, OnProgress
from rlhfd.engines.process import Child
from rlhfd.errors import EngineDiedError

logger = logging.getLogger(__name__)

SILENCE_LIMIT = 300.0  # seconds
EXIT_LIMIT = 10.0

Reply = TypeVar("Reply", bound=wire.Frame)


class LearnerClient:
    """One learner. `silence`: seconds without a frame after which a call is given up.

    For a fault the calls raise NonFiniteError, OutOfMemoryError, BadCheckpointError, JobFileError, DiskFullError,
    StorageError or LearnerFault, and the learner is then what it was before; DeadlineError or EngineDiedError say that
    the process is of no further use.
    """

    def __init__(
        self, channel: Channel, *, silence: float = SILENCE_LIMIT, on_progress: OnProgress | None = None
    ) -> None:
        self._channel = channel
        self._silence = silence
        self._on_progress = on_progress

    @classmethod
    async def connect(
        cls, child: Child, epoch: int, deadlines: Deadlines, on_progress: OnProgress | None = None
    ) -> "LearnerClient":
        """The client of a spawned learner, once it has said hello. Raises EngineStartError."""
        channel = await Channel.open(child, epoch)
        return cls(channel, silence=deadlines.learner_silence, on_progress=on_progress)

    async def load(self, frame: wire.Load) -> wire.Loaded:
        """Load the start model and a checkpoint over it. Raises BadCheckpointError for one that doesn't verify."""
        return await self._call(wire.Loaded, frame, what="the learner to load its model")

    async def learn(self, frame: wire.Learn, groups: Sequence[wire.GroupFrame]) -> wire.Learned:
        """One step; groups in order of ordinal. Raises NonFiniteError with the rollouts named."""
        return await self._call(wire.Learned, frame, *groups, what=f"the learner to learn step {frame.step}")

    async def publish(self, frame: wire.Publish) -> wire.Published:
        """Write what the generator shall load."""
        return await self._call(wire.Published, frame, what=f"the learner to publish into {frame.dir}")

    async def checkpoint(self, frame: wire.Checkpoint) -> wire.Checkpointed:
        """Write a checkpoint; durable when it returns. Raises DiskFullError, StorageError."""
        return await self._call(wire.Checkpointed, frame, what=f"the learner's checkpoint {frame.dir}")

    async def logprobs(self, frame: wire.LogProbs, groups: Sequence[wire.GroupFrame]) -> wire.LogProbsReply:
        """Of stored tokens, under the published tensors of the weights in memory."""
        return await self._call(wire.LogProbsReply, frame, *groups, what="the learner's log-probs")

    async def export(self, frame: wire.Export) -> None:
        """Write the plain model."""
        await self._call(wire.Done, frame, what=f"the learner to export into {frame.dir}")

    async def shutdown(self, *, deadline: float = EXIT_LIMIT) -> None:
        """Ask it to end. Raises DeadlineError where it doesn't."""
        await self._channel.shut_down(deadline=deadline)

    def close(self) -> None:
        """Without asking: for a process that is ended otherwise."""
        self._channel.close()

    async def _call(self, reply_type: type[Reply], *frames: wire.Frame, what: str) -> Reply:
        reply = await self._channel.call(*frames, deadline=self._silence, what=what, on_progress=self._on_progress)
        if isinstance(reply, wire.Fault):
            if reply.trace:
                logger.error("%s failed: %s\n%s", what, reply.message, reply.trace)
            raise error_of(reply, what)
        if not isinstance(reply, reply_type):
            self._channel.close()
            raise EngineDiedError(f"{type(reply).__name__} came as the answer while waiting for {what}")
        return reply
