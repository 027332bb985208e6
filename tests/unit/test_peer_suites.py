"""benchmarks/peer_suites: verdicts on peers' tests, the committed sets, and a run over a checkout of one file."""

import importlib.util
import json
import sys
from pathlib import Path

import pytest
import yaml

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "benchmarks" / "peer_suites"), str(ROOT / "benchmarks")]
import recorded  # noqa: E402
import two_ranks  # noqa: E402
import verdicts  # noqa: E402

FILE = importlib.util.spec_from_file_location("run_of_peer_suites", ROOT / "benchmarks" / "peer_suites" / "run.py")
run = importlib.util.module_from_spec(FILE)  # tests/mutants has a run.py, too
FILE.loader.exec_module(run)

LEAST = {  # applicable tests of each suite, which never become fewer
    "accelerate": 129,
    "deepspeed": 140,
    "fsdp2": 33,
    "transformers": 183,
    "transformers_ranks": 61,
    "trl": 365,
}
TREE = {
    "library": "peer==1.0",
    "checkout": "example.org/peer at 0123456",
    "files": ["tests/test_it.py"],
    "applicable": {"tests/test_it.py": {"Tests": ["test_a", "test_b[1-x]"]}},
    "not_applicable": {"needs a GPU": ["*_cuda"], "needs the network": ["*[hub]"]},
}
FILE = """
import pytest

class Tests:
    def test_a(self):
        assert True

    @pytest.mark.parametrize("how", ["1-x"])
    def test_b(self, how):
        assert how == "2-x", "another how"

    def test_on_cuda(self):
        raise RuntimeError("nothing runs this")

    def test_new(self):
        pytest.skip("needs more")
"""
ON_TWO = """
import os
import tempfile
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

RANK = int(os.environ["RANK"])

def begin():
    dist.init_process_group("gloo")

def test_sums():
    begin()
    assert os.environ.pop("ACCELERATE_USE_CPU") == "true"  # as transformers' tests do
    total = torch.tensor([RANK + 1.0])
    dist.all_reduce(total)
    assert total.item() == 3.0

def test_folder(tmp_path):
    begin()
    assert os.environ["ACCELERATE_USE_CPU"] == "true"
    folder = Path(tempfile.mkdtemp())
    (folder / f"from-{RANK}").touch()
    (tmp_path / f"from-{RANK}").touch()
    dist.barrier()
    assert len(list(folder.iterdir())) == len(list(tmp_path.iterdir())) == 2

def test_differs():
    begin()
    assert RANK == 0, "only rank 1"
    dist.barrier()

def test_after():
    begin()
    dist.barrier()

def test_skipped():
    pytest.skip("needs more")
"""


def suite(folder, **changes):
    path = folder / "peer.yaml"
    path.write_text(yaml.safe_dump(TREE | changes, sort_keys=False))
    return path


def verdict_of(path, **outcomes):
    found = verdicts.judge(verdicts.read(path), {f"tests/test_it.py::Tests::{k}": v for k, v in outcomes.items()})
    return {one.test.rpartition("::")[2]: (one.verdict, one.why) for one in found}


def test_an_applicable_test_passes_fails_or_was_not_run(tmp_path):
    path = suite(tmp_path)
    assert verdict_of(path, test_a=("passed", ""))["test_a"] == ("pass", "")
    assert verdict_of(path, test_a=("failed", "E  no"))["test_a"] == ("fail", "E  no")
    assert verdict_of(path, test_a=("skipped", "needs B"))["test_a"] == ("not run", "skipped: needs B")
    assert verdict_of(path)["test_a"] == ("not run", "absent: this checkout does not have it")


def test_a_test_that_is_not_applicable_has_the_first_reason_whose_pattern_fits(tmp_path):
    path = suite(tmp_path, not_applicable={"first": ["*::test_c*"], "second": ["*::test_c", "*::test_d"]})
    found = verdict_of(path, test_c=("failed", ""), test_d=("passed", ""))
    assert found["test_c"] == ("not applicable", "first")
    assert found["test_d"] == ("not applicable", "second")


def test_a_test_that_no_line_fits_is_unlisted(tmp_path):
    assert verdict_of(suite(tmp_path), test_new=("passed", ""))["test_new"][0] == "unlisted"


