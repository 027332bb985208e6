"""`zero3d launch`: scripts that a shell reads, a manifest that is YAML, and the page that shows them."""

import argparse
import json
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest
import yaml

from zero3d.config import Mesh
from zero3d.config.sections import Plan
from zero3d.memory.segments import segments_note
from zero3d.tools.cli.launch import planned_sizes, sizes
from zero3d.tools.cli.main import main, parse
from zero3d.tools.cli.rank_environment import join_environment
from zero3d.tools.cli.slurm import seconds_of
from zero3d.tools.cli.train import as_words
from zero3d.tools.cli.worker import report_output
from zero3d.tools.cli.workers import RANKS, Worker, chosen_output, environment, ranks_here, resume_command

DOCS = Path(__file__).parents[2] / "docs" / "cluster.md"
NASTY = ["data.train=my files/it's; touch spilt", "output=$(whoami)/`id`/$HOME"]


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "run.yaml").write_text("output: runs/a\n")
    return tmp_path


def worker_words(*words):
    """What a worker of `zero3d train WORDS` is started with."""
    return ["train", *as_words(parse(["train", *words]))]


def launch(capsys, *words):
    assert main(["launch", *words]) == 0
    return capsys.readouterr().out


def words_that_reach(folder, script, name):
    """What `name` is given when a shell runs the script; the program only writes its words down."""
    program = folder / name
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@" > words\n')
    program.chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "HEAD_NODE": "head", "JOB_COMPLETION_INDEX": "1"}
    subprocess.run(["bash", "-e", "-c", script], cwd=folder, env=environment, check=True)
    return (folder / "words").read_text().splitlines()


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize(("target", "program"), [("slurm", "srun"), ("torchrun", "torchrun"), ("k8s", "torchrun")])
def test_the_shell_hands_over_config_and_overrides_untouched(folder, capsys, target, program, nodes):
    text = launch(capsys, target, "run.yaml", *NASTY, "--nodes", str(nodes))
    if target == "k8s":
        shell, option, text = list(yaml.safe_load_all(text))[1]["spec"]["template"]["spec"]["containers"][0]["command"]
        assert (shell, option) == ("sh", "-c")
        assert "$(" not in text.replace("$$(", "")  # Kubernetes would put a variable's value there
        text = text.replace("$$(", "$(")  # as Kubernetes does
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    words = words_that_reach(folder, text, program)
    assert words[words.index("zero3d") :] == ["zero3d", "train", "run.yaml", *NASTY, "--resume", "auto"]


@pytest.mark.parametrize("nodes", [1, 3])
@pytest.mark.parametrize("target", ["torchrun", "k8s"])
def test_torchrun_takes_its_options(folder, capsys, target, nodes):
    from torch.distributed.run import get_args_parser

    text = launch(capsys, target, "run.yaml", "--nodes", str(nodes), "--gpus-per-node", "4")
    if target == "k8s":
        text = list(yaml.safe_load_all(text))[1]["spec"]["template"]["spec"]["containers"][0]["command"][2]
    options = get_args_parser().parse_args(words_that_reach(folder, text, "torchrun"))
    assert (options.nnodes, options.nproc_per_node) == (str(nodes) if nodes > 1 or target == "k8s" else "1:1", "4")
    assert (options.no_python, options.training_script) == (True, "zero3d")
    assert options.standalone is (target == "torchrun" and nodes == 1)


def sbatch(text):
    """The options of a batch script, as sbatch's manual has them; any other ends the test."""
    parser = argparse.ArgumentParser(exit_on_error=False, allow_abbrev=False)
    for name in ("job-name", "time", "partition", "account", "mem", "mem-per-gpu", "output", "open-mode", "signal"):
        parser.add_argument(f"--{name}")
    for name in ("nodes", "ntasks-per-node", "gpus-per-node", "cpus-per-task"):
        parser.add_argument(f"--{name}", type=int)
    for name in ("exclusive", "requeue"):
        parser.add_argument(f"--{name}", action="store_true")
    head, _, rest = text.partition("\n\n")
    lines = head.splitlines()
    assert lines[0] == "#!/bin/bash"
    assert all(line.startswith("#SBATCH --") for line in lines[1:])
    assert "#SBATCH" not in rest  # sbatch reads none behind the first command
    return {k: v for k, v in vars(parser.parse_args([line.split()[1] for line in lines[1:]])).items() if v}


