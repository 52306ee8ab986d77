"""The daemon's handle on a learner, against a scripted child: deadlines, faults, and nonsense."""

import asyncio
import socket
import struct

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rlhfd.core import wire
from rlhfd.core.faults import FAULTS, error_of, fault_of
from rlhfd.engines.channel import Channel
from rlhfd.engines.learner import LearnerClient
from rlhfd.errors import (
    DeadlineError,
    EngineDiedError,
    EngineError,
    EngineStartError,
    LearnerFault,
    NonFiniteError,
    OutOfMemoryError,
)

SOON = 0.02  # seconds, for waits that must run out
PLENTY = 30.0
EXPORT = wire.Export(dir="/somewhere")


class ScriptedChild:
    """The other end of the wire: what a child says, frame by frame."""

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._channel = Channel(sock)
        self._socket = sock

    async def say(self, *frames: wire.Frame) -> None:
        for frame in frames:
            await self.say_bytes(wire.encode(frame))

    async def say_bytes(self, data: bytes) -> None:
        await asyncio.get_running_loop().sock_sendall(self._socket, data)

    async def hear(self) -> wire.AnyFrame:
        async with asyncio.timeout(PLENTY):
            return await self._channel._next()

    def close(self) -> None:
        self._channel.close()


@pytest.fixture
def pair():
    ours, theirs = socket.socketpair()
    channel, child = Channel(ours), ScriptedChild(theirs)
    yield channel, child
    channel.close()
    child.close()


@pytest.fixture
def child(pair):
    return pair[1]


@pytest.fixture
def channel(pair):
    return pair[0]


@pytest.fixture
def client(channel):
    return LearnerClient(channel, silence=PLENTY)


def fault(kind):
    return wire.Fault(kind=kind, message="it went wrong", rollout_ids=[3, 4], trace="Traceback …")


async def test_a_call_sends_its_frames_in_order_and_returns_the_answer(client, child):
    settings = wire.StepSettings(
        loss_type="dapo",
        prox_logp_method="none",
        zero_staleness="behave",
        epsilon=0.2,
        epsilon_high=0.2,
        delta=None,
        behave_weight_cap=None,
        behave_weight_mode="none",
        temperature=1.0,
        max_grad_norm=1.0,
        learning_rates=[0.1],
        minibatches=1,
        num_iterations=1,
        n_sequences=[1],
        n_tokens=[1],
        max_completion_length=8,
    )
    learn = wire.Learn(step=1, version_in=0, groups=2, settings=settings, trace=[])
    groups = [wire.GroupFrame(ordinal=n, rollouts=[]) for n in (4, 9)]
    answer = wire.Learned(
        step=1,
        fingerprint=wire.Fingerprint(losses=[1.0], grad_norms=[1.0], skipped=[False], policy="aa", optimizer="bb"),
        metrics={},
        times={},
        traces=[],
    )
    await child.say(answer)
    assert await client.learn(learn, groups) == answer
    assert [await child.hear() for _ in range(3)] == [learn, *groups]


@pytest.mark.parametrize("kind", FAULTS)
async def test_each_kind_of_fault_is_the_error_that_it_means(client, child, kind):
    await child.say(fault(kind))
    with pytest.raises(FAULTS[kind], match="export into /somewhere: it went wrong") as caught:
        await client.export(EXPORT)
    if isinstance(caught.value, LearnerFault):
        assert caught.value.rollout_ids == (3, 4)
    await child.say(wire.Done())
    await client.export(EXPORT)  # the learner goes on


def test_every_kind_that_the_wire_knows_has_its_error():
    assert set(FAULTS) == set(wire.FaultKind.__args__)


@pytest.mark.parametrize("kind", FAULTS)
def test_a_fault_is_the_same_error_on_both_sides(kind):
    told = fault_of(error_of(fault(kind), "a call"), "")
    assert told.kind == kind


@pytest.mark.parametrize(
    "error", [MemoryError(), RuntimeError("CUDA out of memory. Tried"), RuntimeError("[enforce] can't allocate memory")]
)
def test_memory_that_ran_out_is_told_apart_from_a_bug(error):
    assert isinstance(error_of(fault_of(error, ""), "a call"), OutOfMemoryError)
    assert fault_of(RuntimeError("shape mismatch"), "trace").kind == "bug"
    assert fault_of(NonFiniteError("x", rollout_ids=[5]), "").rollout_ids == [5]


