"""A run of a file goes on with one key changed: where that moves its curve the line names the key and what to type."""

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from contracts import drawn
from damage import edit
from families import family
from file_contracts import BASES, EXCUSED, KEYS, SAVED, file_of, go_on, run, save_others
from models import hf
from training import save_model, save_rows

from zero3d.checkpoint.resume_contract import Change
from zero3d.config import Config, load
from zero3d.config.keys import KEYS as OF_FILES
from zero3d.errors import CheckpointError, ConfigError
from zero3d.tools.cli.main import main
from zero3d.train.resume import restore
from zero3d.train.resume_settings import describe, settings_of, with_groups
from zero3d.train.start import Start


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "model", vocab=64)
    save_model(tmp_path / "other", vocab=68)
    save_rows(tmp_path / "rows.npy")
    save_others(tmp_path)
    return tmp_path


def test_every_key_of_a_file_is_changed_or_excused():
    assert {key.name for key in KEYS} | EXCUSED.keys() == OF_FILES.keys()
    assert not {key.name for key in KEYS} & EXCUSED.keys()
    assert {key.base for key in KEYS} == BASES.keys()


def checked(ranks, base, numbers, folder):
    for of_rank in ranks(BASES[base][0], go_on, str(folder), base, numbers):
        for number, (same, line) in zip(numbers, of_rank, strict=True):
            key = KEYS[number]
            if same is None:
                assert not key.keeps, f"{key.id}: {line}"
                continue
            assert line.startswith(("bitwise: ", "not bitwise: ")), f"{key.id}: {line}"
            named = f"{key.name}=" in line
            assert same or (line.startswith("not bitwise: ") and named), f"{key.id}: {line}"
            assert line.startswith("bitwise: ") or not key.keeps, f"{key.id}: {line}"


@pytest.mark.parametrize("base", BASES)
@pytest.mark.long
def test_where_a_changed_key_moves_the_curve_the_line_names_it(ranks, folder, base):
    checked(ranks, base, [number for number, key in enumerate(KEYS) if key.base == base], folder)


def test_a_share_of_all_changed_keys_is_named_where_it_moves_the_curve(ranks, folder):
    numbers = [number for number, key in enumerate(KEYS) if drawn(key.id)]
    for base in {KEYS[number].base for number in numbers}:
        checked(ranks, base, [number for number in numbers if KEYS[number].base == base], folder)


# --- whose settings count -------------------------------------------------------------------------


def with_settings(folder, settings, output="whole"):
    """Records and line of a run that goes on with another rate, schedule, clipping and micro-batch; its config.yaml."""
    made = file_of(folder, "plain", output)
    wanted, _ = run(made)
    made["optimizer"] |= {"lr": 0.1, "clip_norm": 0.01, "betas": [0.5, 0.5]}
    made["schedule"] = {"name": "constant"}
    records, line = run(made, f"{made['output']}/checkpoints/step-{SAVED}", settings)
    return records == wanted, line, (Path(made["output"]) / "config.yaml").read_text()


def test_the_files_settings_of_the_update_count_unless_the_checkpoints_are_asked_for(ranks, folder):
    same, line, _ = ranks(1, with_settings, str(folder), "given")[0]
    assert not same
    assert line.startswith("not bitwise: other learning rates from here on (the schedule's functions give others)")
    assert "; betas [0.9, 0.95] -> [0.5, 0.5] (the update uses it); lr 0.01 -> 0.1 (the update uses it)" in line
    assert line.endswith(
        "To go on as before, type optimizer.lr=0.01 'optimizer.betas=[0.9, 0.95]' optimizer.clip_norm=0.5 "
        "schedule.name=cosine schedule.warmup=2.0, or --resume-settings saved"
    )
    same, line, written = ranks(1, with_settings, str(folder), "saved", "again")[0]
    assert same
    assert line == "bitwise: as if it had not been interrupted"
    assert "lr: 0.01" in written, "the next resume of the folder goes on with them"


def of_an_older_version(folder):
    """Records and line of a run that goes on with what older versions took for the default, and a run of that."""
    family("gpt_oss").save_pretrained(Path(folder) / "stacked")
    made = file_of(folder, "plain", "whole")
    made["model"] = {"path": str(Path(folder) / "stacked")}
    made["data"]["packing"] = False
    made["optimizer"] |= {"weight_decay": 5.0, "no_decay": None}
    wanted, _ = run(made)
    del made["optimizer"]["no_decay"]
    checkpoint = Path(made["output"], "checkpoints", f"step-{SAVED}")
    _, told = with_groups(load(made), family("gpt_oss"), checkpoint)
    records, line = run(made, str(checkpoint))
    return records == wanted, line, told, Path(made["output"], "config.yaml").read_text()


@pytest.mark.long
def test_a_run_that_an_older_version_began_keeps_its_groups(ranks, folder):
    same, line, told, written = ranks(1, of_an_older_version, str(folder))[0]
    assert same
    assert line == "bitwise: as if it had not been interrupted"
    assert told.startswith(
        "optimizer.no_decay=null: an older version began this run and gave weight decay to 4 parameters that have none "
        "in a new run, such as model.layers.0.mlp.experts.gate_up_proj_bias; it keeps them."
    )
    assert "no_decay: null" in written, "the next resume of the folder goes on with them"


