"""How a command ends: errors become one sentence on stderr and an exit status; a trace only under --debug."""

import os
import sys
import traceback
from collections.abc import Callable
from types import TracebackType

from rlhfd.errors import RlhfdError, StorageError, UsageError

INTERRUPTED = 130
BUG = 1


def ended(command: Callable[[], int], *, debug: bool) -> int:
    """Run a command and give its exit status."""
    sys.excepthook = sys.__excepthook__ if debug else _bug
    try:
        status = command()
        sys.stdout.flush()
    except RlhfdError as error:
        _trace(error, shown=debug)
        return complain(str(error), error.exit_status)
    except BrokenPipeError:  # the reader of our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return StorageError.exit_status
    except OSError as error:
        _trace(error, shown=debug)
        return complain(f"{error.filename or 'the system'}: {error.strerror or error}", StorageError.exit_status)
    except KeyboardInterrupt:
        return INTERRUPTED
    return status


def complain(sentence: str, status: int) -> int:
    """Say a sentence on stderr; the status, to end with."""
    print(f"rlhfd: {sentence}", file=sys.stderr)
    return status


def misused(sentence: str, command: str) -> int:
    """End a command that was called wrongly."""
    text = sentence if sentence.endswith(".") else f"{sentence}."
    return complain(f"{text[:1].lower()}{text[1:]} `{command} --help` shows how.", UsageError.exit_status)


def _trace(error: BaseException, *, shown: bool) -> None:
    if shown:
        traceback.print_exception(error)


def _bug(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    """Instead of a trace. Python ends with status 1 after it."""
    del trace
    complain(f"this is a bug in rlhfd: {kind.__name__}: {error}; --debug shows where", BUG)
