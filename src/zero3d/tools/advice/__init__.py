"""The planner's answers to a run that trains, and the checks of its figures by runs.

planner      the planner that a run is given, and asks (no torch at import)
planned_run  a configuration as the planner sees it: what `auto` becomes in it, what to change when memory has run out
plan_check   the planner's figures, checked by a run's third step
small_runs   steps of small models, by which a machine is calibrated
"""
