"""`zero3d calibrate`: measure this machine for the planner, on workers it starts itself or as one of a launcher's."""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

from zero3d.config import Config
from zero3d.errors import ConfigError, remedy_of
from zero3d.reading import what_it_is
from zero3d.tools.cli.rank_environment import join_environment
from zero3d.tools.cli.train import check_ranks
from zero3d.tools.cli.worker import as_worker, quiet_environment
from zero3d.tools.cli.workers import launch, ranks_here
from zero3d.tools.plan.spec import ClusterSpec
from zero3d.watchdog.own_files import write_whole

DEFAULT = "cluster.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument("--ranks", type=int, help="processes to start on this machine (default: one per GPU; CPU: 2)")
    parser.add_argument("--out", "-o", metavar="FILE", default=DEFAULT, help="file to write (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print what was written")


def run(arguments: argparse.Namespace) -> int:
    """Join a launcher's workers or start workers; rank 0 writes and prints. Raises ConfigError."""
    quiet_environment()
    check_ranks(arguments.ranks)
    path = Path(arguments.out)
    folder = path.resolve().parent
    if not folder.is_dir():
        raise ConfigError(f"--out {path}: there is no folder {folder}.")
    if path.exists() and not path.is_file():
        raise ConfigError(f"--out {path}: this is {what_it_is(path.stat().st_mode)}, name a file.")
    if join_environment():
        as_worker(lambda: work(arguments))
    words = ["calibrate", f"--out={arguments.out}"] + ["--json"] * arguments.json
    return launch(words, arguments.ranks or ranks_here(Config().mesh))


def work(arguments: argparse.Namespace) -> None:
    """Do one rank's part."""
    from zero3d.distributed.mesh import Mesh
    from zero3d.tools.advice.small_runs import small_runs, timed_runs
    from zero3d.tools.plan.calibrate import calibrate
    from zero3d.tools.plan.corrected import farthest, fitted
    from zero3d.tools.plan.spec_json import to_json

    path, mesh = Path(arguments.out), Mesh()
    spec = calibrate(mesh, path.resolve().parent)
    runs = timed_runs(mesh, small_runs(mesh.device.type, mesh.world))
    ranks = f"{mesh.world} rank{'s' if mesh.world > 1 else ''}"
    spec = fitted(spec, runs, f"fitted on steps of {len(runs)} small Llamas on {ranks}")
    if os.environ["RANK"] != "0":
        return
    text = json.dumps(to_json(spec), indent=2)
    try:
        write_whole(path.resolve(), text + "\n")
    except OSError as error:
        raise ConfigError(
            f"--out {path}: cannot be written ({error.strerror}): {remedy_of(error)}, or name another file."
        ) from error
    print(text if arguments.json else "\n".join(lines(spec, path, farthest(spec, runs))), flush=True)


def lines(spec: ClusterSpec, path: Path, off: float) -> list[str]:
    """Return lines with the measured rates and the options that use them.

    off  the largest difference between a measured step and its plan
    """
    gpu = spec.gpu
    text = [
        f"{spec.gpus} x {gpu.name}, {spec.nodes} node{'s' if spec.nodes > 1 else ''} of {spec.per_node}, all at once:",
        f"   products in bf16    {gpu.flops * (gpu.matrix or 0) / 1e12:.3g} TFLOP/s",
        f"   attention in bf16   {gpu.flops * (gpu.flash or 0) / 1e12:.3g} TFLOP/s",
        f"   memory              {gpu.bandwidth / 1e9:.3g} GB/s, {gpu.memory / 1e9:.3g} GB",
        f"   host                {spec.host_link / 1e9:.3g} GB/s, {spec.host_memory / 1e9:.3g} GB",
        f"   host's own memory   {spec.host_bandwidth / 1e9:.3g} GB/s, all processes of a node",
        f"   disk                {spec.disk / 1e9:.3g} GB/s, written and read",
    ]
    for name, link in (("inside a node", spec.inside), ("between nodes", spec.across)):
        source = spec.provenance.get(name.split()[0] if name.startswith("inside") else "across", "datasheet")
        text.append(f"   {name:<20}{link.bandwidth / 1e9:.3g} GB/s, {link.latency * 1e6:.3g} us ({source})")
    if spec.communicator is not None:
        text.append(f"   a communicator      {spec.communicator / 1e6:.0f} MB of device memory")
    if spec.step is not None:
        text += [
            f"   a step, beside      {1e3 * spec.step.fixed:.3g} ms, and {1e3 * spec.step.block:.3g} ms for each block",
            f"   its plan            within {100 * off:.2g} % of each small run that it was fitted on",
        ]
    return [*text, f"written: {path}    use: zero3d plan MODEL --cluster {path} --gpus {spec.gpus}"]
