"""CUDA sources that only tests compile."""

from pathlib import Path
from typing import Any

from surogate.kernels.nvrtc import Source


class Sample(Source):
    """A file of tests/emulator/samples, or any text; no part of what ``make compile`` compiles."""

    def __init__(
        self, stem: str, instances: dict[str, list[tuple[str, ...]]], text: str | None = None
    ) -> None:
        self.stem, self.instances = stem, instances
        self._functions: dict[Any, Any] = {}
        self._shared: dict[Any, int] = {}
        self._text = text

    def text(self) -> str:
        if self._text is not None:
            return self._text
        return (Path(__file__).parent / "samples" / f"{self.stem}.cu").read_text()
