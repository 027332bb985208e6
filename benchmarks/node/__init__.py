"""The parts of cluster_check.py: what only several devices of one node can show.

launches   processes of a part: one launch that fails or hangs leaves the others their time
links      the doctor, and a sum over all devices with peer access and without
axes       stages and axes beside one process
groups     bytes of communicators beside the plan's
holes      a gradient missing on one rank, in each block
drills     a rank stopped in each phase, a rank killed
largest    the largest preset that the plan says fits: beside FSDP2, over tp and pp, beside the plan
"""
