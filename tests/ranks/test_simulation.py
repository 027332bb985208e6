"""A simulated rank beside a real one on gloo, under the same microscope: the peak by category, states, FLOPs and the ledger."""

import json
from unittest.mock import patch

import pytest
import torch
import vision
from torch.utils._python_dispatch import _disable_current_modes

from zero3d.config import load, to_dict
from zero3d.distributed.algorithms import _all_gather as ALL_GATHER
from zero3d.models.presets import PRESETS

FOUR_BLOCKS = {
    "model_type": "llama", "vocab_size": 256, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 512, "tie_word_embeddings": True,
}  # fmt: skip


def real(tree):
    """One rank: the step that a simulated one makes, with weights, values and peers."""
    from zero3d.config import resolve_batch
    from zero3d.models.packing import forward_options
    from zero3d.models.trained import open_trained
    from zero3d.tools.sim.images import find_images
    from zero3d.tools.sim.observe import blank_batches, observe
    from zero3d.tools.sim.replay import peak_of
    from zero3d.train.setup.build import build_engine
    from zero3d.train.setup.inputs import open_mesh

    config = load(tree)
    mesh = open_mesh(config)
    batch = resolve_batch(config.train, mesh.dp)
    opened = open_trained(config)
    options, held = forward_options(opened.module), [opened]
    images = find_images(opened.module, config.data.length, False)

    def batches():
        made = blank_batches(batch.accumulate, (batch.micro_batch, config.data.length), False, options, images)
        for each in made if images else ():
            each["input_ids"][:, : images.tokens] = vision.IMAGE
        return made

    del opened  # it keeps the last weights that it made
    with patch("zero3d.distributed.algorithms._all_gather", gather_copies):
        seen = observe(mesh, lambda: build_engine(config, held.pop(), mesh, batch.accumulate, 5), batches)
    found = {"states": seen.states, "sent": seen.traffic, "did": seen.actions, "work": seen.work}
    made = {name: [plain(each) for each in rows] for name, rows in found.items()}
    peak = peak_of(seen.log)
    events = [] if mesh.tp > 1 else [len(seen.log.who)]  # over tp a real rank also reads its generator's state
    return made | {"peak": [peak.nbytes, dict(peak.categories), plain(peak.at), *events]}


def dry(tree, rank, world=2):
    from zero3d.tools.sim.rank import dry_run

    return dry_run(load(tree), rank, world, "gloo", whole=True)


def gather_copies(full, shard, group, async_op=False):
    """Each of gloo's threads holds what it worked on until its next work, so it gets tensors of its own, unseen."""
    assert not async_op
    with _disable_current_modes():
        own = torch.empty_like(full)
        ALL_GATHER(own, shard.clone(), group=group)
        full.copy_(own)


def plain(value):
    """As JSON has it: no tuples."""
    from zero3d.tools.sim.result import to_json

    return json.loads(json.dumps(to_json(value)))


@pytest.mark.parametrize("overrides", [
    ["zero.stage=3", "model.path=one_block"],
    *(pytest.param(words, marks=pytest.mark.long) for words in (
        ["zero.stage=3", "autocast=true"], ["zero.stage=2", "autocast=true", "activations=full", "train.tiled_loss=true"],
        ["zero.stage=3"], ["zero.stage=0"], ["zero.stage=3", "zero.exact=true"], ["zero.stage=1", "zero.exact=true"],
        ["zero.stage=3", "zero.exact=true", "mesh.pp=2"], ["zero.stage=1", "precision=fp32"], ["zero.stage=2", "activations=full"],
        ["zero.stage=1", "zero.master=split"], ["zero.stage=3", "zero.master=split"],
        ["zero.stage=1", "mesh.tp=2", "mesh.sequence_parallel=true"], ["zero.stage=0", "mesh.pp=2"],
        ["zero.stage=3", "mesh.pp=2"], ["zero.stage=2", "mesh.pp=2", "mesh.schedule=gpipe", "activations=full"],
        ["zero.stage=1", "mesh.pp=2", "mesh.schedule=zbv", "model.path=four_blocks", "train.accumulate=4"],
    )),
])  # fmt: skip
def test_a_simulated_rank_has_the_bytes_and_messages_of_a_real_one(ranks, alone, overrides, tmp_path):
    blocks = 1 if "model.path=one_block" in overrides else 4
    (tmp_path / "config.json").write_text(json.dumps(FOUR_BLOCKS | {"num_hidden_layers": blocks}))
    overrides = [f"model.path={tmp_path}" if word.startswith("model.path=") else word for word in overrides]
    tree = to_dict(
        load(None, ["data.length=32", "train.accumulate=2", "data.packing=false", "model.init=random", *overrides])
    )
    found = ranks(2, real, tree)
    for rank in (0, 1) if "mesh.pp=2" in overrides else (0,):
        simulated = plain(alone(dry, tree, rank))
        for part, wanted in found[rank].items():
            got = simulated[part]
            if part == "peak":
                got = [got["nbytes"], got["categories"], got["at"], simulated["timeline"]["total"]][: len(wanted)]
            assert got == wanted, part


