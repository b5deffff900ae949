"""Starts a training process and follows it: JSON events from its stdout, everything else into a log file, signals passed on.

The child gets a session of its own, so that Ctrl-C in the terminal reaches only the planner. It passes one SIGINT on to the launcher, which stops the
workers after their step, and waits; a second Ctrl-C kills what is left of the child's session.
"""

from __future__ import annotations

import dataclasses
import fcntl
import importlib.util
import json
import os
import re
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from planner.errors import RunFailed, UsageError

_TAIL_LINES = 12
_ERROR_LINE = re.compile(r"^\s*(?:\[\w*\d*\]:)?\s*(?:\w+\.)*\w*(?:Error|Exception|Interrupt)\b.*|.*\berror: .*")


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """How a child ended: its exit code, whether the user interrupted it, and where its words are."""

    returncode: int
    interrupted: bool
    log: Path

    def reason(self) -> str:
        """The last line of the log that looks like an error's, else its last lines."""
        try:
            lines = [line.rstrip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        except OSError:
            return ""
        errors = [line for line in lines if _ERROR_LINE.match(line) and "ChildFailedError" not in line]
        return errors[-1].strip() if errors else "\n".join(lines[-_TAIL_LINES:])


def check_runtime() -> None:
    """Raises UsageError when this Python has no torch to start the runtime with."""
    if importlib.util.find_spec("torch") is None:
        raise UsageError(f"torch is not installed for {sys.executable}: `make install`, or pip install '.[runtime]'; see `planner doctor`")


@contextmanager
def alone(folder: Path) -> Iterator[None]:
    """Holds a folder for one run. Raises UsageError when another process holds it; the hold ends with the process, whatever happens."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"{folder}: another run is using this folder; wait for it, or `planner search -o` into another one") from None
        yield
    finally:
        os.close(handle)


def follow(command: Sequence[str], *, variables: Mapping[str, str], log: Path, on_event: Callable[[dict[str, Any]], None]) -> Outcome:
    """Runs `command` to its end. `on_event` gets every JSON object that it prints on a line of stdout.

    Raises RunFailed when it cannot be started.
    """
    log.parent.mkdir(parents=True, exist_ok=True)
    interrupted = 0
    with _stops_as_interrupts(), log.open("w", encoding="utf-8") as words:
        try:
            child = subprocess.Popen(
                command,
                env={**os.environ, **variables},
                stdout=subprocess.PIPE,
                stderr=words,
                stdin=subprocess.DEVNULL,
                text=True,
                errors="replace",
                start_new_session=True,
            )
        except OSError as error:
            raise RunFailed(f"{command[0]}: cannot be started ({error})") from error
        assert child.stdout is not None
        with child.stdout:
            while True:
                try:
                    _read(child.stdout, words, on_event)
                    child.wait()
                    break
                except KeyboardInterrupt:
                    interrupted += 1
                    _pass_on(child, interrupted)
                except BaseException:
                    _pass_on(child, 2)
                    child.wait()
                    raise
    return Outcome(returncode=child.returncode, interrupted=interrupted > 0, log=log)


def _read(output: IO[str], words: IO[str], on_event: Callable[[dict[str, Any]], None]) -> None:
    for line in output:
        event = parse_event(line)
        if event is None:
            words.write(line)
            words.flush()
        else:
            on_event(event)


def parse_event(line: str) -> dict[str, Any] | None:
    """The JSON object on a line that has an `event`, else None."""
    if not line.startswith("{"):
        return None
    try:
        value = json.loads(line)
    except json.JSONDecodeError:
        return None
    return value if isinstance(value, dict) and "event" in value else None


def _pass_on(child: subprocess.Popen[str], times: int) -> None:
    try:
        if times == 1:
            child.send_signal(signal.SIGINT)
        else:
            os.killpg(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass


@contextmanager
def _stops_as_interrupts() -> Iterator[None]:
    """SIGTERM (a scheduler's way to stop a job) is treated as Ctrl-C, where this is the main thread; so is SIGINT where it was ignored.

    A shell starts a script's background jobs with SIGINT ignored; what is ignored is inherited, and a run could then not be stopped cleanly.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def interrupt(_signal: int, _frame: Any) -> None:
        raise KeyboardInterrupt

    before = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    signal.signal(signal.SIGTERM, interrupt)
    if before[signal.SIGINT] == signal.SIG_IGN:
        signal.signal(signal.SIGINT, interrupt)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
