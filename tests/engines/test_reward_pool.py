"""Real worker processes, friendly and hostile: every score is answered, and the pool lives on."""

import asyncio
import json
import os
import sys
from array import array
from pathlib import Path

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from rlhfd.core import procfs
from rlhfd.core.types import Epoch, JobId
from rlhfd.core.wire import RewardSetup, Score
from rlhfd.engines import rewards
from rlhfd.engines.process import ChildSpec, spawn
from rlhfd.engines.rewards import RewardPool
from rlhfd.errors import DeadlineError, EngineError, EngineStartError, JobFileError

SPECIAL = 256

FRIENDLY = """
import asyncio, os, signal, sys
def exact(completion, answer): return completion.strip() == answer
def batch(prompts, completions, completion_ids, answer, **kwargs): return [float(len(c)) for c in completions]
async def later(completion): await asyncio.sleep(0); return 0.5
def pid(completion): return os.getpid()
"""

HOSTILE = Path(__file__).with_name("hostile_rewards.py").read_text()


@pytest.fixture(scope="module")
def tokenizer_file(tmp_path_factory):
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: i for i, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<end>"])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return path


@pytest.fixture
def ids(tokenizer_file):
    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    return lambda text: array("i", tokenizer.encode(text).ids).tobytes()


def line_of(text):
    return next(number for number, line in enumerate(HOSTILE.splitlines(), 1) if text in line)


class Pauses:
    """Stands for sleeping between starts: records how long, and lets the pool go on at once."""

    def __init__(self):
        self.asked = []

    async def __call__(self, seconds):
        self.asked.append(seconds)


class Rig:
    """A pool over real processes, with what it started."""

    def __init__(self, tmp_path, tokenizer_file, ids):
        self.tmp_path, self.tokenizer_file, self.ids = tmp_path, tokenizer_file, ids
        self.children, self.pauses, self.pools = [], Pauses(), []
        self.log = tmp_path / "logs" / "rewards.1.log"

    async def _spawn(self, slot):
        argv = (sys.executable, "-m", "rlhfd.workers.rewards")
        spec = ChildSpec(
            role="rewards", job_id=JobId(1), attempt=1, epoch=Epoch(7), argv=argv, log_path=self.log, channel=True
        )
        self.children.append(await spawn(spec))
        return self.children[-1]

    def pool(self, source, *specs, size=1, timeouts=(), retries=0, columns=("answer",), memory_bytes=2**31):
        (self.tmp_path / "files").mkdir(exist_ok=True)
        (self.tmp_path / "files" / "carried").write_text(source)
        entries = [
            {"type": "function", "path": f"rewards.py:{spec}", "file": "carried"} if isinstance(spec, str) else spec
            for spec in specs
        ]
        setup = RewardSetup(
            specs=json.dumps(entries),
            files_dir=str(self.tmp_path / "files"),
            tokenizer_file=str(self.tokenizer_file),
            columns=list(columns),
            memory_bytes=memory_bytes,
        )
        pool = RewardPool(
            spawn=self._spawn,
            setup=setup,
            timeouts=[*timeouts, *[10.0] * (len(specs) - len(timeouts))],
            size=size,
            work_dir=self.tmp_path / "work",
            retries=retries,
            pause=self.pauses,
        )
        self.pools.append(pool)
        return pool

    def score(self, reward=0, text="12", rollout=1, **columns):
        return Score(
            rollout_id=rollout,
            reward=reward,
            prompt=json.dumps("6+6="),
            tokens=self.ids(text),
            columns=json.dumps({"answer": "12", **columns}),
            truncated=False,
        )


@pytest.fixture
async def rig(tmp_path, tokenizer_file, ids):
    rig = Rig(tmp_path, tokenizer_file, ids)
    yield rig
    for pool in rig.pools:
        await pool.close()
    assert all(child.status is not None for child in rig.children)
    assert not [p for child in rig.children for p in procfs.remains(child.session_id, child.started)]


