"""Every error zero3d raises on purpose.

    Zero3dError
      ConfigError             an option, precision, stage or input that cannot work
      MeshError               degrees and ranks that do not multiply
      LayoutError             a parameter is not where its unit put it
      OrderError              ranks used units in different orders, or one stopped answering
      ReleasedParameterError  a weight was copied or serialised while it is sharded
      OutOfBudget             a memory budget would be exceeded
      CheckpointError         a checkpoint that is missing, damaged or of another model
      DataError               training data that cannot be read
      RankError               another rank failed, and not with one of these

A message says what was asked, what was found (with the arithmetic) and what to type.
"""

from __future__ import annotations

SHOWN = 60  # characters of a value in a message


def short(text: object) -> str:
    """A value as a message quotes it: the beginning of a long one, without line breaks."""
    try:
        said = str(text)
    except ValueError:  # a whole number of more digits than Python writes
        said = "a huge number"
    said = " ".join(said[: 4 * SHOWN].split()) if len(said) > SHOWN else said
    return said if len(said) <= SHOWN else f"{said[:SHOWN]}..."


class Zero3dError(Exception):
    """Root of all errors raised on purpose; the command line makes one line and an exit code of each.

    from_rank  the rank that tells it, where another rank failed; None on the failing rank itself
    """

    from_rank: int | None = None

    @property
    def exit_code(self) -> int:
        """2 for what the user asked, a ConfigError always; 1 where a machine or another rank's bug is to blame."""
        fault = isinstance(self, RankError) or isinstance(self.__cause__, OSError)
        return 2 if isinstance(self, ConfigError) or not fault else 1


class ConfigError(Zero3dError, ValueError):
    """An option, precision, stage or input that cannot work."""


class MeshError(Zero3dError, ValueError):
    """Degrees and ranks that do not multiply, or an axis that is not built yet."""


class LayoutError(Zero3dError, RuntimeError):
    """A parameter is no longer where its unit put it."""


class OrderError(Zero3dError, RuntimeError):
    """Ranks used units in different orders, or a peer stopped answering."""


class ReleasedParameterError(Zero3dError, RuntimeError):
    """A weight was copied or serialised while only its shard is held."""


class OutOfBudget(Zero3dError, MemoryError):
    """A memory budget would be exceeded."""


class CheckpointError(Zero3dError, RuntimeError):
    """A checkpoint that is missing, damaged or of another model."""


class DataError(Zero3dError, ValueError):
    """Training data that cannot be read."""


class RankError(Zero3dError, RuntimeError):
    """Another rank failed with an error nobody raised on purpose; that rank raises the error itself."""
