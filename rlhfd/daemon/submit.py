"""A submission: validate what can be known now, inspect model and data, then one row.

job (plain data) + carried files ─► config ─► known key? ─► inspection (its own process) ─► rewards import ─► COMMIT
"""

import asyncio
import json
import os
import shutil
import sys
import uuid
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

from rlhfd.api.service import SubmitBody
from rlhfd.config import JobConfig, parse_job, resolved, submit_key
from rlhfd.core.estimate import steps_of
from rlhfd.core.faults import NO_ROOM
from rlhfd.core.placement import place
from rlhfd.core.types import Job, JobId
from rlhfd.daemon.house import House
from rlhfd.engines.process import ChildSpec
from rlhfd.errors import DeadlineError, DiskFullError, JobFileError, StorageError
from rlhfd.pipeline.rewards import RewardPlace, reward_pool
from rlhfd.store import jobs


@dataclass(frozen=True, kw_only=True, slots=True)
class Desk:
    """Takes submissions."""

    house: House

    async def submit(self, body: SubmitBody) -> tuple[Job, bool]:
        """The job's row, and whether it is new. Raises JobFileError with the sentence for the user, DiskFullError."""
        try:
            return await self._submit(body)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            where = error.filename or self.house.state.root
            raise DiskFullError(f"no room for the job in {where}: make room and submit again") from error

    async def _submit(self, body: SubmitBody) -> tuple[Job, bool]:
        config = parse_job(body.spec)
        for name, digest in body.files.items():
            if not self.house.state.file(digest).exists():
                raise JobFileError(f"the file {name} did not arrive; submit again")
        key = submit_key(config, body.files)
        known = None if body.again else await jobs.by_key(self.house.db, key)
        if known is not None:
            return known, False
        place(wants(config), self.house.inventory(), {})
        facts = await self._inspect(config, body.files)
        config = with_steps(config, facts)
        await self._import_rewards(config, facts)
        spec = resolved(config)
        submission = jobs.Submission(
            submit_key=key,
            name=config.job.name,
            spec=spec,
            spec_sha=sha256(json.dumps(spec, sort_keys=True).encode()).hexdigest(),
            facts=facts,
            max_steps=config.job.max_steps,
            priority=body.priority,
            after=None if body.after is None else JobId(body.after),
        )
        return await jobs.submit(self.house.db, submission, again=body.again)

    async def _inspect(self, config: JobConfig, files: dict[str, str]) -> dict[str, Any]:
        """Model facts and prompt snapshot, by a short-lived worker; the snapshot is kept under its hash."""
        out = self.house.state.root / "tmp" / f"inspect-{uuid.uuid4().hex}"
        out.mkdir()
        try:
            request = out / "request.json"
            request.write_text(
                json.dumps(
                    {
                        "job": resolved(config),
                        "files": {name: str(self.house.state.file(digest)) for name, digest in files.items()},
                        "out_dir": str(out),
                        "cache_dir": str(self.house.cache),
                        "allow_download": self.house.settings.allow_download,
                        "allow_remote_code": self.house.settings.allow_remote_code,
                    }
                )
            )
            await self._run_inspection(request, out)
            facts = json.loads((out / "facts.json").read_text())
            kept = self.house.state.prompts(facts["prompts"]["sha256"])
            await asyncio.to_thread(_keep, out, kept)
            return {**facts, "files": files}
        finally:
            shutil.rmtree(out, ignore_errors=True)

    async def _run_inspection(self, request: Path, out: Path) -> None:
        child = await self.house.nursery.spawn(
            ChildSpec(
                role="inspect",
                job_id=None,
                attempt=0,
                epoch=self.house.epoch,
                argv=(sys.executable, "-m", "rlhfd.workers.inspect", str(request)),
                env={"HF_HUB_OFFLINE": "0", "TRANSFORMERS_OFFLINE": "0", "HF_DATASETS_OFFLINE": "0"}
                if self.house.settings.allow_download
                else {},
                log_path=out / "inspect.log",
            )
        )
        limit = self.house.settings.deadlines.inspect
        try:
            async with asyncio.timeout(limit):
                status = await child.wait()
        except TimeoutError:
            raise DeadlineError(f"the inspection of model and data did not end within {limit:.0f} s") from None
        finally:
            await child.terminate(grace=1.0)
        told = out / "error.json"
        if status != 0 and told.exists():
            kind = JobFileError if status == JobFileError.exit_status else StorageError
            raise kind(json.loads(told.read_text())["error"])
        if status != 0:
            raise JobFileError(f"the inspection of model and data failed with status {status}: {child.tail(5)}")

    async def _import_rewards(self, config: JobConfig, facts: dict[str, Any]) -> None:
        """Start one reward worker, so that a file that does not import is refused now and not in a week."""
        place = RewardPlace(
            files=facts["files"],
            files_dir=self.house.state.root / "files",
            columns=facts["prompts"]["columns"],
            tokenizer=self.house.state.prompts(facts["prompts"]["sha256"]) / "tokenizer.json",
            work_dir=self.house.state.root / "tmp" / f"rewards-{uuid.uuid4().hex}",
            log_path=self.house.state.root / "logs" / "submit.log",
            job_id=None,
            attempt=0,
            epoch=self.house.epoch,
        )
        pool = reward_pool(config, place, self.house.nursery, size=1)
        try:
            await pool.start()
        finally:
            await pool.close()


def _keep(made: Path, kept: Path) -> None:
    """Rename a finished snapshot into its place, durably: the job's row comes after it. The same one may be there."""
    try:
        made.rename(kept)
    except OSError:
        if not kept.exists():  # else another submission of the same data was faster
            raise
    directory = os.open(kept.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def wants(config: JobConfig) -> dict[str, int | str]:
    """Role -> number of devices, or "share:<role>"."""
    return {"generator": config.resources.generator, "learner": config.resources.learner}


def with_steps(config: JobConfig, facts: dict[str, Any]) -> JobConfig:
    """`num_train_epochs` turned into steps, now that the number of prompts is known."""
    steps = steps_of(config, facts["prompts"]["rows"])
    return config.model_copy(update={"job": config.job.model_copy(update={"max_steps": steps})})
