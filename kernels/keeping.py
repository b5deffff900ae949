"""Outputs that are kept while a function runs, and handed out when it runs again: products and attention of selective recomputation.

A tape is a list. Inside `record(tape)` every call of `kept` appends what it computed; inside `replay(tape)` the calls, in the same order, return
those instead of computing. One thread at a time records or replays.
"""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from torch import Tensor

_tape: list | None = None
_replaying = False


def kept(compute: Callable, *args: Any) -> Any:
    """`compute(*args)`, a tensor or a tuple of them, by the tape that is in use."""
    if _tape is None:
        return compute(*args)
    if _replaying:
        return _tape.pop(0)
    found = compute(*args)
    # aliases: the outputs themselves will refer to their graph, and that to the tape
    _tape.append(found.detach() if isinstance(found, Tensor) else tuple(t.detach() for t in found))
    return found


@contextlib.contextmanager
def _using(tape: list | None, replaying: bool) -> Iterator[None]:
    global _tape, _replaying
    before = _tape, _replaying
    _tape, _replaying = tape, replaying
    try:
        yield
    finally:
        _tape, _replaying = before


def record(tape: list | None) -> contextlib.AbstractContextManager:
    """Inside, outputs are appended to `tape`; None: they are not kept."""
    return _using(tape, False)


def replay(tape: list | None) -> contextlib.AbstractContextManager:
    """Inside, outputs come from `tape`, first in first out, and leave it; None: they are computed."""
    return _using(tape, True)
