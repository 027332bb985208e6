"""What bits depend on: declared with every key, noted by every checkpoint; the CPU's kernels by what they compute."""

import json
import os
import subprocess
import sys
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from models import hf
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zero3d
from zero3d.checkpoint.code_names import name_of
from zero3d.checkpoint.resume_contract import ROWS, resume_guarantee
from zero3d.config import Batch, Config
from zero3d.config.keys import KEYS
from zero3d.distributed import kernels
from zero3d.engine.state import _groups
from zero3d.errors import CheckpointError
from zero3d.models.written_numbers import numbers_of
from zero3d.spec.bits import DEVICE, ELSEWHERE, FACTS, NCCL, REFUSED
from zero3d.train.resume_settings import batches_of, settings_of
from zero3d.train.setup.losses import next_token_loss

OF_FACTS = {key.bits.fact for key in KEYS.values() if key.bits is not None} - {""}


def about(tmp_path, engine):
    return json.loads((engine.save(tmp_path) / "manifest.json").read_text())["about"]


def test_a_loss_has_the_name_that_older_checkpoints_have():
    assert name_of(next_token_loss).startswith("zero3d.setup.losses.next_token_loss (")


def test_every_row_is_noted_by_an_engine_or_a_run(tmp_path):
    noted = about(tmp_path, zero3d.Engine(nn.Linear(4, 4), precision="fp32"))
    of_run = {*batches_of(Batch(4, 1, 4, 1), 9, rule=2), *settings_of(Config()), "quantize"}
    others = {name for name, row in FACTS.items() if row.when in (DEVICE, NCCL, ELSEWHERE, REFUSED)}
    assert ROWS.keys() <= noted.keys() | of_run | others
    assert noted.keys() - {"micro_batches"} <= ROWS.keys(), "what is noted is compared"


def test_keys_name_facts_that_there_are():
    assert FACTS.keys() >= OF_FACTS
    assert all(row.why or row.when == DEVICE or name == "precision" for name, row in FACTS.items())


def test_notes_are_texts_and_whole_numbers(tmp_path):
    engine = zero3d.Engine(nn.Linear(4, 4), precision="fp16", loss=lambda output, batch: (output, 1))
    assert all(value is None or isinstance(value, (str, int)) for value in about(tmp_path, engine).values())


# --- functions ------------------------------------------------------------------------------------


def sums(text):
    """Named functions, lambdas and functions within them, of one source but for what is replaced."""
    found = {}
    exec(text, found)
    return name_of(found["loss"])


LOSS = "def loss(output, batch):\n    'What it is.'\n    return sum(list(x * 2 for x in output)) + 3"


def test_a_function_is_named_by_its_code():
    assert sums(LOSS) == sums(LOSS) == sums(LOSS.replace("What", "Which"))
    for was, now in (("3", "4"), ("* 2", "* 5"), ("sum", "max"), ("x * 2", "x + 2")):
        assert sums(LOSS.replace(was, now)) != sums(LOSS), f"{was} -> {now}"


def test_an_object_is_named_by_what_is_called_of_it():
    def loss(called, base):
        name = "forward" if base is nn.Module else "__call__"
        return type("Loss", (base,), {name: called})()

    def twice(self, output):
        return output * 2

    def thrice(self, output):
        return output * 3

    for base in (object, nn.Module):
        assert name_of(loss(twice, base)) == name_of(loss(twice, base)) != name_of(loss(thrice, base))
    assert name_of(nn.Linear) == "torch.nn.modules.linear.Linear", "of units a class is named"


def test_whole_numbers_are_noted_as_any_others(tmp_path):
    noted = [about(tmp_path, zero3d.Engine(nn.Linear(4, 4), precision="fp32", clip_norm=norm)) for norm in (1, 1.0)]
    assert noted[0] == noted[1]


