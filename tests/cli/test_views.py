"""What a followed job looks like."""

import io

from rich.console import Console

from rlhfd.cli import views
from rlhfd.cli.views import Bar, Lines, Pace, spread, summary
from tests.fake_service import metric, status


def test_the_time_left_comes_from_the_last_steps():
    pace = Pace()
    for step in range(1, 9):
        pace.add(metric(step, 0.1) | {"time": {"total": 100.0 if step < 4 else 10.0}})
    assert pace.time_left(18) == 100.0
    assert pace.line(18) == "step 8/18  reward 0.100  80 tokens/s  1:40 left"


def test_nothing_is_said_before_the_first_step_or_without_times():
    pace = Pace()
    assert pace.line(10) == ""
    pace.add({"step": 1, "reward_mean": None})
    assert pace.line(10) == "step 1/10  reward -"


def test_lines_say_a_standing_once(capsys):
    view = Lines()
    job = status(1, "adder", "running", phase="generating 2/4 groups")
    view.update(job, [], [])
    view.update(job, [], [metric(1, 0.5)])
    view.update(job | {"phase": "learning"}, [], [])
    assert capsys.readouterr().err.splitlines() == [
        "job 1 running: generating 2/4 groups",
        "step 1/3  reward 0.500  400 tokens/s  0:04 left",
        "job 1 running: learning",
    ]


def test_the_bar_shows_step_reward_speed_and_time_left(monkeypatch):
    screen = io.StringIO()
    drawn = Console(file=screen, force_terminal=True, width=150, markup=False, color_system=None)
    monkeypatch.setattr(views, "console", lambda **_: drawn)
    bar = Bar()
    event = {"id": 1, "at": "2026-01-02T03:04:07Z", "kind": "generator_lost", "why": "it was killed"}
    bar.update(status(1, "adder", "running", step=1), [event], [metric(1, 0.5)])
    bar.close()
    shown = screen.getvalue()
    assert 'generator_lost  why="it was killed"' in shown
    assert "step 1/3  reward 0.500  400 tokens/s  0:04 left" in shown


def test_the_summary_has_a_table_and_a_curve(capsys):
    steps = [metric(n, n / 30) for n in range(1, 31)]
    summary(status(1, "adder", "done", step=30, max_steps=30), steps)
    out = capsys.readouterr().out
    assert "mean reward, steps 1 to 30" in out
    assert "1.000 ┤" in out
    assert sum(line.split()[0].isdecimal() for line in out.splitlines() if line.split()) == 12


def test_a_job_without_steps_has_a_short_summary(capsys):
    summary(status(1, "adder", "failed"), [])
    assert capsys.readouterr().out == "job 1 (adder) is failed after step 0 of 3\n"


def test_spread_keeps_the_first_and_the_last():
    steps = [{"step": n} for n in range(1, 101)]
    kept = [s["step"] for s in spread(steps, 12)]
    assert (kept[0], kept[-1], len(kept)) == (1, 100, 12)
    assert spread(steps[:5], 12) == steps[:5]
