"""Reward functions that do what they must not; carried to real workers by test_reward_pool.py."""

import ctypes
import os
import signal
import subprocess
import sys
from pathlib import Path


def exact(completion, answer):
    return completion.strip() == answer


def exits(completion):
    os._exit(3)


def exits_with_the_system(completion):
    sys.exit(0)


def raises(completion):
    raise ValueError("no number in it")


def interrupts(completion):
    raise KeyboardInterrupt


def kills_itself(completion):
    os.kill(os.getpid(), signal.SIGKILL)


def crashes(completion):
    ctypes.string_at(0)


def spins(completion):
    while True:
        pass


def sleeps(completion):
    signal.pause()


def ignores_signals(completion):
    signal.pthread_sigmask(signal.SIG_BLOCK, set(signal.Signals))
    while True:
        signal.pause()


def recurses(completion):
    return recurses(completion)


def recurses_without_limit(completion):
    def deep(number):
        return deep(number + 1) + number

    sys.setrecursionlimit(10**9)
    return deep(0)


def says_nan(completion):
    return float("nan")


def says_infinity(completion):
    return float("inf")


def says_nothing(completion):
    return None


def says_text(completion):
    return "1.0"


def says_a_list(completion):
    return [1.0]


def takes_memory(completion):
    return len(bytearray(2**33))


def writes_too_much(completion):
    with Path("big").open("wb") as file:
        return file.truncate(2**30)


def opens_too_much(completion):
    return len([Path("/dev/null").open() for _ in range(1000)])


def forks_and_returns(completion):
    os.fork()
    return 1.0


def forks_and_raises(completion):
    os.fork()
    raise ValueError("twice")


def forks_a_daemon(completion):
    if os.fork() == 0:
        os.setsid()
        if os.fork():
            os._exit(0)
        signal.pause()
    os.wait()
    return 1.0


def leaves_a_program(completion):
    subprocess.Popen(["sleep", "1000"])
    return 1.0


def runs_a_program(completion):
    return subprocess.run(["true"], check=True).returncode


def closes_everything(completion):
    os.closerange(0, 256)


def writes_to_every_file(completion):
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, b"\0\0\0\1x")
        except OSError:
            continue
    return 1.0
