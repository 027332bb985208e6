"""What bits depend on: declared with every key, noted by every checkpoint; the CPU's kernels by what they compute."""

import json
import os
import subprocess
import sys

import pytest
import torch
from models import hf
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import zero3d
from zero3d.checkpoint.resume_contract import ROWS, resume_guarantee
from zero3d.config import Batch, Config
from zero3d.config.keys import KEYS
from zero3d.distributed import kernels
from zero3d.models.written_numbers import numbers_of
from zero3d.spec.bits import DEVICE, ELSEWHERE, FACTS, NCCL, REFUSED
from zero3d.train.resume_settings import batches_of, settings_of

OF_FACTS = {key.bits.fact for key in KEYS.values() if key.bits is not None} - {""}


def about(tmp_path, engine):
    return json.loads((engine.save(tmp_path) / "manifest.json").read_text())["about"]


def test_every_row_is_noted_by_an_engine_or_a_run(tmp_path):
    noted = about(tmp_path, zero3d.Engine(nn.Linear(4, 4), precision="fp32"))
    of_run = {*batches_of(Batch(4, 1, 4, 1), 9), *settings_of(Config()), "quantize"}
    others = {name for name, row in FACTS.items() if row.when in (DEVICE, NCCL, ELSEWHERE, REFUSED)}
    assert ROWS.keys() <= noted.keys() | of_run | others
    assert noted.keys() - {"micro_batches"} <= ROWS.keys(), "what is noted is compared"


def test_keys_name_facts_that_there_are():
    assert FACTS.keys() >= OF_FACTS
    assert all(row.why or row.when == DEVICE or name == "precision" for name, row in FACTS.items())


def test_notes_are_texts_and_whole_numbers(tmp_path):
    engine = zero3d.Engine(nn.Linear(4, 4), precision="fp16", loss=lambda output, batch: (output, 1))
    assert all(value is None or isinstance(value, (str, int)) for value in about(tmp_path, engine).values())


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


def test_the_machine_is_asked_in_a_dry_run_too():
    found = kernels.trial()
    with FakeTensorMode(), torch.device("meta"):
        assert kernels.trial() == found


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


def test_numbers_that_forwards_write_beside_a_buffer_go_on(tmp_path):
    def engine():
        torch.manual_seed(0)
        return zero3d.Engine(Counts(), precision="fp32")

    def step(engine, rows):
        loss = engine(torch.ones(rows, 4)).pow(2).mean()
        engine.backward(loss)
        engine.step()
        return loss.item()

    first = engine()
    step(first, 7)
    first.save(tmp_path)
    again = engine()
    again.load(tmp_path)
    assert [step(again, rows) for rows in (5, 3, 9)] == [step(first, rows) for rows in (5, 3, 9)]


def test_only_modules_with_a_buffer_outside_of_the_state_dict_have_such_numbers():
    found = numbers_of([hf("llama")])
    assert found.keys() == {
        f"model.rotary_emb.{name}" for name in ("attention_scaling", "max_seq_len_cached", "original_max_seq_len")
    }
    assert not any(number.is_written for number in found.values())
