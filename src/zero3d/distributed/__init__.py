"""Ranks, and the messages between them.

degrees       sizes of the axes to ranks and back (no torch)
mesh          the ranks of a run on their axes; starts torch.distributed
devices       where a rank computes; cores: near its device
rendezvous    how the ranks of a run find each other in a store
axis          one axis: its process groups, messages between its ranks, errors that say where
groups        an axis' process groups: options by what they carry, and their first collective
waiting       a few numbers through the store, for ranks that come hours apart
algorithms    how collectives are done: natively, or by messages between every two ranks
choice        the algorithm of an axis, by rule (no torch)
collectives   the collectives of the core over one axis
shared_buffer a receive buffer of one rank that others of its host write into
block_codec   values in blocks of 256 as whole numbers with a scale; block_bytes: what they take (no torch)
coded_sums    sums over slow links, of terms in a narrow form
unit_order    how units pass in one order: the first one, and how many are on their way at once (no torch)
order_log     each rank's operations, in order, and the proof that ranks can never meet (no torch)
order_watch   a thread that looks for that proof when nothing moves, and ends the waits
own_calls     collectives of the program's own in which a rank waits for one that waits in a call of ours
ledger        the traffic of every operation, by axis and unit (no torch)
agreement     all ranks go on, or all raise the same error
determinism   deterministic algorithms on accelerators, and the settings that bits depend on there
kernels       the CPU's kernels, named by the bits of a trial
"""
