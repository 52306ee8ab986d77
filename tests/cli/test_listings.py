"""What the listing commands print, for people and as JSON, and how they end."""

import csv
import io
import json

import pytest

from tests.fake_service import metric, sample

STATUS_KEYS = {"id", "name", "state", "step", "max_steps", "attempt", "reason"}


async def test_status_shows_where_the_job_stands(cli, service):
    job = service.add("adder", "running", step=2, phase="generating 12/16 groups", devices=["core 0"])
    outcome = await cli("status", str(job))
    assert outcome.status == 0
    assert outcome.out.startswith("job 1  adder  running\n")
    assert "2 of 3" in outcome.out
    assert "generating 12/16 groups" in outcome.out
    assert "reason" not in outcome.out


async def test_status_as_json_is_the_status_object_alone(cli, service):
    job = service.add("adder", "failed", reason="no room")
    outcome = await cli("status", str(job), "--json")
    assert json.loads(outcome.out) == service.table[job]
    assert json.loads(outcome.out).keys() >= STATUS_KEYS
    assert outcome.err == ""


async def test_status_says_the_same_by_either_way_through_the_parser(cli, service):
    service.add("adder", "running")
    fast, by_typer = await cli("status", "1"), await cli("status", "--", "1")
    assert fast == by_typer


async def test_an_unknown_job_is_one_sentence_and_64(cli, service):
    outcome = await cli("status", "9")
    assert (outcome.status, outcome.out) == (64, "")
    assert outcome.err == "rlhfd: there is no job 9; `rlhfd ls` lists them\n"


@pytest.mark.parametrize("job", ["x", "0", "-1", "1.5"])
async def test_what_is_no_id_is_a_usage_error(cli, service, job):
    outcome = await cli("status", job)
    assert outcome.status == 64
    assert outcome.err.count("\n") == 1


async def test_ls_has_a_line_for_each_job(cli, service):
    service.add("adder", "done", step=3)
    service.add("other", "queued", phase="waits for devices: job 1")
    lines = (await cli("ls")).out.splitlines()
    assert lines[0].split() == ["ID", "NAME", "STATE", "STEP", "UPDATED", "NOW"]
    assert lines[1].split()[:4] == ["1", "adder", "done", "3/3"]
    assert lines[2].endswith("waits for devices: job 1")


async def test_ls_of_nothing_as_json_is_an_empty_list(cli, service):
    assert json.loads((await cli("ls", "--json")).out) == []


async def test_metrics_for_people_have_one_line_a_step(cli, service):
    job = service.add("adder")
    service.learn(job, 0.25, 0.5)
    lines = (await cli("metrics", str(job))).out.splitlines()
    assert [line.split()[:2] for line in lines[1:]] == [["1", "0.250"], ["2", "0.500"]]
    assert lines[1].split()[-2] == "400"  # 800 tokens in 2 s


async def test_metrics_as_json_keep_their_keys(cli, service):
    job = service.add("adder")
    service.learn(job, 0.25)
    assert json.loads((await cli("metrics", str(job), "--json")).out) == [metric(1, 0.25)]


async def test_metrics_as_csv_flatten_the_times(cli, service):
    job = service.add("adder")
    service.learn(job, 0.25, 0.5)
    service.steps[job][1]["reward_mean.exact"] = 0.75
    rows = list(csv.DictReader(io.StringIO((await cli("metrics", str(job), "--csv")).out)))
    assert rows[0]["time.learn"] == "1.25"
    assert (rows[0]["reward_mean.exact"], rows[1]["reward_mean.exact"]) == ("", "0.75")
    assert "time" not in rows[0]


async def test_metrics_of_a_job_without_steps_are_empty(cli, service):
    job = service.add("adder")
    assert (await cli("metrics", str(job), "--csv")).out == ""
    assert json.loads((await cli("metrics", str(job), "--json")).out) == []


