"""Trainers and Accelerate loops that go on from folders written without zero3d have the curve of whoever wrote them.

A plain Trainer writes checkpoint-3 of six steps. It is laid out anew as DeepSpeed and FSDP lay it out, and a Trainer of
ours takes the steps behind it: losses, norms and rates are those of the plain one, which nobody has interrupted.
"""

import re
import shutil
from types import SimpleNamespace

import pytest
import torch
from models import hf
from safetensors.torch import load_file
from test_accelerator import CLOSE, loop
from trainers import keep_only, logged, train

from zero3d.errors import CheckpointError

SAVED = {"save_strategy": "steps", "save_steps": 3}
MOMENTS = ("exp_avg", "exp_avg_sq")
FIRST, STEP = "checkpoint-3", 3


@pytest.fixture(scope="module")
def plain(ranks, tmp_path_factory):
    """A folder with a plain Trainer's checkpoint of step 3, and what it has logged of all six steps."""
    folder = tmp_path_factory.mktemp("plain")
    steps = ranks(1, logged, "plain", folder, SAVED)[0][0]
    keep_only(folder, STEP)
    return folder, steps


def states_of(folder):
    """Weights, and each moment, by name; the optimizer's own state, which knows numbers alone."""
    weights = load_file(folder / "model.safetensors")
    kept = torch.load(folder / "optimizer.pt", weights_only=True)
    named = dict(hf("llama").named_parameters())
    decayed = [name for name in named if "norm" not in name]
    names = decayed + [name for name in named if name not in decayed]
    moments = {key: {name: kept["state"][names.index(name)][key] for name in named} for key in MOMENTS}
    return {"master": {name: weights[name] for name in named}, **moments}, kept, names


