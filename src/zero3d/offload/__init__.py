"""What leaves the device: ZeRO-Offload (arXiv:2101.06840) and ZeRO-Infinity (arXiv:2104.07857).

rates        measured once, for the choice of an executor
records      runs of bytes that move between tiers whole, and the tensors in them
tiered_records all records of a rank, wherever each has its place
ring         buffers through which records pass between a tier and the device
host_tier    records of the host, as its row has them opened (spec/tiers.py)
disk_tier    the same of a disk
host_slab    the host's memory of a rank's tiers: one mapping, carved into records
disk_slab    a rank's records on a disk, two slots for each
record_file  records that are written once, such as frozen weights
direct_file  a file that is read and written past the page cache
commit_file  the file that says which step a disk slab holds whole
updates      of buckets whose states are in records, behind the next forward
executors    of these updates: the torch optimizer on the device, or Adam on the host
host_adam    Adam's update on the host, in chunks
rounding     of its moments to bf16, at random
"""