def test_brackets_of_parameters_stand_for_themselves(tmp_path):
    path = suite(tmp_path, not_applicable={"no such thing": ["*::test_e[1]"]})
    assert verdict_of(path, **{"test_e[1]": ("passed", "")})["test_e[1]"] == ("not applicable", "no such thing")
    assert verdict_of(path, test_e1=("passed", ""))["test_e1"][0] == "unlisted"


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"applicable": {"tests/test_it.py": ["test_a", "test_a"]}}, "tests/test_it.py::test_a is listed twice"),
        ({"reasons": {}}, "it needs applicable, checkout, files, library, not_applicable"),
        ({"left out": {}}, "it needs applicable, checkout, files, library, not_applicable"),
    ],
)
def test_a_suite_that_is_not_written_right_is_refused(tmp_path, changes, why):
    with pytest.raises(ValueError, match=why):
        verdicts.read(suite(tmp_path, **changes))


def test_the_summary_counts_verdicts_and_reasons(tmp_path):
    found = verdicts.judge(
        verdicts.read(suite(tmp_path)),
        {
            "tests/test_it.py::Tests::test_a": ("passed", ""),
            "tests/test_it.py::Tests::test_x_cuda": ("left out", ""),
            "tests/test_it.py::Tests::test_y_cuda": ("left out", ""),
        },
    )
    assert verdicts.summary(found) == {
        "pass": 1, "fail": 0, "not run": 1, "unlisted": 0, "not applicable": 2, "reasons": {"needs a GPU": 2},
    }  # fmt: skip


ON_RANKS = {
    "on_two_ranks": {"counts processes": ["*::test_b*"]},
    "applicable": {"tests/test_it.py": ["test_a", "test_b", "test_c", "test_d", "test_e"]},
}


def test_a_test_on_two_ranks_passes_fails_as_the_original_does_or_had_no_time(tmp_path):
    tests = [f"tests/test_it.py::test_{letter}" for letter in "abcde"]
    a, _, c, d, _ = tests
    ours = {a: ("passed", ""), c: ("failed", "E  ours"), d: ("failed", "E  theirs, too")}
    theirs = {c: ("passed", ""), d: ("failed", "E  another line")}
    found = verdicts.judge_ranks(verdicts.read(suite(tmp_path, **ON_RANKS)), tests, ours, theirs)
    assert [(one.test[-1], one.verdict, one.why) for one in found.pop("bad")] == [
        ("c", "fail", "E  ours"),
        ("d", "fails in the original, too", "E  theirs, too"),
    ]
    assert found == {
        "trains": 5, "pass": 1, "fail": 1, "not run": 0, "fails in the original, too": 1, "not applicable": 1,
        "over the budget": 1, "reasons": {"counts processes": 1},
    }  # fmt: skip


def test_tests_are_drawn_by_the_hash_of_their_ids_whatever_their_order():
    names = [f"tests/test_it.py::test_{number}" for number in range(9)]
    drawn = two_ranks.in_order(names)
    assert drawn == two_ranks.in_order(reversed(names))
    assert sorted(drawn) == names != drawn


@pytest.mark.long
def test_two_ranks_agree_on_each_test_and_begin_anew_behind_one_that_one_of_them_ends_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(two_ranks, "GRACE", 0.0)
    (tmp_path / "test_it.py").write_text(ON_TWO)
    names = ["sums", "folder", "differs", "after", "skipped"]
    words = ["-p", "plugins.record", "-q", "--rootdir", ".", "-p", "no:cacheprovider", "-o", "addopts="]
    found = two_ranks.run(
        [f"test_it.py::test_{name}" for name in names],
        tmp_path,
        words,
        two_ranks.environment_of(run._environment(tmp_path), None),
        budget=300,
        seconds=120,
    )
    outcomes = {test.rpartition("_")[2]: outcome for test, (outcome, _) in found.items()}
    assert outcomes == {
        "sums": "passed", "folder": "passed", "differs": "failed", "after": "passed", "skipped": "skipped",
    }  # fmt: skip
    assert "only rank 1" in found["test_it.py::test_differs"][1]


def test_without_time_nothing_is_run(tmp_path):
    assert two_ranks.run(["test_it.py::test_a"], tmp_path, [], {}, budget=0, seconds=1) == {}


