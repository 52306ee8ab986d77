"""A stale head and a skipped publication, with the real engine and SmolLM2 at the quickstart's rate, in both dtypes.

Each is caught before any token could be sampled under it: the gate stays closed. (In bfloat16 a tolerance sees neither:
the engine differs from float32 by more than a whole step changes.)
"""

import asyncio
import json
import os
import subprocess
import sys
from array import array
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import pytest_asyncio
from safetensors.torch import load_file, save_file

from rlhfd.config import Settings, load_job, parse_job, resolved
from rlhfd.core import procfs, wire
from rlhfd.core.placement import Device
from rlhfd.core.places import cache_dir
from rlhfd.core.types import Version, VersionId, VersionState, VersionStep
from rlhfd.engines.learner import LearnerClient
from rlhfd.engines.process import ChildSpec
from rlhfd.engines.vllm import EngineDeadlines, VllmClient
from rlhfd.engines.vllm_server import VLLM, ServerSpec, VllmServer
from rlhfd.errors import WeightSyncError
from rlhfd.pipeline import publish
from rlhfd.pipeline.context import Context
from rlhfd.pipeline.generate import Generator
from rlhfd.pipeline.learn import Learner, Publication
from rlhfd.pipeline.nursery import Nursery
from rlhfd.pipeline.prompts import Snapshot
from rlhfd.pipeline.publish import Publisher
from rlhfd.store import epochs, jobs
from rlhfd.store.db import Database

REPOSITORY = Path(__file__).parents[2]
pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.timeout(900)]
in_bfloat16 = pytest.mark.parametrize("workshop", ["bfloat16"], indirect=True, scope="module")
in_both = pytest.mark.parametrize("workshop", ["bfloat16", "float32"], indirect=True, scope="module")


@dataclass
class Workshop:
    """One real server, one real learner, SmolLM2."""

    context: Context
    client: VllmClient
    learner: Learner
    calls: LearnerClient


def inspected(out: Path, dtype: str) -> tuple[dict, dict]:
    """The quickstart's resolved job and what the inspection finds."""
    job, files = load_job(REPOSITORY / "jobs/quickstart.toml", [f"model.dtype={dtype}"])
    request = {
        "job": resolved(job),
        "files": {name: str(path) for name, path in files.items()},
        "out_dir": str(out),
        "cache_dir": str(cache_dir(os.environ)),
        "allow_download": False,
        "allow_remote_code": False,
    }
    out.mkdir()
    (out / "request.json").write_text(json.dumps(request))
    subprocess.run([sys.executable, "-m", "rlhfd.workers.inspect", str(out / "request.json")], check=True)
    return resolved(job), json.loads((out / "facts.json").read_text())


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def workshop(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Workshop]:
    dtype: str = request.param
    root = tmp_path_factory.mktemp(dtype)
    spec, facts = inspected(root / "prompts", dtype)
    cores = sorted(os.sched_getaffinity(0))
    devices = [Device(id=f"cpu:{core}", kind="cpu", name="core", memory=0, cores=(core,)) for core in cores[:2]]
    async with await Database.open(root / "rlhfd.db") as db:
        epoch = await epochs.begin_epoch(db, pid=os.getpid(), boot_id=procfs.boot_id(), version="test")
        submission = jobs.Submission(submit_key="k", name="q", spec=spec, spec_sha="s", facts=facts, max_steps=25)
        job, _ = await jobs.submit(db, submission)
        for name in ("logs", "weights"):
            (root / name).mkdir()
        nursery = Nursery(db)
        context = Context(
            job_id=job.id,
            attempt=1,
            epoch=epoch,
            config=parse_job(spec),
            settings=Settings(),
            db=db,
            nursery=nursery,
            snapshot=Snapshot.open(root / "prompts"),
            model_dir=Path(facts["model"]["dir"]),
            eos_token_ids=frozenset(facts["model"]["eos_token_ids"]),
            canary=tuple(tuple(sequence) for sequence in facts["canary"][:2]),
            max_model_len=128,
            max_streams=16,
            engine_module=VLLM,
            devices={"generator": tuple(devices[:1]), "learner": tuple(devices[-1:])},
            job_dir=root,
            run_dir=root,
            weights_dir=root / "weights",
        )
        server = await VllmServer.start(
            ServerSpec(
                job_id=job.id,
                attempt=1,
                epoch=epoch,
                model_dir=context.model_dir,
                socket=root / "g.sock",
                log_path=context.log_path("generator"),
                dtype=dtype,
                max_model_len=128,
                max_num_seqs=16,
                cores=context.cores("generator"),
            ),
            EngineDeadlines(),
        )
        child = await nursery.spawn(
            ChildSpec(
                role="learner",
                job_id=job.id,
                attempt=1,
                epoch=epoch,
                argv=(sys.executable, "-m", "rlhfd.workers.learner"),
                log_path=context.log_path("learner"),
                cores=context.cores("learner"),
                channel=True,
            )
        )
        calls = await LearnerClient.connect(child, epoch, context.settings.deadlines)
        learner = Learner(context)
        await learner.start(calls)
        yield Workshop(context=context, client=server.client, learner=learner, calls=calls)
        calls.close()
        await asyncio.gather(server.stop(), child.terminate(5.0))
        await nursery.close()


def publisher(workshop: Workshop, learner: Learner | None = None) -> tuple[Publisher, Generator]:
    generator = Generator(workshop.context)
    return Publisher(workshop.context, generator, learner or workshop.learner), generator


