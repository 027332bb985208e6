"""Runs that log to trackers, with the packages themselves and without a network; what they kept is read by them.

Weights & Biases and TensorBoard are in test_train_outputs.py.
"""

import os
from collections import defaultdict
from pathlib import Path
from unittest import mock

import pytest
from training import metrics, save_model, save_rows, train, tree

OFFLINE = {"SWANLAB_MODE": "offline", "MLFLOW_DISABLE_TELEMETRY": "true"}


def of_mlflow(made):
    """The learning rate that it was told, and (name, step) -> values, of each run."""
    from mlflow import MlflowClient

    client = MlflowClient(f"sqlite:///{made['output']}/mlflow/mlflow.db")
    experiment = client.get_experiment_by_name("zero3d-test").experiment_id
    for run in client.search_runs([experiment]):
        assert (run.info.run_name, run.info.status) == ("out", "FINISHED")
        points = {}
        for name in run.data.metrics:
            points |= by_step(
                (name, point.step, point.value) for point in client.get_metric_history(run.info.run_id, name)
            )
        yield float(run.data.params["optimizer.lr"]), points


def of_swanlab(made):
    """The same of all folders of one number, which `swanlab sync` sends to one experiment."""
    import yaml
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record
    from swanlab.sdk.internal.core_python.store import DataStoreReader

    found, lr = defaultdict(list), {}
    for file in sorted(Path(made["output"]).glob("swanlab/run-*/*.swanlab")):
        reader, number = DataStoreReader(), None
        reader.open(file)
        for raw in reader:
            record = Record()
            record.ParseFromString(raw)
            if record.WhichOneof("record_type") == "start":
                number = record.start.id
                assert (record.start.name, record.start.project) == ("out", "zero3d-test")
            if record.WhichOneof("record_type") == "scalar" and not record.scalar.key.startswith("__"):
                found[number].append((record.scalar.key, record.scalar.step, record.scalar.value.number))
        lr[number] = yaml.safe_load((file.parent / "files" / "config.yaml").read_text())["optimizer"]["value"]["lr"]
    for number, points in found.items():
        yield lr[number], by_step(points)


def of_trackio(made):
    """The same of each run of the project."""
    from trackio.sqlite_storage import SQLiteStorage

    for name in SQLiteStorage.get_runs("zero3d-test"):
        assert name.startswith("out-")
        logs = SQLiteStorage.get_logs("zero3d-test", name)
        points = (
            (key, log["step"], value) for log in logs for key, value in log.items() if key not in ("step", "timestamp")
        )
        yield SQLiteStorage.get_run_config("zero3d-test", name)["optimizer"]["lr"], by_step(points)


def by_step(points):
    found = defaultdict(list)
    for name, step, value in points:
        found[name, step].append(value)
    return dict(found)


READERS = {"mlflow": of_mlflow, "swanlab": of_swanlab, "trackio": of_trackio}


def logged(made, name):
    """A run in two sessions, on one rank; what the tracker has of it."""
    with mock.patch.dict(os.environ, OFFLINE | {"TRACKIO_DIR": str(Path(made["output"]).parent / "trackio")}):
        train(made, None, 2)
        train(made, "auto")
        return list(READERS[name](made))


@pytest.mark.long  # their packages are larger than all others of the tests, and Trackio wants an older pillow than they do
@pytest.mark.parametrize("name", READERS)
def test_a_tracker_gets_the_records_offline_in_one_run_over_a_resume(ranks, tmp_path, name):
    pytest.importorskip(name, reason=f"pip install 'zero3d[{name}]'")
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    made = tree(tmp_path, log={"to": name, "project": "zero3d-test"}, checkpoint={"every": 2}, data={"validation": 0.2})
    ((lr, points),) = ranks(1, logged, made, name)[0]
    assert lr == made["optimizer"]["lr"]
    lines = metrics(made)
    assert [line["step"] for line in lines] == [1, 2, 3, 4, 5]
    expected = {
        (key, line["step"]): [pytest.approx(float(value))]
        for line in lines
        for key, value in line.items()
        if key != "step" and value is not None
    }
    assert points == expected