def test_a_file_that_cannot_be_imported_counts_the_tests_that_are_written_in_it(tmp_path, monkeypatch):
    monkeypatch.setattr(run, "SUITES", tmp_path)
    monkeypatch.setattr(run, "names", lambda: ["peer"])
    (tmp_path / "checkout" / "tests").mkdir(parents=True)
    (tmp_path / "checkout" / "tests" / "test_it.py").write_text(f"import no_such_module\n{FILE}")
    suite(tmp_path, not_applicable={"imports what is not there": ["tests/test_it.py::*"]}, applicable={})
    out = tmp_path / "out.json"
    run.main(["--suite", "peer", "--checkout", str(tmp_path / "checkout"), "--plain", "--json", str(out)])
    assert json.loads(out.read_text())["reasons"] == {"imports what is not there": 4}


def test_a_test_whose_teardown_fails_has_failed():
    lines = [("passed", ""), ("failed", "E  left open")]
    text = "\n".join(json.dumps({"test": "t", "outcome": outcome, "why": why}) for outcome, why in lines)
    assert run.outcomes_of(text) == {"t": ("failed", "E  left open")}


@pytest.mark.parametrize(
    ("lines", "short"),
    [
        ("file.py:3: in f\nE   ValueError: no /home/me/runs/a.json\nE   it is elsewhere", "ValueError: no .../a.json"),
        ("E   spawn.ProcessRaisedException: \nE   KeyError: 'b'", "KeyError: 'b'"),
        ("it hangs", "it hangs"),
        ("", ""),
    ],
)
def test_an_error_is_shortened_to_its_line_without_folders(lines, short):
    assert run.error_of(lines) == short


def test_a_run_judges_a_checkout_and_does_not_run_what_is_not_applicable(tmp_path, monkeypatch, capfd):
    checkout, out = tmp_path / "checkout", tmp_path / "out.json"
    (checkout / "tests").mkdir(parents=True)
    (checkout / "tests" / "test_it.py").write_text(FILE)
    suite(tmp_path)
    monkeypatch.setattr(run, "SUITES", tmp_path)
    monkeypatch.setattr(run, "names", lambda: ["peer"])
    words = ["--suite", "peer", "--checkout", str(checkout), "--plain", "--json", str(out)]
    assert run.main(words[:-2]) == 1
    assert run.main(words) == 0
    found = json.loads(out.read_text())
    assert {key: found[key] for key in ("pass", "fail", "not run", "unlisted", "not applicable")} == {
        "pass": 1, "fail": 1, "not run": 0, "unlisted": 1, "not applicable": 1,
    }  # fmt: skip
    [failed, new] = found["bad"]
    assert failed["test"] == "tests/test_it.py::Tests::test_b[1-x]"
    assert failed["why"] == "AssertionError: another how"
    assert new["why"] == "skipped: needs more"
    assert "nothing runs this" not in capfd.readouterr().out


def test_a_suite_that_is_not_run_anew_stays_on_record_with_its_commit():
    old, older = {"command": "old", "seconds": 1}, {"command": "older", "commit": "c0", "date": "d0"}
    earlier = {"commit": "c1", "date": "d1", "runs": [old, older]}
    assert recorded.kept("old", earlier) == {**old, "commit": "c1", "date": "d1"}
    assert recorded.kept("older", earlier) == older
    with pytest.raises(RuntimeError, match="it is not on record, so it has to be run, too"):
        recorded.kept("new", earlier)


def test_a_test_file_that_no_line_names_is_unlisted(tmp_path):
    (tmp_path / "tests").mkdir()
    for name in ("test_it", "test_other", "test_new"):
        (tmp_path / "tests" / f"{name}.py").touch()
    found = verdicts.read(suite(tmp_path, left_out={"builds nothing": ["tests/test_other*"]}))
    assert found.unnamed(tmp_path) == ["tests/test_new.py"]


def test_a_run_without_a_checkout_says_what_it_takes(capsys):
    with pytest.raises(SystemExit):
        run.main(["--suite", "transformers", "--checkout", "/nowhere"])
    assert "it takes github.com/huggingface/transformers at " in capsys.readouterr().err


@pytest.mark.parametrize("name", verdicts.names())
def test_the_committed_sets_do_not_shrink(name):
    found = verdicts.read(verdicts.SUITES / f"{name}.yaml")
    assert len(found.applicable) >= LEAST.get(name, 1)
    assert not found.files or {test.partition("::")[0] for test in found.applicable} <= set(found.files)
    assert all(reason.strip() for _, reason in found.patterns)


def test_every_contract_of_fsdp2_is_listed_and_the_other_way_round():
    import fsdp2_contracts

    assert verdicts.read(verdicts.SUITES / "fsdp2.yaml").applicable == set(fsdp2_contracts.CONTRACTS)
