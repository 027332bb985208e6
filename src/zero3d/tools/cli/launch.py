"""`zero3d launch TARGET CONFIG`: prints what starts `zero3d train CONFIG` on a cluster; starts nothing.

slurm      a batch script (slurm.py): one task of srun per GPU, which zero3d joins by itself
k8s        a manifest: an indexed Job with one pod per node, torchrun in each, and a headless Service
torchrun   the command line, for one node or the same on each of several

What is trained stays in CONFIG and its overrides, which are checked here as far as they can be (submission.py); the
text carries nodes and processes only, and says what could not be looked at.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from difflib import get_close_matches
from pathlib import Path

import yaml

from zero3d.config import Config, degrees_of, given_keys, split_words
from zero3d.config.sections import Plan
from zero3d.distributed.degrees import least_ranks
from zero3d.errors import ConfigError, MeshError, short
from zero3d.spec.mesh import Mesh
from zero3d.tools.cli import slurm as batch
from zero3d.tools.cli.plan_options import remembered_of
from zero3d.tools.cli.preflight import check_world
from zero3d.tools.cli.slurm import Resources
from zero3d.tools.cli.submission import check_submission
from zero3d.tools.plan.hardware import cluster
from zero3d.train.setup.left_out import load_filled

SLURM = "slurm"
GPUS = 8  # per node, unless said otherwise
PORT = 29500  # of torchrun's rendezvous
RESTARTS = 3  # of all ranks of a node, after one has died; each goes on from the last checkpoint
GRACE = 300  # seconds between SIGTERM and SIGKILL, for the step at hand and its checkpoint


@dataclass(frozen=True)
class Job:
    """Describes what is started, and on how much.

    comments   what the model has decided of the configuration, and what could not be looked at here
    resources  what a batch system is asked for
    """

    config: str
    overrides: tuple[str, ...]
    nodes: int
    gpus: int
    comments: tuple[str, ...] = ()
    resources: Resources = field(default_factory=Resources)

    @property
    def name(self) -> str:
        """The config's name as Kubernetes and Slurm accept it: letters, digits, "-"; at most 40."""
        return re.sub(r"[^a-z0-9]+", "-", f"zero3d-{Path(self.config).stem.lower()}")[:40].strip("-")

    @property
    def command(self) -> str:
        """Quoted for the shell; --resume auto starts afresh where there is nothing to resume."""
        return shlex.join(["zero3d", "train", self.config, *self.overrides, "--resume", "auto"])


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument("target", metavar="TARGET", help="slurm, k8s or torchrun")
    parser.add_argument(
        "words", nargs="*", metavar="CONFIG KEY=VALUE", help="the YAML file that `zero3d train` takes, overrides"
    )
    parser.add_argument(
        "--nodes", type=int, help="machines (default: as planned, as many as a mesh with a dp fills, else 1)"
    )
    parser.add_argument(
        "--gpus-per-node",
        type=int,
        help=f"processes on each (default: as planned, {GPUS}, or the most below that fill whole nodes)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object with the text in it")
    batch.add_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Print the text. Raises ConfigError."""
    target = check_target(arguments.target)
    config, overrides = split_words(arguments.words)
    if config is None:
        raise ConfigError(f"CONFIG is missing: type zero3d launch {target} CONFIG, the YAML file of the run.")
    resources = batch.resources_of(arguments, GRACE)
    if target != SLURM and (others := resources.given()):
        raise ConfigError(f"{others[0]} is of a batch script: type zero3d launch {SLURM}, or leave it out.")
    filled = load_filled(config, overrides)
    asked = filled.config.mesh, arguments.nodes, arguments.gpus_per_node
    remembered = remembered_of(filled.config.plan, overrides)
    planned = planned_sizes(*asked, remembered)
    job = Job(config, tuple(overrides), *(planned or sizes(*asked)))
    check(job, filled.config)
    unchecked = check_submission(filled.config, given_keys(config, overrides))
    as_planned = planned is not None and arguments.nodes is None and arguments.gpus_per_node is None
    comments = [*filled.lines, *told(job, as_planned, remembered.gpus)]
    comments += [f"not checked: {what}" for what in unchecked]
    job = replace(job, comments=tuple(comments), resources=resources)
    text = TARGETS[target](job)
    if arguments.json:
        text = json.dumps({"target": target, "nodes": job.nodes, "gpus_per_node": job.gpus, "text": text}) + "\n"
    print(text, end="")
    return 0


def check_target(name: str) -> str:
    """Return the target's name. Raises ConfigError with the nearest one."""
    if name not in TARGETS:
        near = get_close_matches(name, TARGETS, 1, cutoff=0.4)
        meant = f" Did you mean {near[0]}?" if near else ""
        raise ConfigError(f"zero3d launch knows {', '.join(TARGETS)}, not {short(name)!r}.{meant}")
    return name


