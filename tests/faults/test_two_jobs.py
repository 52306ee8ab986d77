"""Two jobs at the same time, each on one core with the real vLLM server: version ids interleave, labels don't.

`learner = "share:generator"`: in each job generator and learner take turns. Weights change in mid-rollout, and every
token's label names the weights that sampled it.
"""

import json
import os
from pathlib import Path

import pytest

from tests.daemon import REAL_ENGINE, Daemon, write_job
from tests.faults.test_kill import read

pytestmark = pytest.mark.timeout(900)


@pytest.fixture(scope="module")
def story(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict:
    directory = tmp_path_factory.mktemp("two")
    cores = sorted(os.sched_getaffinity(0))[:2]
    settings = {"generator_module": REAL_ENGINE, "cpu_devices": [[core] for core in cores]}
    with Daemon(directory / "state", settings=settings) as daemon:
        ids = [
            daemon.submit(
                write_job(
                    directory / name,
                    tiny_model,
                    job={"name": name, "seed": seed, "max_steps": 4},
                    rollout={
                        "groups_per_step": 2,
                        "num_generations": 4,
                        "max_completion_length": 160,
                        "overcommit": 2,
                        "max_staleness": 4,
                    },
                    generator={"max_num_seqs": 6},  # so that some rollouts are half done when others are learned
                    resources={"generator": 1, "learner": "share:generator"},
                    checkpoint={"save_steps": 2, "save_total_limit": 10},
                )
            )
            for seed, name in ((1, "one"), (2, "two"))
        ]
        ran = [daemon.wait(job_id, {"done", "failed"}, 600) for job_id in ids]
        audits = [json.loads(daemon.cli("audit", job_id, "--json").stdout) for job_id in ids]
    return {"ids": ids, "ran": ran, "audits": audits, "database": directory / "state" / "rlhfd.db"}


def test_both_are_done(story):
    assert [status["state"] for status in story["ran"]] == ["done", "done"], story["ran"]


def test_they_ran_at_the_same_time_and_their_version_ids_interleave(story):
    rows = read(story["database"], "SELECT job_id FROM policy_version ORDER BY id")
    owners = [row["job_id"] for row in rows]
    assert owners != sorted(owners)


def test_weights_changed_in_mid_rollout(story):
    for job_id in story["ids"]:
        mixed = read(
            story["database"],
            "SELECT 1 FROM rollout JOIN grp ON grp.id = grp_id WHERE job_id = ? AND max_step > min_step",
            job_id,
        )
        assert mixed


def test_every_label_names_the_weights_that_sampled_the_token(story):
    for audit in story["audits"]:
        assert audit["not_rederivable"] == 0
        assert audit["mean_error"] < 1e-4
        assert audit["max_error"] < 1e-2
        assert audit["neighbour_mean_error"] > 10 * audit["mean_error"]