ALL_SHAPES = {
    "8 x 1": (["--nodes", "8", "--gpus-per-node", "1"], {"nodes": 8, "ntasks_per_node": 1, "gpus_per_node": 1}),
    "8 x 4": (["--nodes", "8", "--gpus-per-node", "4", "--partition", "gpu", "--account", "me", "--time", "2-00:00:00",
               "--mem", "500G", "--cpus-per-task", "12"],
              {"nodes": 8, "ntasks_per_node": 4, "gpus_per_node": 4, "partition": "gpu", "account": "me",
               "time": "2-00:00:00", "mem": "500G", "cpus_per_task": 12}),
    "container": (["--container", "img.sqsh", "--mount", "/data:/data"], {"nodes": 1, "gpus_per_node": 8}),
    "shared": (["--shared", "--gpus-per-node", "1"],
               {"exclusive": None, "cpus_per_task": 8, "mem": None, "mem_per_gpu": "64G"}),
    "shared, with an own size": (["--shared", "--gpus-per-node", "1", "--mem", "100G", "--cpus-per-task", "4"],
                                 {"exclusive": None, "cpus_per_task": 4, "mem": "100G", "mem_per_gpu": None}),
}  # fmt: skip


@pytest.mark.parametrize("shape", ALL_SHAPES)
def test_a_batch_script_asks_for_whole_nodes_and_warns_before_the_limit(folder, capsys, shape):
    words, asked = ALL_SHAPES[shape]
    text = launch(capsys, "slurm", "run.yaml", *words)
    subprocess.run(["bash", "-n"], input=text, text=True, check=True)
    usual = {"exclusive": True, "mem": "0", "time": "24:00:00", "signal": "TERM@300", "requeue": True}
    assert sbatch(text).items() >= {k: v for k, v in (usual | asked).items() if v is not None}.items()
    assert not {name for name, value in asked.items() if value is None} & set(sbatch(text))


@pytest.mark.parametrize(("time", "seconds"), [
    ("5", 300), ("5:30", 330), ("1:00:00", 3600), ("2-12", 216000), ("0-1:10", 4200), ("1-0:0:9", 86409), ("0", None),
    ("UNLIMITED", None),
])  # fmt: skip
def test_limits_are_read_as_sbatch_reads_them(time, seconds):
    assert seconds_of(time) == seconds


def run_script(folder, text, doctor=0):
    """The exit code of a batch script under a srun that notes what it is given; `doctor` is that of the preflight."""
    program = folder / "srun"
    program.write_text(
        '#!/bin/bash\n{ printf "%s\\n" "$@"; env | grep -E "^(NCCL|SRUN)_" | sort; echo; } >> calls\n'
        f'[[ " $* " == *" doctor "* ]] && exit {doctor}\nexit 0\n'
    )
    program.chmod(0o755)
    environment = {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_NAME": "zero3d-run", "SLURM_JOB_ID": "7",
                   "SLURM_CPUS_ON_NODE": "96", "SLURM_CPUS_PER_TASK": "12"}  # fmt: skip
    code = subprocess.run(["bash", "-c", text], cwd=folder, env=environment, check=False, capture_output=True)
    return code.returncode, [call.splitlines() for call in (folder / "calls").read_text().split("\n\n") if call]


@pytest.mark.parametrize(("words", "cores"), [([], 12), (["--gpus-per-node", "4"], 24), (["--cpus-per-task", "3"], 12)])
def test_every_task_gets_its_share_of_cores_and_a_log(folder, capsys, words, cores):
    code, (doctor, train) = run_script(folder, launch(capsys, "slurm", "run.yaml", *words))
    assert code == 0
    assert doctor[-4:-1] == ["zero3d", "doctor", "--preflight"]
    assert {"--distribution=block", "--kill-on-bad-exit=1", "--output=zero3d-run-7/rank-%t.log"} <= set(train)
    assert (folder / "zero3d-run-7").is_dir()
    assert {doctor[-1], train[-1]} == {f"SRUN_CPUS_PER_TASK={cores}"}


