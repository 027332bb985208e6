"""Who waits for whom: what each rank is doing, in shared memory, and a monitor that speaks up when nothing moves.

heartbeat   a rank's record in shared memory, and how it is read
own_files   what is read of folders that others may write to, and made there
place       where these records are
stacks      Python stacks of ranks, whatever they are in
waits       what is known of each rank, and from that who waits for whom
monitor     looks at the records, and finds stalls
block       what is said then, as text and as data
joined      the monitor of ranks that another launcher started: a process of its own (`python -m zero3d.watchdog`)
flight_recorder  NCCL's own record of a rank's last collectives, in a file
orphans     what ranks do when their launcher is gone
"""