def test_groups_are_told_by_which_parameters_are_seen_as_which_matrices():
    def groups(**matrices):
        in_groups = SimpleNamespace(group_of={"a": 0, "b": 1}, groups=2)
        return _groups(SimpleNamespace(groups=in_groups, matrices=matrices))

    assert groups(a="whole").startswith("2 (")
    assert len({groups(), groups(a="whole"), groups(b="whole"), groups(a="in two")}) == 4


def test_a_function_with_arguments_is_named_by_both():
    assert name_of(partial(torch.add, alpha=2)) != name_of(partial(torch.add, alpha=3))
    assert name_of(partial(torch.add, alpha=2)) != name_of(partial(torch.sub, alpha=2))
    assert name_of(partial(torch.add, torch.ones(2))) == name_of(partial(torch.add, torch.ones(3))), "not by addresses"


# --- kernels --------------------------------------------------------------------------------------


def in_a_process(**environment):
    code = "from zero3d.distributed.kernels import products, trial; print(products(), '|', trial())"
    done = subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, **environment}, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_kernels_have_one_name_however_often_they_are_tried():
    torch.manual_seed(0)
    before = torch.get_rng_state()
    assert kernels.trial() == kernels.trial()
    assert torch.equal(torch.get_rng_state(), before), "no generator is asked"
    assert kernels.products().endswith(kernels.trial())


def test_terms_of_a_trial_cancel_so_that_rounding_alone_is_left(monkeypatch):
    given = []
    monkeypatch.setattr(kernels.F, "linear", lambda *matrices: given.append(matrices) or torch.zeros(1))
    kernels.trial()
    for left, right in given:
        terms = left[0].double() * right[:8].double()
        assert terms.abs().min() > 0
        assert torch.equal(terms, -terms.flip(1))
    assert {left.dtype for left, _ in given} == {torch.float32, torch.bfloat16}


def test_the_machine_is_asked_in_a_dry_run_too():
    found = kernels.trial()
    with FakeTensorMode(), torch.device("meta"):
        assert kernels.trial() == found


@pytest.mark.long
@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() in ("DEFAULT", "NO AVX"), reason="no other kernels than these"
)
def test_kernels_of_fewer_instructions_have_another_name():
    here = f"{kernels.products()} | {kernels.trial()}"
    assert in_a_process(ATEN_CPU_CAPABILITY="default", ONEDNN_MAX_CPU_ISA="SSE41") != here


def test_other_products_are_no_bitwise_resume(tmp_path, monkeypatch):
    engine = zero3d.Engine(nn.Linear(4, 4), precision="fp32")
    engine.save(tmp_path)
    monkeypatch.setattr("zero3d.engine.state.products", lambda: "another")
    engine.load(tmp_path)
    assert engine.resumed == (
        f"not bitwise: products {kernels.products()} -> another (matrix products sum in another order)"
    )


def test_a_checkpoint_from_before_does_not_say_which_products():
    noted = {"kernels": "AVX512", "products": "here", "dp": 1, "leaves": None}
    before = {name: value for name, value in noted.items() if name != "products"}
    assert resume_guarantee(before, noted) == "not bitwise: not known of the checkpoint: products"
    assert resume_guarantee(before | {"kernels": "AVX2"}, noted).startswith("not bitwise: kernels AVX2 -> AVX512")


# --- numbers beside buffers -----------------------------------------------------------------------


class Counts(nn.Module):
    """Its output depends on a number that it writes, as that of a rotary table does on the longest sequence."""

    def __init__(self):
        super().__init__()
        self.register_buffer("table", torch.ones(4), persistent=False)
        self.linear, self.longest, self.scale = nn.Linear(4, 4), 2, 0.5

    def forward(self, x):
        if len(x) > self.longest:
            self.longest, self.table = torch.tensor(len(x)), self.table * len(x)
        return self.linear(x) * self.table * self.scale / self.longest


def counting():
    torch.manual_seed(0)
    return zero3d.Engine(Counts(), precision="fp32")


def step(engine, rows):
    loss = engine(torch.ones(rows, 4)).pow(2).mean()
    engine.backward(loss)
    engine.step()
    return loss.item()


