"""The command line: one small file per verb, each imported only when it is typed.

main               reads the command line, maps errors to exit codes
train              a run, on workers of this machine or as one of a launcher's
compare            several runs, one after another, all checked before the first; their figures written and shown
plan               plans for a cluster; plan_explain one of them, plan_theory the paper's figures, plan_options
planned_images     what a plan knows of a run's images
calibrate          this machine, measured for the planner
doctor             this machine, a job's hosts or a dead run, examined
simulate           a step without its ranks
ckpt               checkpoints looked at and removed; ckpt_export, ckpt_import; ckpt_text for people
config             what a run would use, what keys mean
report             a run's folder, read by run_folder: how it ended, settings, losses, memory; report_text for people
generate           a text continued: generate_source, whose model; generate_text, prompts and tokens; generate_ranks
launch             what starts a run on a cluster
submission         what a job is refused for where it is submitted; slurm: a batch script
preflight          what is refused before workers start; unbuilt_types, plans and sizes of types
rank_environment   whether this process is a launcher's worker, and which
workers            this machine's workers as their launcher sees them
worker             a worker: its work, its exception, its exit
oom                what the system says about a worker that was killed
"""