async def test_rewards_of_all_types_are_scored_by_one_worker(rig):
    pool = rig.pool(
        FRIENDLY,
        "exact",
        "batch",
        "later",
        {"type": "regex", "pattern": "\\d", "weight": 2.0, "answer_column": None},
        {"type": "regex", "pattern": "x"},
    )
    await pool.start()
    assert pool.names == ["exact", "batch", "later", "regex", "regex_2"]
    answers = [await pool.score(rig.score(reward=n, rollout=3)) for n in range(5)]
    assert [a.value for a in answers] == [1.0, 2.0, 0.5, 1.0, 0.0]
    assert {(a.rollout_id, a.text, a.error) for a in answers} == {(3, "12", "")}


async def test_special_tokens_are_left_out_of_texts(rig):
    pool = rig.pool(FRIENDLY, "exact")
    await pool.start()
    end = array("i", [SPECIAL]).tobytes()
    assert await pool.decode([rig.ids("Zwölf") + end, b""]) == ["Zwölf", ""]
    assert (await pool.score(rig.score(text="12"))).text == "12"


HOW_IT_ENDS = [
    ("exits", "died", "exits ended its process (exit status 3)"),
    ("exits_with_the_system", "exception", f"SystemExit: 0 (rewards.py, line {line_of('sys.exit(0)')})"),
    ("raises", "exception", f"ValueError: no number in it (rewards.py, line {line_of('ValueError')})"),
    ("interrupts", "exception", f"KeyboardInterrupt (rewards.py, line {line_of('raise KeyboardInterrupt')})"),
    ("kills_itself", "died", "SIGKILL"),
    ("crashes", "died", "SIGSEGV"),
    ("recurses", "exception", "RecursionError"),
    ("says_nan", "not_finite", "returned nan"),
    ("says_infinity", "not_finite", "returned inf"),
    ("says_nothing", "wrong_type", "returned None"),
    ("says_text", "wrong_type", "returned '1.0'"),
    ("says_a_list", "wrong_type", "returned [1.0]"),
    ("takes_memory", "exception", "MemoryError"),
    ("writes_too_much", "exception", "File too large"),
    ("opens_too_much", "exception", "Too many open files"),
    ("forks_and_returns", "exception", "left 1 process(es) running"),
    ("forks_and_raises", "exception", "ValueError: twice"),
    ("forks_a_daemon", "exception", "left 1 process(es) running"),
    ("leaves_a_program", "exception", "left 1 process(es) running"),
    ("closes_everything", "died", "ended its process"),
    ("writes_to_every_file", "died", "broke the channel of its worker"),
]


async def test_every_hostile_reward_ends_in_a_recorded_error_and_the_pool_lives_on(rig):
    pool = rig.pool(HOSTILE, "exact", *(function for function, _, _ in HOW_IT_ENDS))
    await pool.start()
    for number, (function, kind, says) in enumerate(HOW_IT_ENDS, 1):
        answer = await pool.score(rig.score(reward=number))
        assert (function, answer.value, answer.error_kind) == (function, None, kind), answer.error
        assert says in answer.error
        assert (await pool.score(rig.score())).value == 1.0, f"after {function}"


async def test_a_program_that_ends_with_the_call_is_fine(rig):
    pool = rig.pool(HOSTILE, "runs_a_program")
    await pool.start()
    assert (await pool.score(rig.score())).value == 0.0


@pytest.mark.parametrize("function", ["spins", "sleeps", "ignores_signals"])
async def test_a_reward_that_hangs_is_killed_at_its_timeout(rig, function):
    pool = rig.pool(HOSTILE, function, "exact", timeouts=[0.5])
    await pool.start()
    answer = await pool.score(rig.score())
    assert (answer.value, answer.error_kind) == (None, "timeout")
    assert answer.error == f"reward {function} gave no value within 0.5 s"
    assert (await pool.score(rig.score(reward=1))).value == 1.0
    assert len(rig.children) == 2
    assert rig.children[0].status is not None


async def test_endless_recursion_ends_at_the_memory_limit(rig):
    pool = rig.pool(HOSTILE, "recurses_without_limit", "exact", timeouts=[30.0], memory_bytes=2**27)
    await pool.start()
    assert (await pool.score(rig.score())).error_kind in {"exception", "died"}
    assert (await pool.score(rig.score(reward=1))).value == 1.0


