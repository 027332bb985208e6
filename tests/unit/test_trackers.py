"""Trackers, by stand-ins of their packages: what each is told of a run and its steps, and that none of them ends it.

Those that are asked, or send to a collector, are in test_endpoints.py, with their own packages.
"""

import os
import random
import sys
from types import ModuleType, SimpleNamespace

import numpy
import pytest
import torch

from zero3d.config import load
from zero3d.config.sections import ENDPOINTS, TRACKERS
from zero3d.errors import ConfigError
from zero3d.train import trackers
from zero3d.train.folder import Folder
from zero3d.train.metrics import Metrics

RECORDS = [
    {"step": 1, "loss": 2.5, "applied": True, "grad_norm": None},
    {"step": 2, "loss": 2.25, "applied": False, "validation_loss/web=a": 2.0},
]
LOGGED = [name for name in TRACKERS if name not in ENDPOINTS]
GIVEN = [(1, {"loss": 2.5, "applied": 1}), (2, {"loss": 2.25, "applied": 0, "validation_loss/web=a": 2.0})]


class Run:
    """What all stand-ins keep of a run: what it was opened with, its steps, how often it was closed."""

    def __init__(self, **opened):
        self.opened, self.logged, self.closed = opened, [], 0

    def log(self, scalars, step):
        self.logged.append((step, scalars))

    def finish(self):
        self.closed += 1


class Writer(Run):
    """Of TensorBoard: one call for each value."""

    def __init__(self, folder, purge_step):
        super().__init__(folder=folder, first=purge_step)
        self.steps = {}

    def add_text(self, name, text, step):
        self.opened[name] = text

    def add_scalar(self, name, value, step):
        self.steps.setdefault(step, {})[name] = value
        self.logged = list(self.steps.items())

    def close(self):
        self.closed += 1


class Client:
    """Of MLflow: runs in experiments, in a store that outlives it."""

    def __init__(self, store):
        self.runs, self.store = STORES.setdefault(store, {}), store

    def get_experiment_by_name(self, name):
        return next(
            (SimpleNamespace(experiment_id=name) for run in self.runs.values() if run.opened["of"] == name), None
        )

    def create_experiment(self, name):
        return name

    def search_runs(self, experiments, text, max_results):
        found = [
            SimpleNamespace(info=SimpleNamespace(run_id=key))
            for key, run in self.runs.items()
            if run.opened["of"] in experiments and text == f"tags.`zero3d-run` = '{run.opened['tags']['zero3d-run']}'"
        ]
        return found[:max_results]

    def create_run(self, of, tags, run_name):
        run = Run(of=of, tags=tags, name=run_name, config={}, store=self.store)
        self.runs[f"id-{len(self.runs)}"] = run
        RUNS.append(run)
        return SimpleNamespace(info=SimpleNamespace(run_id=f"id-{len(self.runs) - 1}"))

    def update_run(self, run, status):
        self.runs[run].opened["status"] = status

    def log_batch(self, run, metrics=(), params=()):
        assert len(params) <= 100
        self.runs[run].opened["config"].update(params)
        if metrics:
            assert len({metric.step for metric in metrics}) == 1
            self.runs[run].log({metric.key: metric.value for metric in metrics}, metrics[0].step)

    def set_terminated(self, run):
        self.runs[run].finish()


RUNS, STORES = [], {}


@pytest.fixture
def packages(monkeypatch):
    """Stand-ins of all packages; the runs that were opened."""

    def opens(kind):
        def init(*words, **named):
            RUNS.append(kind(*words, **named))
            return RUNS[-1]

        return init

    def metric(key, value, timestamp, step):
        return SimpleNamespace(key=key, value=value, step=step)

    contents = {
        "wandb": {"init": opens(Run)},
        "swanlab": {"init": opens(Run), "Settings": lambda **named: named},
        "trackio": {"init": opens(Run)},
        "torch.utils.tensorboard": {"SummaryWriter": opens(Writer)},
        "mlflow": {"MlflowClient": Client},
        "mlflow.tracking": {"is_tracking_uri_set": lambda: "MLFLOW_TRACKING_URI" in os.environ},
        "mlflow.entities": {"Metric": metric, "Param": lambda key, value: (key, value)},
    }
    for name, content in contents.items():
        package = ModuleType(name)
        vars(package).update(content)
        monkeypatch.setitem(sys.modules, name, package)
    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    RUNS.clear()
    STORES.clear()
    return RUNS


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".run").write_text("0123456789abcdef")
    return Folder(tmp_path / "out")


