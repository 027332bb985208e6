"""Copies of checkpoints in S3, as s3fs reaches a server of moto on this host; and uploads that are killed at any moment."""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from models import adamw, batch, bits, build, loss_of
from training import field, save_model, save_rows, train, tree

import zero3d
from zero3d.checkpoint.copies import Copies, located
from zero3d.checkpoint.examine import examine
from zero3d.errors import BAD_INPUT, CheckpointError
from zero3d.stores.store import Store
from zero3d.tools.cli.main import main

pytestmark = pytest.mark.long
KILLS = 20
# An upload whose process kills itself at a call of a function, whichever thread makes it; without one it tells how many it made.
UPLOAD = """
import itertools, os, signal, sys, threading
from pathlib import Path
from zero3d.checkpoint.copies import Copies

url, folder, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
calls, begun = itertools.count(1), False

def count(frame, event, argument):
    if begun and event in ("call", "c_call") and next(calls) == last:
        os.kill(os.getpid(), signal.SIGKILL)

threading.setprofile(count)
sys.setprofile(count)
copies = Copies(url)
copies.look()
begun = True
copies.make_way(int(folder.name.removeprefix("step-")))
copies.upload(folder, ["rank-00000.safetensors", "rank-00000.json"])
copies.commit(folder)
begun = False
print(next(calls))
"""


@pytest.fixture(scope="module")
def s3():
    """Variables with which clients of S3 find a server of this test's own, which has a bucket."""
    pytest.importorskip("s3fs", reason="s3fs is not installed: pip install 'zero3d[s3]'")
    server = pytest.importorskip("moto.server", reason="moto[server] is not installed")
    served = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0)
    served.start()
    host, port = served.get_host_and_port()
    found = {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "of-tests",
        "AWS_SECRET_ACCESS_KEY": "of-tests",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    with pytest.MonkeyPatch.context() as patch:
        for name, value in found.items():
            patch.setenv(name, value)
        import s3fs

        s3fs.S3FileSystem().mkdir("bucket")
        yield found
    served.stop()


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Folders of steps 1 and 2."""
    folder = tmp_path_factory.mktemp("saved")
    engine = zero3d.Engine(build("net"), stage=1, precision="fp32", optimizer=adamw)
    made = []
    for number in (1, 2):
        engine.backward(loss_of(engine, batch(number)))
        engine.step()
        made.append(engine.save(folder))
    return made


def upload(url, folder):
    copies = Copies(url)
    copies.make_way(int(folder.name.removeprefix("step-")))
    copies.upload(folder, ["rank-00000.safetensors", "rank-00000.json"])
    copies.commit(folder)


def upload_killed_at(url, folder, call=0):
    """Upload in a process of its own that is killed at that call: how many calls it made where it came to its end."""
    command = [sys.executable, "-c", UPLOAD, url, str(folder), str(call)]
    ended = subprocess.run(command, stdout=subprocess.PIPE, text=True)
    assert ended.returncode in (0, -signal.SIGKILL)
    return int(ended.stdout or 0)


def uploads_that_are_killed(url, saved):
    """The steps that are found after each of twenty kills at calls that differ, the first call among them."""
    first, second = saved
    upload(url, first)
    calls = upload_killed_at(url, second)
    assert calls > KILLS
    ends = []
    for number in range(KILLS):
        Copies(url).prune(1, keep=1, best=None)
        assert list(Copies(url).look().steps) == [1]
        done = upload_killed_at(url, second, 1 + calls * number // KILLS)
        place = located(url)
        assert examine(place).faults == []
        step = int(place.name.removeprefix("step-"))
        assert step == 2 or not done
        ends.append(step)
    return ends


def test_twenty_kills_of_uploads_to_a_folder_leave_a_whole_checkpoint(saved, tmp_path):
    assert 1 in uploads_that_are_killed(f"file://{tmp_path}/bucket/run", saved)


def test_twenty_kills_of_uploads_to_s3_leave_a_whole_checkpoint(s3, saved):
    assert 1 in uploads_that_are_killed("s3://bucket/kills", saved)


def save_on_ranks(variables, folder, url):
    os.environ.update(variables)
    engine = zero3d.Engine(build("net"), stage=3, precision="fp32", optimizer=adamw)
    engine.backward(loss_of(engine, batch(1)))
    engine.step()
    engine.save(folder, to=url)
    engine.save(folder, wait=False, to=url)  # once more: the first one is moved aside meanwhile
    engine.saved()
    with engine.full_params():
        return bits(engine.module.parameters())


def load_on_ranks(variables, url):
    os.environ.update(variables)
    engine = zero3d.Engine(build("net"), stage=2, precision="fp32", optimizer=adamw)
    engine.load(url)
    with engine.full_params():
        return bits(engine.module.parameters())


def test_ranks_save_to_s3_and_others_go_on(s3, ranks, tmp_path):
    url = "s3://bucket/ranks"
    weights = ranks(2, save_on_ranks, s3, str(tmp_path / "ck"), url)
    shutil.rmtree(tmp_path / "ck")
    assert set(ranks(3, load_on_ranks, s3, url)) == set(weights)
    assert list(Copies(url).look().objects) == ["step-1"]


def train_on_ranks(variables, made, *start):
    os.environ.update(variables)
    return train(made, *start)


def test_a_run_with_data_copies_and_exports_in_s3(s3, ranks, tmp_path):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    expected = ranks(2, train, tree(tmp_path, "local"))[0]
    Store("s3://bucket/data").upload(tmp_path / "rows.npy", "rows.npy")
    made = tree(tmp_path, "out", checkpoint={"to": "s3://bucket/whole/run", "every": 2, "export": True})
    made["data"]["train"] = "s3://bucket/data/rows.npy"
    ranks(2, train_on_ranks, s3, made, None, 3)
    shutil.rmtree(made["output"])
    records = ranks(2, train_on_ranks, s3, made, "auto")[0]
    assert field(records, "loss") == field(expected, "loss")[3:]
    assert list(Copies("s3://bucket/whole/run").look().steps) == [4, 5]
    exported = sorted(path.name for path in (Path(made["output"]) / "hf").iterdir())
    assert sorted(Store("s3://bucket/whole/run/hf").objects()) == exported


def test_ckpt_reads_and_prunes_s3(s3, saved, capsys):
    url = "s3://bucket/verb"
    for folder in saved:
        upload(url, folder)
    assert main(["ckpt", "verify", url]) == 0
    assert main(["ckpt", "prune", url, "--keep", "1", "--yes"]) == 0
    capsys.readouterr()
    assert main(["ckpt", "ls", url, "--json"]) == 0
    assert [each["path"] for each in json.loads(capsys.readouterr().out)["checkpoints"]] == [f"{url}/step-2"]
    assert main(["ckpt", "ls", "s3://no-such-bucket/run"]) == BAD_INPUT


def test_a_bucket_that_is_not_there_is_told_and_is_not_made(s3, tmp_path):
    engine = zero3d.Engine(torch.nn.Linear(4, 4), stage=1)
    with pytest.raises(CheckpointError, match=r"^s3://no-such-bucket/run/step-0 cannot be written .*: check the URL"):
        engine.save(tmp_path, to="s3://no-such-bucket/run")
    assert Store("s3://no-such-bucket").objects() == {}
