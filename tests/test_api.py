"""The API over a real unix socket: its answers, its errors, who may change what, and what it leaves behind."""

import asyncio
import hashlib
import io
import json
import os
import socket
import stat
import tarfile
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
import uvloop

from rlhfd.api import create_app, peer, serve_api
from rlhfd.api.peer import Peer, peer_of
from rlhfd.api.server import bind
from rlhfd.api.transfer import UPLOAD_PREFIX, receive_file, remove_partial_uploads
from rlhfd.errors import AlreadyRunningError, DiskFullError, JobFileError, StorageError
from tests.fake_service import FakeService

SPEC = {"job": {"name": "adder", "max_steps": 3}}


@pytest.fixture
async def service(tmp_path):
    files = tmp_path / "files"
    files.mkdir()
    return FakeService(files)


@pytest.fixture
def socket_path(tmp_path):
    return tmp_path / "run" / "rlhfd.sock"


@pytest.fixture
async def api(service, socket_path):
    async with serve_api(create_app(service), socket_path), over(socket_path) as client:
        yield client


def over(path: Path) -> httpx.AsyncClient:
    return httpx.AsyncClient(transport=httpx.AsyncHTTPTransport(uds=str(path)), base_url="http://rlhfd", timeout=20)


def refused(response: httpx.Response) -> tuple[int, int, str]:
    body = response.json()
    assert set(body) == {"error", "exit_status"}
    return response.status_code, body["exit_status"], body["error"]


async def test_ping_names_the_daemon(api):
    assert (await api.get("/v1/ping")).json() == {"version": "0.1.0", "epoch": 7, "pid": 4242}


async def test_a_job_is_submitted_once_and_found_again(api):
    first = (await api.post("/v1/jobs", json={"spec": SPEC})).json()
    second = (await api.post("/v1/jobs", json={"spec": SPEC})).json()
    assert (first["created"], second["created"]) == (True, False)
    assert first["id"] == second["id"]
    assert (await api.get(f"/v1/jobs/{first['id']}")).json()["name"] == "adder"
    assert len((await api.get("/v1/jobs")).json()) == 1


async def test_all_of_a_submission_reaches_the_service(api, service):
    sha = "ab" * 32
    await api.post("/v1/jobs", json={"spec": SPEC, "files": {"a.jsonl": sha}, "after": 1, "priority": 5, "again": True})
    body = service.submitted[0]
    assert (body.files, body.after, body.priority, body.again) == ({"a.jsonl": sha}, 1, 5, True)


@pytest.mark.parametrize(
    "body",
    [b"", b"not json", b"[]", b'{"spec": 3}', b'{"spec": {}, "prioritty": 1}', b'{"spec": {}, "files": {"a": "x"}}'],
)
async def test_what_is_no_submission_is_refused_as_a_bad_job(api, body):
    code, exit_status, sentence = refused(await api.post("/v1/jobs", content=body))
    assert (code, exit_status) == (400, 78)
    assert "submission" in sentence


async def test_a_bad_job_file_keeps_its_sentence(api, service):
    service.refusal = JobFileError("data.source names prompts.jsonl, which is empty; put a prompt in it")
    expected = (400, 78, "data.source names prompts.jsonl, which is empty; put a prompt in it")
    assert refused(await api.post("/v1/jobs", json={"spec": SPEC})) == expected


async def test_a_full_disk_is_507(api, service):
    service.refusal = DiskFullError("no room")
    assert refused(await api.post("/v1/jobs", json={"spec": SPEC})) == (507, 74, "no room")


async def test_a_submission_over_the_limit_is_not_read_to_its_end(api):
    code, exit_status, sentence = refused(await api.post("/v1/jobs", content=b'"' + b"x" * 9_000_000))
    assert (code, exit_status) == (413, 78)
    assert "limit" in sentence


async def test_an_unknown_id_is_404_and_a_forbidden_transition_409(api, service):
    job = service.add("adder", "done")
    assert refused(await api.get("/v1/jobs/9"))[:2] == (404, 64)
    assert refused(await api.post(f"/v1/jobs/{job}/pause"))[:2] == (409, 64)
    assert service.table[job]["state"] == "done"


