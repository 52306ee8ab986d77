"""Nothing of a child's tree outlives the daemon, the child, or its guard."""

import json
import os
import signal
import subprocess
import sys
import time
from multiprocessing import shared_memory
from pathlib import Path

import pytest

from rlhfd.core import procfs
from rlhfd.core.types import Epoch
from rlhfd.engines.process import Child, ChildSpec, describe_exit, spawn, sweep
from rlhfd.errors import EngineStartError
from tests.engines.children import TREE, Reports, alive, ended, python, watch

DAEMON = """
import asyncio, os, sys, uvloop
from pathlib import Path
from rlhfd.engines.process import ChildSpec, spawn
async def main():
    child = await spawn(ChildSpec(role="test", job_id=None, attempt=1, epoch=1, argv=tuple(sys.argv[3:]),
                                  log_path=Path(sys.argv[2])))
    if os.environ.get("LEAK") and os.fork() == 0:  # another holder of the death pipe: no EOF will come
        os.setsid()
        import signal
        signal.pause()
    print(child.pid, flush=True)
    await child.wait()
factory = {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}[sys.argv[1]]
with asyncio.Runner(loop_factory=factory) as runner:
    runner.run(main())
"""


@pytest.fixture
def reports(tmp_path):
    reports = Reports(tmp_path / "pids")
    yield reports
    reports.close()


@pytest.fixture
def spec(tmp_path):
    def make(*argv: str, **more) -> ChildSpec:
        return ChildSpec(
            role="test",
            job_id=None,
            attempt=1,
            epoch=Epoch(7),
            argv=argv,
            log_path=tmp_path / "logs/test.1.log",
            **more,
        )

    return make


@pytest.fixture
def daemon(tmp_path, reports):
    """A process that spawns the tree and then waits, as the daemon does."""
    started = []

    def start(loop: str = "uvloop", **env: str) -> tuple[subprocess.Popen, list[int]]:
        process = subprocess.Popen(
            [sys.executable, "-c", DAEMON, loop, str(tmp_path / "log"), *python(TREE, str(reports.path))],
            stdout=subprocess.PIPE,
            env=os.environ | {"PYTHONPATH": str(Path.cwd())} | env,
        )
        started.append(process)
        guard = int(process.stdout.readline())
        return process, [guard, *reports.pids(3)]

    yield start
    for process in started:
        process.kill()
        process.wait()
        process.stdout.close()


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_the_whole_tree_is_gone_two_seconds_after_the_daemon(daemon, loop):
    process, tree = daemon(loop)
    watched = watch(tree)
    process.kill()
    assert ended(watched, 2.0)


@pytest.mark.parametrize("loop", ["uvloop", "asyncio"])
def test_the_guard_sees_the_daemons_end_even_where_the_death_pipe_stays_open(daemon, loop):
    process, tree = daemon(loop, LEAK="1")
    holder = next(p.pid for p in procfs.processes() if p.parent == process.pid and p.pid != tree[0])
    watched = watch(tree)
    process.kill()
    try:
        assert ended(watched, 2.5)
        assert alive(holder)
    finally:
        os.kill(holder, signal.SIGKILL)


async def test_a_killed_guard_is_swept_up_after(spec, reports):
    child = await spawn(spec(*python(TREE, str(reports.path))))
    watched = watch(reports.pids(3))
    os.kill(child.pid, signal.SIGKILL)
    assert await child.wait() == -signal.SIGKILL
    assert ended(watched, 0.5)


async def test_a_sweep_finds_the_tree_of_a_guard_that_another_daemon_recorded(reports):
    death, keep = os.pipe()
    guard = subprocess.Popen(
        [sys.executable, "-m", "rlhfd.workers.guard", "--death-fd", str(death), "--", *python(TREE, str(reports.path))],
        pass_fds=[death],
        stdout=subprocess.DEVNULL,
        start_new_session=True,
    )
    watched = watch(reports.pids(3))
    started = procfs.start_ticks(guard.pid)
    guard.kill()
    guard.wait()
    assert await sweep(guard.pid, started) >= 2
    assert ended(watched, 0.5)
    for fd in (death, keep):
        os.close(fd)


