"""Where bytes are held.

arena        allocates every buffer of the engine, by category and place, and reads every device value
scratch      how much the cast of masters takes beside them, and the update of those in halves

cgroups      what the cgroups of this process allow and hold
budget       how many bytes of its host's memory a rank may take
offload      what leaves the device, as the caller asks for it
placement    which records of states leave the device, and how long they are
auto_place   the place of states, and who updates them, where the caller leaves that open
blocks       the unit in which memory and disk are cut
records      runs of bytes that move between tiers whole, and what they are as tensors
host_slab    the host's memory of a rank's tiers: one mapping, carved into records
direct_file  a file that is read and written past the page cache
commit_file  which step a disk slab holds whole
file_lock    a lock on a file that one process holds
disk_slab    a rank's records on a disk, two slots for each
ring         buffers through which records pass between a tier and the device
threads      that read, write and update for tiers, and are given back wherever garbage is collected
"""