def as_deepspeed(folder, stage, ranks=2):
    """Lay it out as a Trainer with DeepSpeed does: weights beside global_step3, in flat parts of two ranks."""
    states, _, _ = states_of(folder)
    (folder / "optimizer.pt").unlink()
    (folder / "latest").write_text(f"global_step{STEP}")
    inner = folder / f"global_step{STEP}"
    inner.mkdir()
    shapes = {name: value.shape for name, value in states["master"].items()}
    parts, slices = {}, [{} for _ in range(ranks)]
    for key, values in states.items():
        if stage == 3:
            parts[key] = [
                torch.cat([part_of(value, rank, ranks) for value in values.values()]) for rank in range(ranks)
            ]
        else:
            flat = torch.cat([value.flatten() for value in values.values()])
            size = -(-len(flat) // ranks)
            parts[key], start = [flat[rank * size : (rank + 1) * size] for rank in range(ranks)], 0
            for name, value in values.items():
                for rank in range(ranks):
                    low, high = max(start, rank * size), min(start + value.numel(), (rank + 1) * size)
                    if low < high:
                        slices[rank][name] = SimpleNamespace(numel=high - low, start=low - rank * size)
                start += value.numel()
    for rank in range(ranks):
        base = {"state": {0: {"step": torch.tensor(float(STEP)), **{key: parts[key][rank] for key in MOMENTS}}}}
        base["param_groups"] = []
        if stage == 3:
            saved = {
                "fp32_flat_groups": [parts["master"][rank]],
                "optimizer_state_dict": base,
                "partition_count": ranks,
            }
        else:
            saved = {"single_partition_of_fp32_groups": [parts["master"][rank]], "base_optimizer_state": base,
                     "partition_count": [ranks], "param_slice_mappings": [slices[rank]]}  # fmt: skip
        file = inner / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt"
        torch.save({"optimizer_state_dict": saved}, file)
        about = {"param_shapes": [shapes], "global_steps": STEP, "ds_version": "0.19.8", "shared_params": {},
                 "buffer_names": [], "module": {}}  # fmt: skip
        name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        torch.save(about, inner / f"{name}_model_states.pt")


def part_of(value, rank, ranks):
    size = -(-value.numel() // ranks)
    return torch.nn.functional.pad(value.flatten(), (0, size * ranks - value.numel())).split(size)[rank]


def as_fsdp(folder, whole):
    """Lay it out as a Trainer with FSDP does: two folders of torch.distributed.checkpoint, or two files by name."""
    states, kept, names = states_of(folder)
    (folder / "optimizer.pt").unlink()
    (folder / "model.safetensors").unlink()
    by_name = {name: kept["state"][i] for i, name in enumerate(names)}
    groups = [group | {"params": [names[i] for i in group["params"]]} for group in kept["param_groups"]]
    if whole:
        torch.save(states["master"], folder / "pytorch_model_fsdp.bin")
        torch.save({"state": by_name, "param_groups": groups}, folder / "optimizer.bin")
        return
    from torch.distributed import checkpoint

    optimizer = {"state": by_name, "param_groups": groups}
    for name, saved in (
        ("pytorch_model_fsdp_0", {"model": states["master"]}),
        ("optimizer_0", {"optimizer": optimizer}),
    ):
        checkpoint.save(saved, checkpoint_id=folder / name, no_dist=True)


FORMS = {
    "plain": lambda folder: None,
    "DeepSpeed, stage 1": lambda folder: as_deepspeed(folder, 1),
    "DeepSpeed, stage 3": lambda folder: as_deepspeed(folder, 3),
    "DeepSpeed, stage 3, no latest": lambda folder: (as_deepspeed(folder, 3), (folder / "latest").unlink()),
    "DeepSpeed without 16-bit weights": lambda folder: (
        as_deepspeed(folder, 3),
        (folder / "model.safetensors").unlink(),
    ),
    "FSDP in shards": lambda folder: as_fsdp(folder, whole=False),
    "FSDP, whole": lambda folder: as_fsdp(folder, whole=True),
    "no scheduler.pt": lambda folder: (folder / "scheduler.pt").unlink(),
}


def laid_out(plain, form, folder):
    shutil.copytree(plain[0] / FIRST, folder / FIRST)
    FORMS[form](folder / FIRST)
    return folder


SHORT = {("DeepSpeed, stage 3", 1, 2), ("FSDP in shards", 1, 0), ("plain", 2, 3)}
ALL = [(form, world, stage) for form in FORMS for world, stage in ((1, 2), (2, 3), (1, 0))]


@pytest.mark.parametrize(("form", "world", "stage"), [
    pytest.param(*case, marks=() if case in SHORT else pytest.mark.long)
    for case in ALL if case in SHORT or case[1:] == (1, 2)
])  # fmt: skip
def test_a_trainer_has_the_curve_of_the_one_that_wrote_the_checkpoint(ranks, plain, tmp_path, form, world, stage):
    folder = laid_out(plain, form, tmp_path)
    before = sorted(path.name for path in (folder / FIRST).iterdir())
    steps = ranks(world, logged, stage, folder, {}, None, "llama", str(folder / FIRST))[0][0]
    assert steps[STEP:] == [pytest.approx(step, **CLOSE) for step in plain[1][STEP:]]
    assert sorted(path.name for path in (folder / FIRST).iterdir()) == before, "nothing is left there"


def adapters():
    """A model with LoRA, the same at every call."""
    from peft import LoraConfig, get_peft_model

    torch.manual_seed(3)
    return get_peft_model(hf("llama"), LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights=False))


@pytest.mark.long
def test_adapters_go_on_over_a_base_that_their_checkpoint_does_not_have(ranks, tmp_path):
    wanted = ranks(1, logged, "plain", tmp_path, SAVED, None, adapters)[0][0]
    keep_only(tmp_path, STEP)
    steps = ranks(2, logged, 3, tmp_path, {}, None, adapters, str(tmp_path / FIRST))[0][0]
    assert steps[STEP:] == [pytest.approx(step, **CLOSE) for step in wanted[STEP:]]


def told_of(folder):
    """What a Trainer of ours raises that resumes a folder, or warns of."""
    import warnings

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            logged(2, folder, {}, None, "llama", str(folder / FIRST))
        except CheckpointError as error:
            return str(error)
    return " ".join(str(each.message) for each in caught)


def damage(folder):
    (folder / "optimizer.pt").write_bytes(b"no file of torch's")


def other_groups(folder):
    kept = torch.load(folder / "optimizer.pt", weights_only=True)
    kept["param_groups"] = kept["param_groups"][:1]
    torch.save(kept, folder / "optimizer.pt")


def other_shapes(folder):
    kept = torch.load(folder / "optimizer.pt", weights_only=True)
    kept["state"][0]["exp_avg"] = torch.zeros(3, 5)
    torch.save(kept, folder / "optimizer.pt")


def without_moments(folder):
    kept = torch.load(folder / "optimizer.pt", weights_only=True)
    torch.save(kept | {"state": {}}, folder / "optimizer.pt")


def of_sagemaker(folder):
    (folder / "optimizer.pt").rename(folder / "optimizer.pt_0")


def one_rank_missing(folder):
    as_deepspeed(folder, 3)
    next((folder / f"global_step{STEP}").glob("*rank_1_*optim_states.pt")).unlink()


def weights_alone(folder):
    (folder / "optimizer.pt").unlink()


@pytest.mark.parametrize(("change", "words"), [
    (damage, r"optimizer\.pt is damaged, or nothing that torch has saved"),
    *(pytest.param(*case, marks=pytest.mark.long) for case in (
        (other_groups, r"has groups of \[\d+\] parameters, and this optimizer has"),
        (other_shapes, r"keeps exp_avg \(3, 5\) of "),
        (without_moments, r"has no moments of AdamW: they would begin at zero"),
        (of_sagemaker, r"states of an optimizer \(optimizer\.pt_0\) in a form that is not read here"),
        (one_rank_missing, "saved by 2 ranks, and has files of 1: copy all of them"),
        (weights_alone, "has weights alone: moments begin at zero"),
    )),
])  # fmt: skip
def test_what_cannot_be_read_or_is_not_there_is_said(ranks, plain, tmp_path, change, words):
    folder = laid_out(plain, "plain", tmp_path)
    change(folder / FIRST)
    assert re.search(words, ranks(1, told_of, folder)[0])


@pytest.mark.parametrize("stage", [pytest.param(2, marks=pytest.mark.long)])
def test_an_accelerate_loop_goes_on_from_what_accelerate_saved(ranks, tmp_path, stage):
    ranks(2, loop, "plain", None, tmp_path / "state")
    wanted = ranks(2, loop, "plain", None, tmp_path / "state", True)[0][0]
    for found, _ in ranks(2, loop, "ours", stage, tmp_path / "state", True):
        assert found == [pytest.approx(log, **CLOSE) for log in wanted]


def resumed(folder, options):
    """What an engine says of a resume from step 3."""
    return train(2, folder, options, None, "llama", str(folder / FIRST))[0].accelerator.engine.resumed


def test_another_norm_to_clip_at_is_said_of_a_resume(ranks, tmp_path):
    ranks(1, logged, 2, tmp_path, SAVED | {"max_steps": STEP})
    assert ranks(1, resumed, tmp_path, {})[0].startswith("bitwise")
    changed = ranks(1, resumed, tmp_path, {"max_grad_norm": 5.0})[0]
    assert changed.startswith("not bitwise: ")
    assert "clip_norm 0.5 -> 5.0" in changed
