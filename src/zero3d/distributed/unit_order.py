"""Says in which order an axis sends units, and how many are on their way at once. No torch.

Each unit that is on its way takes memory for its whole weights or gradients. Its allocation, its account and the proof
that ranks can never meet read the same numbers here.
"""

from __future__ import annotations

ROOT = "root"  # the unit that a forward begins with: all that no block, embedding or head owns
AHEAD = 2  # gathers that run ahead of their use
IN_FLIGHT = 2  # reductions that nobody has waited for yet, and sums over copies of shards behind them
LEAVING = 1  # reduced shards on their way to the host
