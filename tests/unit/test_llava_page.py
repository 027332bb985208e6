"""docs/llava.md: every flag of LLaVA's scripts has a row, every key in it is one, the example has the script's values, and
what it says of other models is so."""

import json
import re
from pathlib import Path

import pytest
import vision

from zero3d.config import load
from zero3d.config.keys import KEYS
from zero3d.pipeline.split import chain_of
from zero3d.tools.cli.main import main
from zero3d.tools.sim.images import find_images

ROOT = Path(__file__).parents[2]
SCRIPT = """
    lora_enable lora_r lora_alpha mm_projector_lr deepspeed model_name_or_path version data_path image_folder vision_tower
    pretrain_mm_mlp_adapter mm_projector_type mm_vision_select_layer mm_use_im_start_end mm_use_im_patch_token
    image_aspect_ratio group_by_modality_length bf16 output_dir num_train_epochs per_device_train_batch_size
    per_device_eval_batch_size gradient_accumulation_steps evaluation_strategy save_steps
    save_total_limit learning_rate weight_decay warmup_ratio lr_scheduler_type logging_steps tf32 model_max_length
    gradient_checkpointing dataloader_num_workers lazy_preprocess report_to
"""  # of scripts/v1_5/finetune_lora.sh
OTHERS = """
    freeze_backbone tune_mm_mlp_adapter mm_patch_merge_type mm_vision_select_feature is_multimodal cache_dir
    freeze_mm_mlp_adapter double_quant quant_type bits lora_dropout lora_weight_path lora_bias
"""  # what else train.py's arguments have


def rows():
    """The flags and the texts of every row of the table."""
    text = (ROOT / "docs" / "llava.md").read_text()
    begin = text.index("| flag of LLaVA |")
    lines = text[begin : text.index("\n\n", begin)].splitlines()[2:]
    cells = [line.strip("| ").split(" | ") for line in lines]
    return [(re.findall(r"--(\w+)", flags), told) for flags, told in cells]


def test_every_flag_of_the_scripts_has_one_row():
    found = [flag for flags, _ in rows() for flag in flags]
    assert sorted(found) == sorted(set(SCRIPT.split() + OTHERS.split()))


OFTEN = ("idefics3", "llava")  # one whose tower reads values, and one whose does not


def ways():
    """The types of each way in which images enter, and whether plans have images then."""
    lines = (ROOT / "docs" / "llava.md").read_text().split("| what the model is given of images |")[1].splitlines()[2:]
    cells = [line.strip("| ").split(" | ") for line in lines[: lines.index("")]]
    return [(re.findall(r"`(\w+)`", types), planned.startswith("yes")) for _, types, planned in cells]


def test_every_type_has_one_way():
    listed = [kind for types, _ in ways() for kind in types]
    assert len(listed) == len(set(listed)) > 15
    assert set(listed) >= {*vision.FAMILIES, "qwen3_vl"}


@pytest.mark.parametrize("kind", [
    kind if kind in OFTEN else pytest.param(kind, marks=pytest.mark.long) for kind in vision.FAMILIES
])  # fmt: skip
def test_what_it_says_of_a_type_is_so(kind):
    [planned] = [planned for types, planned in ways() if kind in types]
    made = vision.model(kind)
    assert planned == (find_images(made, 32, packed=False) is not None)
    assert chain_of(made, None)[0].blocks.endswith(".layers")


def test_every_setting_of_its_table_of_axes_is_a_key():
    begin = (ROOT / "docs" / "llava.md").read_text().split("| setting | what becomes of images |")[1]
    named = [
        key
        for line in begin.split("\n\n")[0].splitlines()
        for key in re.findall(r"`([\w.]+)[=`]", line.split(" | ")[0])
    ]
    sections = {name.split(".")[0] for name in KEYS}
    assert len(named) == 10
    assert [key for key in named if key not in KEYS and key not in sections] == []


def test_every_key_in_it_is_one():
    sections = {name.split(".")[0] for name in KEYS}
    named = [key for _, told in rows() for key in re.findall(r"`([\w.]+)`", told) if not key.startswith("--")]
    assert len(named) > 25
    assert [key for key in named if key not in KEYS and key not in sections] == []


def test_the_example_has_the_scripts_values():
    config = load(ROOT / "examples" / "llava_lora.yaml")
    lora, batch = config.lora, config.train
    assert (lora.rank, lora.alpha, lora.dropout, lora.targets) == (128, 256, 0.05, ("all-linear",))
    assert lora.train_also == ("multi_modal_projector",)
    assert (config.optimizer.lr, config.optimizer.weight_decay) == (2e-4, 0)
    assert config.optimizer.groups == ({"match": "multi_modal_projector", "lr": 2e-5},)
    assert (config.schedule.name, config.schedule.warmup) == ("cosine", 0.03)
    assert (batch.epochs, batch.batch) == (1, 64)
    assert (config.data.length, config.data.workers, config.data.group_by_modality) == (2048, 4, True)
    assert (config.precision, config.checkpoint.keep) == ("bf16", 1)


@pytest.mark.long
def test_the_examples_settings_are_the_planners_choice(tmp_path, capsys):
    """At its own 64 sequences, on the cards that it names; the folder of its model is a preset here, and has no data."""
    text = (ROOT / "examples" / "llava_lora.yaml").read_text()
    (tmp_path / "run.yaml").write_text(text.replace("models/llava-1.5-7b-hf", "llava-1.5-7b"))
    assert main(["plan", str(tmp_path / "run.yaml"), "--json", "--emit", str(tmp_path / "planned.yaml")]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["gpus"], told["gpu"], told["sequences"]) == (4, "a6000", 64)
    own, planned = load(tmp_path / "run.yaml"), load(tmp_path / "planned.yaml")
    assert (planned.train.batch, planned.train.accumulate) == (64, 64 // (4 * own.train.micro_batch))
    chosen = [
        (each.train.micro_batch, each.zero.stage, each.activations, each.mesh.tp or 1, each.mesh.pp or 1)
        for each in (planned, own)
    ]
    assert chosen[0] == chosen[1]