@pytest.mark.long
@pytest.mark.parametrize("overrides", [["zero.stage=2"], *(pytest.param(words, marks=pytest.mark.long) for words in (
    ["zero.exact=true"], ["zero.stage=1", "mesh.pp=2", "train.accumulate=2"],
    ["zero.stage=3", "zero.exact=true", "mesh.pp=2", "train.accumulate=2"],
))])  # fmt: skip
def test_one_with_shared_experts_has_the_bytes_and_messages_of_a_real_one_but_for_its_router(
    ranks, alone, overrides, tmp_path
):
    layers = 2 if "mesh.pp=2" in overrides else 1
    (tmp_path / "config.json").write_text(json.dumps(PRESETS["demo-moe"] | {"num_hidden_layers": layers}))
    words = [
        f"model.path={tmp_path}",
        "model.init=random",
        "data.tokenizer=bytes",
        "data.length=32",
        "data.packing=false",
    ]
    words += ["train.batch=null", "train.micro_batch=2", "train.accumulate=1"]
    tree = to_dict(load(None, [*words, "mesh.ep=2", *overrides]))
    pp = tree["mesh"]["pp"] or 1
    found, simulated = ranks(2 * pp, real, tree)[0], plain(alone(dry, tree, 0, 2 * pp))
    assert simulated["states"] == found["states"]
    sent, rows = ([row for row in each if row["op"] != "pass_rows"] for each in (simulated["sent"], found["sent"]))
    assert sent == rows
    passed = [row["elements"] for row in simulated["sent"] if row["op"] == "pass_rows"]
    tokens, chosen, width = tree["train"]["micro_batch"] * 32, 2, 128
    assert set(passed) == {tree["train"]["accumulate"] * 4 * tokens * chosen // 2 * width}
    assert len(passed) == 1


@pytest.mark.parametrize(("family", "overrides"), [
    *(pytest.param(family, words, marks=pytest.mark.long) for family, words in (
        ("llava", ["zero.stage=3", "train.accumulate=1"]), ("llava", ["zero.stage=2", "activations=full"]), ("llava", ["zero.stage=3", "lora.rank=4"]),
        ("gemma3", ["zero.stage=3"]), ("paligemma", ["zero.stage=1"]), ("internvl", ["zero.stage=3"]),
        ("llava", ["zero.stage=3", "mesh.pp=2"]), ("gemma3", ["zero.stage=2", "mesh.pp=2"]),
    )),
])  # fmt: skip
def test_so_has_one_that_sees_images(ranks, alone, family, overrides, tmp_path):
    (tmp_path / "config.json").write_text(vision.config(family).to_json_string())
    words = ["data.length=24", "train.accumulate=2", "data.packing=false", "model.init=random"]
    tree = to_dict(load(None, [*words, f"model.path={tmp_path}", *overrides]))
    found = ranks(2, real, tree)
    for rank in (0, 1) if "mesh.pp=2" in overrides else (0,):
        wanted, simulated = found[rank], plain(alone(dry, tree, rank))
        simulated["peak"] = [simulated["peak"][key] for key in ("nbytes", "categories", "at")]
        wanted["peak"] = wanted["peak"][:3]  # a real rank has more instants: it reads whether images and tokens match
        assert {part: simulated[part] for part in wanted} == wanted
