import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

from planner.errors import RunFailed
from planner.runner import follow, parse_event


def child(code: str) -> list[str]:
    return [sys.executable, "-u", "-c", textwrap.dedent(code)]


def test_events_words_and_variables(tmp_path: Path):
    events = []
    code = """
    import os, sys
    print('{"event": "step", "step": 1}')
    print("just words")
    print('{"no": "event"}')
    print("{broken")
    print("complaint", file=sys.stderr)
    print('{"event": "note", "message": "' + os.environ["HELLO"] + '"}')
    sys.exit(3)
    """
    outcome = follow(child(code), variables={"HELLO": "you"}, log=tmp_path / "deep" / "run.log", on_event=events.append)
    assert events == [{"event": "step", "step": 1}, {"event": "note", "message": "you"}]
    assert outcome.returncode == 3 and not outcome.interrupted
    log = (tmp_path / "deep" / "run.log").read_text()
    assert {"just words", '{"no": "event"}', "{broken", "complaint"} <= set(log.splitlines())


def test_the_reason_is_the_last_error_line(tmp_path: Path):
    code = "import sys; sys.stderr.write('Traceback\\n  File x\\nValueError: too small\\n[rank0]: noise\\n'); sys.exit(1)"
    assert follow(child(code), variables={}, log=tmp_path / "l", on_event=print).reason() == "ValueError: too small"
    code = "import sys; sys.stderr.write('one\\ntwo\\n'); sys.exit(1)"
    assert follow(child(code), variables={}, log=tmp_path / "l", on_event=print).reason() == "one\ntwo"


def test_a_program_that_is_not_there(tmp_path: Path):
    with pytest.raises(RunFailed, match="cannot be started"):
        follow([str(tmp_path / "nothing")], variables={}, log=tmp_path / "l", on_event=print)


def test_an_interrupt_is_passed_on_and_waited_for(tmp_path: Path):
    code = """
    import signal, sys, time
    def stop(*_):
        print('{"event": "note", "message": "checkpoint"}'); sys.exit(130)
    signal.signal(signal.SIGINT, stop)
    print('{"event": "ready"}')
    time.sleep(60)
    """
    events = []

    def on_event(event):
        events.append(event)
        if event["event"] == "ready":
            threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start()

    outcome = follow(child(code), variables={}, log=tmp_path / "l", on_event=on_event)
    assert outcome.interrupted and outcome.returncode == 130
    assert events[-1]["message"] == "checkpoint"


def test_a_second_interrupt_kills(tmp_path: Path):
    code = """
    import signal, time
    signal.signal(signal.SIGINT, lambda *_: print('{"event": "ready"}'))
    print('{"event": "ready"}')
    while True: time.sleep(1)
    """
    start = time.monotonic()
    outcome = follow(child(code), variables={}, log=tmp_path / "l",
                     on_event=lambda event: threading.Timer(0.2, os.kill, (os.getpid(), signal.SIGINT)).start())  # fmt: skip
    assert outcome.interrupted and outcome.returncode == -signal.SIGKILL
    assert time.monotonic() - start < 30


def test_sigterm_is_treated_like_an_interrupt(tmp_path: Path):
    program = f"""
    import sys
    from pathlib import Path
    from planner.runner import follow
    code = "import signal, sys, time; signal.signal(signal.SIGINT, lambda *_: sys.exit(130))"
    code += "; print('{{\\"event\\": \\"ready\\"}}', flush=True); time.sleep(60)"
    outcome = follow([sys.executable, "-c", code], variables={{}}, log=Path({str(tmp_path / "l")!r}), on_event=lambda e: print("ready", flush=True))
    print(outcome.interrupted, outcome.returncode)
    """
    process = subprocess.Popen(child(program), stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=30)[0] == "True 130\n"


def test_an_error_in_the_listener_leaves_no_child(tmp_path: Path):
    seen = []

    def broken(event):
        seen.append(event["pid"])
        raise RuntimeError("listener")

    code = 'import os, time; print(\'{"event": "x", "pid": %d}\' % os.getpid()); time.sleep(60)'
    with pytest.raises(RuntimeError, match="listener"):
        follow(child(code), variables={}, log=tmp_path / "l", on_event=broken)
    with pytest.raises(ProcessLookupError):
        os.kill(seen[0], 0)


def test_only_objects_with_an_event_are_events():
    assert parse_event('{"event": "x"}\n') == {"event": "x"}
    assert parse_event("[1]") is None and parse_event('{"a": 1}') is None and parse_event("{") is None
