"""Parts of benchmarks/faults.py, one file each, and what all of them use.

What is mutated, and how, is the tests' (tests/mutations.py, tests/damage.py): a campaign takes more cases of it.
"""