async def test_a_sweep_leaves_a_successor_of_the_pid_alone():
    successor = subprocess.Popen(python("import signal; signal.pause()"), start_new_session=True)
    try:
        assert await sweep(successor.pid, procfs.start_ticks(successor.pid) - 1) == 0
        assert successor.poll() is None
    finally:
        successor.kill()
        successor.wait()


async def test_the_childs_exit_status_is_handed_on(spec):
    child = await spawn(spec(*python("raise SystemExit(3)")))
    assert child.status is None
    assert await child.wait() == 3
    assert child.status == 3


async def test_a_child_killed_by_a_signal_shows_as_128_plus_its_number(spec):
    child = await spawn(spec(*python("import os; os.kill(os.getpid(), 11)")))
    assert describe_exit(await child.wait()) == "SIGSEGV"


async def test_what_a_child_leaves_running_goes_with_it(spec, reports):
    leaver = TREE.replace("os.wait() if len(sys.argv) > 2 else None\nstay()", "")
    child = await spawn(spec(*python(leaver, str(reports.path))))
    started = time.monotonic()
    assert await child.wait() == 0
    assert time.monotonic() - started < 3.0
    assert procfs.remains(child.session_id, child.started) == []


async def test_sigterm_reaches_the_child_and_it_may_end_in_its_own_way(spec, reports):
    graceful = """
import os, signal, sys
signal.signal(signal.SIGTERM, lambda *_: sys.exit(5))
os.write(os.open(sys.argv[1], os.O_WRONLY), f"{os.getpid()}\\n".encode())
signal.pause()
"""
    child = await spawn(spec(*python(graceful, str(reports.path))))
    reports.pids(1)
    assert await child.terminate(10.0) == 5


async def test_a_child_that_ignores_sigterm_is_killed_after_the_grace(spec, reports):
    stubborn = "import signal\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\n" + TREE
    child = await spawn(spec(*python(stubborn, str(reports.path))))
    watched = watch(reports.pids(3))
    started = time.monotonic()
    assert describe_exit(await child.terminate(0.1)) == "SIGKILL"
    assert ended(watched, 0.1)
    assert time.monotonic() - started < 1.0


async def test_kill_works_where_the_guard_is_stopped(spec, reports):
    child = await spawn(spec(*python(TREE, str(reports.path))))
    watched = watch(reports.pids(3))
    os.kill(child.pid, signal.SIGSTOP)
    assert await child.kill() == -signal.SIGKILL
    assert ended(watched, 0.1)


async def test_a_command_that_does_not_exist_ends_with_127_and_says_so(spec):
    child = await spawn(spec("/does/not/exist"))
    assert await child.wait() == 127
    assert "cannot execute /does/not/exist: No such file or directory" in child.tail()


async def test_cores_that_the_machine_lacks_are_refused_in_one_line(spec):
    child = await spawn(spec(*python("pass"), cores=(4095,)))
    assert await child.wait() == 126
    assert child.tail().startswith("guard: cannot start the child:")


async def test_an_interpreter_that_cannot_be_started_is_a_start_error(spec, monkeypatch):
    monkeypatch.setattr(sys, "executable", "/does/not/exist")
    with pytest.raises(EngineStartError, match="the test could not be started"):
        await spawn(spec("true"))


async def output(child: Child) -> str:
    assert await child.wait() == 0
    return child.tail()