def test_a_preflight_that_finds_something_stops_the_job(folder, capsys):
    code, (doctor,) = run_script(folder, launch(capsys, "slurm", "run.yaml"), doctor=1)
    assert code == 1
    assert "doctor" in doctor


def test_a_job_without_a_preflight_trains_at_once(folder, capsys):
    code, (train,) = run_script(folder, launch(capsys, "slurm", "run.yaml", "--no-preflight"), doctor=1)
    assert code == 0
    assert "train" in train


def test_variables_of_nccl_reach_every_task(folder, capsys):
    words = ["--nccl", "SOCKET_IFNAME=ib0,eth 1", "--nccl", "NCCL_IB_HCA=mlx5", "--nccl-debug"]
    _, calls = run_script(folder, launch(capsys, "slurm", "run.yaml", *words))
    for call in calls:
        assert call[-5:-1] == ["NCCL_DEBUG=INFO", f"NCCL_DEBUG_FILE={folder}/zero3d-run-7/nccl-%h-%p.log",
                               "NCCL_IB_HCA=mlx5", "NCCL_SOCKET_IFNAME=ib0,eth 1"]  # fmt: skip


@pytest.mark.parametrize("image", ["my image.sqsh", "docker://nvcr.io/torch:26.01", "my image.sif"])
def test_preflight_and_training_run_in_the_container(folder, capsys, image):
    words = ["--container", image, "--mount", "/my data:/data"]
    _, calls = run_script(folder, launch(capsys, "slurm", "run.yaml", *words))
    assert len(calls) == 2
    for call in calls:
        before = call[: call.index("zero3d")]
        if image.endswith(".sif"):
            assert before[-9:] == ["apptainer", "exec", "--nv", "--bind", str(folder), "--pwd", str(folder), "--bind",
                                   "/my data:/data", image][-9:]  # fmt: skip
        else:
            assert before[-3:] == [f"--container-image={image}", f"--container-mounts={folder}:{folder},/my data:/data",
                                   f"--container-workdir={folder}"]  # fmt: skip


def test_kubernetes_pods_find_the_first_one_and_have_time_to_save(folder, capsys):
    service, job = yaml.safe_load_all(launch(capsys, "k8s", "run.yaml", "--nodes", "4", "--gpus-per-node", "2"))
    name, spec = job["metadata"]["name"], job["spec"]
    pod = spec["template"]["spec"]
    assert (spec["completionMode"], spec["completions"], spec["parallelism"]) == ("Indexed", 4, 4)
    assert (service["spec"]["clusterIP"], service["spec"]["selector"]) == ("None", {"job-name": name})
    assert pod["subdomain"] == service["metadata"]["name"] == name
    (container,) = pod["containers"]
    assert f"--master-addr={name}-0.{name} " in container["command"][2]
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 2}
    assert pod["terminationGracePeriodSeconds"] > int(container["env"][0]["value"])


@pytest.mark.parametrize("config", ["Größe 7B (v2).yaml", "x" * 80 + ".yaml", "llama_text.v1.yaml"])
def test_names_are_what_kubernetes_accepts(folder, capsys, config):
    (folder / config).write_text("output: runs/a\n")
    service, _ = yaml.safe_load_all(launch(capsys, "k8s", config))
    assert re.fullmatch(r"[a-z]([-a-z0-9]{0,38}[a-z0-9])?", service["metadata"]["name"])


def test_words_and_options_come_in_any_order(folder, capsys):
    text = launch(capsys, "slurm", "run.yaml", "train.steps=5", "zero.stage=2", "--nodes", "2")
    assert "run.yaml train.steps=5 zero.stage=2" in text
    assert launch(capsys, "slurm", "run.yaml", "train.steps=5", "--nodes", "2", "zero.stage=2") == text
    assert launch(capsys, "--nodes=2", "slurm", "run.yaml", "train.steps=5", "zero.stage=2") == text


