"""Training runs whose steps are not finite: how they end, what they leave, and what they never write."""

import io
import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import yaml
from heard import Heard
from models import hf
from training import contents, metrics, save_model, save_rows, start, train, tree

from zero3d.config import load
from zero3d.errors import CheckpointError, NonFiniteError
from zero3d.train.folder import Folder
from zero3d.train.report import summary

BEYOND = 3e38  # a norm's weight: finite itself, and what it scales is not


@pytest.fixture
def folder(tmp_path):
    save_model(tmp_path / "model")
    save_rows(tmp_path / "rows.npy")
    return tmp_path


@pytest.fixture
def heard(tmp_path):
    made = Heard(tmp_path)
    yield made
    made.close()


def spoil(folder):
    """A model that is finite and computes what is not."""
    model = hf("llama", inner=96)
    with torch.no_grad():
        model.model.norm.weight.fill_(BEYOND)
    model.save_pretrained(folder / "model")


def steps_saved(made):
    return sorted(path.name for path in (Path(made["output"]) / "checkpoints").glob("step-*"))


def given_up(made, *start):
    with pytest.raises(NonFiniteError) as error:
        train(made, *start)
    assert error.value.exit_code == 1
    return str(error.value)


@pytest.mark.long
def test_a_run_whose_every_step_is_not_finite_fails_and_exports_nothing(folder):
    spoil(folder)
    made = tree(folder, checkpoint={"export": True})
    message = given_up(made)
    assert message.startswith(
        "all 5 steps of the run had gradients that are NaN or infinite. First in the last one: unit"
    )
    assert "on rank 0. No step was applied and nothing saved." in message
    assert [line["applied"] for line in metrics(made)] == [False] * 5
    assert steps_saved(made) == []
    assert not (folder / "out" / "hf").exists()


@pytest.mark.parametrize(("health", "run", "told", "message"), [
    ({"max_skips": 3}, 4, ["nonfinite skipped 2"], "3 steps in a row had gradients that are NaN or infinite (health.max_skips=3), up to step 4."),
    ({"nonfinite": "stop"}, 2, [], "step 2 had gradients that are NaN or infinite (health.nonfinite=stop)."),
], ids=["skip", "stop"])  # fmt: skip
def test_a_run_that_diverges_ends_after_so_many_steps_and_leaves_a_state_to_go_on_from(
    folder, heard, health, run, told, message
):
    log = {"on": heard.on("nonfinite", "end")}
    made = tree(folder, optimizer={"lr": 1e30}, schedule={"warmup": 0}, health=health, log=log)
    printed = given_up(made)
    assert printed.startswith(f"{message} First in the last one: unit ")
    assert "--resume auto" in printed
    assert [line["applied"] for line in metrics(made)] == [True] + [False] * (run - 1)
    assert steps_saved(made) == ["step-1"]
    assert heard.lines(2 + len(told)) == [f"end failed {run}", f"nonfinite gives up {run}", *told]
    assert heard.silent


@pytest.mark.long
def test_the_last_good_checkpoint_stays_as_it_is_and_the_run_goes_on_from_it(folder):
    good = tree(folder, train={"steps": 2, "batch": 4, "accumulate": 2})
    train(good)
    held = {path: path.read_bytes() for path in (folder / "out" / "checkpoints").rglob("*") if path.is_file()}
    bad = tree(folder, optimizer={"lr": 1e30}, schedule={"warmup": 0}, health={"max_skips": 2})
    printed = given_up(bad, "auto")
    assert f"{folder}/out/checkpoints/step-2 is there." in printed
    assert f"zero3d train {folder}/out/config.yaml --resume auto" in printed
    assert {path: path.read_bytes() for path in held} == held
    went_on = train(good | {"train": {**good["train"], "steps": 4}}, "auto")
    assert [(line["step"], line["applied"]) for line in went_on] == [(step, True) for step in (1, 2, 3, 4)]