def test_where_no_group_differs_a_run_goes_on_with_the_default(folder):
    assert with_groups(load({}), hf("llama"), None) == (load({}), None)
    damaged = folder / "step-1"
    damaged.mkdir()
    assert with_groups(load({}), hf("llama"), damaged) == (load({}), None)  # refused when it is loaded


def described(then, now, changed, was=None, batches=None, done=2, ranks=1, resumed="not bitwise: as it happens"):
    """The line of a run whose file has changed, and what its engine was asked to compare."""
    asked = []
    checkpoints = SimpleNamespace(
        compare=lambda *noted: asked.extend(noted) or [Change(changed, 1, 2)], loaded={"dp": ranks, "tp": 1, "pp": 1}
    )
    engine = SimpleNamespace(checkpoints=checkpoints, resumed=resumed, steps=done, world=SimpleNamespace(size=1))
    sizes = {"batch": 8, "micro_batch": 2, "steps": 20}
    saved = {"settings": settings_of(load(then)), "batches": sizes | (was or {})}
    return describe(load(now), True, engine, saved, sizes | (batches or {})), asked


def test_sizes_of_batches_are_compared():
    _, (was, now) = described({}, {}, "batch", was={"batch": 4, "micro_batch": 1})
    assert (was["batch"], was["micro_batch"], now["batch"], now["micro_batch"]) == (4, 1, 8, 2)
    assert "steps" not in was, "which a schedule's factors say"


def test_another_number_of_ranks_is_typed_as_such():
    assert described({}, {}, "dp", ranks=2)[0] == "not bitwise: as it happens. To go on as before, type --ranks 2"


SO_FAR = "; rates up to here are those of a run that began with these settings"


@pytest.mark.parametrize(
    ("then", "now", "changed", "done", "so_far"),
    [
        ({"decay": 2}, {"decay": 5}, "factors", 14, True),
        ({"decay": 2}, {"decay": 5}, "factors", 18, False),
        ({"decay": 2}, {"decay": 5}, "batch", 14, False),
        ({"warmup": 2}, {"warmup": 4}, "factors", 14, False),
    ],
)
def test_a_line_says_where_the_rates_so_far_were_those_of_the_new_schedule(then, now, changed, done, so_far):
    files = [{"schedule": {"name": "wsd", **each}} for each in (then, now)]
    line, _ = described(*files, changed, done=done)
    assert (SO_FAR in line) == so_far
    name, value = next(iter(then.items()))
    assert line.endswith(f". To go on as before, type schedule.{name}={float(value)}, or --resume-settings saved")


def test_slots_have_no_settings_for_a_run_that_asks_a_checkpoint_for_them():
    optimizer = SimpleNamespace(torch=torch.optim.AdamW([torch.zeros(1)]))
    engine = SimpleNamespace(
        optimizer=optimizer, slots=SimpleNamespace(path=Path("run/offload/rank-00000.note-0.json"))
    )
    start = Start(resume="auto", settings="saved")
    with pytest.raises(
        ConfigError, match="takes settings from a checkpoint, and run/offload holds a later step: leave"
    ):
        restore(Config(), start, None, engine, None, None, from_slots=True)


def with_nulls(folder):
    """Whether a run without clipping goes on so, where its file has some and the checkpoint's settings are asked for."""
    made = file_of(folder, "plain", "whole")
    made["optimizer"]["clip_norm"] = None
    wanted, _ = run(made)
    made["optimizer"]["clip_norm"] = 0.01
    records, line = run(made, f"{made['output']}/checkpoints/step-{SAVED}", "saved")
    return records == wanted, line


def test_settings_of_a_checkpoint_that_are_null_count_too(ranks, folder):
    assert ranks(1, with_nulls, str(folder))[0] == (True, "bitwise: as if it had not been interrupted")


def from_an_engine(folder):
    """The error of a run that asks for settings of a checkpoint which has none."""
    made = file_of(folder, "plain", "whole")
    run(made)
    saved = Path(made["output"]) / "checkpoints" / f"step-{SAVED}"
    edit(saved, lambda manifest: manifest["loop"].pop("settings"))
    with pytest.raises(CheckpointError) as error:
        run(made, str(saved), "saved")
    line = run(made, str(saved))[1]
    return str(error.value), line


def test_a_checkpoint_without_settings_says_so(ranks, folder):
    error, line = ranks(1, from_an_engine, str(folder))[0]
    assert "--resume-settings saved: " in error
    assert "does not say which settings its run had" in error
    assert line == "bitwise: as if it had not been interrupted", "its engine has noted what an engine knows"


@pytest.mark.parametrize("words", [["--resume-settings", "saved"], ["--resume", "auto", "--resume-settings", "file"]])
def test_bad_settings_of_a_command_are_one_error(words, capsys):
    with pytest.raises(SystemExit) as end:
        sys.exit(main(["train", "output=nowhere", *words]))
    assert end.value.code == 2
    assert "--resume-settings" in capsys.readouterr().err
