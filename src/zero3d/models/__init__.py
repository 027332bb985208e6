"""Hugging Face and plain models: opened, built without weights, loaded by slices, searched for blocks.

open.py          model.path -> a module and its weights
places.py        what model.path names, by names of files
presets.py       configs of well-known models, by name
build.py         a config -> a module without weights; new weights
parts.py         which class a config opens as: the whole model, or its language model alone
files.py         tensors of a folder's files
quantised_folders.py  folders in 8 or 4 bits already
load.py          weights of a folder, by slices
kept.py          tensors of a folder that are not trained and that exports carry on
foreign_code.py  no code of a model's folder runs
bases.py         what a model is made of: base, language model, numbers of its config
blocks.py        the repeated blocks, and which parameters form a unit
recurrences.py   which modules are recurrences or short convolutions, and which parameters are theirs
chain.py         whether a model is a chain: what pipelines can cut
placeholders.py  what stands for the modules of other model chunks
packing.py       whether a model keeps packed documents apart; what training passes to it
packing_trial.py two documents in a row against each alone, in a copy of a model
packing_images.py  the same of documents with images
mixing.py        convolutions and recurrences of packed rows, and masks made without positions
kernel_trial.py  whether kernels of mixers keep packed documents apart on the device
packed_documents.py  what those functions are told of a forward: where its documents are
convolution.py   a causal convolution that reaches back to a document's first token
layer_kinds.py   which kinds of mixing a type's file defines, and a config that has each
fp64.py          arithmetic that stays in fp64 where a model's code asks for fp32
mask_code.py     what the code of a forward says: its names, whether positions make its masks
document_masks.py  masks of rows whose images attend in both directions
document_positions.py  positions of a document with images
written_numbers.py  numbers in modules: those that forwards write beside buffers, a hash of all
plan_names.py    names as transformers' plans call them
experts.py       how experts are computed
tiles.py         linear layers and embeddings whose weight is gathered in tiles
fp8.py           linear layers that multiply in fp8
quantised.py     frozen linear layers in 8 or 4 bits, decoded where they are used
quantised_experts.py  frozen stacks of experts in 8 or 4 bits, decoded for a layer's forward
bitsandbytes_layers.py  layers that somebody has loaded in 8 or 4 bits
codecs.py        weights to groups of 8 and 4 bits, and back
loss_code.py     what a model's code says of its loss: shifts of labels, and what criteria ignore
targets.py       what a model's own loss is the mean of: how many targets a micro-batch has
tiled_loss.py    the loss of the next token without logits of the whole vocabulary
"""

from __future__ import annotations

from importlib import import_module
from typing import Any


def __getattr__(name: str) -> Any:
    """Load the module of a public name when it is first used."""
    if name != "open":
        raise AttributeError(f"module 'zero3d.models' has no attribute {name!r}")
    return import_module("zero3d.models.open")
