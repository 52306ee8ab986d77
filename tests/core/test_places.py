"""Where a daemon lives and where a client looks for it."""

from pathlib import Path

import pytest

from rlhfd.core.places import cache_dir, client_sockets, server_socket, state_dir
from rlhfd.errors import UsageError

HOME = {"HOME": "/home/ada"}
HERE = Path("/named")


@pytest.mark.parametrize(
    ("environ", "given", "configured", "expected"),
    [
        (HOME, None, None, "/home/ada/.local/state/rlhfd"),
        (HOME | {"XDG_STATE_HOME": "/x"}, None, None, "/x/rlhfd"),
        (HOME | {"XDG_STATE_HOME": ""}, None, None, "/home/ada/.local/state/rlhfd"),
        (HOME | {"XDG_STATE_HOME": "/x", "STATE_DIRECTORY": "/var/lib/a:/var/lib/b"}, None, None, "/var/lib/a"),
        (HOME | {"STATE_DIRECTORY": "/var/lib/a"}, None, "/etc-says", "/etc-says"),
        (HOME | {"STATE_DIRECTORY": "/var/lib/a", "RLHFD_STATE_DIR": "/mine"}, None, "/etc-says", "/mine"),
        (HOME | {"RLHFD_STATE_DIR": "/mine"}, HERE, "/etc-says", "/named"),
        (HOME, Path("~/state"), None, "/home/ada/state"),
        ({}, None, None, "/.local/state/rlhfd"),
    ],
)
def test_the_nearest_word_about_the_state_directory_holds(environ, given, configured, expected):
    assert state_dir(environ, given=given, configured=configured) == Path(expected)


@pytest.mark.parametrize(
    ("environ", "given", "state_given", "expected"),
    [
        (HOME, Path("/s.sock"), HERE, "/s.sock"),
        (HOME | {"RLHFD_SOCKET": "/e.sock"}, None, HERE, "/e.sock"),
        (HOME | {"RUNTIME_DIRECTORY": "/run/rlhfd"}, None, HERE, "/named/rlhfd.sock"),
        (HOME | {"RUNTIME_DIRECTORY": "/run/rlhfd", "XDG_RUNTIME_DIR": "/r"}, None, None, "/run/rlhfd/rlhfd.sock"),
        (HOME | {"XDG_RUNTIME_DIR": "/run/user/7"}, None, None, "/run/user/7/rlhfd/rlhfd.sock"),
        (HOME, None, None, "/home/ada/.local/state/rlhfd/rlhfd.sock"),
    ],
)
def test_a_daemon_listens_where_its_clients_look(environ, given, state_given, expected):
    state = state_dir(environ, given=state_given)
    path = server_socket(environ, given=given, state_given=state_given, state=state)
    assert path == Path(expected)
    of_the_client = {name: value for name, value in environ.items() if name != "RUNTIME_DIRECTORY"}
    assert path in client_sockets(of_the_client, given=given, state_given=state_given)


def test_the_settings_socket_comes_after_the_command_line_and_the_environment():
    assert server_socket(HOME, configured="/c.sock", state=HERE) == Path("/c.sock")
    assert server_socket(HOME | {"RLHFD_SOCKET": "/e.sock"}, configured="/c.sock", state=HERE) == Path("/e.sock")


def test_a_given_place_is_the_only_one_looked_at():
    assert client_sockets(HOME, given=Path("/s.sock")) == [Path("/s.sock")]
    assert client_sockets(HOME, state_given=HERE) == [Path("/named/rlhfd.sock")]
    assert client_sockets(HOME | {"RLHFD_STATE_DIR": "/mine"}) == [Path("/mine/rlhfd.sock")]


def test_without_a_given_place_the_own_daemon_comes_before_the_systems():
    looked_at = client_sockets(HOME | {"XDG_RUNTIME_DIR": "/run/user/7"})
    assert looked_at[:2] == [Path("/run/user/7/rlhfd/rlhfd.sock"), Path("/run/rlhfd/rlhfd.sock")]


def test_a_relative_state_directory_is_made_absolute():
    assert state_dir(HOME, given=Path("here")).is_absolute()


def test_a_socket_path_that_is_too_long_says_what_to_do():
    with pytest.raises(UsageError, match="--socket"):
        server_socket(HOME, given=Path("/" + "x" * 120), state=HERE)


def test_the_cache_is_the_service_managers_or_the_users():
    assert cache_dir(HOME) == Path("/home/ada/.cache/rlhfd")
    assert cache_dir(HOME | {"CACHE_DIRECTORY": "/var/cache/rlhfd"}) == Path("/var/cache/rlhfd")
