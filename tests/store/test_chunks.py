import struct

import pytest

from rlhfd.core.types import Group, RolloutId, RolloutState, VersionStep
from rlhfd.errors import StateError
from rlhfd.store import chunks, groups, progress, replay, rollouts, versions
from tests.store.story import NUMERICS, Story, logps_of, submitted, tokens_of


async def generating(story: Story) -> RolloutId:
    (group,) = await story.admit()
    await rollouts.start_rollout(story.db, group.rollouts[0].id, story.epoch)
    return group.rollouts[0].id


async def test_chunks_are_stored_byte_for_byte_in_order(story: Story):
    rollout_id = await generating(story)
    assert await story.append(rollout_id, 0, 5)
    assert await story.append(rollout_id, 5, 2)
    first, second = await chunks.chunks(story.db, rollout_id)
    assert (first.start, first.n, first.tokens, first.logps) == (0, 5, tokens_of(rollout_id, 0, 5), logps_of(0, 5))
    assert (second.start, second.n, second.version_step) == (5, 2, 0)
    assert await chunks.tokens(story.db, rollout_id) == tokens_of(rollout_id, 0, 7)
    assert await chunks.tokens_committed(story.db, story.id) == 7


async def test_a_duplicate_is_told_and_changes_nothing(story: Story):
    rollout_id = await generating(story)
    await story.append(rollout_id, 0, 5)
    await story.append(rollout_id, 5, 5)
    before = await chunks.chunks(story.db, rollout_id)
    assert not await story.append(rollout_id, 0, 5)
    assert not await story.append(rollout_id, 5, 5)
    assert await chunks.chunks(story.db, rollout_id) == before
    assert await chunks.tokens_committed(story.db, story.id) == 10


async def test_a_gap_is_a_bug(story: Story):
    rollout_id = await generating(story)
    await story.append(rollout_id, 0, 5)
    with pytest.raises(StateError, match="the chunk at token 6 of rollout 1 leaves a gap: it has 5 tokens"):
        await story.append(rollout_id, 6, 5)


async def test_other_bytes_at_the_same_place_are_no_duplicate(story: Story):
    rollout_id = await generating(story)
    await story.append(rollout_id, 0, 5)
    version = await story.version()
    for start, tokens in ((0, tokens_of(9, 0, 5)), (0, tokens_of(rollout_id, 0, 4)), (3, tokens_of(rollout_id, 3, 5))):
        logps = logps_of(start, len(tokens) // 4)
        with pytest.raises(StateError, match="is not what is stored there"):
            await chunks.append_chunk(story.db, rollout_id, start, tokens, logps, version.id)


async def test_the_last_chunk_ends_the_rollout_in_the_same_transaction(story: Story):
    rollout_id = await generating(story)
    await story.append(rollout_id, 0, 5)
    assert await story.append(rollout_id, 5, 2, finish="stop")
    (group,) = await groups.live_groups(story.db, story.id)
    ended = group.rollouts[0]
    assert (ended.state, ended.finish, ended.n_tokens) == (RolloutState.FINISHED, "stop", 7)
    assert not await story.append(rollout_id, 5, 2, finish="stop")
    with pytest.raises(StateError):
        await story.append(rollout_id, 5, 2, finish="length")
    with pytest.raises(StateError):
        await story.append(rollout_id, 7, 1)


async def test_a_rollout_may_end_without_another_token(story: Story):
    rollout_id = await generating(story)
    version = await story.version()
    await story.append(rollout_id, 0, 5)
    assert await chunks.append_chunk(story.db, rollout_id, 5, b"", b"", version.id, finish="length")
    assert not await chunks.append_chunk(story.db, rollout_id, 5, b"", b"", version.id, finish="length")
    (group,) = await groups.live_groups(story.db, story.id)
    assert (group.rollouts[0].finish, group.rollouts[0].n_tokens) == ("length", 5)


async def test_only_a_rollout_in_generation_gains_tokens(story: Story):
    (group,) = await story.admit()
    with pytest.raises(StateError, match="is not what is stored there"):
        await story.append(group.rollouts[0].id, 0, 5)
    with pytest.raises(StateError, match="version 1 is not of the job that rollout 99 belongs to"):
        await story.append(RolloutId(99), 0, 5)


@pytest.mark.parametrize(
    ("tokens", "logps"), [(b"", b""), (b"1234", b""), (b"12345", b"12345"), (b"1234", b"12345678")]
)
async def test_half_a_token_or_a_token_without_a_log_prob_is_refused(story: Story, tokens: bytes, logps: bytes):
    rollout_id = await generating(story)
    version = await story.version()
    with pytest.raises(StateError, match=f"has {len(tokens)} bytes of tokens, {len(logps)} of log-probs"):
        await chunks.append_chunk(story.db, rollout_id, 0, tokens, logps, version.id)


async def test_a_version_of_another_job_can_not_have_sampled_it(story: Story):
    rollout_id = await generating(story)
    other = await versions.latest_trained(story.db, (await submitted(story.db, "other")).id)
    with pytest.raises(StateError, match="is not of the job"):
        await story.append(rollout_id, 0, 5, other)
    assert await chunks.chunks(story.db, rollout_id) == ()


async def two_versions(story: Story) -> Group:
    """A group whose first rollout has 2 tokens of version 0 and 3 of version 1."""
    (group,) = await story.admit(deadline=3)
    rollout_id = group.rollouts[0].id
    await rollouts.start_rollout(story.db, rollout_id, story.epoch)
    await story.append(rollout_id, 0, 2)
    await rollouts.release_rollout(story.db, rollout_id)
    version = await story.learned_step()
    await rollouts.start_rollout(story.db, rollout_id, story.epoch)
    await story.append(rollout_id, 2, 3, version)
    return group


async def test_every_token_knows_its_version(story: Story):
    group = await two_versions(story)
    data = await chunks.rollout_data(story.db, [group.id])
    assert list(data) == [rollout.id for rollout in group.rollouts]
    first, second = data.values()
    assert struct.unpack("<5i", first.versions) == (0, 0, 1, 1, 1)
    assert (len(first.tokens), len(first.logps)) == (20, 20)
    assert (second.tokens, second.versions) == (b"", b"")
    stored = (await groups.group(story.db, group.id)).rollouts[0]
    assert (stored.min_step, stored.max_step, stored.resumes) == (0, 1, 1)


async def test_tokens_of_lost_versions_can_be_told_apart(story: Story):
    group = await two_versions(story)
    await replay.void_from(story.db, story.id, 1, NUMERICS, {})
    (first, _) = (await chunks.rollout_data(story.db, [group.id], lost_as=VersionStep(-1))).values()
    assert struct.unpack("<5i", first.versions) == (0, 0, -1, -1, -1)
    (first, _) = (await chunks.rollout_data(story.db, [group.id])).values()
    assert struct.unpack("<5i", first.versions) == (0, 0, 1, 1, 1)
    assert await progress.groups_labelled(story.db, story.id, [1]) == []
    assert group.id in await progress.groups_labelled(story.db, story.id, [0, 1])


async def test_numbers_come_back_bit_for_bit(story: Story):
    rollout_id = await generating(story)
    version = await story.version()
    tokens = struct.pack("<4i", 0, 1, 2**31 - 1, -(2**31))
    logps = struct.pack("<4f", -0.0, -1e-45, float("-inf"), -1.1754944e-38)
    await chunks.append_chunk(story.db, rollout_id, 0, tokens, logps, version.id)
    (chunk,) = await chunks.chunks(story.db, rollout_id)
    assert (chunk.tokens, chunk.logps) == (tokens, logps)
