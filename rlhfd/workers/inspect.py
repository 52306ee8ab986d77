"""Inspect what a job names: model, data, reward files. A short-lived process; from then on nobody needs the originals.

    REQUEST.json ─► model directory found, safe, measured ─► every prompt rendered and tokenised once ─► OUT/
        {job, files, out_dir, cache_dir, allow_download, allow_remote_code}
    OUT/ prompts.bin prompts.idx tokenizer.json, and last facts.json; or error.json {"error", "exit_status"}

`python -m rlhfd.workers.inspect REQUEST.json` ends with 0, or with the status of the error (78 for a bad job).
"""

import ast
import errno
import hashlib
import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import msgspec

from rlhfd.config import FunctionReward, JobConfig, parse_job
from rlhfd.errors import DiskFullError, JobFileError, RlhfdError, StorageError
from rlhfd.workers import data
from rlhfd.workers.model_directory import Permissions, check_safe, first_line, resolve
from rlhfd.workers.snapshot import TOKENIZER_FILE, Written, write_durably, write_snapshot

FULL = (errno.ENOSPC, errno.EDQUOT)


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What to inspect, and where its files are. Paths are absolute."""

    job: dict[str, Any]
    files: dict[str, str]
    out_dir: str
    cache_dir: str
    allow_download: bool = False
    allow_remote_code: bool = False


def inspect(request: Request) -> dict[str, Any]:
    """The facts; snapshot and tokenizer are in `out_dir` when it returns. Raises JobFileError, StorageError."""
    job = parse_job(request.job)
    files = {name: Path(path) for name, path in request.files.items()}
    allowed = Permissions(download=request.allow_download, remote_code=request.allow_remote_code)
    cache, out = Path(request.cache_dir), Path(request.out_dir)
    _go_offline(job, allowed)
    for reward in job.reward:
        if isinstance(reward, FunctionReward):
            check_reward_file(reward, files)
    directory = resolve(job.model, cache, allowed)
    check_safe(directory, job.model, allowed)
    return _snapshot(job, directory, data.Library(files=files, allowed=allowed, cache_dir=cache), out)


def _snapshot(job: JobConfig, directory: Path, library: data.Library, out: Path) -> dict[str, Any]:
    """Measure the model, write the tokenizer and the prompts, and put the facts together."""
    from rlhfd.workers.model_facts import measure
    from rlhfd.workers.render import Renderer, room_for_prompts

    tokenizer = load_tokenizer(directory, trust=job.model.trust_remote_code)
    model = measure(directory, job.model, tokenizer)
    limit = room_for_prompts(job, model.max_model_len)
    serialised = _serialised(tokenizer)
    tokenizer_sha256 = hashlib.sha256(serialised).hexdigest()
    renderer = Renderer(tokenizer=tokenizer, data=job.data, limit=limit, vocab=model.vocab)
    written = write_snapshot(renderer.render(data.rows(job, library)), out, tokenizer_sha256)
    if written.rows == 0:
        raise JobFileError(_empty(job, renderer.skipped, limit))
    write_durably(out / TOKENIZER_FILE, serialised)
    return {
        "model": model.plain(),
        "prompts": _prompt_facts(written, renderer.skipped),
        "tokenizer_sha256": tokenizer_sha256,
        "canary": written.canary,
    }


def _prompt_facts(written: Written, skipped: int) -> dict[str, Any]:
    return {
        "rows": written.rows,
        "skipped": skipped,
        "sha256": written.sha256,
        "tokens_max": written.tokens_max,
        "tokens_mean": written.tokens_sum / written.rows,
        "columns": sorted(written.columns or ()),
    }


def _empty(job: JobConfig, skipped: int, limit: int) -> str:
    if skipped:
        return (
            f"all {skipped} prompts of {job.data.source} are over {limit} tokens and were skipped: raise "
            "model.max_model_len, or lower rollout.max_completion_length"
        )
    return f"{job.data.source} holds no rows: put at least one prompt into it"


def check_reward_file(reward: FunctionReward, files: Mapping[str, Path]) -> None:
    """The file parses and defines the function. It is imported by a reward worker, never here. Raises JobFileError."""
    function, path = reward.path.rpartition(":")[2], files.get(reward.file)
    if path is None:
        raise JobFileError(f'reward.path = "{reward.path}" names a file that was not sent along: submit the job again')
    try:
        tree = ast.parse(path.read_bytes(), filename=reward.file)
    except (OSError, SyntaxError, ValueError, RecursionError, MemoryError) as error:
        line = f" line {error.lineno}" if isinstance(error, SyntaxError) and error.lineno else ""
        raise JobFileError(
            f"{reward.file}{line} is no Python that can be read ({first_line(error)}): mend it"
        ) from error
    names = {name for statement in tree.body for name in _defined(statement)}
    if function not in names and "*" not in names:
        raise JobFileError(f"{reward.file} defines no function {function}: correct reward.path or add it")


def _defined(statement: ast.stmt) -> list[str]:
    """The names that one top-level statement may define, also inside its branches."""
    found: list[str] = []
    for node in ast.walk(statement):
        match node:
            case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                found.append(name)
            case ast.Name(id=name, ctx=ast.Store()):
                found.append(name)
            case ast.alias(name=name, asname=other):
                found.append(other or name.partition(".")[0])
            case _:
                pass
    return found


def load_tokenizer(directory: Path, *, trust: bool) -> Any:
    """The model's own fast tokenizer. Raises JobFileError."""
    from transformers import AutoTokenizer

    try:
        tokenizer = cast("Any", AutoTokenizer).from_pretrained(
            directory, local_files_only=True, trust_remote_code=trust
        )
    except (OSError, ValueError, KeyError, TypeError, ImportError, AttributeError) as error:
        raise JobFileError(
            f"{directory} has no tokenizer that can be loaded ({first_line(error)}): add its files"
        ) from error
    if not tokenizer.is_fast:
        raise JobFileError(f"the tokenizer in {directory} has no tokenizer.json: save it again as a fast tokenizer")
    return tokenizer


def _serialised(tokenizer: Any) -> bytes:
    """tokenizer.json, without the truncation or padding that its last user left in it."""
    backend = tokenizer.backend_tokenizer
    backend.no_truncation()
    backend.no_padding()
    return cast("str", backend.to_str()).encode()


def _go_offline(job: JobConfig, allowed: Permissions) -> None:
    """Before huggingface_hub is imported, which reads these once."""
    wanted = job.model.allow_download or job.data.allow_download
    if not (wanted and allowed.download):
        os.environ.update(HF_HUB_OFFLINE="1", TRANSFORMERS_OFFLINE="1", HF_DATASETS_OFFLINE="1")


def main(request_path: Path) -> int:
    """Inspect, and leave facts.json or error.json behind. The exit status."""
    request = msgspec.json.decode(request_path.read_bytes(), type=Request)
    out = Path(request.out_dir)
    try:
        facts = _on_disk(request)
    except RlhfdError as error:
        sys.stderr.write(f"{error}\n")
        (out / "error.json").write_text(json.dumps({"error": str(error), "exit_status": error.exit_status}))
        return error.exit_status
    write_durably(out / "facts.json", json.dumps(facts).encode())
    return 0


def _on_disk(request: Request) -> dict[str, Any]:
    """As `inspect`, with the disk's own faults named."""
    try:
        return inspect(request)
    except OSError as error:
        where = error.filename or request.out_dir
        if error.errno in FULL:
            raise DiskFullError(f"no room for the prompts in {where}: make room and submit again") from error
        raise StorageError(f"{where} failed while the job was inspected: {error.strerror or error}") from error


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