def configured(*words):
    return load(None, ["optimizer.lr=0.125", *words])


def logged(folder, config, records=RECORDS, say=pytest.fail, rank=0):
    with Metrics(folder, config, rank, say=say) as metrics:
        for record in records:
            metrics.write(record)


NUMBER = "0123456789abcdef"
TOLD = {
    "tensorboard": lambda root: {"folder": f"{root}/tensorboard", "first": 1},
    "wandb": lambda root: {"project": "mine", "name": "out", "id": NUMBER, "resume": "allow", "dir": str(root)},
    "swanlab": lambda root: {
        "project": "mine",
        "name": "out",
        "id": NUMBER,
        "resume": "allow",
        "log_dir": f"{root}/swanlab",
    },
    "mlflow": lambda root: {"of": "mine", "name": "out", "store": f"sqlite:///{root}/mlflow/mlflow.db"},
    "trackio": lambda root: {"project": "mine", "name": f"out-{NUMBER}", "resume": "allow"},
}


@pytest.mark.parametrize("name", LOGGED)
def test_each_tracker_gets_the_same_values_the_configuration_and_the_names(packages, folder, name):
    logged(folder, configured(f"log.to={name}", "log.project=mine"))
    (run,) = packages
    names = {"validation_loss/web=a": "validation_loss/web_a"} if name == "mlflow" else {}
    assert run.logged == [
        (step, {names.get(key, key): value for key, value in scalars.items()}) for step, scalars in GIVEN
    ]
    assert run.opened | TOLD[name](folder.root.resolve()) == run.opened
    of_lr = {
        "tensorboard": lambda text: "\n  lr: 0.125\n" in text,
        "mlflow": lambda flat: flat["optimizer.lr"] == "0.125",
    }
    assert of_lr.get(name, lambda tree: tree["optimizer"]["lr"] == 0.125)(run.opened["config"])
    assert run.closed == 1


def test_all_are_opened_by_rank_0_when_there_is_a_first_record_and_none_without(packages, folder):
    config = configured(f"log.to={','.join(LOGGED)}")
    logged(folder, config, rank=1)
    logged(folder, config, records=[])
    with Metrics(folder, config, 0, 3, any_left=False):
        pass
    assert packages == []
    logged(folder, config)
    assert [run.closed for run in packages] == [1] * len(LOGGED)


@pytest.mark.parametrize("name", ["wandb", "swanlab", "mlflow", "trackio"])
def test_a_resumed_run_goes_on_in_its_own(packages, folder, name):
    config = configured(f"log.to={name}")
    for record in RECORDS:
        logged(folder, config, [record])
    if name == "mlflow":
        (run,) = packages
        assert [step for step, _ in run.logged] == [1, 2]
        assert (run.opened["status"], run.closed) == ("RUNNING", 2)
    else:
        first, second = packages
        assert first.opened == second.opened
        assert second.opened["resume"] == "allow"


def test_another_run_of_the_same_name_is_another_one(packages, folder, tmp_path):
    config = configured("log.to=mlflow,trackio")
    other = Folder(tmp_path / "elsewhere" / "out")
    other.root.mkdir(parents=True)
    (other.root / ".run").write_text("f" * 16)
    for each in (folder, other):
        logged(each, config)
    assert len(packages) == 4
    assert len({run.opened["name"] for run in packages if "project" in run.opened}) == 2


def test_what_trackers_keep_in_the_folder_goes_with_a_run_that_is_overwritten(folder):
    for name in ("tensorboard", "wandb", "swanlab", "mlflow"):
        (folder.root / name).mkdir()
    folder.clear()
    assert list(folder.root.iterdir()) == []


