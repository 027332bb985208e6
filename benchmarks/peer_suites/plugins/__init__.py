"""Plugins of pytest's for the suites of peers: `record` writes what became of each test, the others put us in place.

rank                one of two ranks that run the same tests
gathered            weights are whole between steps, for tests that read them

peer_transformers   transformers.Trainer trains on our engine (also for TRL)
peer_accelerate     accelerate.Accelerator is ours
peer_deepspeed      deepspeed.initialize and deepspeed's schedules are ours
"""
