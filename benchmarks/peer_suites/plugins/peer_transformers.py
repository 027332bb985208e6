"""transformers.Trainer and every subclass of it train on our engine. PEER_STAGE: of ZeRO, in place of the default."""

import os

from zero3d.ways.huggingface.transformers import patch

patch(stage=int(os.environ["PEER_STAGE"]) if "PEER_STAGE" in os.environ else None)
