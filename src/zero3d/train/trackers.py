"""Trackers: other projects' packages that get every step's values and the run's configuration, from rank 0.

    name          goes to                                                       a resumed run
    tensorboard   event files in OUTPUT/tensorboard                             goes on in its folder
    wandb         Weights & Biases; OUTPUT/wandb under WANDB_MODE=offline       goes on in its own
    swanlab       SwanLab; OUTPUT/swanlab under SWANLAB_MODE=offline            goes on in its own, in the cloud
    mlflow        MLFLOW_TRACKING_URI, else OUTPUT/mlflow                       goes on in its own
    trackio       where `trackio show` looks                                    goes on in its own
    prometheus    OUTPUT/metrics.prom and a port (endpoints.py)                 counts anew
    otel          a collector of OpenTelemetry (endpoints.py)                   counts anew

A tracker is opened with the first record of a session, so that a run without a step left opens none. An error of a
tracker is one line of warning, and the run goes on without the tracker: metrics.jsonl has every value. Its random draws
change no training.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, Protocol

import torch

from zero3d.config import Config, to_dict, to_yaml
from zero3d.config.describe import scalar
from zero3d.config.keys import KEYS, value_of
from zero3d.config.own_code import in_one_line
from zero3d.config.sections import OTEL, PROMETHEUS
from zero3d.rng import rng_state, set_rng_state
from zero3d.train.endpoints import OpenTelemetry, Prometheus
from zero3d.train.folder import Folder

Scalars = Mapping[str, float]
CPU = torch.device("cpu")
MLFLOW_TAG, MOST_PARAMETERS = "zero3d-run", 100  # of a run; in one call
MLFLOW_NAME = re.compile(r"[^\w.\- :/]")  # characters that a name has not


@dataclass(frozen=True)
class TrackedRun:
    """Holds what a tracker is told of a run when it is opened.

    name     of the output folder
    number   the run's own, the same after a resume
    project  that it belongs to
    first    step of this session
    say      prints one line
    """

    folder: Path
    name: str
    number: str
    project: str
    config: Config
    first: int
    say: Callable[[str], Any]

    @property
    def settings(self) -> dict[str, Any]:
        """The configuration as nested mappings."""
        return to_dict(self.config)

    @property
    def flat(self) -> dict[str, str]:
        """The configuration by dotted keys, as text; keys that are null are left out."""
        values = {name: value_of(self.config, name) for name in KEYS}
        return {name: scalar(value) for name, value in values.items() if value is not None}


class Tracker(Protocol):
    """Takes the values of each step. Its constructor opens a run."""

    def log(self, step: int, scalars: Scalars) -> None:
        """Take what was measured in a step."""

    def close(self) -> None:
        """Finish: there are no more steps."""


class TensorBoard:
    """Writes event files. Those from the first step on of an earlier session no longer count."""

    def __init__(self, run: TrackedRun) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self._writer = SummaryWriter(str(run.folder / "tensorboard"), purge_step=run.first)
        self._writer.add_text("config", f"```yaml\n{to_yaml(run.config)}\n```", run.first)

    def log(self, step: int, scalars: Scalars) -> None:
        for name, value in scalars.items():
            self._writer.add_scalar(name, value, step)

    def close(self) -> None:
        self._writer.close()


class Wandb:
    """Logs to a run of Weights & Biases."""

    def __init__(self, run: TrackedRun) -> None:
        import wandb

        self._run = wandb.init(
            project=run.project,
            dir=str(run.folder),
            config=run.settings,
            resume="allow",
            id=run.number or None,
            name=run.name,
        )

    def log(self, step: int, scalars: Scalars) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        """Finish the run: wandb sends what is left."""
        self._run.finish()


class SwanLab:
    """Logs to an experiment of SwanLab. Nobody is asked for a key on a terminal."""

    def __init__(self, run: TrackedRun) -> None:
        import swanlab

        self._run = swanlab.init(
            project=run.project,
            name=run.name,
            log_dir=str(run.folder / "swanlab"),
            config=run.settings,
            resume="allow",
            id=run.number or None,
            settings=swanlab.Settings(interactive=False),
        )

    def log(self, step: int, scalars: Scalars) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


class MLflow:
    """Logs to a run of an MLflow server, or of a SQLite file where MLFLOW_TRACKING_URI names none."""

    def __init__(self, run: TrackedRun) -> None:
        from mlflow import MlflowClient
        from mlflow.entities import Param
        from mlflow.tracking import is_tracking_uri_set

        own = f"sqlite:///{run.folder.resolve() / 'mlflow' / 'mlflow.db'}"
        self._client = MlflowClient(None if is_tracking_uri_set() else own)
        experiment = self._client.get_experiment_by_name(run.project)
        of = self._client.create_experiment(run.project) if experiment is None else experiment.experiment_id
        mine = f"tags.`{MLFLOW_TAG}` = '{run.number}'"
        if run.number and (before := self._client.search_runs([of], mine, max_results=1)):
            self._id = before[0].info.run_id
            self._client.update_run(self._id, status="RUNNING")
        else:
            self._id = self._client.create_run(of, tags={MLFLOW_TAG: run.number}, run_name=run.name).info.run_id
            given = [Param(name, value) for name, value in run.flat.items()]
            for at in range(0, len(given), MOST_PARAMETERS):  # they never change: those of the first session stay
                self._client.log_batch(self._id, params=given[at : at + MOST_PARAMETERS])

    def log(self, step: int, scalars: Scalars) -> None:
        from mlflow.entities import Metric

        now = int(time.time() * 1000)
        values = [Metric(MLFLOW_NAME.sub("_", name), float(value), now, step) for name, value in scalars.items()]
        self._client.log_batch(self._id, values)

    def close(self) -> None:
        self._client.set_terminated(self._id)


class Trackio:
    """Logs to a run of Trackio, which is on this machine."""

    def __init__(self, run: TrackedRun) -> None:
        import trackio

        name = "-".join(filter(None, (run.name, run.number)))  # it goes by names, and folders may be called the same
        self._run = trackio.init(project=run.project, name=name, config=run.settings, resume="allow", embed=False)

    def log(self, step: int, scalars: Scalars) -> None:
        self._run.log(dict(scalars), step=step)

    def close(self) -> None:
        self._run.finish()


OPENERS: Mapping[str, Callable[[TrackedRun], Tracker]] = MappingProxyType(
    {
        "tensorboard": TensorBoard,
        "wandb": Wandb,
        "swanlab": SwanLab,
        "mlflow": MLflow,
        "trackio": Trackio,
        PROMETHEUS: lambda run: Prometheus(run.folder, run.name, run.config.log.host, run.config.log.port, run.say),
        OTEL: lambda run: OpenTelemetry(run.name, run.project, run.say),
    }
)


class Trackers:
    """Hands records to the trackers of a run, and leaves out failed ones.

    say  prints one line
    """

    def __init__(self, folder: Folder, config: Config, say: Callable[[str], Any]) -> None:
        self._folder, self._config = folder, config
        self._say = say
        self._waiting = list(config.log.trackers)
        self._open: dict[str, Tracker] = {}

    def write(self, record: Mapping[str, Any]) -> None:
        """Log a record under its step; what has no value is left out."""
        step = record["step"]
        values = {name: value for name, value in record.items() if name != "step" and value is not None}
        scalars = {name: int(value) if isinstance(value, bool) else value for name, value in values.items()}
        for name in self._waiting:
            with self._watched(name, f"cannot be opened at step {step}"):
                self._open[name] = OPENERS[name](self._run_from(step))
        self._waiting = []
        for name, tracker in list(self._open.items()):
            with self._watched(name, f"failed at step {step}"):
                tracker.log(step, scalars)

    def close(self) -> None:
        """Finish all runs of trackers."""
        for name in list(self._open):
            with self._watched(name, "failed at the end"):
                self._open.pop(name).close()

    def _run_from(self, first: int) -> TrackedRun:
        root, config = self._folder.root, self._config
        return TrackedRun(root, root.resolve().name, self._folder.run_id, config.log.project, config, first, self._say)

    @contextmanager
    def _watched(self, name: str, what: str) -> Iterator[None]:
        """Call a tracker inside: report its error and leave it out; random states are restored afterwards."""
        tensors, plain = rng_state(CPU)
        try:
            yield
        except Exception as error:  # noqa: BLE001 (another project's; no training ends for it)
            self._say(f"warning: tracker {name} {what}, and the run goes on without it: {in_one_line(error)}")
            if (failed := self._open.pop(name, None)) is not None:
                with suppress(Exception):
                    failed.close()  # what it has so far is kept
        set_rng_state(tensors, plain, CPU)
