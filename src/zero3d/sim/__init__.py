"""The dry run: the real engine on a fake process group, without data, values and GPUs.

group       one rank of a world that is not there; all patches that this takes
where       which phase, micro-batch and module is running
memory      every storage from birth to death, as a log
replay      the log as a peak with its largest tensors, and as a timeline
flops       multiplications and additions by phase and part
observe     one step of an engine, real or not, under all of these
rank        one rank of a configuration, in a process of its own
simulate    one rank of each class of a mesh
result      what comes out, with JSON round trip
trace       the same for chrome://tracing or Perfetto
"""
