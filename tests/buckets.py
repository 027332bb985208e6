"""Masters in halves, updated in buckets that are smaller than the parameters of tests."""

from contextlib import ExitStack, contextmanager
from unittest import mock


@contextmanager
def buckets_of(size):
    """Update masters in halves in buckets of so many elements, so that pieces are cut."""
    with ExitStack() as patches:
        for user in ("masters", "updates"):
            patches.enter_context(mock.patch(f"zero3d.zero.{user}.update_bucket", return_value=size))
        yield
