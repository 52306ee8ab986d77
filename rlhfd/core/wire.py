"""Frames between the daemon and its own workers: u32 big-endian length + msgpack, one tagged struct each.

Both sides import this module and nothing else of each other. One call is in flight on a channel at a time (the
reward pool: one per worker); `Progress` frames are its heartbeat. Arrays travel as little-endian bytes: token ids and
version steps int32, log-probs float32. A frame is at most `MAX_FRAME` bytes, so groups reach the learner one by one.
"""

from struct import Struct as Packer
from typing import Literal, TypeAlias

import msgspec

PROTOCOL = 1
MAX_FRAME = 64 * 1024 * 1024
HEADER = Packer(">I")


class Frame(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Base of all frames; the struct's name is the tag."""


# --- both channels -------------------------------------------------------------------------------------------------


class Hello(Frame, frozen=True):
    """Child -> daemon, first frame. `epoch`: the one it was started under; `started`: its start time in ticks."""

    protocol: int
    epoch: int
    pid: int
    started: int


class Progress(Frame, frozen=True):
    """Child -> daemon while a call runs: heartbeat and position."""

    phase: str
    done: int
    total: int


FaultKind: TypeAlias = Literal["non_finite", "out_of_memory", "bad_model", "bad_checkpoint", "disk_full", "io", "bug"]


class Fault(Frame, frozen=True):
    """Child -> daemon instead of a result. `kind` picks the class of errors.py: see `core/faults.py`."""

    kind: FaultKind
    message: str
    rollout_ids: list[int] = []
    trace: str = ""


class Shutdown(Frame, frozen=True):
    """Daemon -> child: end with status 0."""


class Done(Frame, frozen=True):
    """Child -> daemon: a call without a result of its own has ended well."""


# --- learner -------------------------------------------------------------------------------------------------------


class LearnerSettings(Frame, frozen=True):
    """What holds for the life of a learner process."""

    dtype: Literal["bfloat16", "float32"]
    use_peft: bool = False
    lora_r: int = 16
    lora_alpha: int = 32
    lora_dropout: float = 0.0
    lora_target_modules: list[str] = []
    gradient_checkpointing: bool = False
    weight_decay: float = 0.0
    adam_beta1: float = 0.9
    adam_beta2: float = 0.999
    adam_epsilon: float = 1e-8
    seed: int = 0
    trust_remote_code: bool = False


class Load(Frame, frozen=True):
    """Load the start model, then the checkpoint over it (weights, optimiser), if any."""

    model_dir: str
    checkpoint_dir: str | None
    settings: LearnerSettings
    threads: int


class Loaded(Frame, frozen=True):
    """`step`: the version now in memory. `numerics`: the redo log's key (versions, CPU flags, attention …)."""

    step: int
    parameters: int
    trainable: int
    numerics: dict[str, str]


class StepSettings(Frame, frozen=True):
    """The values in force in one step: recorded before it is learned, replayed as they stand.

    `learning_rates` has one entry per optimiser step (num_iterations x minibatches, in that order). `n_sequences` and
    `n_tokens` are the loss denominators N and T per minibatch, counted before skipping, capping and micro-batching.
    """

    loss_type: str
    prox_logp_method: Literal["loglinear", "recompute", "metrics", "none"]
    zero_staleness: Literal["behave", "theta"]
    epsilon: float
    epsilon_high: float
    delta: float | None
    behave_weight_cap: float | None
    behave_weight_mode: Literal["token_truncate", "token_mask", "none"]
    temperature: float
    max_grad_norm: float
    learning_rates: list[float]
    minibatches: int
    num_iterations: int
    n_sequences: list[int]
    n_tokens: list[int]
    max_completion_length: int
    beta: float = 0.0


class RolloutFrame(Frame, frozen=True):
    """One rollout for a learner. prompt int32 [P], tokens int32 [T], logps float32 [T], versions int32 [T] (steps).

    `minibatch` and `micro_batch` place it (micro_batch counts inside its minibatch); `skipped`: in N and T, but not
    forwarded; `masked`: in N and not in T (truncated, under mask_truncated_completions).
    """

    id: int
    prompt: bytes
    tokens: bytes
    logps: bytes
    versions: bytes
    advantage: float
    minibatch: int
    micro_batch: int
    masked: bool = False
    skipped: bool = False


class GroupFrame(Frame, frozen=True):
    """The rollouts of one group, in the order of k. A step's groups follow its `Learn`, in order of ordinal."""

    ordinal: int
    rollouts: list[RolloutFrame]


class Learn(Frame, frozen=True):
    """Step `step` from `version_in`; `groups` GroupFrames follow. `trace`: rollouts whose tokens to report."""

    step: int
    version_in: int
    groups: int
    settings: StepSettings
    trace: list[int]


class Fingerprint(Frame, frozen=True):
    """What a replay must reproduce: per optimiser step loss, norm, skipped; checksums (hex) over all bits after it."""

    losses: list[float]
    grad_norms: list[float]
    skipped: list[bool]
    policy: str
    optimizer: str


class TokenTrace(Frame, frozen=True):
    """What the first pass used per token of a rollout, each [T]: staleness int32; the rest float32.

    policy: log-prob of the current policy at the step's start; prox: proximal log-prob; weight: w after the cap;
    ratio: r.
    """

    rollout_id: int
    staleness: bytes
    alpha: bytes
    policy: bytes
    prox: bytes
    weight: bytes
    ratio: bytes


class Learned(Frame, frozen=True):
    """`metrics`: see core/metrics.py for names. `times`: seconds {prox_logp, learn}."""

    step: int
    fingerprint: Fingerprint
    metrics: dict[str, float]
    times: dict[str, float]
    traces: list[TokenTrace]


class Publish(Frame, frozen=True):
    """Write what the generator shall load into `dir`: safetensors in `dtype` and config, no tokenizer.

    `noise_seed`: not None makes a *probe*: every tensor moved by 5 % of its own spread. `canary`: token sequences
    whose log-probs (fp32 compute on the published, rounded tensors; no temperature) come back in `Published.canary`,
    float32 [len - 1] each.
    """

    dir: str
    noise_seed: int | None
    canary: list[bytes]


class Published(Frame, frozen=True):
    """`changed`: share of published (rounded) elements that differ from the last real publication; 1.0 for a first."""

    step: int
    changed: float
    nbytes: int
    canary: list[bytes]


class Checkpoint(Frame, frozen=True):
    """Write a checkpoint to `dir`, durably: temporary name, fsyncs and rename are the learner's."""

    dir: str
    version_id: int
    epoch: int


class Checkpointed(Frame, frozen=True):
    """Durable: files, directory and its parent are fsynced. `manifest_sha`: hex of manifest.json."""

    manifest_sha: str
    nbytes: int


class LogProbs(Frame, frozen=True):
    """Log-probs of stored tokens under the published (rounded) weights in memory; `groups` GroupFrames follow."""

    groups: int
    temperature: float


class LogProbsReply(Frame, frozen=True):
    """rollout id -> float32 [T]."""

    logps: dict[int, bytes]


class Export(Frame, frozen=True):
    """Write a plain Hugging Face directory (adapter merged, dtype of the model, tokenizer copied) to `dir`."""

    dir: str


# --- rewards -------------------------------------------------------------------------------------------------------


class RewardSetup(Frame, frozen=True):
    """Prepare a worker: `specs` is the job's [[reward]] list as JSON, `files_dir` holds the carried files by name.

    `columns`: the extra columns of every row (None: not known, parameters are then checked row by row). `work_dir`: a
    private empty directory, the worker's cwd, HOME and TMPDIR; the pool fills it in. `memory_bytes`: private memory
    that user code may map; 0 is no limit.
    """

    specs: str
    files_dir: str
    tokenizer_file: str
    columns: list[str] | None = None
    work_dir: str = ""
    memory_bytes: int = 4 * 1024**3


class RewardReady(Frame, frozen=True):
    """The rewards' display names, in order."""

    names: list[str]


class RewardsRefused(Frame, frozen=True):
    """Worker -> pool instead of RewardReady: the job's rewards can't be used as written; one sentence says why."""

    message: str


class Score(Frame, frozen=True):
    """Reward number `reward` of one rollout. prompt: JSON (string or messages); columns: JSON of the row's extras."""

    rollout_id: int
    reward: int
    prompt: str
    tokens: bytes
    columns: str
    truncated: bool


class Scored(Frame, frozen=True):
    """A finite number, or why there is none (`error_kind` as in RewardError.kind). `text`: the decoded completion."""

    rollout_id: int
    reward: int
    value: float | None
    error_kind: str = ""
    error: str = ""
    text: str = ""


class Decode(Frame, frozen=True):
    """Token ids int32 -> text, special tokens left out."""

    tokens: list[bytes]


class Decoded(Frame, frozen=True):
    """The texts, in order."""

    texts: list[str]


AnyFrame: TypeAlias = (
    Hello
    | Progress
    | Fault
    | Shutdown
    | Done
    | Load
    | Loaded
    | Learn
    | GroupFrame
    | Learned
    | Publish
    | Published
    | Checkpoint
    | Checkpointed
    | LogProbs
    | LogProbsReply
    | Export
    | RewardSetup
    | RewardReady
    | RewardsRefused
    | Score
    | Scored
    | Decode
    | Decoded
)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(AnyFrame)


def encode(frame: Frame) -> bytes:
    """The frame with its length in front. Raises ValueError past MAX_FRAME."""
    body = _encoder.encode(frame)
    if len(body) > MAX_FRAME:
        raise ValueError(f"a {type(frame).__name__} frame of {len(body)} bytes is over the limit of {MAX_FRAME}")
    return HEADER.pack(len(body)) + body


def decode(body: bytes) -> AnyFrame:
    """One frame from its body. Raises msgspec.DecodeError or msgspec.ValidationError on anything else."""
    return _decoder.decode(body)
