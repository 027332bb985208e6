"""The core: ZeRO stages 0-3 as one code path. Read the files in this order:

stages, layout, arena, collectives, unit, hooks, prefetch, optimizer.
"""