@pytest.mark.parametrize("path", ["/v1/jobs/x", "/v1/jobs/0", "/v1/jobs/1/events?wait=1e9", "/v1/jobs/1/samples?n=0"])
async def test_a_wrong_parameter_is_a_usage_error(api, path):
    assert refused(await api.get(path))[:2] == (400, 64)


async def test_an_unknown_route_or_method_has_the_same_shape(api):
    assert refused(await api.get("/v2/jobs"))[:2] == (404, 64)
    assert refused(await api.delete("/v1/jobs/1"))[:2] == (405, 64)
    assert refused(await api.post("/v1/jobs/1/explode"))[:2] == (400, 64)


async def test_a_bug_is_a_sentence_to_the_caller(api, service):
    service.refusal = ZeroDivisionError("oh")
    code, exit_status, sentence = refused(await api.get("/v1/doctor"))
    assert (code, exit_status) == (500, 1)
    assert "ZeroDivisionError" in sentence


async def test_transitions_go_through(api, service):
    job = service.add("adder", "running")
    states = [(await api.post(f"/v1/jobs/{job}/{verb}")).json()["state"] for verb in ("pause", "resume", "cancel")]
    assert states == ["paused", "queued", "cancelled"]


async def test_metrics_come_after_a_step(api, service):
    job = service.add("adder")
    service.learn(job, 0.1, 0.2, 0.3)
    assert [m["step"] for m in (await api.get(f"/v1/jobs/{job}/metrics?after=1")).json()] == [2, 3]


async def test_a_nan_metric_arrives_as_null(api, service):
    job = service.add("adder")
    service.learn(job, float("nan"))
    assert (await api.get(f"/v1/jobs/{job}/metrics")).json()[0]["reward_mean"] is None


async def test_events_wait_for_the_next_one(api, service):
    job = service.add("adder")
    service.move(job, "submitted")
    poll = asyncio.create_task(api.get(f"/v1/jobs/{job}/events?after=1&wait=20"))
    await asyncio.wait_for(service.waiting.wait(), 10)
    assert not poll.done()
    service.move(job, "started", state="running")
    assert [e["kind"] for e in (await poll).json()] == ["started"]


async def test_events_that_are_there_come_at_once(api, service):
    job = service.add("adder")
    service.move(job, "submitted")
    answer = await api.get(f"/v1/jobs/{job}/events?after=0&wait=60", timeout=5)
    assert [e["id"] for e in answer.json()] == [1]


async def test_logs_go_on_from_an_offset(api, service):
    job = service.add("adder")
    service.text[job] = "one\ntwo\n"
    first = (await api.get(f"/v1/jobs/{job}/logs?worker=learner&offset=4")).json()
    assert first == {"text": "two\n", "offset": 8, "files": ["learner.1.log"]}


async def test_a_file_is_kept_under_its_hash_and_asked_for_by_head(api, service):
    data = os.urandom(3_000_000)
    sha = hashlib.sha256(data).hexdigest()
    assert (await api.head(f"/v1/files/{sha}")).status_code == 404
    assert (await api.put(f"/v1/files/{sha}", content=data)).json() == {"sha256": sha, "bytes": len(data)}
    assert (await api.head(f"/v1/files/{sha}")).status_code == 200
    assert service.file_path(sha).read_bytes() == data


async def test_a_file_of_another_hash_leaves_nothing(api, service):
    code, exit_status, _ = refused(await api.put(f"/v1/files/{'0' * 64}", content=b"other"))
    assert (code, exit_status) == (400, 78)
    assert list(service.files.iterdir()) == []


async def test_a_file_name_that_is_no_hash_is_refused(api, service):
    assert (await api.put("/v1/files/..%2f..%2fetc", content=b"x")).status_code in {400, 404}
    assert refused(await api.put(f"/v1/files/{'A' * 64}", content=b"x"))[:2] == (400, 64)
    assert list(service.files.iterdir()) == []


async def test_a_file_over_the_limit_leaves_nothing(tmp_path):
    async def pieces():
        yield b"12345"
        yield b"67890"

    with pytest.raises(JobFileError, match="over the limit of 8 bytes"):
        await receive_file(pieces(), tmp_path / "f", "0" * 64, limit=8)
    assert list(tmp_path.iterdir()) == []