def sizes(mesh: Mesh, nodes: int | None, gpus: int | None, planned: int | None = None) -> tuple[int, int]:
    """Return nodes and GPUs of each, as asked, or such that they hold all ranks of a mesh that says its dp.

    planned  ranks of another mesh, where a file says for how many it is
    """
    world = planned if mesh.dp is None else least_ranks(degrees_of(mesh))
    if world is None:
        return 1 if nodes is None else nodes, GPUS if gpus is None else gpus
    if gpus is None:
        most = min(GPUS, world // max(1, nodes or 1))
        gpus = max((count for count in range(1, most + 1) if world % count == 0), default=1)
    return max(1, world // max(1, gpus)) if nodes is None else nodes, gpus


def planned_sizes(mesh: Mesh, nodes: int | None, gpus: int | None, planned: Plan) -> tuple[int, int] | None:
    """Return nodes and GPUs of each that a file was planned for; None where it does not say, or mesh or options do.

    A node is a machine: as many as the file says, else as its cards come. Raises ConfigError for no whole ones.
    """
    if planned.gpus is not None and planned.gpus % (planned.nodes or 1):
        raise ConfigError(
            f"plan.gpus={planned.gpus} on plan.nodes={planned.nodes}: pass plan.gpus as a multiple of plan.nodes."
        )
    if planned.gpus is None or (nodes is not None and gpus is not None):
        return None
    if mesh.dp is not None and least_ranks(degrees_of(mesh)) != planned.gpus:
        return None
    if nodes is None and gpus is None:
        if planned.gpu is not None:
            with suppress(ConfigError):  # of GPUs that fill no such nodes
                cards = cluster(planned.gpu, planned.gpus, planned.nodes)
                return cards.hosts, cards.on_host
        nodes = planned.nodes
    found = sizes(mesh, nodes, gpus, planned.gpus)
    return found if found[0] * found[1] == planned.gpus else None


def told(job: Job, as_planned: bool, gpus: int | None) -> list[str]:
    """Say that a plan decides nodes and GPUs, or that it was made for other ones. gpus: those it was made for."""
    sizes, ranks = f"{job.nodes} x {job.gpus} GPUs", job.nodes * job.gpus
    if as_planned:
        return [f"{sizes}, as the section plan of the file says: --nodes and --gpus-per-node say others"]
    return [] if gpus in (None, ranks) else [f"{sizes} = {ranks} ranks, and the file was planned for {gpus}"]


def check(job: Job, config: Config) -> None:
    """Refuse what cannot be started, or would not go on when it is started again. Raises ConfigError."""
    for option, value in (("--nodes", job.nodes), ("--gpus-per-node", job.gpus)):
        if value < 1:
            raise ConfigError(f"{option} {value}: type a whole number from 1.")
    if config.output is None:
        raise ConfigError(
            f"{job.config} names no output, and a job that is started again looks for its checkpoints there: "
            "name a folder that all nodes share with output=FOLDER."
        )
    world = job.nodes * job.gpus
    try:
        check_world(config, world)
    except (ConfigError, MeshError) as error:
        raise ConfigError(f"nodes x GPUs = {job.nodes} x {job.gpus} = {world} processes: {error}") from error


def slurm(job: Job) -> str:
    """Return a script for sbatch."""
    return batch.script(job.name, (job.nodes, job.gpus), job.command, job.resources, job.comments, GRACE)


def torchrun(job: Job) -> str:
    """Return a shell command."""
    if job.nodes == 1:
        options = f"--standalone --nproc-per-node={job.gpus} --max-restarts={RESTARTS}"
        return f"{commented(job)}torchrun {options} --no-python {job.command}\n"
    return f"""\
{commented(job)}# The same on each of the {job.nodes} nodes; HEAD_NODE is the name of one of them, reachable from all.
torchrun --nnodes={job.nodes} --nproc-per-node={job.gpus} --rdzv-backend=c10d --rdzv-id={job.name} \\
  --rdzv-endpoint="${{HEAD_NODE:?}}:{PORT}" --no-python {job.command}
"""


def k8s(job: Job) -> str:
    """Return a manifest for kubectl apply."""
    comment = """\
# Set the image (with zero3d and CONFIG's folder as working directory) and the claim of a volume that
# all pods can write; CONFIG's output belongs on that volume, /data.
"""
    return commented(job) + comment + yaml.safe_dump_all([service(job), indexed_job(job)], sort_keys=False, width=1000)


def commented(job: Job) -> str:
    """Return the job's comments, a line each."""
    return "".join(f"# {line}\n" for line in job.comments)


def service(job: Job) -> dict[str, object]:
    """Return the headless Service by which pods find the first one."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": job.name},
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {"job-name": job.name},
            "ports": [{"name": "rendezvous", "port": PORT}],
        },
    }


def indexed_job(job: Job) -> dict[str, object]:
    """Return the Job: pod i has host name NAME-i in the Service's domain; a pod that fails is started again."""
    script = (
        f"exec torchrun --nnodes={job.nodes} --nproc-per-node={job.gpus} --node-rank=$JOB_COMPLETION_INDEX "
        f"--master-addr={job.name}-0.{job.name} --master-port={PORT} --no-python {job.command}"
    )
    container = {
        "name": "train",
        "image": "IMAGE",
        "command": ["sh", "-c", script.replace("$(", "$$(")],  # Kubernetes itself expands $(NAME)
        # torchrun kills workers so long after SIGTERM; heeded from torch 2.12, before it was always 30
        "env": [{"name": "TORCH_ELASTIC_SHUTDOWN_TIMEOUT", "value": str(GRACE)}],
        "resources": {"limits": {"nvidia.com/gpu": job.gpus}},
        "volumeMounts": [{"name": "data", "mountPath": "/data"}, {"name": "shm", "mountPath": "/dev/shm"}],
    }
    pod = {
        "subdomain": job.name,
        "restartPolicy": "OnFailure",
        "terminationGracePeriodSeconds": GRACE + 30,
        "containers": [container],
        "volumes": [
            {"name": "data", "persistentVolumeClaim": {"claimName": "CLAIM"}},
            {"name": "shm", "emptyDir": {"medium": "Memory"}},
        ],
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": job.name},
        "spec": {
            "completionMode": "Indexed",
            "completions": job.nodes,
            "parallelism": job.nodes,
            "template": {"spec": pod},
        },
    }


TARGETS: dict[str, Callable[[Job], str]] = {SLURM: slurm, "k8s": k8s, "torchrun": torchrun}
