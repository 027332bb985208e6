"""accelerate.Accelerator is ours, for all that imports it after this. PEER_STAGE: of ZeRO, in place of the default."""

import os
from typing import Any

import accelerate
import accelerate.accelerator

from zero3d.ways.huggingface.accelerate import Accelerator


class Staged(Accelerator):
    """With the stage that is asked for."""

    def __init__(self, *given: Any, **others: Any) -> None:
        super().__init__(*given, **{"stage": int(os.environ["PEER_STAGE"]), **others})


accelerate.Accelerator = accelerate.accelerator.Accelerator = Staged if "PEER_STAGE" in os.environ else Accelerator
