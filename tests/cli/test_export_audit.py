"""export writes a whole directory or none; audit prints the report, and errors that come late."""

import io
import json
import tarfile

import pytest

from rlhfd.cli import export
from rlhfd.errors import StorageError


async def test_export_writes_the_files(cli, service, tmp_path):
    job = service.add("adder", "done")
    target = tmp_path / "out" / "model"
    outcome = await cli("export", str(job), str(target), "--version", "3")
    assert outcome.status == 0
    assert (target / "model.safetensors").read_bytes() == bytes(range(256)) * 5000
    assert (target / "nested" / "empty.txt").read_text() == ""
    assert service.exports == [3]
    assert [p.name for p in target.parent.iterdir()] == ["model"]
    assert target.stat().st_mode & 0o777 == 0o755


async def test_export_into_an_empty_directory_is_fine(cli, service, tmp_path):
    job = service.add("adder", "done")
    target = tmp_path / "model"
    target.mkdir()
    found = json.loads((await cli("export", str(job), str(target), "--json")).out)
    assert found == {"dir": str(target), "bytes": 1_280_023, "files": ["config.json", "model.safetensors", "nested"]}


async def test_export_into_a_used_directory_is_refused(cli, service, tmp_path):
    job = service.add("adder", "done")
    outcome = await cli("export", str(job), str(tmp_path))
    assert outcome.status == 64
    assert "is not empty" in outcome.err
    assert service.exports == []


async def test_a_version_that_is_gone_leaves_no_directory(cli, service, tmp_path):
    job = service.add("adder", "done")
    outcome = await cli("export", str(job), str(tmp_path / "model"), "--version", "99")
    assert (outcome.status, outcome.err) == (64, "rlhfd: version 99 is not there any more; kept are 0 and 3\n")
    assert not (tmp_path / "model").exists()


async def test_an_export_that_breaks_off_leaves_no_directory(cli, service, tmp_path, monkeypatch):
    async def short(_):
        yield tarfile.TarInfo("config.json").tobuf()
        yield b"x" * 100
        raise StorageError("the disk failed")

    monkeypatch.setattr("rlhfd.api.app.tar_stream", short)
    job = service.add("adder", "done")
    outcome = await cli("export", str(job), str(tmp_path / "out" / "model"))
    assert outcome.status in {69, 74}
    assert list((tmp_path / "out").iterdir()) == []


@pytest.mark.parametrize("name", ["../evil", "/etc/evil", "a/../../evil"])
def test_names_that_lead_elsewhere_are_refused(tmp_path, name):
    out = io.BytesIO()
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(tarfile.TarInfo(name))
    out.seek(0)
    with pytest.raises(StorageError, match="no plain file"):
        export._unpack(out, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_links_are_refused(tmp_path):
    out = io.BytesIO()
    link = tarfile.TarInfo("config.json")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    with tarfile.open(fileobj=out, mode="w") as tar:
        tar.addfile(link)
    out.seek(0)
    with pytest.raises(StorageError, match="no plain file"):
        export._unpack(out, tmp_path)


async def test_audit_prints_the_errors_and_what_is_missing(cli, service):
    job = service.add("adder", "done")
    outcome = await cli("audit", str(job))
    assert outcome.status == 0
    assert "1000 tokens: mean error 2e-06, max 0.0001 nats" in outcome.out
    assert "mean 0.020000 under its neighbour" in outcome.out
    assert "0 tokens can't be derived again" in outcome.out


async def test_audit_as_json_is_the_report_alone(cli, service):
    job = service.add("adder", "done")
    report = json.loads((await cli("audit", str(job), "--json")).out)
    assert (report["tokens"], report["not_rederivable"]) == (1000, 0)


async def test_an_audit_that_fails_midway_ends_with_its_sentence(cli, service):
    job = service.add("adder", "done")
    service.broken_audit = True
    outcome = await cli("audit", str(job), "--json")
    assert (outcome.status, outcome.out) == (74, "")
    assert outcome.err == "rlhfd: the checkpoint of step 3 can't be read; run rlhfd doctor\n"
