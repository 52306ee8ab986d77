"""What the quickstart and the overlap bench make of the numbers that they measure."""

import json
from dataclasses import replace

import pytest

from jobs.quickstart import __main__ as quickstart
from jobs.quickstart.__main__ import Trained, checks, report
from jobs.quickstart.serving import Usage, serving
from rlhfd.config import load_job
from tests.bench import overlap
from tests.bench.overlap import Run, measured, ratios
from tests.daemon import FAKE_ENGINE, write_job

START = Usage(at=100.0, cpu=2.0, rss=60 * 2**20, rss_peak=60 * 2**20)
END = Usage(at=600.0, cpu=12.0, rss=90 * 2**20, rss_peak=95 * 2**20)


def trained(rewards, ended=END):
    steps = [{"step": n, "reward_mean": reward} for n, reward in enumerate(rewards, start=1)]
    return Trained(steps=steps, seconds=500.0, started=START, ended=ended)


GOOD = trained([0.1] * 3 + [0.3] * 14 + [0.6] * 5)


def unmet(run, before=0.1, after=0.5):
    return [check.what for check in checks(run, before, after) if not check.ok]


def test_a_run_that_learned_passes():
    assert unmet(GOOD) == []
    assert report(GOOD, checks(GOOD, 0.1, 0.5), 700.0)["passed"]


@pytest.mark.parametrize(
    ("run", "before", "after", "what"),
    [
        (trained([0.1] * 3 + [0.3] * 11 + [0.6] * 5), 0.1, 0.5, "steps"),
        (trained([0.25] * 3 + [0.3] * 14 + [0.6] * 5), 0.1, 0.5, "mean reward, first 3 steps"),
        (trained([0.1] * 3 + [0.3] * 14 + [0.45] * 5), 0.1, 0.5, "mean reward, last 5 steps"),
        (GOOD, 0.1, 0.29, "held-out sums right, after"),
        (trained([0.1] * 17 + [0.6] * 5, replace(END, rss=150 * 2**20)), 0.1, 0.5, "daemon's memory, MiB"),
        (trained([0.1] * 17 + [0.6] * 5, replace(END, cpu=27.0)), 0.1, 0.5, "daemon's share of one core"),
    ],
)
def test_a_run_fails_by_the_one_bound_that_it_breaks(run, before, after, what):
    assert unmet(run, before, after) == [what]


def test_exactly_a_fifth_more_sums_is_enough():
    assert unmet(GOOD, before=0.1, after=0.3) == []


def test_the_daemons_share_counts_only_what_it_used_while_the_job_ran():
    assert report(GOOD, [], 700.0)["daemon"]["cpu_share"] == pytest.approx(10.0 / 500.0)


def test_a_daemon_that_can_not_start_is_quoted(tmp_path):
    (tmp_path / "state").write_text("in the way")
    with (
        pytest.raises(RuntimeError, match=r"rlhfd serve ended with status \d+: .+"),
        serving(tmp_path / "state", tmp_path / "serve.log"),
    ):
        pytest.fail("it answered")


def test_a_daemon_is_ready_when_it_says_so_and_gone_afterwards(tmp_path):
    with serving(tmp_path / "state", tmp_path / "serve.log") as daemon:
        first = daemon.usage()
        assert 0 < first.rss <= first.rss_peak
        assert daemon.usage().cpu >= first.cpu
    with pytest.raises(FileNotFoundError):
        daemon.usage()


@pytest.fixture
def fake_engine(tmp_path):
    """Settings under which the daemon takes the engine that only the tests use."""
    config = tmp_path / "config.toml"
    config.write_text(f'generator_module = "{FAKE_ENGINE}"\n')
    return config


def test_train_leaves_metrics_and_two_models_that_can_be_asked(tmp_path, tiny_model, fake_engine, monkeypatch):
    monkeypatch.setattr(quickstart, "JOB", write_job(tmp_path / "job", tiny_model))
    monkeypatch.setattr(quickstart, "BUILD", tmp_path)
    with serving(tmp_path / "state", tmp_path / "serve.log", config=fake_engine) as daemon:
        run = quickstart.train(daemon)
    assert [step["step"] for step in run.steps] == [1, 2]
    assert run.ended.at - run.started.at == pytest.approx(run.seconds, abs=1.0)
    held_out = quickstart.evaluate()
    for name in ("before", "after"):
        assert 0.0 <= held_out[name]["bare"] <= held_out[name]["correct"] <= 1.0
        assert len(held_out[name]["answers"]) == 100
    assert held_out["before"]["answers"] != held_out["after"]["answers"]
    assert json.dumps(report(run, checks(run, 0.1, 0.5), 1.0))


@pytest.mark.parametrize("arm", overlap.ARMS)
def test_every_arm_of_the_bench_is_a_valid_job(arm):
    job, _ = load_job(overlap.JOB, overlap.ARMS[arm])
    assert job.rollout.overlap_learning == (arm == "overlap")


def test_an_arm_of_the_bench_runs_and_is_measured(tmp_path, tiny_model, fake_engine, monkeypatch):
    monkeypatch.setattr(overlap, "JOB", write_job(tmp_path / "job", tiny_model))
    monkeypatch.setattr(overlap, "WARM_UP", 1)
    plain = overlap.settings
    monkeypatch.setattr(overlap, "settings", lambda arm: plain(arm) + fake_engine.read_text())
    run = overlap.run_arm("shared", 0, 2)
    assert run.seconds > 0
    assert run.parts["learn"] > 0
    assert run.staleness_mean == 0.0


def step(total, tokens, staleness=1.0):
    return {"time": {"total": total, "learn": total / 2}, "tokens_generated": tokens, "staleness_mean": staleness}


def test_an_arm_is_measured_by_its_mean_step():
    run = measured("overlap", 0, [step(4.0, 100), step(6.0, 300, staleness=2.0)])
    assert run == Run(
        arm="overlap",
        turn=0,
        seconds=5.0,
        parts={"total": 5.0, "learn": 2.5},
        tokens_per_second=40.0,
        staleness_mean=1.5,
    )


def test_a_ratio_compares_runs_of_one_turn_and_leaves_unfinished_turns_out():
    def run(arm, turn, seconds):
        return Run(arm=arm, turn=turn, seconds=seconds, parts={}, tokens_per_second=1.0, staleness_mean=1.0)

    runs = [
        run("overlap", 0, 4.0),
        run("off", 0, 6.0),
        run("overlap", 1, 5.0),
        run("off", 1, 5.0),
        run("overlap", 2, 5.0),
    ]
    assert ratios(runs, "off") == [1.5, 1.0]
    assert ratios(runs, "shared") == []
