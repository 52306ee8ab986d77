"""serve: settings, state directory and socket reach the daemon as the line, the environment and the file say."""

from pathlib import Path

import pytest

from rlhfd import daemon
from rlhfd.__main__ import main


@pytest.fixture
def served(monkeypatch):
    """What the daemon was started with; nothing is started."""
    calls = []

    def start(settings, state, socket):
        calls.append((settings, state, socket))
        return 0

    monkeypatch.setattr(daemon, "main", start)
    for name in ("RLHFD_STATE_DIR", "RLHFD_SOCKET", "STATE_DIRECTORY", "RUNTIME_DIRECTORY", "XDG_RUNTIME_DIR"):
        monkeypatch.delenv(name, raising=False)
    return calls


def test_a_named_state_directory_brings_its_socket(served, tmp_path):
    assert main(["serve", "--state-dir", str(tmp_path)]) == 0
    assert served[0][1:] == (tmp_path, tmp_path / "rlhfd.sock")


def test_the_settings_file_is_read(served, tmp_path):
    config = tmp_path / "config.toml"
    config.write_text(f'state_dir = "{tmp_path}/state"\nsocket = "{tmp_path}/s"\nretries = 9\n')
    assert main(["serve", "--config", str(config)]) == 0
    settings, state, socket = served[0]
    assert (settings.retries, state, socket) == (9, tmp_path / "state", tmp_path / "s")


def test_the_line_comes_before_the_settings(served, tmp_path):
    config = tmp_path / "config.toml"
    config.write_text('state_dir = "/elsewhere"\n')
    assert main(["serve", "--config", str(config), "--state-dir", str(tmp_path), "--socket", "/x/s"]) == 0
    assert served[0][1:] == (tmp_path, Path("/x/s"))


def test_bad_settings_are_78(served, tmp_path, capsys):
    config = tmp_path / "config.toml"
    config.write_text("retries = 0\n")
    assert main(["serve", "--config", str(config)]) == 78
    assert "retries" in capsys.readouterr().err
    assert served == []


def test_the_daemons_exit_status_is_the_commands(monkeypatch, tmp_path):
    monkeypatch.setattr(daemon, "main", lambda *_: 75)
    assert main(["serve", "--state-dir", str(tmp_path)]) == 75
