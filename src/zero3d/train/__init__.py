"""Runs: training on top of the engine, its records and reports, and its measurements beside the formulas.

run                a run from start to end, and its result
setup              a configuration becomes an engine and data
start              the options of a run's start, and refusals before it
folder             the output folder: what lies where, claimed once, pruned
lock               one run per output folder
resume             the checkpoint that a run goes on from, loaded into engine and data
resume_settings    settings of a resumed run: compared with the earlier ones, and chosen
loop               steps, evaluations, checkpoints, stops
loop_state         how far a run is, as a checkpoint keeps it
stragglers         ranks slower than their peers, found in what each takes of its own (no torch)
rank_watch         what ranks tell of that, and what a run says of it
criterion          which evaluation is the best one, and when a run ends early
evaluations        results of an evaluation: the held-out loss, of each source of a mixture too
own_values         values of a user's own function at each evaluation
callbacks          a user's own classes, told what happens
own_calls          calls of a user's own code
event_commands     a user's own commands, started when something happens
resume_hints       why a run cannot go on as it is, and the command to type
offload            states off the device: the choice for auto, its part in a resumed run, files on a disk
stop               a signal becomes a request to stop
metrics            records of steps to metrics.jsonl and to trackers
trackers           TensorBoard, Weights & Biases, SwanLab, MLflow, Trackio, which a run goes on without
endpoints          Prometheus and OpenTelemetry: the last values of a run, for monitoring
progress           a live bar, or lines; how long the rest takes
profiler           a profiler's trace of a few steps, on every rank
traces             traces of several ranks as one file (no torch)
flops              operations of a step, and how many a device could do
measure            memory measured beside the formulas
device_memory      memory of a device, allocated and reserved
traffic            bytes sent beside the formulas
planner            the interface of a planner, and a planner that plans nothing
weights            weights kept or cast in gathers, as its plan says
run_card           what a run's file and records say for the model card of its export
exported_folder    the exported folder: written, put in place, loaded again
sample             a text that the trained model goes on with
curve              averages of losses, and losses as text
series             a run's curves and what happened at which step, by its records
run_plot           them as one picture, run.png
tables             memory and traffic of a run as tables (no torch)
session_report     report.json: what only the process of a run knows, for zero3d report
report             a finished run as tables and as JSON
variants           the runs of a comparison
comparison         their figures beside those of the first
comparison_table   as tables
comparison_plot    as one picture
"""