async def test_silence_is_an_error_that_names_the_call_and_ends_the_channel(channel, child):
    client = LearnerClient(channel, silence=SOON)
    with pytest.raises(DeadlineError, match=r"0\.02 s while waiting for the learner to export into /somewhere"):
        await client.export(EXPORT)
    await child.say(wire.Done())  # too late: it must not be taken for the next answer
    with pytest.raises(EngineDiedError, match="got no answer"):
        await client.export(EXPORT)


async def test_progress_keeps_a_long_call_alive(channel, child):
    """Each frame comes within the deadline of the one before, all of them together take longer than it."""
    seen: list[int] = []
    turn = asyncio.Event()

    def note(progress: wire.Progress) -> None:
        seen.append(progress.done)
        turn.set()

    client = LearnerClient(channel, silence=1.0, on_progress=note)
    loop = asyncio.get_running_loop()
    call = asyncio.create_task(client.export(EXPORT))
    started = loop.time()
    number = 0
    while loop.time() - started < 1.2:
        number += 1
        turn.clear()
        await child.say(wire.Progress(phase="export", done=number, total=0))
        async with asyncio.timeout(PLENTY):
            await turn.wait()
    await child.say(wire.Done())
    await call
    assert seen == list(range(1, number + 1))


async def test_a_cancelled_call_ends_the_channel(channel, child):
    client = LearnerClient(channel, silence=PLENTY)
    call = asyncio.create_task(client.export(EXPORT))
    await child.hear()
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    with pytest.raises(EngineDiedError, match="was given up"):
        await client.export(EXPORT)


async def test_a_second_call_while_one_is_in_flight_is_refused_and_the_first_goes_on(client, child):
    first = asyncio.create_task(client.export(EXPORT))
    await child.hear()
    with pytest.raises(EngineError, match="in flight"):
        await client.export(EXPORT)
    await child.say(wire.Done())
    await first


async def test_an_answer_of_another_kind_is_an_engine_that_lost_its_mind(client, child):
    await child.say(wire.Checkpointed(manifest_sha="", nbytes=0))
    with pytest.raises(EngineDiedError, match="Checkpointed came as the answer"):
        await client.export(EXPORT)


async def test_an_end_in_the_middle_of_a_frame_is_a_dead_engine(client, child):
    call = asyncio.create_task(client.export(EXPORT))
    await child.hear()
    await child.say_bytes(wire.encode(wire.Done())[:-1])
    child.close()
    with pytest.raises(EngineDiedError, match="closed its channel while waiting for the learner to export"):
        await call


async def test_a_frame_too_large_to_be_one_is_not_waited_for(client, child):
    await child.say_bytes(struct.pack(">I", wire.MAX_FRAME + 1))
    with pytest.raises(EngineDiedError, match="announced a frame"):
        await client.export(EXPORT)


async def test_a_frame_larger_than_any_buffer_arrives_whole(client, child):
    large = wire.LogProbsReply(logps={1: bytes(5_000_000)})
    saying = asyncio.create_task(child.say(large))
    assert await client.logprobs(wire.LogProbs(groups=0, temperature=1.0), []) == large
    await saying


@given(st.binary(max_size=200))
async def test_garbage_is_an_error_and_never_an_answer(data):
    ours, theirs = socket.socketpair()
    client, child = LearnerClient(Channel(ours), silence=PLENTY), ScriptedChild(theirs)
    await child.say_bytes(data)
    child.close()
    try:
        with pytest.raises(EngineError):
            await client.export(EXPORT)
    finally:
        client.close()


@pytest.mark.parametrize("change", [{"epoch": 6}, {"protocol": wire.PROTOCOL + 1}])
async def test_a_child_of_another_epoch_or_protocol_is_refused(channel, child, change):
    fields = {"protocol": wire.PROTOCOL, "epoch": 7, "pid": 1, "started": 1} | change
    await child.say(wire.Hello(**fields))
    with pytest.raises(EngineStartError, match="another protocol or epoch"):
        await channel.handshake(7, who="the learner")
    with pytest.raises(EngineDiedError):
        await LearnerClient(channel).export(EXPORT)


async def test_a_child_that_never_says_hello_did_not_start(channel):
    with pytest.raises(EngineStartError, match="did not say hello"):
        await channel.handshake(7, who="the learner", deadline=SOON)
