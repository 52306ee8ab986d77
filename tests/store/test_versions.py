import pytest

from rlhfd.core.types import JobId, VersionId, VersionState
from rlhfd.errors import StateError
from rlhfd.store import events, versions
from tests.store.story import Story


async def test_a_published_version_is_what_the_generator_runs(story: Story):
    start = await story.version()
    assert await versions.latest_published(story.db, story.id) is None
    published = await versions.publish(story.db, start.id)
    assert published.state is VersionState.PUBLISHED
    assert await versions.latest_published(story.db, story.id) == published
    newer = await story.learned_step()
    assert await versions.latest_trained(story.db, story.id) == newer
    assert await versions.latest_published(story.db, story.id) == published


async def test_publishing_again_after_an_engine_start_is_told_once(story: Story):
    version = await story.version()
    for _ in range(3):
        await versions.publish(story.db, version.id)
    assert [event.kind for event in await events.after(story.db, story.id, 0)].count("published") == 1


async def test_versions_at_the_generator_never_go_back(story: Story):
    first = await story.learned_step()
    second = await story.learned_step()
    await versions.publish(story.db, second.id)
    with pytest.raises(StateError, match=f"version {first.id} can't publish now, though it is trained"):
        await versions.publish(story.db, first.id)
    with pytest.raises(StateError, match="no version 99"):
        await versions.publish(story.db, VersionId(99))


async def test_a_version_id_names_one_step_for_ever(story: Story):
    start = await story.version()
    made = [await story.learned_step() for _ in range(2)]
    assert await versions.steps_by_id(story.db, story.id) == {start.id: 0, made[0].id: 1, made[1].id: 2}


async def test_a_job_without_a_version_is_damage(story: Story):
    with pytest.raises(StateError, match="job 99 has no version at all"):
        await versions.latest_trained(story.db, JobId(99))
