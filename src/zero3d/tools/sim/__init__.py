"""The dry run: the real engine on a fake process group, without data, values and GPUs; and models traced likewise.

group       the process group, the axes and the mesh of a rank whose world is not there
peers       the norms that the absent ranks of its model-parallel group would have
patches     functions of others that are replaced meanwhile, and why
position    which phase, micro-batch and module is running
memory      every storage from birth to death, as a log; the arena that labels them
replay      the log as a peak with its largest tensors, and as a timeline
flops       multiplications and additions by phase and chunk
observe     one step of an engine, real or not, under all of these
repeats     how many micro-batches of a step must be run to know all of them
rank        one rank of a configuration, in a process of its own; `request` is its input
simulate    one rank of each class of a mesh
result      what comes out, with JSON round trip
card_autocast  autocast with a card's lists of operations
mixer_kernels  kernels of recurrences and convolutions, which a card would run
orders      the actions of every pipeline stage; `gantt` when they work and wait
chrome      all of it for chrome://tracing or Perfetto
file_lengths  tokens of a sample of a run's records; sampled_records: that
images      what a sequence has of images; `known` values of whole numbers where all else has shapes alone
file_images  how many patches sequences of a run's data have, and how fast a core prepares them
tower       the vision tower of a model as parts of its spec
model_spec  a model as the planner sees it; `units`, `figures`, `live`, `stand_ins` are its parts
"""
