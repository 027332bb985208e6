"""benchmarks/gpu_check.py: whatever becomes of a part is a result, in a file that is valid at any moment."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import warnings
from collections import Counter
from pathlib import Path

import psutil
import pytest
import torch

from zero3d.distributed.choice import choose_algorithm

ROOT = Path(__file__).parents[2]
sys.path.append(str(ROOT / "benchmarks"))
import gpu_check  # noqa: E402
import llama  # noqa: E402
from campaign import account, calls, host, loopback, process, record, speed, streams, turns  # noqa: E402

FAULTS = """
import os, signal, subprocess, time
from pathlib import Path

def count(place):
    with (Path(__file__).parent / "begun").open("a") as begun:
        begun.write(place.part + "\\n")

def passes(place, account):
    count(place)
    account.ran("sum", 2.0)
    account.headline("step_syncs", 3)

def fails(place, account):
    count(place)
    account.ran("loss", float("nan"), "it is not a number")

def raises(place, account):
    count(place)
    account.ran("before", 1)
    raise RuntimeError("out of memory")

def dies(place, account):
    count(place)
    account.ran("before", 1)
    os.kill(os.getpid(), signal.SIGKILL)

def skips(place, account):
    count(place)
    account.skipped("streams", "a CPU has none")

def hangs(place, account):
    count(place)
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    account.ran("processes", [os.getpid(), child.pid])
    time.sleep(600)
