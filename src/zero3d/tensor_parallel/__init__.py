"""Tensor parallelism over plain modules: plans, cuts, regions, what it sends."""
