"""Tensor parallelism over plain modules: a plan gives modules styles, styles cut parameters and add regions.

In reading order:

regions.py          the functions between common and own activations: copy_to, reduce_from, gather_from, scatter_to
channel.py          their collectives
plan.py             which style each module gets, from a user's map and a model's own plan
shipped.py          plans that transformers lacks
proposal.py         lines of a plan that a message proposes
styles.py           what a style cuts and hooks
mixers.py           Mamba2 mixers: heads and groups of a rank, norms and B, C that ranks share
heads.py            arguments of attention with an entry for every head
vocabulary.py       embedding, head and loss over a cut vocabulary
sequence.py         sequence parallelism, and dropout around cut modules
planned_regions.py  where activations pass between ranks, from the plan alone
traffic.py          what that sends, by formula (no torch)
parallelize.py      all of it: parallelize(model, axis, ledger, plan); parameters become the rank's own
"""