async def test_what_rewards_print_reaches_the_log_and_nothing_else(rig):
    source = (
        "import os\ndef f(completion):\n    print('seen by', completion)\n    os.write(2, b'raw\\n')\n    return 1\n"
    )
    pool = rig.pool(source, "f")
    await pool.start()
    assert (await pool.score(rig.score())).value == 1.0
    assert rig.log.read_text().splitlines() == ["seen by 12", "raw"]


async def test_a_flood_of_output_is_cut_and_costs_no_reward(rig):
    pool = rig.pool("def f(completion):\n    for _ in range(30): print('x' * 2**20)\n    return 1\n", "f")
    await pool.start()
    answers = [await pool.score(rig.score()) for _ in range(4)]
    assert [a.value for a in answers] == [1.0] * 4
    assert rig.log.stat().st_size < 33 * 2**20
    assert b"dropped" in rig.log.read_bytes()[-200:]


async def test_a_traceback_of_the_users_file_is_in_the_log(rig):
    pool = rig.pool("def f(completion):\n    return inner()\ndef inner():\n    raise ValueError('here')\n", "f")
    await pool.start()
    answer = await pool.score(rig.score())
    assert "(rewards.py, line 4)" in answer.error
    log = rig.log.read_text()
    assert "return inner()" in log
    assert "raise ValueError('here')" in log


async def test_user_code_runs_in_an_empty_directory_with_a_clean_environment(rig, monkeypatch):
    monkeypatch.setenv("WANDB_API_KEY", "secret")
    source = (
        "import os\n"
        "def empty(completion): return os.listdir('.') == []\n"
        "def private(completion): return os.getcwd() == os.environ['HOME'] == os.environ['TMPDIR']\n"
        "def clean(completion): return not [k for k in os.environ if 'KEY' in k or k in ('USER', 'RLHFD_CHANNEL_FD')]\n"
        "def unprivileged(completion): return os.environ['CUDA_VISIBLE_DEVICES'] == '' and os.read(0, 1) == b''\n"
        "def light(completion):\n"
        "    import sys\n"
        "    return not {'torch', 'numpy', 'math_verify', 'reasoning_gym'} & sys.modules.keys()\n"
    )
    pool = rig.pool(source, "empty", "private", "clean", "unprivileged", "light")
    await pool.start()
    assert [(await pool.score(rig.score(reward=n))).value for n in range(5)] == [1.0] * 5


async def test_user_code_runs_under_resource_limits(rig):
    source = (
        "import resource as r\n"
        "def core(completion): return r.getrlimit(r.RLIMIT_CORE)[1]\n"
        "def file_size(completion): return r.getrlimit(r.RLIMIT_FSIZE)[1]\n"
        "def open_files(completion): return r.getrlimit(r.RLIMIT_NOFILE)[1]\n"
        "def memory(completion): return r.getrlimit(r.RLIMIT_DATA)[1]\n"
        "def processor(completion): return 600 < r.getrlimit(r.RLIMIT_CPU)[0] < 1200\n"
        "def first_to_go(completion): return int(open('/proc/self/oom_score_adj').read())\n"
    )
    pool = rig.pool(source, "core", "file_size", "open_files", "memory", "processor", "first_to_go", memory_bytes=2**30)
    await pool.start()
    values = [(await pool.score(rig.score(reward=n))).value for n in range(6)]
    assert values == [0, 64 * 2**20, 256, 2**30, 1, 1000]


async def test_an_alarm_that_a_reward_left_running_does_not_end_the_worker(rig):
    source = "import signal\ndef f(completion):\n    signal.setitimer(signal.ITIMER_REAL, 0.01)\n    return 1\n"
    pool = rig.pool(source, "f", "f")
    await pool.start()
    assert [(await pool.score(rig.score())).value for _ in range(20)] == [1.0] * 20
    assert len(rig.children) == 1


