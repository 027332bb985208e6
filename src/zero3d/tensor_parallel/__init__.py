"""Tensor parallelism: modules that compute with this tp rank's slices of their parameters."""
