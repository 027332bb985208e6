"""Files as DeepSpeed lays them out are put together; nothing in them is run; what lacks is told."""

import argparse
import collections
import enum
import json
import pickle
import re
import sys
import types
from pathlib import Path

import numpy
import pytest
import torch
from models import adamw, batch, hf, loss_of

import zero3d
from zero3d.tools.cli.main import main
from zero3d.ways.checkpoints import dcp, deepspeed
from zero3d.ways.checkpoints.archives import map_file, read_torch
from zero3d.ways.checkpoints.restricted import Inert

RAN = []
OURS = "zero3d_test_fragments"


class Fragment:
    """As DeepSpeed's own: it is saved as an object of its class."""

    def __init__(self, numel, start):
        self.numel, self.start = numel, start


def note(word):
    """What a pickle could call in the process of one who loads it."""
    RAN.append(word)


class Harmful:
    """An object whose pickle does so."""

    def __reduce__(self):
        return note, ("ran",)


@pytest.fixture
def fragment():
    """Fragment as a class of a module that is gone when files are read."""
    module = types.ModuleType(OURS)
    Fragment.__module__, before = OURS, Fragment.__module__
    module.Fragment = Fragment
    sys.modules[OURS] = module
    yield Fragment
    Fragment.__module__ = before
    sys.modules.pop(OURS, None)


def trained_states():
    """A model after three steps: parameters, and Adam's moments by name."""
    model = hf("llama")
    model.model.embed_tokens.weight.requires_grad_(False)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach()[:, :].clone())
    optimizer = adamw([p for p in model.parameters() if p.requires_grad])
    for step in range(3):
        loss_of(model, batch(step)).backward()
        optimizer.step()
        optimizer.zero_grad()
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    moments = {key: {name: optimizer.state[p][key] for name, p in named.items()} for key in ("exp_avg", "exp_avg_sq")}
    return model, {"master": {name: p.detach() for name, p in named.items()}, **moments}


