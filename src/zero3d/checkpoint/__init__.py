"""Sharded, atomic checkpoints that load on any mesh; exports as Hugging Face folders.

state             what a checkpoint takes of an engine: the full model by name, states as 1-D pieces, boxes of those
frozen_base       which frozen weights of an engine are those of a folder, and are left out; the digest of that folder
json_values       state dicts as JSON values and back
folders           which checkpoints a directory holds, and what may go
copies            which an object store holds; uploads of which a kill leaves nothing that counts
writing           files that are on the disk once they are written: tensors through one buffer
save              every rank's file and part of the manifest, the manifest over them, the rename that commits
host_copy         the host's memory that states are copied into
background        saves behind training: the copy, then what `save` does, in a thread
manifest          what a checkpoint says of itself: records, names, the format
fields            values out of a JSON file by name, type and range
manifest_parser   the manifest read and checked, and the ranks' parts of it, one by one and held together
tiling            boxes are all of a tensor exactly once
files             regular files, their bytes block by block; checksums of files of tensors and of each tensor
integrity         files against the manifest: checksums and headers
option_values     options and numbers that torch's optimizer is given: by type, then tried on a twin of it
compatibility     the checkpoint against the engine: model, optimizer, scheduler, buffers, random states
restore           check all of it, then fill every rank's pieces from the boxes that overlap them
slots             what a restart from the slots of a disk needs beside their records
code_names        functions and classes, named by their code
update_settings   options of the optimizer's groups, and the schedule: noted, and put back after a load
resume_contract   whether a run that goes on has the bits of one that was never interrupted
fingerprint       one hash of all states, however ranks share them out
published         the weights as whole tensors by their published names, unit by unit
export            the weights as a folder that `from_pretrained` loads
model_card        its page: what the weights were made of and how, for people and for the Hub
base_licence      the licence of a base model, as its folder says it
source_commit     the commit that this code is of, where that is written down
streamed_folder   the same folder, as a receiver of streamed weights

In one process, without an engine:

inventory         which checkpoints a directory holds, by a quick look, and which may go
examine           every byte and box, to the end: the first fault of each file
stored_states     any range of any state, out of the boxes of all ranks
difference        two checkpoints against each other
offline_export    the folder that `export` writes, from a checkpoint's files

No torch: folders, copies, files, fields, frozen_base, manifest, manifest_parser, tiling, integrity, inventory,
resume_contract, model_card, base_licence, source_commit.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Load the module of a public name when it is first used."""
    if name != "streamed_folder":
        raise AttributeError(f"module 'zero3d.checkpoint' has no attribute {name!r}")
    return import_module("zero3d.checkpoint.streamed_folder")
