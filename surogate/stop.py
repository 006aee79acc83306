"""SIGINT and SIGTERM: at once where nothing can be lost, after the step at hand while steps are
made.
"""

import contextlib
import os
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any

_NOTE = "{}: stopping after this step, with a checkpoint; once more to stop at once\n"


class Stop:
    """Takes the two signals over within its block. ``asked`` is the name of the one that came.

    A signal ends the process by SystemExit(128 + its number); within ``deferred`` the first is only
    remembered, and the caller ends with ``status`` when it has saved what there is.
    """

    def __init__(self) -> None:
        self.asked, self.status = "", 0
        self._deferred = False
        self._before: dict[int, Any] = {}

    def __enter__(self) -> "Stop":
        with contextlib.suppress(ValueError):  # not in the main thread: signals are not ours
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler)

    @contextlib.contextmanager
    def deferred(self) -> Iterator[None]:
        """A block in which the first signal waits."""
        self._deferred = True
        try:
            yield
        finally:
            self._deferred = False

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self.asked or not self._deferred:
            raise SystemExit(128 + number)
        self.asked, self.status = signal.Signals(number).name, 128 + number
        os.write(2, _NOTE.format(self.asked).encode())  # a stream may be busy in the code below us
