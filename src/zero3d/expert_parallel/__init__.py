"""Expert parallelism: the ranks of the ep axis share a layer's experts out, and tokens travel to their experts.

In reading order:

plan.py         which modules are experts, from a user's map and a model's own plan
rows.py         rows of tokens pass between ranks, and their gradients back
dispatch.py     a layer's forward: tokens to experts and back, for each rank that sent some
traffic.py      what that sends, by formula (no torch)
load.py         how many tokens each expert gets, and the bias that levels it
share.py        all of it: share_out(model, ep, plan, how)
"""
