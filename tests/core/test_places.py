"""Where a daemon lives and where a client looks for it."""

from pathlib import Path

import pytest

from rlhfd.core.places import client_sockets, socket_path, state_dir

HOME = {"HOME": "/home/ada"}


@pytest.mark.parametrize(
    ("environ", "override", "expected"),
    [
        (HOME, None, "/home/ada/.local/state/rlhfd"),
        (HOME | {"XDG_STATE_HOME": "/x"}, None, "/x/rlhfd"),
        (HOME | {"XDG_STATE_HOME": ""}, None, "/home/ada/.local/state/rlhfd"),
        (HOME | {"XDG_STATE_HOME": "/x", "STATE_DIRECTORY": "/var/lib/rlhfd:/var/lib/b"}, None, "/var/lib/rlhfd"),
        (HOME | {"STATE_DIRECTORY": "/var/lib/rlhfd", "RLHFD_STATE_DIR": "/mine"}, None, "/mine"),
        (HOME | {"RLHFD_STATE_DIR": "/mine"}, "/named", "/named"),
        ({}, None, "/.local/state/rlhfd"),
    ],
)
def test_the_nearest_word_about_the_state_directory_holds(environ, override, expected):
    assert state_dir(environ, override) == Path(expected)


@pytest.mark.parametrize(
    ("environ", "socket", "state", "expected"),
    [
        (HOME, "/s.sock", "/named", "/s.sock"),
        (HOME | {"RLHFD_SOCKET": "/e.sock"}, None, "/named", "/e.sock"),
        (HOME | {"RUNTIME_DIRECTORY": "/run/rlhfd"}, None, "/named", "/named/rlhfd.sock"),
        (HOME | {"RUNTIME_DIRECTORY": "/run/rlhfd", "XDG_RUNTIME_DIR": "/r"}, None, None, "/run/rlhfd/rlhfd.sock"),
        (HOME | {"XDG_RUNTIME_DIR": "/run/user/7"}, None, None, "/run/user/7/rlhfd/rlhfd.sock"),
        (HOME, None, None, "/home/ada/.local/state/rlhfd/rlhfd.sock"),
    ],
)
def test_a_daemon_listens_where_its_clients_look(environ, socket, state, expected):
    path = socket_path(environ, socket, state)
    assert path == Path(expected)
    looked_at = client_sockets({k: v for k, v in environ.items() if k != "RUNTIME_DIRECTORY"}, socket, state)
    assert path in looked_at


def test_a_given_place_is_the_only_one_looked_at():
    assert client_sockets(HOME, "/s.sock") == [Path("/s.sock")]
    assert client_sockets(HOME, None, "/named") == [Path("/named/rlhfd.sock")]


def test_without_a_given_place_the_own_daemon_comes_before_the_systems():
    looked_at = client_sockets(HOME | {"XDG_RUNTIME_DIR": "/run/user/7"})
    assert looked_at[:2] == [Path("/run/user/7/rlhfd/rlhfd.sock"), Path("/run/rlhfd/rlhfd.sock")]


def test_a_relative_state_directory_is_made_absolute():
    assert state_dir(HOME, "here").is_absolute()
