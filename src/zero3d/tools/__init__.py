"""Tools: they import the library and the ways in, and neither imports them.

plan    what a model, a cluster and a plan need and take, by formula; search
sim     the engine on a fake group: `zero3d simulate`; a model becomes the planner's data
advice  what the planner says of a run that trains
page    what `zero3d plan` says, and HTML pages
doctor  what is wrong with a machine, with hosts together, with a dead run
vision  vision-language models by type: a tiny model of each
cli     one file per verb; workers, launchers
"""
