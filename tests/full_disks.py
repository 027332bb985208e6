"""Files that can be no longer than so much: a full disk without a disk of its own."""

import resource
import signal
from contextlib import contextmanager


@contextmanager
def limited(nbytes):
    """Let files of this process have so many bytes, inside; a write beyond fails with EFBIG, its first part is there."""
    old, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    before = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (old, hard))
        signal.signal(signal.SIGXFSZ, before)
