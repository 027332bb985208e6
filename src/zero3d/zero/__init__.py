"""The core: ZeRO stages 0-3 as one code path.

stages, layout, tokens             the stage table; where parameters lie; which uses of units gather them
policy, weights, gradients, unit   what units share; the parameters gathered, released and reduced together
hooks, gathers, reductions         module and autograd events; when units are gathered; when they are reduced
streams                            the side streams of both
masters, state_spans, updates      what the optimizer updates, whole or in halves; where which states are
accumulation, optimizer_states     when a step is due; a torch optimizer over pieces, its states in flat buffers
optimizer                          the step: norm, clip, update, refresh
host_update, rounding              Adam's update on the host, in chunks; its moments in bf16
param_groups, initial_weights      what the caller passes: optimizers and groups; the first weights
model_group                        what the ranks that share one copy of the model agree on in a step
exact                              the same bits at any number of data-parallel ranks
"""
