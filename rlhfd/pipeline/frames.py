"""From the tables to the learner's frames: settings of the process, stored rollouts of a step."""

from collections.abc import Sequence

from rlhfd.core import wire
from rlhfd.core.types import Step
from rlhfd.pipeline.context import Context


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
    return max(1, sum(len(device.cores) for device in context.devices["learner"]))


def tokens_bytes(tokens: Sequence[int]) -> bytes:
    """int32 little-endian."""
    return b"".join(token.to_bytes(4, "little") for token in tokens)


async def group_frames(context: Context, step: Step) -> list[wire.GroupFrame]:
    """The stored rollouts of a recorded step, one frame a group, in the recorded order."""
    data = await context.store.rollouts.rollout_data(step.groups)
    groups = {group.id: group for group in await context.store.rollouts.groups(step.groups)}
    frames: list[wire.GroupFrame] = []
    for group_id in step.groups:
        prompt = tokens_bytes(context.snapshot.row(groups[group_id].row).tokens)
        members = [
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
            for use in step.rollouts
            if use.group_id == group_id
        ]
        frames.append(wire.GroupFrame(ordinal=groups[group_id].ordinal, rollouts=members))
    return frames
