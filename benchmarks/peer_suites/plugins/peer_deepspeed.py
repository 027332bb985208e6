"""deepspeed.initialize, its error, zero.Init, zero.GatheredParameters and what utils has for parameters are ours.

They are so in DeepSpeed's harness: DeepSpeed itself is installed, for its tests import its names.

Those tests run on ranks that a fork server starts anew, which would import DeepSpeed as it is: they are forked from
pytest's process instead. The all-reduce in shared memory, which would be compiled first, is left out.
"""

import os

os.environ["DS_ACCELERATOR"] = "cpu"
os.environ.setdefault("DS_UNITTEST_TIMEOUT", "100")
os.environ.setdefault("LOCAL_SIZE", "2")  # CPUs count as one device each elsewhere, and tests of two ranks are skipped

import deepspeed
import torch.multiprocessing

from zero3d.errors import ConfigError
from zero3d.ways.deepspeed import initialize, utils, zero

_set_start_method = torch.multiprocessing.set_start_method


def fork(method: str, force: bool = False) -> None:
    """Set the start method, but for the fork server."""
    _set_start_method("fork" if method == "forkserver" else method, force=force)


deepspeed.initialize, deepspeed.DeepSpeedConfigError = initialize, ConfigError
deepspeed.zero.Init, deepspeed.zero.GatheredParameters = zero.Init, zero.GatheredParameters
for name in [name for name in vars(utils) if name.startswith("safe_") or name == "RepeatingLoader"]:
    setattr(deepspeed.utils, name, getattr(utils, name))
deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
torch.multiprocessing.set_start_method = fork
