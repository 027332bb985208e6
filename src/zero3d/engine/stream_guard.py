"""Refuses, while an engine streams its weights, everything that would change them, and a second stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Self

from zero3d.engine.feature import Feature
from zero3d.engine.runtime import Runtime
from zero3d.errors import ConfigError


class Streaming(Feature):
    """Knows whether weights are being streamed, and refuses meanwhile what would change them."""

    name = "stream_weights"

    def __init__(self) -> None:
        self._under_way = False

    @classmethod
    def opened(cls, parts: Runtime) -> Self:
        return cls()

    def refuse(self, call: str) -> None:
        """Raise ConfigError while a stream is under way."""
        if self._under_way:
            raise ConfigError(
                f"{call} while weights are streamed: take the stream to its end first, or close() it on all ranks."
            )

    @contextmanager
    def begun(self) -> Iterator[None]:
        """Have a stream under way inside. Raises ConfigError where one is."""
        self.refuse("stream_weights()")
        self._under_way = True
        try:
            yield
        finally:
            self._under_way = False