@pytest.mark.parametrize(("what", "kind"), [("os._exit(1)", "died"), ("signal.pause()", "timeout")])
async def test_a_death_or_timeout_is_tried_again(rig, what, kind):
    marker = rig.tmp_path / "was here"
    source = (
        "import os, signal\n"
        f"def f(completion):\n    if not os.path.exists({str(marker)!r}):\n"
        f"        open({str(marker)!r}, 'w').close()\n        {what}\n    return 1\n"
    )
    pool = rig.pool(source, "f", timeouts=[1.0], retries=1)
    await pool.start()
    assert (await pool.score(rig.score())).value == 1.0
    marker.unlink()
    pool = rig.pool(source, "f", timeouts=[1.0], retries=0)
    await pool.start()
    assert (await pool.score(rig.score())).error_kind == kind


async def test_an_exception_is_not_tried_again(rig):
    source = "calls = []\ndef f(completion):\n    calls.append(1)\n    raise ValueError(len(calls))\n"
    pool = rig.pool(source, "f", retries=3)
    await pool.start()
    assert "ValueError: 1" in (await pool.score(rig.score())).error
    assert "ValueError: 2" in (await pool.score(rig.score())).error


async def test_starts_back_off_while_a_worker_answers_nothing(rig):
    pool = rig.pool(HOSTILE, "exits", "exact", retries=2)
    await pool.start()
    assert (await pool.score(rig.score())).error_kind == "died"
    assert (await pool.score(rig.score(reward=1))).value == 1.0
    assert rig.pauses.asked == [1.0, 2.0, 4.0]
    assert (await pool.score(rig.score())).error_kind == "died"  # it has answered since, so it starts at once
    assert (await pool.score(rig.score(reward=1))).value == 1.0
    assert rig.pauses.asked == [1.0, 2.0, 4.0, 1.0, 2.0]


async def test_several_scores_run_at_once_on_different_workers(rig):
    fifo = rig.tmp_path / "meeting"
    os.mkfifo(fifo)
    source = (
        f"def reads(completion):\n    with open({str(fifo)!r}) as f: return len(f.read())\n"
        f"def writes(completion):\n    with open({str(fifo)!r}, 'w') as f: return f.write('abc')\n"
    )
    pool = rig.pool(source, "reads", "writes", size=2)
    await pool.start()
    answers = await asyncio.gather(*(pool.score(rig.score(reward=n)) for n in range(2)))
    assert [a.value for a in answers] == [3.0, 3.0]


async def test_more_scores_than_workers_wait_their_turn(rig):
    pool = rig.pool(FRIENDLY, "exact", size=2)
    await pool.start()
    answers = await asyncio.gather(*(pool.score(rig.score(rollout=n)) for n in range(30)))
    assert [(a.rollout_id, a.value) for a in answers] == [(n, 1.0) for n in range(30)]
    assert len(rig.children) <= 2


async def test_a_cancelled_score_costs_its_worker_and_nothing_else(rig):
    started = rig.tmp_path / "started"
    os.mkfifo(started)
    source = (
        f"import signal\ndef hangs(completion):\n    open({str(started)!r}, 'w').close()\n    signal.pause()\n"
        + FRIENDLY
    )
    pool = rig.pool(source, "hangs", "exact")
    await pool.start()
    task = asyncio.create_task(pool.score(rig.score()))
    await asyncio.to_thread(started.read_bytes)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert (await pool.score(rig.score(reward=1))).value == 1.0
    assert len(rig.children) == 2


async def test_a_score_cancelled_while_it_waits_costs_nothing(rig):
    pool = rig.pool(FRIENDLY, "exact", "pid")
    await pool.start()
    first = asyncio.create_task(pool.score(rig.score(reward=1)))
    waiting = asyncio.create_task(pool.score(rig.score()))
    await asyncio.sleep(0)
    waiting.cancel()
    pid = (await first).value
    assert (await pool.score(rig.score(reward=1))).value == pid