def test_numbers_that_forwards_write_beside_a_buffer_go_on(tmp_path):
    first = counting()
    step(first, 7)
    first.module.scale = 1 / 3
    first.save(tmp_path)
    again = counting()
    again.load(tmp_path)
    assert (type(again.module.longest), again.module.scale) == (int, 1 / 3), "as a model's own, and every bit"
    assert [step(again, rows) for rows in (5, 3, 9)] == [step(first, rows) for rows in (5, 3, 9)]


def test_a_tensor_that_is_no_number_is_refused_in_the_place_of_one(tmp_path):
    class Other(Counts):
        def __init__(self):
            super().__init__()
            del self.longest
            self.register_buffer("longest", torch.ones(3, dtype=torch.int64))

    zero3d.Engine(Other(), precision="fp32").save(tmp_path)
    with pytest.raises(CheckpointError, match=r"'longest' is int64 \(3,\), and a number of the model has this name"):
        counting().load(tmp_path)


def test_numbers_go_back_to_what_they_were_before_an_earlier_step(tmp_path):
    engine = counting()
    step(engine, 2)
    engine.save(tmp_path)
    wanted = [step(engine, rows) for rows in (9, 5)]
    engine.load(tmp_path)
    assert [step(engine, rows) for rows in (9, 5)] == wanted


def test_slots_hold_numbers_beside_buffers(tmp_path):
    def on_disk():
        torch.manual_seed(0)
        offload = {"optimizer": "disk", "params": "disk", "directory": str(tmp_path)}
        return zero3d.Engine(Counts(), precision="fp32", offload=offload)

    whole, first = counting(), on_disk()
    wanted = [step(whole, rows) for rows in (7, 5, 9)]
    assert step(first, 7) == wanted[0]
    first.note()
    first.optimizer.flush()
    del first
    again = on_disk()
    again.load_slots()
    assert [step(again, rows) for rows in (5, 9)] == wanted[1:]


def test_only_modules_with_a_buffer_outside_of_the_state_dict_have_such_numbers():
    found = numbers_of([hf("llama")])
    assert found.keys() == {
        f"model.rotary_emb.{name}" for name in ("attention_scaling", "max_seq_len_cached", "original_max_seq_len")
    }
    assert not any(number.is_written for number in found.values())


def test_a_number_that_is_none_any_more_is_not_saved(tmp_path):
    model = Counts()
    engine = zero3d.Engine(model, precision="fp32")
    model.longest = None
    engine.save(tmp_path)


# --- the model ------------------------------------------------------------------------------------


def of_dropout(p, eps=1e-5):
    torch.manual_seed(0)
    return zero3d.Engine(nn.Sequential(nn.Linear(4, 4), nn.Dropout(p), nn.LayerNorm(4, eps)), precision="fp32")


@pytest.mark.parametrize("changed", [{"p": 0.2}, {"p": 0.1, "eps": 1e-3}])
def test_layers_that_compute_otherwise_are_no_bitwise_resume(tmp_path, changed):
    of_dropout(0.1).save(tmp_path)
    for options, said in (({"p": 0.1}, "bitwise: "), (changed, "not bitwise: other numbers in the model's modules (")):
        engine = of_dropout(**options)
        engine.load(tmp_path)
        assert engine.resumed.startswith(said)


def test_a_model_of_a_library_has_its_version_noted(tmp_path):
    import transformers

    assert about(tmp_path, zero3d.Engine(hf("llama"), precision="fp32"))["library"] == (
        f"transformers {transformers.__version__}"
    )


def scaled(factor, start=0):
    return lambda output, batch, offset=start: (factor * output.sum() + offset, 1)


def test_a_loss_is_named_with_the_plain_values_that_it_takes_from_around_it():
    assert name_of(scaled(2.0)) == name_of(scaled(2.0))
    assert len({name_of(scaled(2.0)), name_of(scaled(3.0)), name_of(scaled(2.0, 1))}) == 3


def test_kernels_have_their_name_under_autocast_too():
    found = kernels.trial()
    with torch.autocast("cpu"):
        assert kernels.trial() == found
