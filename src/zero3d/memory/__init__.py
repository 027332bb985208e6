"""Where bytes are held.

arena        allocates every buffer of the engine, by category and place, and reads every device value
scratch      how much the cast of masters takes beside them, and the update of those in halves

segments     growing segments of a GPU's memory, asked for before CUDA starts
cgroups      what the cgroups of this process allow and hold
budget       how many bytes of its host's memory a rank may take
blocks       the unit in which memory and disk are cut
file_lock    a lock on a file that one process holds
threads      that read, write and update for tiers, and are given back wherever garbage is collected
"""
