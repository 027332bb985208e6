"""Lines that commands of a run write, which nobody waits for: read from a pipe as they come."""

import os
import select

PATIENCE = 60  # seconds, after which a command that was to start has not


class Heard:
    """A named pipe; `on(*events)` is a `log.on` whose commands write a line of facts to it."""

    def __init__(self, folder):
        self.path = folder / "heard"
        os.mkfifo(self.path)
        self._file = os.open(self.path, os.O_RDWR)  # so that who writes needs no reader
        self._rest = b""

    def on(self, *events, facts=("EVENT", "HOW", "STEP")):
        line = " ".join(f"$ZERO3D_{name}" for name in facts)
        return dict.fromkeys(events, f"echo \"{line}\" > '{self.path}'")

    def lines(self, many):
        """The next lines, sorted: commands run side by side."""
        while self._rest.count(b"\n") < many:
            assert select.select([self._file], [], [], PATIENCE)[0], f"{many} lines are expected; there is {self._rest}"
            self._rest += os.read(self._file, 1 << 16)
        *found, self._rest = self._rest.split(b"\n", many)
        return sorted(line.decode() for line in found)

    @property
    def silent(self):
        """Whether nothing else has come."""
        return not self._rest and not select.select([self._file], [], [], 0)[0]

    def close(self):
        os.close(self._file)
