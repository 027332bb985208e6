"""A configuration becomes an engine and data.

build.py         the engine of a configuration; `zero3d.from_config`
left_out.py      keys that a file leaves out and the model decides: data.length, data.tokenizer
inputs.py        mesh, model without weights, data and batches, checked on all ranks before anything large is allocated
vision.py        the processor of a model that takes images
attention.py     the implementation of attention, by name or by what is installed
text_part.py     model.part=text: where a refusal names it, and checkpoints of runs that were made before it
packages.py      packages that a configuration needs beside zero3d's own
losses.py        the loss of models that return logits; whether a model's own is computed in tiles
recurrences.py   how ranks that share sequences divide recurrences, where that is left open
optimizer.py     the optimizer that is named, and its parameter groups
schedule.py      the learning rate over a run, also over one that goes on
"""
