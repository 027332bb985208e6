"""The doctor: what is wrong with a machine, or with a run that died, and what to type. `zero3d doctor` is its verb.

    table.PROBES -> examine(PROBES, Request) -> findings by name -> view.show, view.as_json, exit code

finding       a verdict, what was found with its figures, what to type; what a probe is asked (`Request`)
table         symptom -> probe -> remedy, as data
examine       probes in processes of their own, each with its time
probe         such a process
versions      packages that must fit together
devices       GPUs, peer-to-peer, NCCL, ACS, pinned memory; topology: what nvidia-smi and lspci print
allreduce     an all-reduce among processes of this machine
network       interfaces, hosts, ports
adapters      InfiniBand and RoCE
storage       /dev/shm, disk, free space, clocks
limits        limits of a process, leftovers of dead runs
together      the hosts of a launcher's job, one with another; links: the pace between each two neighbours
preflight     which findings stop a job
dead_run      the watchdog's file of a run
slow_rank     a rank that a run found slower than its peers
view          a table for people, JSON for programs

No torch at import; processes that need it import it inside.
"""
