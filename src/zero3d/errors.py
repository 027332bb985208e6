"""Every error zero3d raises on purpose.

    Zero3dError
      ConfigError             an option, precision, stage or input that cannot work                      2
      MeshError               degrees and ranks that do not multiply                                     2
      DataError               training data that cannot be read                                          2
        TokenError            a token id or a label that the model's vocabulary does not have            2
      CheckpointError         a checkpoint that is missing, damaged or of another model                  2
        CopyError             a checkpoint that is whole on disk and was not copied to its store         2
        RetiredFormatError    a checkpoint of a format that only older versions read                     2
      OutOfBudget             a host's memory or a disk has less room than is asked for                  2
      LayoutError             a parameter is not where its unit put it
      OrderError              ranks used units in different orders, or one stopped answering
      ReleasedParameterError  a weight was copied or serialised while it is sharded
      NonFiniteError          gradients or trained weights that are NaN or infinite
      MemoryExhaustedError    a device or a host has no memory left in the middle of a run
      CorruptionError         a rank computed other gradients than it or its neighbour did from the same values
      StreamError             streamed weights that did not reach their receiver as they were sent
      RankError               another rank failed, and not with one of these

A message says what was asked, what was found (with the arithmetic) and what to type.

Exit codes. 2 is for bad input alone: the errors marked so, unless the system made one of them (an OSError is its
cause): then it is 2 only where that speaks of a path somebody gave (missing, no folder, not allowed, ...) and 1 where
a disk is full or fails. All else is 1. An error that one rank raises and others repeat has one code on all of them
(agreement.py), and ranks that lose a peer end with that peer's code if it could still say why (axis.py), else with 1.
"""

from __future__ import annotations

import errno

BAD_INPUT, FAULT = 2, 1
OF_PATHS = frozenset(
    (
        errno.ENOENT,
        errno.ENOTDIR,
        errno.EISDIR,
        errno.EEXIST,
        errno.EACCES,
        errno.EPERM,
        errno.EROFS,
        errno.ELOOP,
        errno.ENAMETOOLONG,
        errno.ENOTEMPTY,
    )
)
FULL = (errno.ENOSPC, errno.EDQUOT)
REMEDIES = dict.fromkeys(FULL, "make room") | {
    errno.EFBIG: "raise `ulimit -f` or make room",
    **dict.fromkeys((errno.EMFILE, errno.ENFILE), "raise `ulimit -n`"),
    **dict.fromkeys(
        (errno.EEXIST, errno.ENOTEMPTY, errno.ENOTDIR, errno.EISDIR, errno.ELOOP), "move away what else has this name"
    ),
    **dict.fromkeys((errno.ENOENT, errno.ESTALE), "see to it that nobody removes this folder"),
    **dict.fromkeys((errno.EACCES, errno.EPERM), "let this user write there"),
    errno.EROFS: "mount it so that it can be written",
    errno.ENAMETOOLONG: "choose a shorter path",
    **dict.fromkeys((errno.ENOMEM, errno.EAGAIN), "end what else takes this machine's memory"),
}
SHOWN = 60  # characters of a value in a message


def short(text: object) -> str:
    """Return a value as a message quotes it: the beginning of a long one, without breaks and control characters."""
    try:
        quoted = str(text)
    except ValueError:  # a whole number of more digits than Python writes
        quoted = "a huge number"
    if len(quoted) > SHOWN or not quoted.isprintable():
        words = " ".join(quoted[: 4 * SHOWN].split())
        quoted = "".join(each if each.isprintable() else ascii(each)[1:-1] for each in words)
    return quoted if len(quoted) <= SHOWN else f"{quoted[:SHOWN]}..."


def remedy_of(error: OSError) -> str:
    """Return what to do about a file that the system does not let us write, as the beginning of a sentence."""
    if isinstance(error, ConnectionError | TimeoutError):
        return "look at the network"
    return REMEDIES.get(error.errno or 0, "have the disk looked at")


class Zero3dError(Exception):
    """Root of all errors raised on purpose; the command line makes one line and an exit code of each.

    bad_input  whether errors of this class are about what the user gave
    from_rank  the rank that tells it, where another rank failed; None on the failing rank itself
    agreed     the exit code of that rank
    """

    bad_input = False
    from_rank: int | None = None
    agreed: int | None = None

    @property
    def exit_code(self) -> int:
        """Return 2 for bad input, 1 where a machine, a peer or a bug is to blame."""
        if self.agreed is not None:
            return self.agreed
        system = self.__cause__ if isinstance(self.__cause__, OSError) else None
        by_user = system is None or system.errno in OF_PATHS
        return BAD_INPUT if self.bad_input and by_user else FAULT


class ConfigError(Zero3dError, ValueError):
    """An option, precision, stage or input that cannot work."""

    bad_input = True


class MeshError(Zero3dError, ValueError):
    """Degrees and ranks that do not multiply, or an axis that is not built yet."""

    bad_input = True


class LayoutError(Zero3dError, RuntimeError):
    """A parameter is no longer where its unit put it."""


class OrderError(Zero3dError, RuntimeError):
    """Ranks used units in different orders, or a peer stopped answering."""


class ReleasedParameterError(Zero3dError, RuntimeError):
    """A weight was read, written, copied or serialised while only its shard is held."""


class OutOfBudget(Zero3dError, MemoryError):
    """A host's memory or a disk has less room than is asked for."""

    bad_input = True


class CheckpointError(Zero3dError, RuntimeError):
    """A checkpoint that is missing, damaged or of another model."""

    bad_input = True


class RetiredFormatError(CheckpointError):
    """A checkpoint of a format that this version no longer reads, whole or not."""


class CopyError(CheckpointError):
    """A checkpoint that is whole on disk and could not be copied to an object store."""


class DataError(Zero3dError, ValueError):
    """Training data that cannot be read."""

    bad_input = True


class TokenError(DataError, IndexError):
    """A token id or a label that the model's vocabulary does not have: torch's own lookups raise IndexError for it."""


class NonFiniteError(Zero3dError, ArithmeticError):
    """Gradients or trained weights that are NaN or infinite."""


class MemoryExhaustedError(Zero3dError, MemoryError):
    """A device or a host has no memory left in the middle of a run."""


class CorruptionError(Zero3dError, ArithmeticError):
    """A rank computed other gradients than it or its neighbour did from the same values: a machine is at fault."""


class StreamError(Zero3dError, RuntimeError):
    """Streamed weights that did not reach their receiver as they were sent, or a receiver that did not take them."""


class RankError(Zero3dError, RuntimeError):
    """Another rank failed with an error nobody raised on purpose; that rank raises the error itself."""
