import pytest

from rlhfd.core.types import Checkpoint, CheckpointId, CheckpointState, GroupState, Version
from rlhfd.errors import StateError
from rlhfd.store import checkpoints, chunks, epochs, events, groups, progress
from tests.store.story import Story


async def saved(story: Story, version: Version) -> Checkpoint:
    row = await checkpoints.begin(story.db, story.id, version.id, f"/checkpoints/{version.id}")
    return await checkpoints.commit(story.db, row.id, f"sha{version.id}", 100)


async def test_a_checkpoint_counts_only_once_its_files_are_durable(story: Story):
    version = await story.learned_step()
    row = await checkpoints.begin(story.db, story.id, version.id, "/checkpoints/2")
    assert (row.state, row.step, row.version_id) == (CheckpointState.WRITING, 1, version.id)
    assert await checkpoints.newest_valid(story.db, story.id) == ()
    done = await checkpoints.commit(story.db, row.id, "sha", 100)
    assert (done.state, done.manifest_sha, done.nbytes) == (CheckpointState.COMMITTED, "sha", 100)
    assert await checkpoints.newest_valid(story.db, story.id) == (done,)
    assert (await progress.progress(story.db, story.id)).saved == 1


async def test_beginning_and_committing_again_is_doing_it_once(story: Story):
    version = await story.learned_step()
    done = await saved(story, version)
    assert await checkpoints.begin(story.db, story.id, version.id, done.dir) == done
    assert await checkpoints.commit(story.db, done.id, f"sha{version.id}", 100) == done
    with pytest.raises(StateError, match="a committed checkpoint can't commit"):
        await checkpoints.commit(story.db, done.id, "another", 100)
    with pytest.raises(StateError, match="no checkpoint 99"):
        await checkpoints.commit(story.db, CheckpointId(99), "sha", 1)
    assert [event.kind for event in await events.after(story.db, story.id, 0)].count("checkpoint") == 1


async def test_a_bad_checkpoint_is_never_loaded_and_the_one_before_is_next(story: Story):
    first, second = [await saved(story, await story.learned_step()) for _ in range(2)]
    assert [c.id for c in await checkpoints.newest_valid(story.db, story.id)] == [second.id, first.id]
    await checkpoints.mark_bad(story.db, second.id, "manifest.json does not match")
    assert [c.id for c in await checkpoints.newest_valid(story.db, story.id)] == [first.id]
    event = (await events.after(story.db, story.id, 0))[-1]
    assert (event.kind, event.body["reason"]) == ("checkpoint_bad", "manifest.json does not match")
    with pytest.raises(StateError, match="a bad checkpoint can't reject"):
        await checkpoints.mark_bad(story.db, second.id, "again")
    with pytest.raises(StateError, match=r"\(bad\) still has .* remove it first"):
        await checkpoints.begin(story.db, story.id, second.version_id, second.dir)


async def test_what_is_pruned_goes_in_the_opposite_order(story: Story):
    rows = [await saved(story, await story.learned_step()) for _ in range(4)]
    pruned = await checkpoints.prune(story.db, story.id, 2)
    assert {c.id for c in pruned} == {rows[0].id, rows[1].id}
    assert await checkpoints.prune(story.db, story.id, 2) == pruned  # a crash in between: they come again
    with pytest.raises(StateError, match="is committed, not deleting: prune it first"):
        await checkpoints.forget(story.db, rows[3].id)
    for checkpoint in (*pruned, *pruned):
        await checkpoints.forget(story.db, checkpoint.id)
    assert await checkpoints.prune(story.db, story.id, 2) == ()
    assert [c.id for c in await checkpoints.newest_valid(story.db, story.id)] == [rows[3].id, rows[2].id]


async def test_a_checkpoint_being_written_is_not_pruned_but_one_of_a_dead_epoch_is(story: Story):
    version = await story.learned_step()
    row = await checkpoints.begin(story.db, story.id, version.id, "/checkpoints/2")
    assert await checkpoints.prune(story.db, story.id, 2) == ()
    await epochs.begin_epoch(story.db, pid=2, boot_id="boot", version="0.1")
    assert [c.id for c in await checkpoints.prune(story.db, story.id, 2)] == [row.id]
    await checkpoints.forget(story.db, row.id)
    assert (await checkpoints.begin(story.db, story.id, version.id, "/checkpoints/2")).state is CheckpointState.WRITING


async def test_nothing_is_collected_before_there_are_as_many_checkpoints_as_are_kept(story: Story):
    await saved(story, await story.learned_step())
    assert await checkpoints.collect_rollouts(story.db, story.id, 2) == 0
    await saved(story, await story.learned_step())
    assert await checkpoints.collect_rollouts(story.db, story.id, 2) == 1
    assert await progress.collected_to(story.db, story.id) == 1


async def test_collection_deletes_what_the_oldest_kept_checkpoint_covers_and_nothing_else(story: Story):
    (dropped, going) = await story.admit(2)
    await groups.drop_group(story.db, dropped.id, "its deadline has passed")
    versions = [await story.learned_step() for _ in range(4)]
    await saved(story, versions[1])
    await saved(story, versions[3])
    before = await chunks.tokens_committed(story.db, story.id)
    assert await checkpoints.collect_rollouts(story.db, story.id, 2) == 3  # two consumed ones and the dropped one
    assert await checkpoints.collect_rollouts(story.db, story.id, 2) == 0
    left = await story.db.read(
        lambda c: [
            (row["ordinal"], row["state"])
            for row in c.execute("SELECT ordinal, state FROM grp WHERE id IN (SELECT grp_id FROM rollout) ORDER BY id")
        ]
    )
    assert left == [(1, GroupState.OPEN), (4, GroupState.CONSUMED), (5, GroupState.CONSUMED)]
    assert [g.ordinal for g in await groups.live_groups(story.db, story.id)] == [going.ordinal]
    assert await chunks.tokens_committed(story.db, story.id) == before == 24
    assert await progress.tokens_stored(story.db, story.id) == 12
    assert await groups.next_ordinal(story.db, story.id) == 6


async def test_a_bad_checkpoint_covers_nothing(story: Story):
    rows = [await saved(story, await story.learned_step()) for _ in range(3)]
    await checkpoints.mark_bad(story.db, rows[2].id, "damaged")
    assert await checkpoints.collect_rollouts(story.db, story.id, 2) == 1
