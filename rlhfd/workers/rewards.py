"""A reward worker: one process of the pool, `python -m rlhfd.workers.rewards`.

    pool ──RewardSetup──► rewards ready (RewardReady) or refused (RewardsRefused)
         ──Score────────► Scored: a finite number, or the kind of error and one sentence
         ──Decode───────► Decoded

User code runs here and only here: whatever it raises is an answer; if it hangs, ends the process or breaks the
channel, the pool kills this process and starts another. What it prints goes to the log.
"""

import json
import os
import signal
import traceback
from array import array
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from tokenizers import Tokenizer

from rlhfd.core.wire import AnyFrame, Decode, Decoded, RewardReady, RewardSetup, RewardsRefused, Score, Scored, Shutdown
from rlhfd.errors import JobFileError, RewardError
from rlhfd.workers import reward_limits as limits
from rlhfd.workers.channel import CHANNEL_FD, Channel
from rlhfd.workers.reward_specs import display_names, prepare, read_specs
from rlhfd.workers.scoring import ForeignError, Reward, Sample, evaluate, supervise

LOGGED_FRAMES = 10  # of a user's traceback, the innermost


@dataclass(frozen=True, kw_only=True)
class Scorer:
    """What answers the pool's frames. `home`: the pid that may answer; a forked copy of it may not."""

    rewards: Sequence[Reward]
    timeouts: Sequence[float]
    tokenizer: Tokenizer
    home: int

    def score(self, frame: Score) -> Scored:
        """The value of one reward for one rollout, or what kept it from having one."""
        sample = self._sample(frame)
        limits.rearm_cpu_limit(self.timeouts[frame.reward])
        limits.drop_output_of_a_full_log()
        known = limits.children()
        try:
            value = evaluate(self.rewards[frame.reward], sample)
        except RewardError as problem:
            self._hold_copies()
            _log(problem)
            scored = _scored(frame, sample, error_kind=problem.kind, error=str(problem))
        else:
            self._hold_copies()
            scored = _scored(frame, sample, value=value)
        limits.disarm_alarms()
        strays = limits.kill_strays(known)
        if strays and scored.value is not None:
            name = self.rewards[frame.reward].name
            error = f"reward {name} left {len(strays)} process(es) running; it must end what it starts"
            return _scored(frame, sample, error_kind="exception", error=error)
        return scored

    def decode(self, frame: Decode) -> Decoded:
        """The texts of token ids, special tokens left out."""
        return Decoded(texts=[self._text(_ids(tokens)) for tokens in frame.tokens])

    def _sample(self, frame: Score) -> Sample:
        ids = _ids(frame.tokens)
        return Sample(
            prompt=json.loads(frame.prompt),
            completion=self._text(ids),
            completion_ids=ids,
            truncated=frame.truncated,
            columns=json.loads(frame.columns),
        )

    def _text(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def _hold_copies(self) -> None:
        """Keep a copy of this process, which a reward forked off and let return, from answering; it is then killed."""
        while os.getpid() != self.home:
            signal.pause()


def _ids(tokens: bytes) -> list[int]:
    return array("i", tokens).tolist()


def _scored(
    frame: Score, sample: Sample, *, value: float | None = None, error_kind: str = "", error: str = ""
) -> Scored:
    return Scored(
        rollout_id=frame.rollout_id,
        reward=frame.reward,
        value=value,
        error_kind=error_kind,
        error=error,
        text=sample.completion,
    )


def _log(problem: RewardError) -> None:
    """Leave the end of the user's traceback in the log."""
    cause = problem.__cause__.__cause__ if problem.__cause__ else None
    with suppress(OSError):  # the log is full
        traceback.print_exception(cause or problem, limit=-LOGGED_FRAMES)


def set_up(frame: RewardSetup) -> tuple[Scorer, list[str]]:
    """Fence this process in, then load what the job brings. Raises JobFileError for rewards that can't be used."""
    home = os.getpid()
    tokenizer = _load_tokenizer(frame.tokenizer_file)
    os.chdir(frame.work_dir)
    limits.strip_environment(frame.work_dir)
    limits.quiet_streams()
    limits.apply_limits(memory_bytes=frame.memory_bytes)
    specs = read_specs(frame.specs)
    rewards = [prepare(spec, frame) for spec in specs]
    if os.getpid() != home:  # the user's file forked, and this is the copy
        os._exit(1)
    limits.disarm_alarms()
    scorer = Scorer(rewards=rewards, timeouts=[spec.timeout for spec in specs], tokenizer=tokenizer, home=home)
    return scorer, display_names(rewards)


def _load_tokenizer(file: str) -> Tokenizer:
    try:
        return supervise(lambda: Tokenizer.from_file(file))
    except ForeignError as problem:
        raise JobFileError(f"the tokenizer {file} can't be read: {problem}") from problem


def serve(channel: Channel) -> None:
    """Answer the pool's frames until it says Shutdown or is gone."""
    first = channel.receive()
    if not isinstance(first, RewardSetup):
        raise TypeError(f"the first frame of a reward worker is RewardSetup, not {type(first).__name__}")
    try:
        scorer, names = set_up(first)
    except JobFileError as problem:
        channel.send(RewardsRefused(message=str(problem)))
        return
    channel.send(RewardReady(names=names))
    while not isinstance(frame := channel.receive(), Shutdown):
        channel.send(_answer(scorer, frame))


def _answer(scorer: Scorer, frame: AnyFrame) -> Scored | Decoded:
    match frame:
        case Score():
            return scorer.score(frame)
        case Decode():
            return scorer.decode(frame)
        case _:
            raise TypeError(f"a reward worker can't answer {type(frame).__name__}")


def main() -> None:
    """Ends with status 0 after Shutdown, after a refusal, or when the daemon is gone."""
    os.set_inheritable(int(os.environ[CHANNEL_FD]), False)  # what a reward starts must not hold it
    channel = Channel.from_environment()
    with suppress(EOFError, ConnectionError):
        serve(channel)


if __name__ == "__main__":
    main()