async def test_a_file_for_a_directory_that_is_gone_is_a_storage_error(tmp_path):
    async def pieces():
        yield b"x"

    with pytest.raises(StorageError, match="can't store"):
        await receive_file(pieces(), tmp_path / "gone" / "f", "0" * 64, limit=8)


def test_what_a_killed_daemon_half_received_is_removed_at_start(tmp_path):
    (tmp_path / f"{UPLOAD_PREFIX}abc").write_bytes(b"half")
    (tmp_path / ("a" * 64)).write_bytes(b"whole")
    assert remove_partial_uploads(tmp_path) == 1
    assert [p.name for p in tmp_path.iterdir()] == ["a" * 64]


async def test_an_export_is_a_tar_of_the_directory_and_is_cleaned_up(api, service):
    job = service.add("adder", "done")
    answer = await api.get(f"/v1/jobs/{job}/export?version=3")
    with tarfile.open(fileobj=io.BytesIO(answer.content)) as tar:
        content = {m.name: tar.extractfile(m).read() for m in tar.getmembers()}
    assert content["model.safetensors"] == bytes(range(256)) * 5000
    assert set(content) == {"config.json", "model.safetensors", "nested/empty.txt"}
    assert service.exports == [3]
    await asyncio.wait_for(service.export_closed.wait(), 10)


async def test_an_export_that_is_broken_off_is_cleaned_up(api, service):
    job = service.add("adder", "done")
    big = service.files / "exported" / "big.bin"
    big.parent.mkdir()
    with big.open("wb") as out:
        out.truncate(64 * 1024 * 1024)
    async with api.stream("GET", f"/v1/jobs/{job}/export") as answer:
        await anext(answer.aiter_raw())
        assert not service.export_closed.is_set()
    await asyncio.wait_for(service.export_closed.wait(), 10)


async def test_an_export_of_a_version_that_is_gone_is_refused(api, service):
    job = service.add("adder", "done")
    assert refused(await api.get(f"/v1/jobs/{job}/export?version=99"))[:2] == (409, 64)
    assert service.exports == []


async def test_an_audit_streams_progress_and_ends_with_the_report(api, service):
    job = service.add("adder", "done")
    lines = [json.loads(line) for line in (await api.post(f"/v1/jobs/{job}/audit")).text.splitlines()]
    assert [line.get("done") for line in lines[:-1]] == [1, 2]
    assert lines[-1]["not_rederivable"] == 0


async def test_an_audit_of_an_unknown_job_is_404(api):
    assert refused(await api.post("/v1/jobs/5/audit"))[:2] == (404, 64)


async def test_an_audit_that_fails_midway_says_so_in_its_last_line(api, service):
    job = service.add("adder", "done")
    service.broken_audit = True
    last = json.loads((await api.post(f"/v1/jobs/{job}/audit")).text.splitlines()[-1])
    assert last == {"error": "the checkpoint of step 3 can't be read; run rlhfd doctor", "exit_status": 74}


# --- the peer rule ----------------------------------------------------------------------------------------------------

STRANGER = Peer(pid=1, uid=os.geteuid() + 12345, gids=frozenset({54321}), socket_gid=1000)


def test_root_the_daemons_user_and_the_sockets_group_may_change():
    assert not STRANGER.may_change
    assert replace(STRANGER, uid=0).may_change
    assert replace(STRANGER, uid=os.geteuid()).may_change
    assert replace(STRANGER, gids=frozenset({54321, 1000})).may_change


def test_a_socket_without_a_file_gives_no_group():
    assert not replace(STRANGER, socket_gid=None).may_change


CHANGES = [
    ("POST", "/v1/jobs"),
    ("POST", "/v1/jobs/1/cancel"),
    ("POST", "/v1/jobs/1/audit"),
    ("PUT", f"/v1/files/{'0' * 64}"),
]


@pytest.mark.parametrize(("method", "path"), CHANGES)
async def test_a_stranger_may_look_but_not_change(service, socket_path, monkeypatch, method, path):
    service.add("adder", "running")
    monkeypatch.setattr(peer, "peer_of", lambda _: STRANGER)
    async with serve_api(create_app(service), socket_path), over(socket_path) as client:
        assert refused(await client.request(method, path))[:2] == (403, 77)
        assert (await client.get("/v1/jobs/1")).json()["state"] == "running"
    assert list(service.files.iterdir()) == []


