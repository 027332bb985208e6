"""The core: ZeRO stages 0-3 as one code path.

tokens                             which uses of units gather them
unit_parts, weights, unit          what a unit is made of; the parameters gathered, released and reduced together
local_gradients, gradient_shards   what autograd gives a rank; this rank's shard of the sums over ranks
gradients                          both together, from autograd to the step
wires                              what travels when weights are gathered, and over which ranks
hooks, gathers, reductions         module and autograd events; when units are gathered; when they are reduced
streams                            the side streams of both
pending_parameters, released_parameters  operations on parameters whose values are on their way, or not here
buckets, masters                   a unit's states wherever they are placed; what the optimizer updates
updates                            a torch optimizer's step over all pieces or bucket by bucket
arrivals                           which gradients of a unit have come in a backward, and whether more will
accumulation, optimizer_states     when a step is due; a torch optimizer over pieces, its states in flat buffers
optimizer                          the step: norm, clip, update, refresh
param_groups, initial_weights      what the caller passes: optimizers and groups; the first weights
model_group                        what the ranks that share one copy of the model agree on in a step
step_parts, clocks                 the parts of a step that take time, by name; seconds of each
own_seconds                        what each step takes of a rank without its waits, by which slow ranks are found
exact                              the same bits at any number of data-parallel ranks
"""