def test_a_server_of_mlflow_is_where_its_variable_says(packages, folder, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://server:5000")
    logged(folder, configured("log.to=mlflow"))
    assert list(STORES) == [None], "which is MLflow's own choice"


# --- failures ---------------------------------------------------------------------------------------


class Broken:
    """A tracker that fails where it is told to, and draws at random wherever it is called."""

    def __init__(self, where, error):
        self.where, self.error, self.steps, self.closed = where, error, [], 0

    def open(self, run):
        self._called("open")
        return self

    def log(self, step, scalars):
        self.steps.append(step)
        self._called("log")

    def close(self):
        self.closed += 1
        self._called("close")

    def _called(self, where):
        random.random(), numpy.random.rand(), torch.rand(1)
        if where == self.where:
            raise self.error


@pytest.fixture
def broken(monkeypatch):
    def at(where, error=None):
        made = Broken(where, error or ConnectionError("no\nnetwork"))
        monkeypatch.setattr(trackers, "OPENERS", {**trackers.OPENERS, "wandb": made.open})
        return made

    return at


@pytest.mark.parametrize(
    ("where", "what", "steps", "closed"),
    [
        ("open", "cannot be opened at step 1", [], 0),
        ("log", "failed at step 1", [1], 1),
        ("close", "failed at the end", [1, 2], 1),
    ],
)
def test_a_tracker_that_fails_is_one_line_and_left_out_and_the_others_go_on(
    packages, folder, broken, where, what, steps, closed
):
    made, said = broken(where), []
    logged(folder, configured("log.to=wandb,trackio"), say=said.append)
    assert len(said) == 1
    assert said[0].startswith(
        f"warning: tracker wandb {what}, and the run goes on without it: ConnectionError: no network"
    )
    assert "\n" not in said[0]
    assert (made.steps, made.closed) == (steps, closed)
    (run,) = packages
    assert run.logged == GIVEN
    assert folder.last_step == 2


def test_a_full_disk_of_a_tracker_does_not_end_a_run_that_can_write_its_metrics(folder, broken):
    broken("log", OSError(28, "No space left on device"))
    said = []
    logged(folder, configured("log.to=wandb"), say=said.append)
    assert len(said) == 1
    assert len(folder.metrics.read_text().splitlines()) == 2


@pytest.mark.parametrize("fails", [None, "open", "log", "close"])
def test_what_a_tracker_draws_at_random_changes_no_training(folder, broken, fails):
    broken(fails)

    def drawn():
        return random.random(), float(numpy.random.rand()), float(torch.rand(1))

    def seeded():
        random.seed(3), numpy.random.seed(3), torch.manual_seed(3)

    seeded()
    alone = drawn()
    seeded()
    logged(folder, configured("log.to=wandb"), say=lambda line: None)
    assert drawn() == alone


def test_an_error_of_the_run_is_not_hidden_by_a_tracker_that_fails_behind_it(folder, broken):
    broken("close")
    with (
        pytest.raises(ZeroDivisionError),
        Metrics(folder, configured("log.to=wandb"), 0, say=lambda _: None) as metrics,
    ):
        metrics.write(RECORDS[0])
        raise ZeroDivisionError


# --- keys -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "asked", "project"),
    [
        ([], {}, "zero3d"),
        (["log.to=wandb"], {"wandb": "log.to=wandb"}, "zero3d"),
        (["log.to=mlflow,wandb,mlflow", "log.project=a"], {"mlflow": "log.to=mlflow", "wandb": "log.to=wandb"}, "a"),
        (["log.to=[swanlab]"], {"swanlab": "log.to=swanlab"}, "zero3d"),
        (["log.to=null"], {}, "zero3d"),
    ],
)
def test_trackers_are_asked_for_by_a_list(words, asked, project):
    log = load(None, words).log
    assert log.trackers == asked
    assert log.project == project


@pytest.mark.parametrize(
    ("word", "message"),
    [
        ("log.to=wanbd", "found the text 'wanbd'. Did you mean wandb?"),
        ("log.to=wandb,mlfow", "Did you mean mlflow?"),
        (
            "log.to=[wandb, 3]",
            "log.to takes tensorboard, wandb, swanlab, mlflow, trackio, prometheus or otel, or a list of them, or null; found",
        ),
        ("log.to=[]", "found []."),
    ],
)
def test_a_tracker_nobody_knows_is_refused_with_the_nearest_name(word, message):
    with pytest.raises(ConfigError) as told:
        load(None, [word])
    assert message in str(told.value)