async def test_without_a_peer_nothing_changes(service):
    transport = httpx.ASGITransport(app=create_app(service))
    async with httpx.AsyncClient(transport=transport, base_url="http://rlhfd") as client:
        assert refused(await client.post("/v1/jobs", json={"spec": SPEC}))[:2] == (403, 77)
    assert service.submitted == []


def test_the_kernel_names_the_peer(socket_path):
    listener, _ = bind(socket_path)
    with listener, socket.socket(socket.AF_UNIX) as caller:
        listener.listen()
        caller.connect(str(socket_path))
        accepted, _ = listener.accept()
        with accepted:
            asked = peer_of(accepted)
    assert (asked.pid, asked.uid) == (os.getpid(), os.geteuid())
    assert asked.gids >= {os.getgid(), *os.getgroups()}
    assert asked.socket_gid == socket_path.stat().st_gid


def test_groups_come_from_the_user_database_where_the_kernel_does_not_tell(socket_path, monkeypatch):
    monkeypatch.setattr(peer, "SO_PEERGROUPS", 9999)
    listener, _ = bind(socket_path)
    with listener, socket.socket(socket.AF_UNIX) as caller:
        listener.listen()
        caller.connect(str(socket_path))
        accepted, _ = listener.accept()
        with accepted:
            assert os.getgid() in peer_of(accepted).gids


def test_the_peer_is_known_under_uvloop_too(tmp_path):
    async def ask():
        files = tmp_path / "files"
        files.mkdir()
        path = tmp_path / "s"
        async with serve_api(create_app(FakeService(files)), path), over(path) as client:
            return (await client.post("/v1/jobs", json={"spec": SPEC})).status_code

    assert uvloop.run(ask()) == 200


# --- the socket -------------------------------------------------------------------------------------------------------


async def test_the_socket_is_for_its_group_and_goes_with_the_server(service, socket_path):
    async with serve_api(create_app(service), socket_path) as task:
        assert stat.S_IMODE(socket_path.stat().st_mode) == 0o660
        assert stat.S_IMODE(socket_path.parent.stat().st_mode) == 0o750
        assert not task.done()
    assert not socket_path.exists()
    assert task.done()


async def test_a_socket_in_use_is_refused_and_left_alone(service, socket_path):
    async with serve_api(create_app(service), socket_path), over(socket_path) as client:
        with pytest.raises(AlreadyRunningError, match=rf"another daemon answers on {socket_path}"):
            async with serve_api(create_app(service), socket_path):
                pass
        assert (await client.get("/v1/ping")).status_code == 200


async def test_a_dead_daemons_socket_is_replaced(service, socket_path):
    bind(socket_path)[0].close()
    assert socket_path.exists()
    async with serve_api(create_app(service), socket_path), over(socket_path) as client:
        assert (await client.get("/v1/ping")).status_code == 200


def test_a_file_that_is_no_socket_is_not_removed(tmp_path):
    path = tmp_path / "precious"
    path.write_text("data")
    with pytest.raises(StorageError, match="is no socket"):
        bind(path)
    assert path.read_text() == "data"


def test_a_path_too_long_for_a_socket_says_what_to_do(tmp_path):
    with pytest.raises(StorageError, match="--socket"):
        bind(tmp_path / ("x" * 120))


def test_a_directory_that_cant_be_made_is_one_sentence(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match="can't make the socket"):
        bind(tmp_path / "file" / "rlhfd.sock")


async def test_a_long_poll_does_not_keep_the_daemon(service, socket_path):
    job = service.add("adder")
    async with over(socket_path) as client:
        async with serve_api(create_app(service), socket_path):
            poll = asyncio.create_task(client.get(f"/v1/jobs/{job}/events?after=0&wait=60"))
            await asyncio.wait_for(service.waiting.wait(), 10)
        async with asyncio.timeout(10):
            await asyncio.wait({poll})
    assert poll.exception() or poll.result().status_code == 500