@pytest.mark.long
def test_fp16_finds_its_loss_scale_and_ends_only_where_there_is_none(folder, heard):
    falls = {"precision": "fp16", "loss_scale": {"initial": 2.0**18, "hysteresis": 1}}
    made = tree(folder, health={"nonfinite": "stop"}, train={"steps": 9}, log={"on": heard.on("nonfinite")}, **falls)
    applied = [record["applied"] for record in train(made)]
    assert applied[0] is False
    assert applied[-1] is True
    assert not (folder / "out" / "events.log").exists(), "overflows that the loss scale is found by are no news"
    made = tree(folder, output="low", health={"max_skips": 9}, precision="fp16",
                loss_scale={"initial": 2.0**40, "minimum": 2.0**39, "hysteresis": 1})  # fmt: skip
    printed = given_up(made)
    assert printed.startswith("fp16 gradients overflow at the minimum loss scale")
    assert "First in the last one: unit" in printed
    assert "on rank 0" in printed
    assert "bf16" in printed


INFINITE, NO_TARGETS = (float("inf"), 1.0), (0.0, 0.0)  # factors of a step's sum of losses, and of its weight


@pytest.fixture
def losses(monkeypatch):
    """Factors by step, counted by the engine's calls; two micro-batches a step."""
    from zero3d.engine.losses import Losses

    factors, plain, seen = {}, Losses.sum_and_weight, []

    def changed(self, output, batch):
        seen.append(None)
        of_loss, of_weight = factors.get((len(seen) + 1) // 2, (1.0, 1.0))
        total, weight = plain(self, output, batch)
        return total * of_loss, weight * of_weight

    def of(by_step):
        seen.clear()
        factors.clear()
        factors.update(by_step)

    monkeypatch.setattr(Losses, "sum_and_weight", changed)
    return of


def test_a_skipped_step_and_saved_checkpoints_have_a_line_each(folder, losses):
    from rich.console import Console

    from zero3d.train.progress import Progress
    from zero3d.train.run import run

    losses({2: INFINITE, 3: INFINITE})
    made = tree(folder, health={"max_skips": 9}, checkpoint={"every": 2}, train={"steps": 5})
    printed = io.StringIO()
    run(load(made), start("test"), Progress(Console(file=printed, width=500)))
    lines = printed.getvalue().splitlines()
    assert [line for line in lines if "skipped:" in line] == ["step 2: skipped: its gradients are not finite"]
    checkpoints = f"{folder}/out/checkpoints"
    assert [line for line in lines if line.startswith("saved")] == [
        f"saved: {checkpoints}/step-1",
        f"saved: {checkpoints}/step-2",
        f"saved: {checkpoints}/step-3",
    ]


def position(made, step):
    saved = json.loads((Path(made["output"]) / f"checkpoints/step-{step}/manifest.json").read_text())
    return saved["loop"]["in_a_row"], saved["loop"]["step"], saved["loss_scale"]["steps"]


@pytest.mark.long
def test_a_resume_goes_on_counting_and_a_diverged_run_never_ends_well(folder, losses):
    made = tree(folder, checkpoint={"export": True}, health={"max_skips": 3})
    losses(dict.fromkeys(range(3, 10), INFINITE))
    given_up(made)
    assert position(made, 2) == (3, 5, 0)
    made["train"]["steps"] = 7
    losses({1: NO_TARGETS, 2: INFINITE})
    assert given_up(made, "auto").startswith("4 steps in a row")
    assert not (folder / "out" / "hf").exists()


@pytest.mark.long
def test_a_session_that_applies_nothing_fails_whatever_is_between(folder, losses):
    losses(dict.fromkeys((1, 2, 4, 5), INFINITE) | {3: NO_TARGETS})
    message = given_up(tree(folder, output="all", checkpoint={"export": True}))
    assert message.startswith("none of the 5 steps of the run was applied, 4 of which had gradients that are NaN")
    assert "First in the last one: unit 'lm_head'" in message
    made = tree(folder, output="some", train={"steps": 2})
    losses({})
    train(made)
    made["train"]["steps"] = 4
    losses({1: INFINITE, 2: INFINITE})
    assert given_up(made, "auto").startswith("all 2 steps from step 3 on had gradients")
    assert steps_saved(made) == ["step-2"]


@pytest.mark.long
def test_a_run_too_short_for_its_loss_scale_fails_and_says_so(folder):
    made = tree(folder, precision="fp16", loss_scale={"initial": 2.0**40, "hysteresis": 1}, checkpoint={"export": True})
    message = given_up(made)
    assert "all 5 steps of the run had" in message
    assert "fell to 3.43597e+10 by then: give more train.steps or a lower loss_scale.initial. First" in message
    assert "No step was applied and nothing saved." in message
    assert not (folder / "out" / "hf").exists()


@pytest.mark.parametrize("fails", [False, True])
def test_fp16_at_its_smallest_scale_saves_what_there_is_and_a_save_that_fails_hides_nothing(
    folder, losses, monkeypatch, fails
):
    from zero3d.engine.engine import Engine

    def refuse(self, *_, **__):
        raise CheckpointError("the disk is full.")

    if fails:
        monkeypatch.setattr(Engine, "save", refuse)
    losses({3: INFINITE})
    made = tree(folder, precision="fp16", loss_scale={"initial": 1.0, "minimum": 1.0, "hysteresis": 1})
    message = given_up(made)
    assert message.startswith("fp16 gradients overflow at the minimum loss scale 1 (boundary 2)")
    if fails:
        assert "the disk is full. Nothing is saved. Lower optimizer.lr" in message
    else:
        assert position(made, 2) == (0, 2, 3)
        losses({})
        assert len(train(made, "auto")) == 5


def test_spoiled_weights_are_not_saved_and_a_checkpoint_of_them_is_not_gone_on_from(folder, losses, monkeypatch):
    from zero3d.train import loop, resume

    losses({})
    diverges = {"precision": "fp16", "loss_scale": {"initial": 1.0}, "schedule": {"warmup": 0}}
    made = tree(folder, train={"steps": 2}, checkpoint={"every": 1, "keep": 1}, **diverges)
    train(made)
    bad = tree(folder, optimizer={"lr": 1e6}, train={"steps": 4}, checkpoint={"every": 1, "keep": 1}, **diverges)
    message = given_up(bad, "auto")
    assert message.startswith("weights are NaN or infinite: model.embed_tokens.weight in fp16")
    assert f"They are not saved, and {folder}/out/checkpoints/step-2 is there." in message
    assert steps_saved(made) == ["step-2"]
    with monkeypatch.context() as unseen:
        for module in (loop, resume):
            unseen.setattr(module, "check_weights", lambda *_: None)
        bad["train"]["steps"] = 3
        bad["checkpoint"]["keep"] = 2
        train(bad, "auto")
    message = given_up(made | {"train": {**made["train"], "steps": 9}}, "auto")
    steps = folder / "out" / "checkpoints"
    assert f"{steps}/step-3 holds them. Take an older one, --resume {steps}/step-2, or start anew" in message


@pytest.mark.long
def test_skipped_steps_from_an_older_checkpoint_leave_the_newer_ones_and_the_command_names_it(folder, losses):
    losses({})
    made = tree(folder, train={"steps": 4, "batch": None, "micro_batch": 2}, checkpoint={"every": 1})
    train(made)
    held = contents(folder / "out" / "checkpoints")
    older = f"{folder}/out/checkpoints/step-3"
    made["train"]["steps"], made["health"] = 9, {"max_skips": 2}
    losses({1: INFINITE, 2: INFINITE})
    message = given_up(made, older)
    assert message.endswith(f"zero3d train {folder}/out/config.yaml --resume {older} --ranks=1")
    assert contents(folder / "out" / "checkpoints") == held
    losses({1: INFINITE})
    assert train(made, older, 4) == f"step 4 of 9 and those before it were not finite; what was before is in {older}"
    assert contents(folder / "out" / "checkpoints") == held
    losses({1: INFINITE})
    assert len(train(made, older)) == 9
    assert steps_saved(made) == ["step-7", "step-8"]


@pytest.mark.long
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_held_out_loss_that_is_not_finite_is_never_the_best(folder, monkeypatch, value):
    from zero3d.engine.engine import Engine

    made = tree(folder, data={"validation": 0.3}, train={"steps": 2}, evaluate={"every": 1})
    losses = iter([3.0, value, value])
    monkeypatch.setattr(Engine, "evaluate", lambda self, batches: torch.tensor(next(losses)))
    train(made)
    assert (folder / "out" / "checkpoints" / "best").readlink() == Path("step-1")


def test_weights_of_a_folder_that_are_not_finite_are_refused_by_name(folder, ranks):
    model = hf("llama", inner=96)
    with torch.no_grad():
        model.model.layers[1].mlp.down_proj.weight[-1, -1] = float("inf")
    model.save_pretrained(folder / "model")
    made = tree(folder)
    errors = [error for _, error in ranks(2, train, made, check=False)]
    assert ["model.layers.1.mlp.down_proj.weight in fp32" in str(error) for error in errors] == [True] * 2, errors
    assert not (folder / "out").exists()


@pytest.mark.parametrize(("wire", "reloaded", "said"), [
    ("same", float("nan"), "nan, NOT the same"), ("same", 2.6, "2.600000, NOT the same"),
    ("int8", float("nan"), "nan, NOT the same"), ("int8", 2.6, "2.600000, of the exact weights"),
])  # fmt: skip
def test_an_export_that_computes_another_number_is_not_the_same(wire, reloaded, said):
    result = SimpleNamespace(
        steps=[], history=[], seconds=1.0, peak_memory=1, peak_host=1, peak_reserved=None, held_out_loss=2.5,
        exported_loss=2.5, averaged_loss=2.25,
        reloaded_loss=reloaded, fingerprint="", expert_load={}, values={"accuracy": 0.5}, of_sources={}, exports=[Path("out/hf")],
        reloaded_by="AutoModelForCausalLM", trace=None, slowest=None,
        config=load({"checkpoint": {"verify": True}, "zero": {"gather_wire": wire}}), folder=Folder(Path("out")), checkpoint=Path("out/step-1"),
    )  # fmt: skip
    lines = list(summary(result))
    assert any(f"loaded with AutoModelForCausalLM.from_pretrained: {said}" in line for line in lines)
    assert "evaluated: accuracy 0.5" in lines


@pytest.mark.long
def test_the_command_ends_with_exit_code_1_and_tells_it_once(zero3d_in_fork, folder):
    spoil(folder)
    (folder / "run.yaml").write_text(yaml.safe_dump(tree(folder, health={"max_skips": 2})))
    done = zero3d_in_fork(folder, "train", "run.yaml", "--ranks=2")
    assert done.returncode == 1, done.stderr
    assert done.stderr.count("NonFiniteError: 2 steps in a row had gradients that are NaN or infinite") == 1
    assert "Traceback" not in done.stderr


# --- on one rank of several -----------------------------------------------------------------------


def run_with_nan(made, rank, name, first):
    """A run in which one rank's gradients of a parameter are NaN, from its `first` backward on; how it ends."""
    import zero3d.train.run as of_run
    from zero3d.train.loop import Loop

    seen = []

    class Spoilt(Loop):
        def __init__(self, config, engine, *rest):
            super().__init__(config, engine, *rest)
            if engine.world.rank == rank:
                dict(engine.module.named_parameters())[name].register_hook(spoil_late)

    def spoil_late(grad):
        seen.append(None)
        return grad * float("nan") if len(seen) >= first else grad

    of_run.Loop = Spoilt
    try:
        train(made)
    except NonFiniteError as error:
        return str(error), error.exit_code, error.from_rank
    finally:
        of_run.Loop = Loop
    return None


@pytest.mark.parametrize(
    ("health", "steps"),
    [({"max_skips": 2}, 4), pytest.param({"nonfinite": "stop"}, 3, marks=pytest.mark.long)],
    ids=["skip", "stop"],
)
def test_a_nan_on_one_rank_stops_all_and_names_that_rank_and_the_unit(ranks, folder, health, steps):
    name = "model.layers.1.mlp.down_proj.weight"
    made = tree(folder, health=health, checkpoint={"every": 1})
    told = ranks(2, run_with_nan, made, 1, name, 5)  # two micro-batches a step: from the third step on
    assert {code for _, code, _ in told} == {1}
    (message,) = [message for message, _, from_rank in told if from_rank is None]
    assert f"First in the last one: unit 'model.layers.1', parameter {name} on rank 1." in message
    assert f"{folder}/out/checkpoints/step-2 is there." in message
    assert [line["applied"] for line in metrics(made)] == [True, True] + [False] * (steps - 2)
