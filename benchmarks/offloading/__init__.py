"""Parts of benchmarks/offload.py, one file each, and how all of them take turns."""