def halves_1(values, ranks):
    """Stages 1 and 2: the flat vector of all, cut into equal slices, and where each parameter lies in a slice."""
    flat = torch.cat([value.flatten() for value in values.values()])
    size = -(-flat.numel() // ranks)
    flat = torch.nn.functional.pad(flat, (0, size * ranks - flat.numel()))
    mappings = [{} for _ in range(ranks)]
    start = 0
    for name, value in values.items():
        for rank in range(ranks):
            low, high = max(start, rank * size), min(start + value.numel(), (rank + 1) * size)
            if low < high:
                mappings[rank][name] = high - low, low - rank * size
        start += value.numel()
    return list(flat.split(size)), mappings


def halves_3(values, ranks):
    """Stage 3: an equal part of each parameter on every rank."""
    parts = [[] for _ in range(ranks)]
    for value in values.values():
        size = -(-value.numel() // ranks)
        padded = torch.nn.functional.pad(value.flatten(), (0, size * ranks - value.numel()))
        for rank, part in enumerate(padded.split(size)):
            parts[rank].append(part)
    return [torch.cat(of_rank) for of_rank in parts]


def write(folder, stage, fragment, ranks=3, harmful=None):
    model, states = trained_states()
    folder.mkdir(parents=True)
    if stage == 3:
        flat = {key: halves_3(values, ranks) for key, values in states.items()}
        mappings = None
    else:
        flat = {key: halves_1(values, ranks)[0] for key, values in states.items()}
        mappings = halves_1(states["master"], ranks)[1]
    frozen = {"model.embed_tokens.weight": model.model.embed_tokens.weight.detach()}
    for rank in range(ranks):
        moments = {"step": torch.tensor(3.0), **{key: flat[key][rank] for key in ("exp_avg", "exp_avg_sq")}}
        base = {"state": {0: moments}, "param_groups": []}
        master = [torch.nn.Parameter(flat["master"][rank])]
        if stage == 3:
            saved = {"fp32_flat_groups": master, "optimizer_state_dict": base, "partition_count": ranks}
        else:
            at = [{name: fragment(*where) for name, where in mappings[rank].items()}]
            saved = {"single_partition_of_fp32_groups": master, "base_optimizer_state": base,
                     "partition_count": [ranks], "param_slice_mappings": at}  # fmt: skip
        saved = {"optimizer_state_dict": saved | {"loss_scaler": harmful}}
        torch.save(saved, folder / f"bf16_zero_pp_rank_{rank}_mp_rank_00_optim_states.pt")
    shapes = {name: value.shape for name, value in states["master"].items()}
    for rank in range(ranks if stage == 3 else 1):
        parts = {name: halves_3({name: value}, ranks)[rank] if stage == 3 else value for name, value in frozen.items()}
        about = {"param_shapes": [shapes], "frozen_param_shapes": {name: v.shape for name, v in frozen.items()},
                 "frozen_param_fragments": parts, "global_steps": 3, "ds_version": "0.19.8", "shared_params": {},
                 "buffer_names": [], "module": {}}  # fmt: skip
        name = f"zero_pp_rank_{rank}_mp_rank_00" if stage == 3 else "mp_rank_00"
        torch.save(about, folder / f"{name}_model_states.pt")
    return model, states


def import_of(source, target, *more):
    return main(["ckpt", "import", str(source), str(target), "--json", *more])


@pytest.mark.parametrize("stage", [2, 3])
def test_parts_of_three_ranks_become_one_checkpoint(tmp_path, capsys, fragment, stage):
    model, states = write(tmp_path / "ds" / "global_step3", stage, fragment)
    (tmp_path / "ds" / "latest").write_text("global_step3")
    sys.modules.pop(OURS)
    assert import_of(tmp_path / "ds", tmp_path / "out") == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["step"], told["trained"], told["frozen"], told["moments"]) == (3, len(states["master"]), 1, True)
    other = hf("llama")
    other.model.embed_tokens.weight.requires_grad_(False)
    with torch.no_grad():
        for p in other.parameters():
            p.zero_()
    engine = zero3d.Engine(other, stage=3, precision="fp32", optimizer=adamw)
    engine.load(tmp_path / "out")
    assert engine.resumed.startswith("not bitwise: it was imported from DeepSpeed 0.19.8")
    with engine.full_params():
        for (name, p), q in zip(engine.module.named_parameters(), model.parameters(), strict=True):
            assert torch.equal(p, q), name
    for owned in engine.optimizer.pieces:
        for key in ("exp_avg", "exp_avg_sq"):
            found = engine.optimizer.states_of(owned)[key]
            assert torch.equal(found, states[key][owned.name].flatten()), (owned.name, key)
    assert engine.steps == 3
    assert import_of(tmp_path / "ds", tmp_path / "out") == 2
    assert "is there already" in capsys.readouterr().err
    assert import_of(tmp_path / "ds", tmp_path / "weights", "--weights-only") == 0
    assert json.loads(capsys.readouterr().out)["moments"] is False


def test_a_universal_checkpoint_is_read(tmp_path, capsys):
    _, states = trained_states()
    for name in states["master"]:
        (tmp_path / "universal" / "zero" / name).mkdir(parents=True)
        for key, values in states.items():
            file = {"master": "fp32"}.get(key, key)
            torch.save({"param": values[name]}, tmp_path / "universal" / "zero" / name / f"{file}.pt")
    torch.save(torch.tensor(3.0), tmp_path / "universal" / "zero" / name / "step.pt")
    assert import_of(tmp_path / "universal", tmp_path / "out") == 0
    assert json.loads(capsys.readouterr().out)["step"] == 3
    assert main(["ckpt", "verify", str(tmp_path / "out")]) == 0


def test_nothing_that_a_file_names_is_run(tmp_path, fragment):
    write(tmp_path / "ds", 3, fragment, harmful=Harmful())
    assert deepspeed.read(tmp_path / "ds").step == 3
    assert RAN == []
    torch.load(tmp_path / "ds" / "bf16_zero_pp_rank_0_mp_rank_00_optim_states.pt", weights_only=False)
    assert RAN == ["ran"], "it would have run"
    RAN.clear()
    torch.save({"made": Harmful(), "getattr": getattr, "kept": fragment(1, 2)}, tmp_path / "x.pt")
    found = read_torch(map_file(tmp_path, "x.pt"))
    assert isinstance(found["made"], Inert)
    assert found["getattr"] is Inert
    assert vars(found["kept"]) == {"numel": 1, "start": 2}
    assert RAN == []


class Settings(dict):
    """A mapping with attributes, as configurations are."""


class Losses(list):
    """A list of a class of its own."""


def test_what_a_program_saved_beside_its_tensors_does_not_keep_them_from_being_read(tmp_path):
    kept = Settings(lr=0.1)
    kept.name = "mine"
    beside = {
        "settings": kept, "losses": Losses([1.0, 2.0]), "by_step": collections.defaultdict(list, {1: [2.0]}),
        "last": collections.deque([1, 2], 8), "arguments": argparse.Namespace(lr=0.1), "path": Path("x"), "number": 1 << 70,
        "array": numpy.ones(3), "scalar": numpy.float64(2), "bytes": b"x", "kinds": {1, 2}, "kind": Kind.ONE, "range": range(3),
    }  # fmt: skip
    tensors = {"p": torch.nn.Parameter(torch.ones(2)), "frozen": torch.arange(3)}
    torch.save(beside | {"tensors": tensors}, tmp_path / "x.pt")
    found = read_torch(map_file(tmp_path, "x.pt"))
    assert found.keys() == beside.keys() | {"tensors"}
    torch.testing.assert_close(
        {name: value.data for name, value in found["tensors"].items()}, {"p": torch.ones(2), "frozen": torch.arange(3)}
    )
    assert not found["tensors"]["p"].requires_grad
    assert found["by_step"] == {1: [2.0]}


class Kind(enum.Enum):
    ONE = 1


def lose_a_rank(folder):
    next(folder.glob("*rank_1*optim*")).unlink()


def cut_a_file(folder):
    path = next(folder.glob("*rank_1*optim*"))
    path.write_bytes(path.read_bytes()[:500])


def plain_pickle(folder):
    path = next(folder.glob("*rank_1*optim*"))
    path.write_bytes(pickle.dumps({"a": 1}))


def lose_moments(folder):
    for path in folder.glob("*optim*"):
        saved = torch.load(path, weights_only=False)
        del saved["optimizer_state_dict"]["optimizer_state_dict"]["state"][0]["exp_avg"]
        torch.save(saved, path)


def cut_by_tp(folder):
    path = next(folder.glob("*rank_1*optim*"))
    path.rename(path.with_name(path.name.replace("mp_rank_00", "mp_rank_01")))


def lay_out_otherwise(folder):
    for path in folder.glob("*optim*"):
        torch.save({"optimizer_state_dict": [1, 2]}, path)


def forget_shapes(folder):
    for path in folder.glob("*model_states*"):
        torch.save({"module": {}}, path)


@pytest.mark.parametrize(("harm", "words"), [
    (lose_a_rank, "was saved by 3 ranks, and has files of 2"),
    (cut_a_file, "is damaged, or nothing that torch has saved"),
    (plain_pickle, "is damaged, or nothing that torch has saved"),
    (lose_moments, "has no exp_avg and exp_avg_sq of"),
    (cut_by_tp, "was saved with model parallelism"),
    (lay_out_otherwise, "is not laid out as DeepSpeed 0.19 lays it out"),
    (forget_shapes, "is not laid out as DeepSpeed 0.19 lays it out"),
    (lambda folder: [path.unlink() for path in folder.iterdir()], r"has neither \*_optim_states.pt"),
])  # fmt: skip
def test_what_cannot_be_read_is_told(tmp_path, capsys, fragment, harm, words):
    write(tmp_path / "ds", 3, fragment)
    harm(tmp_path / "ds")
    assert import_of(tmp_path / "ds", tmp_path / "out") == 2
    told = capsys.readouterr().err
    assert re.search(words, told), told
    assert not Path(tmp_path / "out").exists()


def test_tensors_of_dcp_are_read_in_the_dtypes_in_which_they_were_saved(tmp_path):
    """A frozen 16-bit weight and a number that fp32 does not have, beside a weight with its moments."""
    from torch.distributed import checkpoint

    frozen = {"base": torch.tensor([1.5, -2.0], dtype=torch.bfloat16), "seen": torch.tensor([2**24 + 1])}
    trained = torch.tensor([0.25, 3.0])
    states = {"exp_avg": trained / 2, "exp_avg_sq": trained * 2, "step": torch.tensor(7.0)}
    model = {f"model.{name}": tensor for name, tensor in (frozen | {"head": trained}).items()}
    optimizer = {f"optim.state.head.{name}": tensor for name, tensor in states.items()}
    checkpoint.save(model | optimizer, checkpoint_id=tmp_path / "dcp", no_dist=True)
    found = dcp.read(dcp.found(tmp_path / "dcp"))
    assert found.step == 7
    assert found.frozen.keys() == frozen.keys()
    for name, tensor in frozen.items():
        torch.testing.assert_close(found.frozen[name], tensor, rtol=0, atol=0)  # dtypes, too
    torch.testing.assert_close(found.masters, {"head": trained}, rtol=0, atol=0)
    del states["step"]
    torch.testing.assert_close(found.moments, {"head": states}, rtol=0, atol=0)
