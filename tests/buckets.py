"""Masters in halves and records of states, updated in buckets that are smaller than the parameters of tests."""

from contextlib import ExitStack, contextmanager
from unittest import mock

USERS = ("zero.masters", "zero.updates", "offload.states", "engine.averages")


@contextmanager
def buckets_of(size):
    """Update masters in halves, and states in records, in buckets of so many elements, so that pieces are cut."""
    with ExitStack() as patches:
        for user in USERS:
            patches.enter_context(mock.patch(f"zero3d.{user}.update_bucket", return_value=size))
        yield
