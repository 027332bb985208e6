"""TRL's trainers train on our engine, whose process group goes with each test: TRL's fixtures take one for vLLM's."""

import pytest
import torch.distributed as dist

from plugins import peer_transformers as peer_transformers


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_teardown() -> None:
    """End the group that an engine has begun."""
    if dist.is_initialized():
        dist.destroy_process_group()
