"""The parts of gpu_check.py, and the processes they run in.

account     what a part writes down while it runs, and the place it runs at
process     a part in a fresh process with a limit
worker      that process
record      results of all parts in one JSON file, and as a table
training    short trainings that the parts compare

loopback    axes of one rank that call their backend's collectives
numbers     parity, bits, two ranks on one device
streams     order on the side streams, slowed side streams, the CUDA sanitizer
host        what the host waits for, and how often a step calls the device
holdings    bytes on the device
speed       tokens/s, kernels, idle time
command     `zero3d train`
"""
