import asyncio

from rlhfd.core.types import JobId
from rlhfd.errors import UsageError
from rlhfd.store import events
from rlhfd.store.db import Database
from tests.store.story import begin


async def test_events_are_told_in_order_from_where_one_stands(db: Database):
    await begin(db)
    made = [await events.add(db, JobId(1), "note", {"n": n}) for n in range(3)]
    other = await events.add(db, JobId(2), "note", {"n": 9})
    assert await events.after(db, JobId(1), 0) == tuple(made)
    assert await events.after(db, JobId(1), made[1].id) == (made[2],)
    assert await events.after(db, None, made[1].id) == (made[2], other)
    assert await events.after(db, JobId(1), 0, limit=2) == tuple(made[:2])
    assert await events.newest(db, JobId(2)) == other.id
    assert await events.newest(db, JobId(3)) == 0


async def test_an_event_knows_its_epoch(db: Database):
    assert (await events.add(db, None, "note", {})).epoch == 0
    epoch = await begin(db)
    assert (await events.add(db, None, "note", {})).epoch == epoch


async def test_an_event_is_there_exactly_if_what_it_tells_of_is(db: Database):
    def fail(connection):
        events.insert(connection, None, "note", {}, 0)
        raise UsageError("no")

    await asyncio.gather(db.write(fail), return_exceptions=True)
    assert await events.after(db, None, 0) == ()


async def test_a_follower_gets_at_once_what_is_there_already(db: Database):
    event = await events.add(db, JobId(1), "note", {})
    assert await events.wait_newer(db, JobId(1), 0, timeout=3600) == (event,)


async def test_every_follower_is_woken_by_the_next_event_of_its_job(db: Database):
    followers = [asyncio.create_task(events.wait_newer(db, JobId(1), 0, timeout=60)) for _ in range(3)]
    everything = asyncio.create_task(events.wait_newer(db, None, 0, timeout=60))
    for follower in followers:
        await asyncio.sleep(0)
        assert not follower.done()
    other = await events.add(db, JobId(2), "note", {})
    assert await everything == (other,)
    event = await events.add(db, JobId(1), "note", {})
    assert await asyncio.gather(*followers) == [(event,)] * 3


async def test_a_follower_is_told_when_nothing_happens(db: Database):
    assert await events.wait_newer(db, JobId(1), 0, timeout=0.01) == ()
    assert await events.wait_newer(db, JobId(1), 0, timeout=0) == ()