async def test_a_child_sees_its_own_devices_and_a_clean_environment(spec, monkeypatch):
    monkeypatch.setenv("SECRET_TOKEN", "of the daemon")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1,2,3")
    show = python("import json, os; print(json.dumps([dict(os.environ), sorted(os.sched_getaffinity(0))]))")
    core = min(os.sched_getaffinity(0))
    env, cores = json.loads(
        await output(await spawn(spec(*show, cores=(core,), gpus=("GPU-a", "GPU-b"), env={"X": "y"})))
    )
    assert cores == [core]
    assert env["OMP_NUM_THREADS"] == "1"
    assert env["CUDA_VISIBLE_DEVICES"] == "GPU-a,GPU-b"
    assert env["HF_HUB_OFFLINE"] == "1"
    assert env["RLHFD_EPOCH"] == "7"
    assert env["X"] == "y"
    assert "SECRET_TOKEN" not in env


async def test_a_child_without_gpus_sees_none(spec, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")
    child = await spawn(spec(*python("import os; print(repr(os.environ['CUDA_VISIBLE_DEVICES']))")))
    assert await output(child) == "''"


async def test_the_channel_is_a_socket_between_daemon_and_child(spec):
    echo = (
        "import os, socket; s = socket.socket(fileno=int(os.environ['RLHFD_CHANNEL_FD'])); s.sendall(s.recv(9)[::-1])"
    )
    child = await spawn(spec(*python(echo), channel=True))
    child.channel_socket.setblocking(True)
    child.channel_socket.sendall(b"frame")
    assert child.channel_socket.recv(9) == b"emarf"
    assert child.channel_socket.recv(9) == b""  # nobody else holds the other end
    assert await child.wait() == 0
    child.channel_socket.close()


async def test_a_child_inherits_no_descriptor_but_its_channel(spec):
    leak = os.open("/dev/null", os.O_RDONLY)
    os.set_inheritable(leak, True)
    child = await spawn(spec(*python("import os; print(sorted(os.listdir('/proc/self/fd')))")))
    assert await output(child) == "['0', '1', '2', '3']"  # 3 reads the directory
    os.close(leak)


async def test_the_tail_is_of_this_start_alone(spec):
    first = await spawn(spec(*python("print('from the first start')")))
    assert await output(first) == "from the first start"
    second = await spawn(spec(*python("for i in range(30): print(i)")))
    assert (await output(second)).splitlines()[0] == "10"
    assert second.tail(2) == "28\n29"


SEGMENT = """
import os, signal, sys
if os.fork():
    signal.pause()
from multiprocessing import get_context, resource_tracker, shared_memory
segment = shared_memory.SharedMemory(create=True, size=64)
lock = get_context("spawn").Lock()
resource_tracker.unregister(segment._name, "shared_memory")
resource_tracker.unregister(lock._semlock.name, "semaphore")
print(segment.name, "sem." + lock._semlock.name.lstrip("/"), flush=True)
os.write(os.open(sys.argv[1], os.O_WRONLY), f"{os.getpid()}\\n".encode())
signal.pause()
"""


@pytest.mark.parametrize("victim", ["child", "guard"])
async def test_shared_memory_of_a_killed_engine_is_removed_and_nobody_elses(spec, reports, victim):
    foreign = shared_memory.SharedMemory(create=True, size=64)
    child = await spawn(spec(*python(SEGMENT, str(reports.path))))
    (pid,) = reports.pids(1)
    made = [Path("/dev/shm", name) for name in child.tail().split()]
    assert [path.exists() for path in made] == [True, True]
    if victim == "guard":
        os.kill(child.pid, signal.SIGKILL)
        await child.wait()
    else:
        await child.kill()
    assert not alive(pid)
    assert [path.exists() for path in made] == [False, False]
    assert Path("/dev/shm", foreign.name).exists()
    foreign.close()
    foreign.unlink()


async def test_the_guard_reaps_orphans(spec, reports):
    child = await spawn(spec(*python(TREE, str(reports.path), "wait for the one that forks twice")))
    reports.pids(3)
    children = [p for p in procfs.processes() if p.parent == child.pid]
    zombies = [path for path in Path("/proc").glob("[0-9]*/stat") if f") Z {child.pid} " in path.read_text()]
    assert len(children) == 2  # the child, and the grandchild that left its parent
    assert zombies == []
    await child.kill()