async def test_a_metric_without_a_number_is_a_dash(cli, service):
    job = service.add("adder")
    service.learn(job, float("nan"))
    assert (await cli("metrics", str(job))).out.splitlines()[1].split()[:2] == ["1", "-"]


async def test_samples_for_people_show_prompt_answer_reward_and_versions(cli, service):
    job = service.add("adder")
    service.learn(job, 0.5, 0.6)
    outcome = await cli("samples", str(job), "-n", "1")
    assert "step 2" in outcome.out
    assert "What is 2 + 3?" in outcome.out
    assert "It is 5." in outcome.out
    assert "reward 1.000 (exact_number 1.000, short 0.500)" in outcome.out
    assert "versions 0 to 1" in outcome.out
    assert "step 1" not in outcome.out


async def test_samples_as_json_have_one_entry_a_token(cli, service):
    job = service.add("adder")
    service.learn(job, 0.5)
    found = json.loads((await cli("samples", str(job), "--json")).out)
    assert found == [sample(1)]
    assert len(found[0]["tokens"]) == len(found[0]["version_steps"]) == len(found[0]["alpha"])


async def test_samples_of_chat_messages_name_the_roles(cli, service, monkeypatch):
    job = service.add("adder")
    messages = [{"role": "system", "content": "Be short."}, {"role": "user", "content": "2 + 2?"}]

    async def one(*_):
        return [sample(1) | {"prompt": json.dumps(messages)}]

    monkeypatch.setattr(service, "samples", one)
    assert "[system] Be short.\n[user] 2 + 2?" in (await cli("samples", str(job))).out


async def test_what_a_model_wrote_cant_steer_the_terminal(cli, service, monkeypatch):
    job = service.add("adder")

    async def one(*_):
        return [sample(1) | {"completion": "\x1b]0;owned\x07 \x1b[2J\r5"}]

    monkeypatch.setattr(service, "samples", one)
    out = (await cli("samples", str(job))).out
    assert "\x1b" not in out
    assert "\\x1b[2J\\x0d5" in out


async def test_logs_print_the_end(cli, service):
    job = service.add("adder")
    service.text[job] = "x" * 20000 + "\nlast line\n"
    outcome = await cli("logs", str(job))
    assert outcome.out.endswith("\nlast line\n")
    assert len(outcome.out) == 16 * 1024


async def test_followed_logs_end_with_the_job(cli, service):
    job = service.add("adder", "done")
    service.text[job] = "one\n"
    assert (await cli("logs", str(job), "-f")).out == "one\n"


async def test_events_say_when_and_what(cli, service):
    job = service.add("adder")
    service.move(job, "generator_lost")
    service.log[job][-1] |= {"why": "it was killed", "losses": 1}
    assert (await cli("events", str(job))).out.endswith('generator_lost  why="it was killed" losses=1\n')


async def test_followed_events_end_with_the_job_and_are_json_lines(cli, service):
    job = service.add("adder", "done")
    service.move(job, "started")
    service.move(job, "done")
    lines = (await cli("events", str(job), "-f", "--json")).out.splitlines()
    assert [json.loads(line)["kind"] for line in lines] == ["started", "done"]


@pytest.mark.parametrize(("verb", "state", "after"), [("pause", "running", "paused"), ("resume", "paused", "queued")])
async def test_a_change_prints_where_the_job_stands_then(cli, service, verb, state, after):
    job = service.add("adder", state)
    assert (await cli(verb, str(job))).out == f"job 1 (adder) is {after}\n"
    assert service.table[job]["state"] == after


async def test_a_change_as_json_is_the_status(cli, service):
    job = service.add("adder", "running")
    assert json.loads((await cli("cancel", str(job), "--json")).out)["state"] == "cancelled"


async def test_a_forbidden_change_is_64(cli, service):
    job = service.add("adder", "done")
    outcome = await cli("retry", str(job))
    assert (outcome.status, outcome.err) == (64, "rlhfd: job 1 is done and can't be asked to retry\n")