class Headless:
    """The learner, as if it left the tied head out of what it publishes."""

    def __init__(self, real: Learner, directory: Path) -> None:
        self._real, self._directory = real, directory
        self.in_use: Path | None = None

    @property
    def written(self) -> Publication | None:
        return self._beheaded(self._real.written)

    async def probe(self) -> Publication:
        return self._beheaded(await self._real.probe())

    def _beheaded(self, made: Publication) -> Publication:
        target = self._directory / made.dir.name
        if not target.exists():
            target.mkdir()
            tensors = load_file(made.dir / "model.safetensors")
            tensors.pop("lm_head.weight")
            save_file(tensors, target / "model.safetensors", metadata={"format": "pt"})
            (target / "config.json").write_bytes((made.dir / "config.json").read_bytes())
        return replace(made, dir=target)


@in_both
async def test_a_whole_publication_is_put_into_service(workshop):
    work, generator = publisher(workshop)
    await work.commission(workshop.client, await work._learner.probe())
    assert generator.open
    assert generator.version.step == 0


@in_bfloat16
async def test_a_publication_without_the_tied_head_is_refused_by_its_file(workshop, tmp_path):
    work, generator = publisher(workshop, Headless(workshop.learner, tmp_path))
    with pytest.raises(WeightSyncError, match=r"has no lm_head\.weight"):
        await work.commission(workshop.client, await work._learner.probe())
    assert not generator.open


@in_bfloat16
async def test_it_is_refused_by_the_engines_own_log_where_the_file_was_not_looked_at(workshop, tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "assert_head", lambda _: None)
    work, generator = publisher(workshop, Headless(workshop.learner, tmp_path))
    with pytest.raises(WeightSyncError, match="did not load every weight"):
        await work.commission(workshop.client, await work._learner.probe())
    assert not generator.open


@in_both
async def test_it_is_refused_by_the_probe_where_nothing_else_noticed(workshop, tmp_path, monkeypatch):
    monkeypatch.setattr(publish, "assert_head", lambda _: None)
    monkeypatch.setattr(VllmClient, "failed_weight_lines", lambda *_: [])
    work, generator = publisher(workshop, Headless(workshop.learner, tmp_path))
    with pytest.raises(WeightSyncError, match="does not follow a publication"):
        await work.commission(workshop.client, await work._learner.probe())
    assert not generator.open


@in_both
async def test_a_publication_that_is_silently_skipped_is_refused(workshop, monkeypatch):
    """After one step at the quickstart's learning rate."""
    work, generator = publisher(workshop)
    await work.commission(workshop.client, await work._learner.probe())
    before = workshop.learner.written
    workshop.learner.written = await one_step_later(workshop)
    assert workshop.learner.written.changed > 0

    async def skipped(*_: object) -> None:
        return None

    monkeypatch.setattr(VllmClient, "reload", skipped)
    with pytest.raises(WeightSyncError, match="not one bit"):
        await work.publish()
    assert not generator.open

    monkeypatch.undo()
    before_load, after_load = await loaded_for_real(workshop)
    assert before_load != after_load, "the check could never pass"
    workshop.learner.written = before


async def loaded_for_real(workshop: Workshop) -> tuple[list, list]:
    """The canary before and after the same publication is loaded, not skipped."""
    sequences = [list(sequence) for sequence in workshop.context.canary]
    before = await workshop.client.canary(sequences)
    await workshop.client.pause("abort")
    await workshop.client.reload(workshop.learner.written.dir)
    await workshop.client.reset_prefix_cache()
    await workshop.client.resume()
    return before, await workshop.client.canary(sequences)


async def one_step_later(workshop: Workshop) -> Publication:
    """Version 1: one optimiser step over two made-up completions, at the quickstart's rate."""
    prompt = array("i", workshop.context.snapshot.row(0).tokens).tobytes()
    tokens = array("i", range(100, 108))
    rollouts = [
        wire.RolloutFrame(
            id=number,
            prompt=prompt,
            tokens=tokens.tobytes(),
            logps=array("f", [-9.0] * len(tokens)).tobytes(),
            versions=array("i", [0] * len(tokens)).tobytes(),
            advantage=advantage,
            minibatch=0,
            micro_batch=0,
        )
        for number, advantage in ((1, 1.0), (2, -0.5))
    ]
    settings = wire.StepSettings(
        loss_type="dapo",
        prox_logp_method="loglinear",
        zero_staleness="behave",
        epsilon=0.2,
        epsilon_high=0.2,
        delta=None,
        behave_weight_cap=5.0,
        behave_weight_mode="token_truncate",
        temperature=1.0,
        max_grad_norm=1.0,
        learning_rates=[workshop.context.config.learner.learning_rate],
        minibatches=1,
        num_iterations=1,
        n_sequences=[2],
        n_tokens=[2 * len(tokens)],
        max_completion_length=12,
    )
    learn = wire.Learn(step=1, version_in=0, groups=1, settings=settings, trace=[])
    await workshop.calls.learn(learn, [wire.GroupFrame(ordinal=0, rollouts=rollouts)])
    target = workshop.context.weights_dir / "v-next"
    canary = [array("i", sequence).tobytes() for sequence in workshop.context.canary]
    published = await workshop.calls.publish(wire.Publish(dir=str(target), noise_seed=None, canary=canary))
    version = Version(id=VersionId(99), step=VersionStep(1), state=VersionState.TRAINED)
    return Publication(
        version=version, dir=target, changed=published.changed, canary=tuple(published.canary), seconds=0.0
    )
