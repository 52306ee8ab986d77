"""From the tables to the learner's frames: settings of the process, stored rollouts of a step."""

import sys
from array import array
from collections.abc import Iterable, Sequence

from rlhfd.core import wire
from rlhfd.core.types import Group, RolloutId, Step, StepRollout, VersionStep
from rlhfd.pipeline.context import Context
from rlhfd.store import chunks, groups, progress

assert sys.byteorder == "little", "token ids and log-probs are stored little-endian"  # noqa: S101


LOST = VersionStep(-(2**31))  # a label next to no version's: its weights can't be made again


def learner_settings(context: Context) -> wire.LearnerSettings:
    """The job file's [model] and [learner], as the process takes them."""
    learner = context.config.learner
    return wire.LearnerSettings(
        dtype=context.config.model.dtype,
        use_peft=learner.use_peft,
        lora_r=learner.lora_r,
        lora_alpha=learner.lora_alpha,
        lora_dropout=learner.lora_dropout,
        lora_target_modules=list(learner.lora_target_modules),
        gradient_checkpointing=learner.gradient_checkpointing,
        weight_decay=learner.weight_decay,
        adam_beta1=learner.adam_beta1,
        adam_beta2=learner.adam_beta2,
        adam_epsilon=learner.adam_epsilon,
        seed=context.config.job.seed,
        trust_remote_code=context.config.model.trust_remote_code,
    )


def threads(context: Context) -> int:
    """As many as the lease has cores; recorded with each step as part of the numerics key."""
    return max(1, len(context.cores("learner") or ()))


def tokens_bytes(tokens: Sequence[int]) -> bytes:
    """int32 little-endian."""
    return array("i", tokens).tobytes()


async def group_frames(context: Context, step: Step) -> list[wire.GroupFrame]:
    """The stored rollouts of a recorded step, one frame a group, in the recorded order."""
    uses = {use.rollout_id: use for use in step.rollouts}
    data = await chunks.rollout_data(context.db, step.groups)
    return [
        wire.GroupFrame(ordinal=group.ordinal, rollouts=_members(context, group, data, uses))
        for group in await groups.groups(context.db, step.groups)
    ]


def _members(
    context: Context,
    group: Group,
    data: dict[RolloutId, chunks.RolloutData],
    uses: dict[RolloutId, StepRollout],
) -> list[wire.RolloutFrame]:
    prompt = tokens_bytes(context.snapshot.row(group.row).tokens)
    return [
        wire.RolloutFrame(
            id=use.rollout_id,
            prompt=prompt,
            tokens=data[use.rollout_id].tokens,
            logps=data[use.rollout_id].logps,
            versions=data[use.rollout_id].versions,
            advantage=use.advantage,
            minibatch=use.minibatch,
            micro_batch=use.micro_batch,
            masked=use.masked,
            skipped=use.skipped,
        )
        for rollout in group.rollouts
        if (use := uses.get(rollout.id)) is not None
    ]


async def labelled_frames(context: Context, versions: Iterable[int]) -> list[wire.GroupFrame]:
    """Every stored rollout with a token of one of these version steps, whatever became of it, for `LogProbs`."""
    ids = await progress.groups_labelled(context.db, context.job_id, list(versions))
    data = await chunks.rollout_data(context.db, ids, lost_as=LOST)
    frames: list[wire.GroupFrame] = []
    for group in await groups.groups(context.db, ids):
        prompt = tokens_bytes(context.snapshot.row(group.row).tokens)
        members = [
            wire.RolloutFrame(
                id=rollout.id,
                prompt=prompt,
                tokens=data[rollout.id].tokens,
                logps=data[rollout.id].logps,
                versions=data[rollout.id].versions,
                advantage=0.0,
                minibatch=0,
                micro_batch=0,
            )
            for rollout in group.rollouts
            if data[rollout.id].tokens
        ]
        frames.append(wire.GroupFrame(ordinal=group.ordinal, rollouts=members))
    return frames
