"""Every recipe that needs neither hub nor GPU takes a step, with the tiny model in the place of its own."""

from pathlib import Path

import pytest

from tests.conftest import MakeTinyModel
from tests.daemon import Daemon

JOBS = Path(__file__).parents[2] / "jobs"
NEED_THE_HUB = {"gsm8k-a3po.toml"}
RECIPES = sorted(path.name for path in JOBS.glob("*.toml") if path.name not in NEED_THE_HUB)


def test_the_recipes_are_the_ones_that_are_known():
    assert {path.name for path in JOBS.glob("*.toml")} == {*RECIPES, *NEED_THE_HUB}


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory, make_tiny_model: MakeTinyModel) -> dict[str, dict]:
    """The last status of each recipe's job, all on one daemon."""
    smaller = {
        "model.model_name_or_path": make_tiny_model("--eos"),
        "model.dtype": "float32",
        "job.max_steps": 1,
        "rollout.groups_per_step": 2,
        "rollout.num_generations": 2,
        "rollout.max_completion_length": 12,
    }
    flags = [part for key, value in smaller.items() for part in ("--set", f"{key}={value}")]
    with Daemon(tmp_path_factory.mktemp("recipes") / "state") as daemon:
        ids = {name: daemon.submit(JOBS / name, *flags) for name in RECIPES}
        return {name: daemon.wait(job_id, {"done", "failed", "paused"}, 240.0) for name, job_id in ids.items()}


@pytest.mark.parametrize("name", RECIPES)
def test_a_recipe_takes_a_step(ran, name):
    assert (ran[name]["state"], ran[name]["step"]) == ("done", 1), ran[name]["reason"]
