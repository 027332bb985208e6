"""The dry run: the real engine on a fake process group, without data, values and GPUs; and models traced likewise.

group       one rank of a world that is not there
patches     everything that is put in the place of something else meanwhile, and why
where       which phase, micro-batch and module is running
memory      every storage from birth to death, as a log
replay      the log as a peak with its largest tensors, and as a timeline
flops       multiplications and additions by phase and part
observe     one step of an engine, real or not, under all of these
repeats     how many micro-batches of a step must be run to know all of them
peers       what its replica would tell it
rank        one rank of a configuration, in a process of its own; `request` is what it is asked
simulate    one rank of each class of a mesh
result      what comes out, with JSON round trip
gantt       when the stages of a pipeline work and wait
chrome      all of it for chrome://tracing or Perfetto
trace       a model as the planner sees it; `units`, `figures`, `live` are its parts
"""
