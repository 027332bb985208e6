"""Who is waiting for whom: what each rank is doing, in shared memory, and a monitor that speaks up when nothing moves.

heartbeat   a rank's record in shared memory, and how it is read
"""