async def test_a_worker_that_dies_while_idle_is_replaced(rig):
    pool = rig.pool(FRIENDLY, "pid")
    await pool.start()
    pid = (await pool.score(rig.score())).value
    os.kill(int(pid), 9)
    await rig.children[0].wait()
    answer = await pool.score(rig.score())
    assert answer.value not in {pid, None}, answer.error


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("import nothing_like_this\ndef f(completion): return 1\n", r"rewards.py does not import: ModuleNotFoundError"),
        ("def f(completion):\n  return (\n", r"SyntaxError: .*\(rewards.py, line 2\)"),
        ("def f(completion, anwser): return 1\n", r"asks for `anwser`"),
        ("import os\nos._exit(5)\n", r"while it was imported, ended its process \(exit status 5\)"),
        ("import os\nos.fork()\nraise ValueError\n", r"ValueError"),
    ],
)
async def test_rewards_that_can_not_be_used_are_refused_at_the_start(rig, source, says):
    pool = rig.pool(source, "f")
    with pytest.raises(JobFileError, match=says):
        await pool.start()


async def test_rewards_that_hang_while_they_are_imported_are_refused(rig, monkeypatch):
    monkeypatch.setattr(rewards, "START_LIMIT", 1.0)
    pool = rig.pool("import signal\nsignal.pause()\n", "f")
    with pytest.raises(JobFileError, match="did not import within 1 s"):
        await pool.start()


async def test_a_spec_with_a_wrong_key_is_refused(rig):
    pool = rig.pool(FRIENDLY, {"type": "regex", "pattern": 3})
    with pytest.raises(JobFileError, match=r"\[\[reward\]\] can't be used: Expected `str`, got `int`"):
        await pool.start()


async def test_a_damaged_tokenizer_is_refused(rig, tmp_path):
    rig.tokenizer_file = tmp_path / "tokenizer.json"
    rig.tokenizer_file.write_text("{")
    with pytest.raises(JobFileError, match=r"tokenizer.json can't be read"):
        await rig.pool(FRIENDLY, "exact").start()


async def test_a_pool_whose_workers_stop_starting_says_so(rig):
    marker = rig.tmp_path / "broken"
    source = f"import os\nif os.path.exists({str(marker)!r}): raise ValueError('gone')\n" + HOSTILE
    pool = rig.pool(source, "exits")
    await pool.start()
    marker.touch()
    assert (await pool.score(rig.score())).error_kind == "died"
    with pytest.raises(EngineStartError, match=r"do not start any more: .*ValueError: gone"):
        await pool.score(rig.score())
    assert rig.pauses.asked == [1.0, 2.0, 4.0, 8.0, 16.0]


async def test_a_wait_for_a_worker_that_never_comes_names_what_it_waited_for(rig, monkeypatch):
    rig.pauses = lambda seconds: asyncio.Event().wait()  # the pause before the next start does not end
    pool = rig.pool(HOSTILE, "exits")
    await pool.start()
    assert (await pool.score(rig.score())).error_kind == "died"
    pool._timeouts = [0.1]
    for limit in ("START_LIMIT", "DECODE_LIMIT", "LONGEST_PAUSE"):
        monkeypatch.setattr(rewards, limit, 0.0)
    with pytest.raises(DeadlineError, match=r"no reward worker was free within 0.1 s"):
        await pool.score(rig.score())


@pytest.mark.parametrize("turns", [0, 1, 3, 10, 1000])
async def test_a_start_that_is_cancelled_leaves_no_process(rig, turns):
    pool = rig.pool(FRIENDLY, "exact")
    starting = asyncio.create_task(pool.start())
    for _ in range(turns):
        await asyncio.sleep(0)
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    assert all(child.status is not None for child in rig.children)


async def test_a_closed_pool_answers_those_who_wait(rig):
    pool = rig.pool(HOSTILE, "sleeps", "raises")
    await pool.start()
    asked = [asyncio.create_task(pool.score(rig.score())) for _ in range(3)]
    await asyncio.sleep(0)
    await pool.close()
    answers = await asyncio.gather(*asked, return_exceptions=True)
    assert [str(answer) for answer in answers] == ["the reward pool is closed"] * 3
    assert not Path(rig.tmp_path / "work").exists()
    with pytest.raises(EngineError, match="the reward pool is closed"):
        await pool.score(rig.score())