"""


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """Rows of a campaign that end in every way there is, by name."""
    (tmp_path / "planted.py").write_text(FAULTS)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setattr(gpu_check, "CPU_LIMIT_S", 60.0)
    names = ("passes", "fails", "raises", "dies", "skips", "hangs")
    return {name: gpu_check.Part(name, f"planted:{name}", 60, 1, "") for name in names}


def check(parts, names, out, *words):
    """Run these parts on the CPU; the exit code and the file."""
    code = gpu_check.main(["--device", "cpu", "--json", str(out), *words], [parts[name] for name in names])
    return code, json.loads(out.read_text())


def alive(process):
    """Whether a process runs; one that nobody has waited for may still have its number."""
    return psutil.pid_exists(process) and psutil.Process(process).status() != psutil.STATUS_ZOMBIE


def test_a_part_that_fails_raises_or_dies_is_a_result_and_the_next_one_runs(parts, tmp_path, capsys):
    code, found = check(parts, ("raises", "dies", "fails", "skips", "passes"), tmp_path / "out.json")
    assert code == 1
    outcomes = {name: result["outcome"] for name, result in found["parts"].items()}
    assert outcomes == {
        "raises": "crashed", "dies": "crashed", "fails": "failed", "skips": "skipped", "passes": "passed"
    }  # fmt: skip
    assert found["parts"]["raises"]["ran"] == found["parts"]["dies"]["ran"] == {"before": 1}
    assert found["parts"]["raises"]["said"][-1] == "RuntimeError: out of memory"
    assert found["parts"]["dies"]["why"] == "ended with SIGKILL"
    assert found["parts"]["fails"]["ran"] == {"loss": "nan"}
    assert found["parts"]["fails"]["failed"] == {"loss": "it is not a number"}
    assert found["parts"]["skips"]["skipped"] == {"streams": "a CPU has none"}
    assert (found["step_dispatches"], found["step_syncs"]) == (None, 3)
    assert "ended with SIGKILL" in capsys.readouterr().out.split("part ")[-1]


def test_only_parts_that_hold_give_exit_code_0(parts, tmp_path):
    assert check(parts, ("passes", "skips"), tmp_path / "out.json")[0] == 0


def test_a_part_that_hangs_is_killed_at_its_limit_and_has_said_where(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(gpu_check, "CPU_LIMIT_S", 3.0)
    code, found = check(parts, ("hangs",), tmp_path / "out.json")
    hung = found["parts"]["hangs"]
    assert (code, hung["outcome"], hung["why"]) == (1, "hung", f"killed after {hung['limit_s']:.3g} s")
    assert not any(alive(process) for process in hung["ran"]["processes"])
    assert any("planted.py" in line and "in hangs" in line for line in hung["said"])


def test_a_part_on_the_cpu_has_more_time_where_it_takes_longer_to_begin():
    on_cpu, on_card = account.Place("a", "cpu", 90.0), account.Place("a", "cuda:0", 90.0)
    quiet = process.QUIET_START_S
    assert [process.limit_of(on_cpu, started) for started in (quiet / 2, quiet, 5 * quiet)] == [
        quiet / 2 + 90,
        quiet + 90,
        5 * quiet + 450,
    ]
    assert process.limit_of(on_card, 5 * quiet) == 90


def test_a_part_that_the_end_of_the_call_cut_short_is_not_run_and_runs_again(parts, tmp_path, monkeypatch):
    monkeypatch.setattr(calls, "LEAST_S", 0.1)
    monkeypatch.setitem(gpu_check.CALL_S, "cpu", 1.5)
    code, found = check(parts, ("hangs",), tmp_path / "out.json")
    assert (code, found["parts"]["hangs"]["outcome"]) == (1, "not run")
    monkeypatch.setitem(gpu_check.CALL_S, "cpu", 600.0)
    monkeypatch.setattr(gpu_check, "CPU_LIMIT_S", 1.0)
    _, found = check(parts, ("hangs",), tmp_path / "out.json", "--resume")
    assert found["parts"]["hangs"]["outcome"] == "hung"


def test_to_resume_is_to_run_what_has_not_ended_by_itself(parts, tmp_path):
    out, names = tmp_path / "out.json", ("passes", "fails", "raises", "skips")
    check(parts, names, out)
    code, found = check(parts, names, out, "--resume")
    begun = Counter((tmp_path / "begun").read_text().split())
    assert begun == {"passes": 1, "fails": 1, "raises": 2, "skips": 1}
    assert (code, found["step_syncs"], len(found["parts"])) == (1, 3, 4)
    check(parts, names, out)
    assert Counter((tmp_path / "begun").read_text().split())["passes"] == 2


def test_what_a_killed_call_was_running_runs_again(parts, tmp_path):
    out = tmp_path / "out.json"
    _, found = check(parts, ("passes",), out)
    found["parts"]["passes"]["outcome"] = "running"
    out.write_text(json.dumps(found))
    check(parts, ("passes",), out, "--resume")
    assert (tmp_path / "begun").read_text().split() == ["passes", "passes"]


@pytest.mark.parametrize("change", [{"torch": "2.0"}, {"device": "cuda"}, {"parts": None}])
def test_to_resume_from_another_machine_is_refused(parts, tmp_path, capsys, change):
    out = tmp_path / "out.json"
    _, found = check(parts, ("skips",), out)
    out.write_text(json.dumps(found | change))
    assert gpu_check.main(["--device", "cpu", "--json", str(out), "--resume"], list(parts.values())) == 2
    assert "--resume" in capsys.readouterr().err
    assert json.loads(out.read_text()) == found | change


def test_a_call_that_is_stopped_keeps_what_its_part_had_found_and_leaves_no_process(parts, tmp_path):
    out = tmp_path / "out.json"

    def stop():
        while not out.exists() or "processes" not in out.read_text():
            time.sleep(0.05)
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=stop, daemon=True).start()
    code, found = check(parts, ("hangs", "passes"), out)
    assert code == 1
    assert found["parts"]["hangs"]["outcome"] == "stopped"
    assert not any(alive(process) for process in found["parts"]["hangs"]["ran"]["processes"])
    assert "passes" not in found["parts"]


def test_when_the_calls_time_is_up_parts_are_left_for_the_next(parts, tmp_path, monkeypatch):
    monkeypatch.setitem(gpu_check.CALL_S, "cpu", 0.0)
    code, found = check(parts, ("passes",), tmp_path / "out.json")
    assert (code, found["parts"]["passes"]["outcome"]) == (1, "not run")
    monkeypatch.undo()
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert check(parts, ("passes",), tmp_path / "out.json", "--resume")[0] == 0


@pytest.mark.long
def test_the_file_is_whole_whenever_it_is_read(tmp_path):
    out, ended = tmp_path / "out.json", threading.Event()
    account.write_json(out, {"rows": []})

    def write():
        for count in range(300):
            account.write_json(out, {"rows": ["x" * 100] * count})
        ended.set()

    threading.Thread(target=write, daemon=True).start()
    reads = 0
    while not ended.is_set():
        assert isinstance(json.loads(out.read_text())["rows"], list)
        reads += 1
    assert reads > 1


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--only", "spede"], "'spede' is no part"),
        (["--minutes", "-1"], "--minutes -1"),
        (["--minutes", "nan"], "--minutes nan"),
        (["--resume"], "--json FILE"),
        (["--device", "tpu"], "--device"),
    ],
)
def test_bad_input_is_exit_code_2(words, says, capsys):
    with pytest.raises(SystemExit) as exit_code:
        gpu_check.parse(words)
    assert exit_code.value.code == 2
    assert says in capsys.readouterr().err


def test_without_a_card_nothing_is_checked(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert gpu_check.main(["--json", str(tmp_path / "out.json")]) == 2
    assert "--device cpu" in capsys.readouterr().err
    assert not (tmp_path / "out.json").exists()


def test_a_name_before_the_dot_means_all_its_parts_and_no_minutes_leave_speed_out():
    def names(*words):
        return [part.name for part in gpu_check.chosen(gpu_check.PARTS, gpu_check.parse(words))]

    assert names("--only", "bits,parity") == ["parity", "bits.deterministic", "bits.default"]
    assert names("--only", "streams.late") == ["streams.late"]
    assert names() == [part.name for part in gpu_check.PARTS]
    assert "turns.8k" not in names("--minutes", "0")


def test_what_is_planned_fits_in_three_calls_limits_in_four_and_every_part_in_its_limit():
    arguments = gpu_check.parse([])
    places = [gpu_check.place_of(part, gpu_check.PARTS, arguments) for part in gpu_check.PARTS]
    planned = sum(part.planned_s + place.seconds for part, place in zip(gpu_check.PARTS, places, strict=True))
    assert planned <= 3 * gpu_check.CALL_S["cuda"] < 1800
    assert sum(place.limit_s for place in places) <= 4 * gpu_check.CALL_S["cuda"]
    assert all(place.limit_s < gpu_check.CALL_S["cuda"] / 2 for place in places)
    assert all(part.planned_s < part.limit_s for part in gpu_check.PARTS)


def test_idle_time_is_when_nothing_runs_on_any_stream():
    spans = [
        speed.Span("gemm", 0, 4000), speed.Span("all_gather", 1000, 9000),
        speed.Span("Memcpy DtoH", 10000, 11000), speed.Span("adam", 14000, 20000),
    ]  # fmt: skip
    assert speed.busy(spans, steps=2) == {
        "kernels": 1.5, "copies": 0.5, "step_ms": 0.01, "idle_ms": 0.002, "idle": 0.2, "longest_gap_us": 3.0
    }  # fmt: skip


def test_lanes_out_of_order_are_found():
    good = [
        ("gather.issue", "a"),
        ("gather.issue", "b"),
        ("gather.join", "a"),
        ("gather.free", "a"),
        ("gather.join", "b"),
    ]
    assert streams.order_faults(good) == []
    assert streams.count_ahead(good) == 1
    assert streams.order_faults([("reduce.issue", "a"), ("reduce.issue", "a"), ("reduce.join", "a")]) == []
    assert streams.order_faults([("gather.join", "a")]) == ["event 0: gather.join of a after nothing"]
    assert streams.order_faults([("reduce.issue", "a")]) == ["reduction of a was never joined"]


def test_one_read_at_the_boundary_may_wait():
    read = Counter({"arena.py:111 return list(values.tolist())": 1})
    nothing = Counter()
    assert host.unwanted({"forward": nothing, "backward": nothing, "step": read}) == ""
    assert host.unwanted({"forward": nothing, "backward": nothing, "step": read + read}) == "step: 2 reads"
    assert host.unwanted({"forward": read, "backward": nothing, "step": nothing}).startswith("forward: arena.py:111")
    assert (
        host.unwanted({"forward": nothing, "backward": nothing, "step": Counter({"step.py:92 x": 1})})
        == "step: step.py:92 x"
    )


def test_an_operation_that_waits_is_told_by_its_line(monkeypatch):
    prototype = "a prototype feature that does not yet detect all synchronizing operations"
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: warnings.warn(prototype, stacklevel=1))
    with host.waits() as lines:
        for _ in range(2):
            warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
        warnings.warn("of something else", stacklevel=1)
    ((line, count),) = lines.items()
    assert line.startswith("test_gpu_check.py:")
    assert "synchronizing" in line
    assert count == 2


def test_the_sanitizer_is_shown_the_storage_of_a_view():
    class OnCard(torch.Tensor):
        is_cuda = True

    class Reader:
        def _handle_argument(self, value, is_write, name=None):
            seen.append((value.data_ptr(), is_write, name))

    seen, full = [], torch.zeros(64)
    reader = streams.by_storage(Reader)()
    reader._handle_argument(full[32:].as_subclass(OnCard), True, name="out")
    reader._handle_argument(full[32:], False)
    assert seen == [(full.data_ptr(), True, "out"), (full[32:].data_ptr(), False, None)]


def test_the_sanitizer_takes_allocating_for_no_access():
    class Reader:
        def parse_outputs(self, schema, outputs, *, is_factory):
            seen.append((schema.name, is_factory))

    seen, reader = [], streams.allocating(Reader)()
    for made in (
        torch.ops.aten.empty.memory_format,
        torch.ops.aten.empty_strided.default,
        torch.ops.aten.zeros.default,
    ):
        reader.parse_outputs(made._schema, None, is_factory=False)
    assert seen == [("aten::empty", True), ("aten::empty_strided", True), ("aten::zeros", False)]


@pytest.mark.long
def test_a_part_of_every_module_holds_with_the_cpu_in_the_place_of_the_card(tmp_path):
    """`make campaign` runs all of them."""
    out = tmp_path / "out.json"
    kinds = {part.work.partition(":")[0]: part.name for part in reversed(gpu_check.PARTS)}
    named = {*kinds.values(), "step", "streams.sanitizer", "weights"} - {"syncs", "hybrids"}  # which a CPU skips
    chosen = [part.name for part in gpu_check.PARTS if part.name in named]
    script = [sys.executable, str(ROOT / "benchmarks" / "gpu_check.py"), "--device", "cpu"]
    done = subprocess.run(
        [*script, "--only", ",".join(chosen), "--json", str(out)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = json.loads(out.read_text())
    assert list(found["parts"]) == chosen
    assert {result["outcome"] for result in found["parts"].values()} == {"passed"}
    assert 0 < found["step_dispatches"] <= 40
    assert 0 < found["step_syncs"] <= 1
    assert all("shape" in result["ran"] for result in found["parts"].values())


def test_a_table_has_a_line_for_every_part_and_what_is_wrong():
    campaign = record.Record(None, {}, resume=False)
    campaign.put(
        "nccl",
        {"outcome": "failed", "seconds": 9.6, "limit_s": 60.0, "ran": {"a": 1}, "skipped": {}, "failed": {"a": "off"}},
    )
    assert campaign.table().splitlines() == [
        "part  outcome  seconds  limit  ran  skipped",
        "nccl  failed        10     60    1        0",
        "    a: off",
    ]


def test_figures_with_goals_are_the_last_table_those_beside_other_parts_among_them(parts, tmp_path, capsys):
    campaign = record.Record(None, {}, resume=False)
    assert campaign.goals() == ""
    turn = account.Account(tmp_path / "account.json")
    turn.goal("speed", 1.0, 0.97)
    turn.goal("bytes, apart", 0.02, 0.01, most=True)
    campaign.put("turns.8k", process.account_of(tmp_path))

    def of_steps(rate, losses):
        return {"ran": {"64 tokens a step": {"tokens_per_s": rate, "losses": losses, "micro_batches": 2}}}

    campaign.put("offload.resident", of_steps(10.0, [4.0, 2.0]))
    campaign.put("offload.host", of_steps(9.5, [4.0, 2.0]))
    campaign.put("offload.disk", of_steps(1.0, [4.0, 2.2]))
    rows = [line.split("  ") for line in campaign.goals().splitlines()[1:]]
    missed = {row[0].strip(): row[-1] == "missed" for row in rows}
    assert missed == {
        "speed": True, "bytes, apart": False, "offload.host: losses / resident, apart": False,
        "offload.host, 64 tokens a step: tokens/s / resident": False, "offload.disk: losses / resident, apart": True,
    }  # fmt: skip


def test_a_part_without_a_package_that_it_needs_is_skipped_and_says_which(parts, tmp_path):
    parts["passes"] = parts["passes"]._replace(needs=("torch", "no_such_module"))
    code, found = check(parts, ("passes", "skips"), tmp_path / "out.json")
    assert (code, found["parts"]["passes"]["outcome"]) == (0, "skipped")
    assert found["parts"]["passes"]["skipped"] == {"all of it": "needs no_such_module: pip install no_such_module"}
    assert "passes" not in (tmp_path / "begun").read_text()


@pytest.mark.long
def test_a_machine_without_what_all_parts_need_is_told_so(tmp_path):
    hide = "import sys; sys.modules['yaml'] = None; sys.path.insert(0, sys.argv[1]); import gpu_check"
    done = subprocess.run(
        [sys.executable, "-c", hide, str(ROOT / "benchmarks")], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stderr) == (2, "the campaign needs PyYAML beside torch: pip install PyYAML\n")


def test_without_transformers_the_llama_is_one_of_the_same_shape(monkeypatch):
    sizes, ids = [], torch.arange(32).view(2, 16)
    for absent in (False, True):
        if absent:
            monkeypatch.setattr(llama, "find_spec", lambda name: None)
        model = llama.Llama(speed.CPU_SHAPE)
        sizes.append(sum(p.numel() for p in model.parameters()))
        loss = model(ids, ids)
        loss.backward()
        assert 5 < float(loss) < 8
        assert all(bool(p.grad.isfinite().all()) for p in model.parameters())
    assert isinstance(model.inner, llama.Bare)
    assert sizes[0] == sizes[1]
    later = ids.clone()
    later[:, 9:] += 1
    assert torch.equal(model.inner(ids)[:, :9], model.inner(later)[:, :9])  # nobody looks ahead


def test_peaks_of_a_way_to_train_are_said_over_fsdp2s_where_there_is_a_card():
    peer = {"tokens_per_s": 1.0, "peak_gib": 20.0, "peak_reserved_gib": 40.0}
    row = {"tokens_per_s": 1.0, "peak_gib": 22.0, "peak_reserved_gib": 38.0}
    assert turns.memory_ratios(row, peer) == {"allocated": 1.1, "reserved": 0.95}
    assert turns.memory_ratios({"tokens_per_s": 1.0}, {"tokens_per_s": 1.0}) == {}


def test_turns_go_forth_and_back():
    assert list(turns.order_of(2)) == [*speed.VARIANTS, *reversed(speed.VARIANTS)]


# --- an axis of one rank that takes the path of many ------------------------------------------------


def test_its_size_is_more_than_one_and_no_more_than_others():
    size = loopback.One(1)
    assert [size > other for other in (0, 1, 2, 8)] == [True, True, False, False]
    assert [size == 1, size != 1, size - 1, 8 // size] == [False, True, 0, 8]


@pytest.mark.parametrize("backend", ["gloo", "nccl"])
@pytest.mark.parametrize("asked", ["auto", "native", "all-to-all"])
def test_it_reduces_as_several_ranks_on_nccl_do(backend, asked):
    assert loopback.as_on_nccl(backend, loopback.One(1), asked, None) == choose_algorithm("nccl", 8, asked, None)
