"""A submission and its inspection, over a real store; the inspecting process is the test's."""

import asyncio
import errno
import json
from pathlib import Path

import pytest

from rlhfd.api.service import SubmitBody
from rlhfd.daemon import submit as module
from rlhfd.daemon.submit import Desk
from rlhfd.errors import DeadlineError, DiskFullError, JobFileError, StorageError
from tests.pipeline.workshop import job_spec

FACTS = {"model": {"dir": "/m"}, "prompts": {"sha256": "c" * 64, "rows": 8, "columns": []}, "canary": []}


class Child:
    """The inspection: writes what it found, then ends with a status, or never."""

    def __init__(self, out: Path, status: int | None, error: str = "") -> None:
        self.told: list[str] = []
        self._status = status
        if status == 0:
            (out / "facts.json").write_text(json.dumps(FACTS))
        if error:
            (out / "error.json").write_text(json.dumps({"error": error}))

    async def wait(self) -> int:
        return self._status if self._status is not None else await asyncio.Event().wait()

    async def terminate(self, grace: float) -> int:
        self.told.append("terminate")
        return 0

    def tail(self, lines: int) -> str:
        return "Killed"


class Nursery:
    def __init__(self, *outcomes: tuple) -> None:
        self.outcomes, self.children = list(outcomes), []
        self.began = asyncio.Event()

    async def spawn(self, spec) -> Child:
        self.children.append(Child(spec.log_path.parent, *self.outcomes.pop(0)))
        self.began.set()
        return self.children[-1]


class Pool:
    async def start(self) -> None:
        return None

    async def close(self) -> None:
        return None


@pytest.fixture
def desk(site, monkeypatch):
    monkeypatch.setattr(module, "reward_pool", lambda *_, **__: Pool())

    def open_(*outcomes: tuple) -> Desk:
        object.__setattr__(site.house, "nursery", Nursery(*outcomes))
        return Desk(house=site.house)

    return open_


def body(**changes: object) -> SubmitBody:
    return SubmitBody(**{"spec": job_spec(), **changes})


def left(desk: Desk) -> list[Path]:
    return list((desk.house.state.root / "tmp").iterdir())


async def test_a_job_is_inspected_once_and_queued(desk):
    open_desk = desk((0,))
    job, created = await open_desk.submit(body())
    assert (created, job.state, job.max_steps) == (True, "queued", 4)
    assert job.facts["files"] == {}
    assert open_desk.house.state.prompts("c" * 64).is_dir()
    assert await open_desk.submit(body()) == (job, False)
    assert left(open_desk) == []


async def test_again_makes_another_over_the_same_snapshot(desk):
    open_desk = desk((0,), (0,))
    first, _ = await open_desk.submit(body())
    second, created = await open_desk.submit(body(again=True))
    assert created
    assert second.id != first.id
    assert left(open_desk) == []


async def test_two_at_once_are_one_job(desk):
    open_desk = desk((0,), (0,))
    both = await asyncio.gather(open_desk.submit(body()), open_desk.submit(body()))
    assert {job.id for job, _ in both} == {1}
    assert sorted(created for _, created in both) == [False, True]


async def test_a_file_that_did_not_arrive_is_named(desk):
    with pytest.raises(JobFileError, match=r"the file rewards\.py did not arrive"):
        await desk().submit(body(files={"rewards.py": "d" * 64}))


@pytest.mark.parametrize(
    ("outcome", "sentence"),
    [((78, "row 3 has no prompt"), "^row 3 has no prompt$"), ((137,), "failed with status 137: Killed")],
)
async def test_what_the_inspection_found_wrong_is_the_answer(desk, outcome, sentence):
    open_desk = desk(outcome)
    with pytest.raises(JobFileError, match=sentence):
        await open_desk.submit(body())
    assert left(open_desk) == []
    assert open_desk.house.nursery.children[0].told == ["terminate"]


async def test_a_disk_that_fills_up_under_the_inspection_is_no_fault_of_the_job(desk):
    open_desk = desk((74, "no room for the prompts in /state: make room and submit again"))
    with pytest.raises(StorageError, match=r"^no room for the prompts"):
        await open_desk.submit(body())
    assert left(open_desk) == []


async def test_a_disk_that_is_full_before_it_is_told_as_that(desk, monkeypatch):
    open_desk = desk()

    def full(*_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", "/state/tmp/inspect-1")

    monkeypatch.setattr(Path, "mkdir", full)
    with pytest.raises(DiskFullError, match="no room for the job in /state/tmp/inspect-1: make room and submit again"):
        await open_desk.submit(body())


async def test_an_inspection_that_does_not_end_is_ended(desk, site):
    settings = site.house.settings
    deadlines = settings.deadlines.model_copy(update={"inspect": 0.01})
    object.__setattr__(site.house, "settings", settings.model_copy(update={"deadlines": deadlines}))
    open_desk = desk((None,))
    with pytest.raises(DeadlineError, match="did not end within 0 s"):
        await open_desk.submit(body())
    assert open_desk.house.nursery.children[0].told == ["terminate"]


async def test_a_daemon_that_stops_meanwhile_ends_the_inspection(desk):
    open_desk = desk((None,))
    submitting = asyncio.create_task(open_desk.submit(body()))
    await open_desk.house.nursery.began.wait()
    submitting.cancel()
    await asyncio.gather(submitting, return_exceptions=True)
    assert open_desk.house.nursery.children[0].told == ["terminate"]
    assert left(open_desk) == []


async def test_more_devices_than_the_machine_has_are_refused_before_any_inspection(desk):
    with pytest.raises(JobFileError, match="asks for 10 devices"):
        await desk().submit(body(spec=job_spec(resources={"generator": 9, "learner": 1})))
