"""What the planner says of a run that trains, and what runs say of the planner's figures.

planner      what a run is given to ask: the answers of the planner (no torch at import)
planned_run  a configuration as the planner sees it: what `auto` becomes in it, what to change when memory has run out
plan_check   the planner's figures, checked by a run's third step
small_runs   steps of small models, by which a machine is calibrated
"""
