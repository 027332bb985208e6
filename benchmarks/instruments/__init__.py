"""Instruments that find on a CPU what would go wrong on an accelerator; tests and gpu_check.py use them.

accelerator        a device of its own over host memory: tensors that only its kernels can read
host_traffic       counts its copies from and to the host and all that waits for it, by line of zero3d
groups             process groups that note what they are asked, refuse other devices, and need no peers or have threads
first_operations   whether a group's first operation has all its ranks
rendezvous         replays what ranks ask of groups as NCCL would do it, also on harder machines: who waits for whom
interleavings      tries every order in which hosts of ranks and what they ask for can come
unequal            ranks that do not do the same: a hole on one of them, pipelines, a caller's groups
planted_between_ranks  faults that are put into zero3d, to see which instrument finds which
races              streams, and whether what they do to the same memory is in an order
traffic            bytes that a step moves between memory and a cache
step_syncs         what a step of an engine costs in waits, in a process of its own
dispatches         what a step has torch dispatch, beside FSDP2's and plain PyTorch's
step_seconds       what a step takes of the host in CPU seconds and own calls, in turns with another checkout
"""
