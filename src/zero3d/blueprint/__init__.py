"""What every unit of a rank is, decided once, before anything is allocated: pure arithmetic, no torch.

layout       where each parameter lies in its unit, and where shards are cut
stages       the stage table, and what it allows
state_spans  where which optimizer states lie in what a rank updates
"""