def test_json_holds_the_same_text(folder, capsys):
    answer = json.loads(launch(capsys, "slurm", "run.yaml", "--nodes", "2", "--json"))
    assert answer["text"] == launch(capsys, "slurm", "run.yaml", "--nodes", "2")
    assert (answer["target"], answer["nodes"], answer["gpus_per_node"]) == ("slurm", 2, 8)


@pytest.mark.parametrize(("mesh", "asked", "started"), [
    ({}, (None, None), (1, 8)), ({}, (4, 2), (4, 2)), ({"dp": 2}, (None, None), (1, 2)), ({"dp": 4, "tp": 2, "pp": 2}, (None, None), (2, 8)),
    ({"dp": 16}, (4, None), (4, 4)), ({"dp": 16}, (None, 4), (4, 4)), ({"tp": 2}, (None, None), (1, 8)),
    ({"dp": 12}, (None, None), (2, 6)), ({"dp": 13}, (None, None), (13, 1)), ({"dp": 12}, (3, None), (3, 4)),
])  # fmt: skip
def test_a_mesh_that_says_its_dp_says_how_many_processes_there_are(mesh, asked, started):
    assert sizes(Mesh(**mesh), *asked) == started


@pytest.mark.parametrize(("planned", "mesh", "asked", "started"), [
    ({"gpus": 16, "gpu": "h100"}, {}, (None, None), (2, 8)),
    ({"gpus": 16, "gpu": "h100", "nodes": 4}, {}, (None, None), (4, 4)),
    ({"gpus": 16, "gpu": "gb200"}, {"dp": 16}, (None, None), (4, 4)),  # machines of a rack
    ({"gpus": 2, "gpu": "a6000"}, {}, (None, None), (1, 2)),
    ({"gpus": 16}, {}, (None, None), (2, 8)),
    ({"gpus": 16, "nodes": 4}, {}, (None, None), (4, 4)),
    ({"gpus": 16, "gpu": "nobodys"}, {}, (None, None), (2, 8)),
    ({"gpus": 16, "gpu": "h100"}, {}, (4, None), (4, 4)),
    ({"gpus": 16, "gpu": "h100"}, {}, (None, 4), (4, 4)),
    ({"gpus": 16, "gpu": "h100"}, {}, (4, 2), None),  # as asked
    ({"gpus": 16, "gpu": "h100"}, {}, (3, None), None),
    ({"gpus": 16, "gpu": "h100"}, {"dp": 4}, (None, None), None),  # the mesh is of another number
    ({"gpu": "h100"}, {}, (None, None), None),
])  # fmt: skip
def test_a_file_that_was_planned_says_how_many_processes_there_are(planned, mesh, asked, started):
    assert planned_sizes(Mesh(**mesh), *asked, Plan(**planned)) == started


