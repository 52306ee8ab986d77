"""Publications into a scripted engine: the order of calls, and what keeps the gate closed."""

import asyncio
import json
from array import array
from pathlib import Path

import pytest

from rlhfd.core.types import Version, VersionId, VersionState, VersionStep
from rlhfd.errors import EngineDiedError, EngineError, WeightSyncError
from rlhfd.pipeline.generate import Generator, Stream
from rlhfd.pipeline.learn import Publication
from rlhfd.pipeline.publish import Publisher
from rlhfd.store import events, jobs, versions
from tests.pipeline.workshop import Workshop

LOADED = ["reload", "reset", "label", "resume", "canary"]


def weights(directory: Path, value: float, *, head: bool = True) -> Path:
    """A publication that an engine answers with the canary (0, value)."""
    directory.mkdir()
    name = "lm_head.weight" if head else "model.embed_tokens.weight"
    header = json.dumps({name: {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}).encode()
    data = len(header).to_bytes(8, "little") + header + array("f", [value]).tobytes()
    (directory / "model.safetensors").write_bytes(data)
    return directory


def floats(value: float) -> bytes:
    return array("f", [0.0, value]).tobytes()


class Engine:
    """Serves what was loaded last. `stale`: reloads that it only claims; `noise`: what it differs by."""

    def __init__(self, start: float = 0.0, *, stale: int = 0, noise: float = 1e-6) -> None:
        self.calls: list[str] = []
        self.value, self.stale, self.noise = start, stale, noise
        self.labels: list[str] = []
        self.lines: list[str] = []
        self.on_canary = None

    async def pause(self, mode: str = "abort") -> None:
        assert mode == "abort"
        self.calls.append("pause")

    async def resume(self) -> None:
        self.calls.append("resume")

    async def reload(self, directory: Path) -> None:
        self.calls.append("reload")
        if self.stale:
            self.stale -= 1
            return
        data = (directory / "model.safetensors").read_bytes()
        self.value = array("f", data[-4:])[0]

    async def reset_prefix_cache(self) -> None:
        self.calls.append("reset")

    async def label(self, version: str) -> None:
        self.calls.append("label")
        self.labels.append(version)

    async def canary(self, sequences) -> list:
        self.calls.append("canary")
        if self.on_canary is not None:
            self.on_canary()
        return [array("f", [0.0, self.value + self.noise]) for _ in sequences]

    def log_mark(self) -> int:
        return 0

    def failed_weight_lines(self, since: int) -> list[str]:
        return self.lines


class Learner:
    """What the publisher sees of it."""

    def __init__(self) -> None:
        self.written: Publication | None = None
        self.in_use: Path | None = None


class Scene:
    """A job whose version 0 is written, with a probe beside it."""

    def __init__(self, shop: Workshop, version: Version) -> None:
        self.shop, self.learner, self.generator = shop, Learner(), Generator(shop.context)
        self.publisher = Publisher(shop.context, self.generator, self.learner)
        self.learner.written = self.publication(version, 0.0)
        self.probe = self.publication(version, 1.0, name="probe")

    def publication(self, version: Version, value: float, *, name: str = "", changed: float = 1.0) -> Publication:
        target = weights(self.shop.context.weights_dir / (name or f"v{version.id}"), value)
        return Publication(version=version, dir=target, changed=changed, canary=(floats(value),), seconds=2.0)

    async def commission(self, engine: Engine) -> None:
        await self.publisher.commission(engine, self.probe)
        engine.calls.clear()

    async def next_version(self, value: float, *, changed: float = 1.0) -> Version:
        def insert(connection) -> int:
            sql = (
                "INSERT INTO policy_version (job_id, step, state, created_us) VALUES (?, 1, 'trained', 0) RETURNING id"
            )
            return connection.execute(sql, (self.shop.job.id,)).fetchone()[0]

        made = VersionId(await self.shop.db.write(insert))
        version = Version(id=made, step=VersionStep(1), state=VersionState.TRAINED)
        self.learner.written = self.publication(version, value, changed=changed)
        return version

    async def kinds(self) -> list[str]:
        return [event.kind for event in await events.after(self.shop.db, self.shop.job.id, 0)]


@pytest.fixture
async def scene(shop: Workshop) -> Scene:
    return Scene(shop, await versions.latest_trained(shop.db, shop.job.id))


class TestAFreshEngine:
    async def test_is_measured_loaded_probed_and_loaded_again(self, scene: Scene):
        engine = Engine()
        await scene.publisher.commission(engine, scene.probe)
        assert engine.calls == ["canary", *["pause", *LOADED] * 3]
        assert engine.labels == ["1", "probe", "1"]
        assert scene.generator.open
        assert scene.generator.client is engine
        assert scene.learner.in_use == scene.learner.written.dir
        assert (await versions.latest_published(scene.shop.db, scene.shop.job.id)).step == 0

    async def test_its_noise_is_measured_once_a_job(self, scene: Scene):
        await scene.commission(Engine(noise=2e-3))
        job = await jobs.job(scene.shop.db, scene.shop.job.id)
        assert job.noise == pytest.approx(1e-3, rel=1e-3)
        engine = Engine(noise=2e-3)
        await scene.publisher.commission(engine, scene.probe)
        assert engine.calls[0] == "pause"
        assert (await scene.kinds()).count("canary_noise") == 1

    async def test_that_does_not_follow_the_probe_stays_out_of_service(self, scene: Scene):
        engine = Engine(stale=3)
        with pytest.raises(WeightSyncError, match="does not follow a publication"):
            await scene.publisher.commission(engine, scene.probe)
        assert not scene.generator.open
        assert scene.generator.client is None
        assert await versions.latest_published(scene.shop.db, scene.shop.job.id) is None

    async def test_that_is_far_from_the_reference_stays_out_of_service(self, scene: Scene):
        await jobs.set_noise(scene.shop.db, scene.shop.job.id, 1e-6)
        with pytest.raises(WeightSyncError, match="over the tolerance"):
            await scene.publisher.commission(Engine(noise=0.1), scene.probe)
        assert not scene.generator.open

    async def test_that_does_not_come_back_from_the_probe_stays_out_of_service(self, scene: Scene):
        engine = Engine()
        canaries = iter(range(10))

        def drift() -> None:
            engine.noise = 1e-6 * (1 + next(canaries))

        engine.on_canary = drift
        with pytest.raises(WeightSyncError, match="did not come back"):
            await scene.publisher.commission(engine, scene.probe)

    async def test_whose_log_names_a_tensor_stays_out_of_service(self, scene: Scene):
        engine = Engine()
        engine.lines = ["Failed to load weights of lm_head"]
        with pytest.raises(WeightSyncError, match="did not load every weight: Failed to load weights of lm_head"):
            await scene.publisher.commission(engine, scene.probe)

    async def test_is_not_given_a_publication_without_a_head(self, scene: Scene, tmp_path: Path):
        weights(tmp_path / "headless", 0.0, head=False)
        real = scene.learner.written
        scene.learner.written = Publication(
            version=real.version, dir=tmp_path / "headless", changed=1.0, canary=real.canary, seconds=0.0
        )
        engine = Engine()
        with pytest.raises(WeightSyncError, match=r"has no lm_head\.weight"):
            await scene.publisher.commission(engine, scene.probe)
        assert "reload" not in engine.calls

    async def test_without_any_publication_is_refused(self, scene: Scene):
        scene.learner.written = None
        with pytest.raises(WeightSyncError, match="the learner has written none"):
            await scene.publisher.commission(Engine(), scene.probe)


class TestAPublication:
    async def test_pauses_loads_checks_and_then_opens_the_gate(self, scene: Scene):
        engine = Engine()
        await scene.commission(engine)
        made = await scene.next_version(0.25)
        served = await scene.publisher.publish()
        assert engine.calls == ["pause", *LOADED]
        assert engine.labels[-1] == str(made.id)
        assert (served.step, served.seconds >= 2.0) == (1, True)
        assert scene.generator.open
        assert scene.generator.version.id == made.id
        assert (await versions.latest_published(scene.shop.db, scene.shop.job.id)).id == made.id

    async def test_that_was_not_loaded_is_tried_once_more(self, scene: Scene):
        engine = Engine()
        await scene.commission(engine)
        await scene.next_version(1e-5)
        engine.stale = 1
        served = await scene.publisher.publish()
        assert served is not None
        assert engine.calls == ["pause", *LOADED, "pause", *LOADED]
        assert "publication_retried" in await scene.kinds()

    async def test_that_was_not_loaded_twice_stops_the_job(self, scene: Scene):
        engine = Engine()
        await scene.commission(engine)
        await scene.next_version(1e-5)
        engine.stale = 2
        with pytest.raises(WeightSyncError, match="not one bit"):
            await scene.publisher.publish()
        assert not scene.generator.open
        assert (await versions.latest_published(scene.shop.db, scene.shop.job.id)).step == 0

    async def test_that_changed_nothing_may_leave_the_canary_as_it_was(self, scene: Scene):
        await scene.commission(Engine())
        await scene.next_version(0.0, changed=0.0)
        assert (await scene.publisher.publish()).step == 1

    async def test_of_what_is_served_already_only_resumes(self, scene: Scene):
        engine = Engine()
        await scene.commission(engine)
        await scene.publisher.hold()
        assert not scene.generator.open
        assert await scene.publisher.publish() is None
        assert engine.calls == ["pause", "resume"]
        assert scene.generator.open

    async def test_of_a_version_that_a_diverged_replay_lost_is_not_put_into_service(self, scene: Scene):
        await scene.commission(Engine())
        made = await scene.next_version(0.25)
        lose = "UPDATE policy_version SET state = 'lost' WHERE id = ?"
        await scene.shop.db.write(lambda connection: connection.execute(lose, (made.id,)))
        with pytest.raises(EngineError, match="was lost by a diverged replay"):
            await scene.publisher.publish()
        assert not scene.generator.open

    async def test_of_an_engine_lost_at_the_end_does_not_put_it_back(self, scene: Scene):
        engine = Engine()
        await scene.commission(engine)
        await scene.next_version(0.25)
        engine.on_canary = scene.generator.out_of_service
        with pytest.raises(EngineDiedError, match="lost as soon as it served version 1"):
            await scene.publisher.publish()
        assert not scene.generator.open
        assert scene.generator.client is None

    async def test_without_an_engine_does_nothing(self, scene: Scene):
        assert await scene.publisher.publish() is None


class TestAHold:
    async def test_twice_is_once(self, scene: Scene):
        engine = Engine()
        await scene.commission(engine)
        await scene.publisher.hold()
        await scene.publisher.hold()
        assert engine.calls == ["pause"]

    async def test_without_an_engine_does_nothing(self, scene: Scene):
        await scene.publisher.hold()
        assert not scene.generator.open

    async def test_says_so_where_a_stream_gained_no_row_in_time(self, scene: Scene):
        scene.shop.limits(publish_patience=0.0)
        scene.generator._context = scene.publisher._context = scene.shop.context
        engine = Engine()
        await scene.commission(engine)
        (group,) = await scene.shop.admit()
        stream = Stream(rollout=group.rollouts[0], length=0)
        scene.generator._streams[1] = stream
        scene.generator._empty.clear()
        holding = asyncio.create_task(scene.publisher.hold())
        while not engine.calls:
            await asyncio.sleep(0)
        scene.generator._streams.clear()
        scene.generator._empty.set()
        await holding
        assert "publication_impatient" in await scene.kinds()
