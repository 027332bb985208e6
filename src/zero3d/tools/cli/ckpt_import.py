"""`zero3d ckpt import SOURCE FOLDER`: another trainer's checkpoint as one of ours."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from zero3d.errors import CheckpointError, short


def declare(parser: argparse.ArgumentParser) -> None:
    """Declare what it takes."""
    parser.add_argument(
        "source",
        metavar="SOURCE",
        help="a folder saved by DeepSpeed (stages 1 to 3, universal) or by torch.distributed.checkpoint",
    )
    parser.add_argument("folder", metavar="FOLDER", help="where the checkpoint is written, as FOLDER/step-N")
    parser.add_argument(
        "--weights-only", action="store_true", help="leave out the optimizer's moments, and begin at step 0"
    )


def imported(source: str, folder: str, weights_only: bool) -> dict[str, Any]:
    """Read, write, and return what was done. Raises CheckpointError."""
    from zero3d.ways.checkpoints import dcp, deepspeed
    from zero3d.ways.checkpoints.foreign import laid_out, write

    path = Path(os.path.expanduser(source))
    if not os.path.isdir(path):
        raise CheckpointError(f"{short(source)} is not a folder: type that of a checkpoint of DeepSpeed's or torch's.")
    try:
        of_deepspeed = deepspeed.found(path)
        folders = dcp.found(path) if of_deepspeed is None else []
    except OSError as error:
        raise CheckpointError(f"{short(source)} cannot be read: {error.strerror}.") from error
    if of_deepspeed is not None:
        with laid_out(of_deepspeed, "DeepSpeed 0.19"):
            foreign = deepspeed.read(of_deepspeed)
    elif folders:
        with laid_out(path, "torch.distributed.checkpoint"):
            foreign = dcp.read(folders)
    else:
        raise CheckpointError(
            f"{short(source)} has neither *_optim_states.pt or zero/ of DeepSpeed's nor {dcp.METADATA} of torch's: "
            "name the folder that has them, or the one whose file latest names it."
        )
    if weights_only:
        foreign.moments, foreign.step = {}, 0
    written = write(foreign, Path(os.path.expanduser(folder)))
    return {
        "source": foreign.source,
        "checkpoint": str(written),
        "step": foreign.step,
        "trained": len(foreign.masters),
        "frozen": len(foreign.frozen),
        "parameters": sum(values.numel() for values in (*foreign.masters.values(), *foreign.frozen.values())),
        "moments": bool(foreign.moments),
    }


def lines(done: dict[str, Any]) -> Iterator[str]:
    """Yield what was done, and how to go on."""
    moments, tensors = "with Adam's moments" if done["moments"] else "without moments", done["trained"] + done["frozen"]
    yield f"{done['source']}: {done['parameters']:,} parameters in {tensors} tensors, {moments}"
    yield f"checkpoint: {done['checkpoint']}    type zero3d train run.yaml --resume {done['checkpoint']}"