def test_a_planned_file_is_launched_as_planned_and_says_so(folder, capsys):
    (folder / "run.yaml").write_text("output: runs/a\nplan: {gpus: 4, gpu: a6000}\n")
    text = launch(capsys, "torchrun", "run.yaml")
    said = "# 1 x 4 GPUs, as the section plan of the file says: --nodes and --gpus-per-node say others\n"
    assert text.count(said) == 1
    assert "--nproc-per-node=4" in text
    for words in (["mesh.tp=1"], ["--gpus-per-node", "8", "--nodes", "1"]):  # another mesh than the planned
        text = launch(capsys, "torchrun", "run.yaml", *words)
        assert "--nproc-per-node=8" in text
        assert said not in text
    assert "# 1 x 8 GPUs = 8 ranks, and the file was planned for 4\n" in text
    assert "as the section plan" not in launch(capsys, "torchrun", "run.yaml", "--gpus-per-node", "2")  # which is typed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["slrm", "run.yaml"], "Did you mean slurm?"),
        (["torch", "run.yaml"], "Did you mean torchrun?"),
        (["pbs", "run.yaml"], "slurm, k8s, torchrun, not 'pbs'."),
        (["slurm", "absent.yaml"], "absent.yaml"),
        (["slurm", "."], ". is a folder"),
        (["slurm", "run.yaml", "zero.stage"], "'zero.stage' is not KEY=VALUE"),
        (["slurm", "run.yaml", "zero.stag=2"], "Did you mean zero.stage?"),
        (["slurm", "run.yaml", "plan.gpus=9", "plan.nodes=2"], "plan.gpus=9 on plan.nodes=2: pass plan.gpus as a multiple"),
        (["slurm", "run.yaml", "output=null"], "output=FOLDER"),
        (["slurm", "run.yaml", "mesh.dp=3", "--gpus-per-node", "8"], "1 x 8 = 8 processes: 8 ranks cannot form"),
        (["slurm", "run.yaml", "mesh.tp=3", "--nodes", "2"], "2 x 8 = 16 processes: 16 ranks cannot form"),
        (["slurm", "run.yaml", "train.batch=12"], "1 x 8 = 8 processes: train.batch 12 is not a multiple of dp 8"),
        (["slurm", "run.yaml", "--nodes", "0"], "--nodes 0"),
        (["slurm", "run.yaml", "--gpus-per-node", "-1"], "--gpus-per-node -1"),
        (["slurm"], "CONFIG"),
        (["slurm", "run.yaml", "--time", "tomorrow"], "--time tomorrow: type it as sbatch takes it"),
        (["slurm", "run.yaml", "--time", "5"], "--time 5 is 300 seconds (a number alone is minutes)"),
        (["slurm", "run.yaml", "--mem", "lots"], "--mem lots: type a whole number"),
        (["slurm", "run.yaml", "--cpus-per-task", "0"], "--cpus-per-task 0: type a whole number from 1"),
        (["slurm", "run.yaml", "--partition", "a b"], "--partition a b: type its name"),
        (["slurm", "run.yaml", "--mount", "/a:/b"], "add --container IMAGE"),
        (["slurm", "run.yaml", "--container", "a.sif", "--mount", "/a"], "type FOLDER:FOLDER"),
        (["slurm", "run.yaml", "--nccl", "DEBUG"], "--nccl DEBUG: type NAME=VALUE"),
        (["torchrun", "run.yaml", "--partition", "gpu"], "--partition is of a batch script"),
        (["k8s", "run.yaml", "--no-preflight"], "--no-preflight is of a batch script"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_what_cannot_be_started_is_refused_in_one_line(folder, capsys, words, message):
    assert main(["launch", *words]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ConfigError: ")
    assert err.count("\n") == 1
    assert message in err


def test_the_page_on_clusters_shows_what_launch_prints(folder, capsys):
    blocks = re.findall(
        r"^```console\n\$ zero3d (launch [^\n]+)\n(.+?)^```", DOCS.read_text(), re.MULTILINE | re.DOTALL
    )
    assert {shlex.split(line)[1] for line, _ in blocks} == {"slurm", "k8s", "torchrun"}
    for line, shown in blocks:
        assert launch(capsys, *shlex.split(line)[1:]) == shown


@pytest.mark.parametrize(
    ("words", "line"),
    [
        (["train", "a b.yaml", "zero.stage=2"], "zero3d train 'a b.yaml' zero.stage=2 --resume auto"),
        (["train", "a.yaml", "--resume", "auto", "--json"], "zero3d train a.yaml --json --resume auto"),
        (["train", "--resume=old", "a.yaml"], "zero3d train a.yaml --resume auto"),
        (worker_words("a.yaml", "--ranks", "3", "--stage=1"), "zero3d train a.yaml --ranks=3 --stage=1 --resume auto"),
        (
            worker_words("a.yaml", "--resume", "old", "--resume-settings", "saved"),
            "zero3d train a.yaml --resume-settings=saved --resume auto",
        ),
    ],
)
def test_a_stopped_run_says_how_it_goes_on(words, line):
    assert resume_command(words) == line


def test_a_run_that_chose_its_folder_goes_on_in_it():
    words = worker_words("a.yaml", "zero.stage=2", "--ranks", "3", "--steps=9", "--json")
    line = "zero3d train zero3d-a-2/config.yaml --ranks=3 --json --resume auto"
    assert resume_command(words, "zero3d-a-2") == line


def test_workers_tell_their_launcher_the_folder_they_chose(tmp_path, monkeypatch):
    worker = Worker(0, None, tmp_path)
    assert chosen_output(worker) == ""
    monkeypatch.delenv("ZERO3D_LAUNCHED", raising=False)
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", str(tmp_path / "error.json"))
    report_output(Path("zero3d-a"))
    assert chosen_output(worker) == ""
    monkeypatch.setenv("ZERO3D_LAUNCHED", "1")
    report_output(Path("zero3d-a"))
    assert chosen_output(worker) == "zero3d-a"


ALLOCATORS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_HIP_ALLOC_CONF")


def test_workers_get_segments_that_grow_unless_somebody_has_set_the_allocator(tmp_path, monkeypatch):
    for name in ALLOCATORS:
        monkeypatch.delenv(name, raising=False)
    of_worker = environment(2, 12345, tmp_path)
    assert [of_worker.get(name) for name in ALLOCATORS] == ["expandable_segments:True", None, None]
    for given in ALLOCATORS:
        with monkeypatch.context() as patch:
            patch.setenv(given, "max_split_size_mb:256")
            of_worker = environment(2, 12345, tmp_path)
            assert [name for name in ALLOCATORS if name in of_worker] == [given]
            assert of_worker[given] == "max_split_size_mb:256"


@pytest.mark.parametrize("launcher", ["torchrun", "srun"])
def test_ranks_of_other_launchers_get_them_too(monkeypatch, launcher):
    given = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
    srun = {"SLURM_STEP_ID": "0", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0", "SLURM_LOCALID": "0"}
    variables = given if launcher == "torchrun" else srun
    for known in ({}, {"PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:256"}):
        monkeypatch.setattr(os, "environ", variables | known)
        assert join_environment()
        found = {name: os.environ[name] for name in ALLOCATORS if name in os.environ}
        assert found == (known or {"PYTORCH_ALLOC_CONF": "expandable_segments:True"})


def test_an_engine_on_a_gpu_tells_a_program_of_ones_own(monkeypatch):
    for name in ALLOCATORS:
        monkeypatch.delenv(name, raising=False)
    assert "PYTORCH_ALLOC_CONF=expandable_segments:True" in segments_note("cuda")
    assert segments_note("cpu") is None
    monkeypatch.setenv("PYTORCH_HIP_ALLOC_CONF", "")
    assert segments_note("cuda") is None


def test_a_bare_machine_gets_as_many_workers_as_the_mesh_or_its_accelerators(monkeypatch):
    from zero3d.distributed import devices

    monkeypatch.setattr(devices, "count_devices", lambda: 0)
    assert ranks_here(Mesh()) == RANKS == 2
    assert ranks_here(Mesh(pp=2, ep=3)) == 6
    monkeypatch.setattr(devices, "count_devices", lambda: 8)
    assert ranks_here(Mesh(tp=2)) == 8
    assert ranks_here(Mesh(dp=2)) == 2
    assert ranks_here(Mesh(dp=2, tp=2, pp=3)) == 12


# --- typing errors ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["trian", "a.yaml"], "Did you mean train?"),
        (["lunch"], "Did you mean launch?"),
        (["--json", "trian"], "Did you mean train?"),
        (["frobnicate"], "compare"),
        (["config", "shw"], "Did you mean show?"),
        (["config", "show", "--jsn"], "--jsn. Did you mean --json?"),
        (["train", "a.yaml", "--resum", "auto"], "--resum. Did you mean --resume?"),
        (["train", "a.yaml", "--ranksn=2"], "--ranksn=2. Did you mean --ranks?"),
        (["launch", "slurm", "a.yaml", "--node", "2"], "--node. Did you mean --nodes?"),
        (["train", "a.yaml", "--quiet"], "--quiet. See what it takes: zero3d train --help"),
    ],
    ids=" ".join,
)  # fmt: skip
def test_the_nearest_verb_or_option_is_named(capsys, words, message):
    assert main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("ConfigError: ")
    assert err.count("\n") == 1
    assert message in err
