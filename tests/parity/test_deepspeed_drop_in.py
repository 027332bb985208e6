"""Programs written for DeepSpeed on `initialize`: plain PyTorch's losses, at every stage, on two ranks, after a resume."""

import contextlib
import io
import json
from contextlib import nullcontext

import pytest
import torch
from models import batch, hf, loss_of
from tensors import tiny
from trainers import Rows

from zero3d.errors import ConfigError
from zero3d.ways import deepspeed
from zero3d.ways.deepspeed.client_state import decode, encode
from zero3d.ways.deepspeed.memory_usage import see_memory_usage

STEPS, MICRO = 4, 2
DOCUMENT = {
    "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO, "gradient_clipping": 0.05,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "betas": [0.9, 0.95], "weight_decay": 0.1}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4, "warmup_type": "linear"}},
}  # fmt: skip


def given(step, micro, ranks=1):
    return [batch(100 * step + micro, rank) for rank in range(ranks)]


def train_plain(ranks=1):
    """Means of the losses of each step, of the loop that everyone writes; the rates are those of the schedule."""
    model, losses = hf("llama"), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, betas=(0.9, 0.95), weight_decay=0.1)
    for step in range(STEPS):
        optimizer.param_groups[0]["lr"] = 1e-2 * max(step - 1, 0) / 4
        values = [loss_of(model, ids) for micro in range(MICRO) for ids in given(step, micro, ranks)]
        (sum(values) / len(values)).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(sum(value.item() for value in values) / len(values))
    return losses


def loop(engine, first, last, ranks=1, rank=0):
    """DeepSpeed's loop; means of this rank's losses of each step."""
    losses = []
    for step in range(first, last):
        values = []
        for micro in range(MICRO):
            assert engine.is_gradient_accumulation_boundary() == (micro == MICRO - 1)
            loss = loss_of(engine, given(step, micro, ranks)[rank].to(engine.device))
            engine.backward(loss)
            engine.step()
            values.append(loss.item())
        losses.append(sum(values) / len(values))
    return losses


@pytest.mark.parametrize("stage", [0, pytest.param(3, marks=pytest.mark.long)])
def test_one_rank_has_the_losses_of_plain_pytorch(stage, tmp_path):
    tree = DOCUMENT | {"zero_optimization": {"stage": stage}}
    (tmp_path / "ds.json").write_text(json.dumps(tree))
    engine, optimizer, loader, schedule = deepspeed.initialize(
        model=(model := hf("llama")), model_parameters=model.parameters(), config=str(tmp_path / "ds.json")
    )
    assert (loader, engine.zero_optimization_stage(), engine.gradient_accumulation_steps()) == (None, stage, MICRO)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (4, 2)
    assert loop(engine, 0, STEPS) == pytest.approx(train_plain(), rel=1e-6)
    assert (engine.global_steps, engine.global_samples, engine.micro_steps) == (STEPS, 4 * STEPS, MICRO * STEPS)
    assert engine.get_lr() == [group["lr"] for group in optimizer.param_groups] == schedule.get_last_lr()
    assert 0 < engine.get_global_grad_norm() < 100
    assert (engine.fp16_enabled(), engine.bfloat16_enabled(), engine.gradient_clipping()) == (False, False, 0.05)


KEPT = {"epoch": 1, "best": float("inf"), "shape": (2, [3.0, None]), "of": {0: "a", (1, 2): True}, "__kind__": "b"}


@pytest.mark.parametrize("value", [
    torch.ones(2), torch.tensor([[1.5, float("nan")]], dtype=torch.bfloat16), torch.empty(0, 3), torch.tensor(True),
    torch.Generator().manual_seed(1).get_state(),
], ids=("ones", "nan", "empty", "one", "random state"))  # fmt: skip
def test_tensors_of_a_client_state_come_back(value):
    found = decode(json.loads(json.dumps(encode({"x": [value]}), allow_nan=False)))["x"][0]
    torch.testing.assert_close(found, value, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(("value", "words"), [
    ({"x": torch.zeros(100_001)}, r"client_state\['x'\] is a tensor of torch\.float32 and 100,001 elements"),
    ({"x": [1j]}, r"client_state\['x'\]\[0\] is a complex, which would not come back"),
    ({"x": {1, 2}}, r"client_state\['x'\] is a set"),
])  # fmt: skip
def test_what_of_a_client_state_would_not_come_back_is_refused(value, words):
    with pytest.raises(ConfigError, match=words):
        encode(value)


def train(stage, folder):
    """Two steps, a checkpoint, and the rest by another engine: losses of this rank, and the client's state."""
    tree = DOCUMENT | {"zero_optimization": {"stage": stage, "overlap_comm": True}}
    engine = deepspeed.initialize(model=hf("llama"), config=tree)[0]
    rank, folder = engine.global_rank, f"{folder}/{stage}"
    losses = loop(engine, 0, 2, 2, rank)
    with (
        pytest.warns(UserWarning, match="loads nothing: there is no file .*none/latest") if rank == 0 else nullcontext()
    ):
        assert engine.load_checkpoint(f"{folder}/none") == (None, None)
    engine.save_checkpoint(folder, client_state=KEPT)
    other = deepspeed.initialize(model=hf("llama"), config=tree)[0]
    path, state = other.load_checkpoint(folder)
    assert path.endswith("global_step2/step-2")
    return losses + loop(other, 2, STEPS, 2, rank), state, other.micro_steps


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1, 2)), 3])
def test_two_ranks_at_every_stage_and_after_a_resume(ranks, tmp_path, stage):
    wanted = train_plain(2)
    first, second = ranks(2, train, stage, str(tmp_path))
    assert [sum(both) / 2 for both in zip(first[0], second[0], strict=True)] == pytest.approx(wanted, rel=1e-5)
    assert first[1:] == second[1:] == (KEPT, MICRO * STEPS)


def test_a_dataset_a_scheduler_and_an_optimizer_of_ones_own():
    data = torch.utils.data.TensorDataset(torch.arange(10))
    tree = {key: value for key, value in DOCUMENT.items() if key not in ("optimizer", "scheduler")}
    model = hf("llama")
    own = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)
    engine, optimizer, loader, schedule = deepspeed.initialize(
        model=model, optimizer=own, config=tree, training_data=data,
        lr_scheduler=lambda optimizer: torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step),
    )  # fmt: skip
    assert [len(rows) for (rows,) in loader] == [2] * 5
    assert (optimizer, engine.get_mom()) == (own, [0.5])
    loop(engine, 0, 2)
    assert engine.get_lr() == schedule.get_last_lr() == [0.025]


def loaded(tp):
    """The rows that this rank's loader brings in an epoch, of ten."""
    tree = DOCUMENT | {"tensor_parallel": {"autotp_size": tp}}
    data = torch.utils.data.TensorDataset(torch.arange(10))
    loader = deepspeed.initialize(model=tiny("llama"), config=tree, training_data=data)[2]
    return [row for (rows,) in loader for row in rows.tolist()]


def trained_by_json(sp):
    """Losses of three steps of a JSON's loop, the sequences that this rank was handed, and how a program counts."""
    tree = DOCUMENT | {"train_micro_batch_size_per_gpu": 4, "gradient_accumulation_steps": 1, "train_batch_size": 4}
    model, data = hf("llama"), Rows(12)
    engine, _, loader, _ = deepspeed.initialize(
        model=model, config=tree | {"sequence_parallel_size": sp}, training_data=data
    )
    losses, handed = [], []
    for micro_batch in loader:
        handed += micro_batch["input_ids"].tolist()
        loss = engine(**micro_batch).loss
        engine.backward(loss)
        engine.step()
        losses.append(float(loss.detach()))
    return losses, handed, engine.engine.mesh.sp, (engine.dp_world_size, engine.get_data_parallel_rank())


def test_ranks_that_share_sequences_are_handed_the_same_ones(ranks):
    ((wanted, data, *_),), two = ranks(1, trained_by_json, 1), ranks(2, trained_by_json, 2)
    assert len(data) == 12
    for losses, handed, *counted in two:
        assert losses == pytest.approx(wanted, rel=1e-5)
        assert handed == data
        assert counted == [2, (1, 0)]


def test_dp_ranks_share_a_dataset_out_and_tp_ranks_have_the_same_rows(ranks):
    first, second = ranks(2, loaded, 1)
    assert (len(first), len(second), sorted(first + second)) == (5, 5, list(range(10)))
    first, second = ranks(2, loaded, 2)
    assert first == second
    assert sorted(first) == list(range(10))


@pytest.mark.parametrize(("options", "why"), [
    ({}, "needs DeepSpeed's configuration"),
    ({"config": {"zero_optimization": {"stag": 1}}}, "config: zero_optimization.stag is not a key of DeepSpeed's"),
    ({"config": {"train_batch_size": "auto", "optimizer": {"type": "AdamW"}}}, "train_batch_size is auto, and initialize"),
    ({"config": {"train_batch_size": 1}, "model_parameters": [torch.nn.Parameter(torch.ones(1))]},
     "has no optimizer, and none is given"),
    ({"config": DOCUMENT, "mpu": 3}, r"initialize\(mpu=...\) is not supported"),
    ({"config": DOCUMENT | {"train_batch_size": 7}}, "train.batch 7 is not micro_batch 2 x accumulate 2 x dp 1 = 4"),
])  # fmt: skip
def test_what_cannot_be_is_one_line(options, why):
    with pytest.raises(ConfigError, match=why):
        deepspeed.initialize(model=hf("llama"), **options)


def test_calls_without_a_counterpart_are_refused():
    engine = deepspeed.initialize(model=hf("llama"), config=DOCUMENT)[0]
    with pytest.raises(AttributeError, match="no 'eigenvalue_enabled' of DeepSpeed's here"):
        engine.eigenvalue_enabled()
    with pytest.raises(ConfigError, match="enabled: true"):
        engine.compile()
    with pytest.raises(ConfigError, match="custom_load_fn"):
        engine.load_checkpoint("anywhere", custom_load_fn=print)


def two_losses(stage, apart, forwards):
    """Weights after steps of two losses of one forward or of two: back-propagated one after the other, or their sum.

    Neither clipping nor an optimizer that divides by the gradient hides how often they count.
    """
    tree = DOCUMENT | {
        "gradient_accumulation_steps": 1,
        "zero_optimization": {"stage": stage},
        "gradient_clipping": 0.0,
    }
    model = hf("llama")
    own = torch.optim.SGD(model.parameters(), lr=10.0)
    del tree["optimizer"], tree["scheduler"]
    engine = deepspeed.initialize(model=model, optimizer=own, config=tree)[0]
    for step in range(2):
        ids = [batch(10 * step + number, engine.engine.mesh.rank) for number in range(forwards)]
        logits = [engine(input_ids=each).logits for each in ids]
        one, other = logits[0].square().mean(), logits[-1].sin().mean()
        if apart:
            engine.backward(one, retain_graph=forwards == 1)
            engine.backward(other)
        else:
            engine.backward(one + other)
        engine.step()
    with engine.engine.full_params():
        return [p.detach().clone() for p in engine.module.parameters()]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_backward_returns_the_loss_of_a_micro_batch_in_its_dtype(dtype):
    bf16 = {"bf16": {"enabled": dtype == torch.bfloat16}}
    model, tree = torch.nn.Linear(4, 1), {"train_micro_batch_size_per_gpu": 1, "gradient_accumulation_steps": 4} | bf16
    engine = deepspeed.initialize(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1.0), config=tree)[0]
    loss = engine(torch.ones(2, 4, dtype=dtype)).square().mean()
    assert loss.dtype == dtype
    torch.testing.assert_close(engine.backward(loss), loss / 4, rtol=0, atol=0)


@pytest.mark.parametrize("forwards", [1, 2])
@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
def test_two_losses_of_a_micro_batch_are_their_sum(ranks, stage, forwards):
    both = (ranks(2, two_losses, stage, apart, forwards) for apart in (True, False))
    for found, wanted in zip(*both, strict=True):
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def evaluating(frozen):
    """The loss of an engine without an optimizer at stage 3 and of its model before; what trains it is refused."""
    model = hf("llama").requires_grad_(not frozen)
    tree = {"train_batch_size": 2, "zero_optimization": {"stage": 3}, "_note": 1, "comms_config": {"enabled": 1}}
    tree = tree | ({"optimizer": {"type": "AdamW"}} if frozen else {})
    ids = batch(0)
    wanted = loss_of(model, ids).item()
    engine, optimizer, _, schedule = deepspeed.initialize(model=model, config=tree)
    assert (optimizer, schedule) == (None, None)
    found = loss_of(engine.eval(), ids)
    for call in (lambda: engine.backward(found), engine.step):
        with pytest.raises(ConfigError, match="of an engine without an optimizer, which evaluates only"):
            call()
    engine.destroy()
    assert [p.requires_grad for p in model.parameters()] == [not frozen] * len(list(model.parameters()))
    return found.item(), wanted


@pytest.mark.parametrize("frozen", [True, False], ids=["frozen", "no optimizer"])
def test_a_model_that_nothing_trains_gets_an_engine_for_evaluation(ranks, frozen):
    for found, wanted in ranks(2, evaluating, frozen):
        assert found == pytest.approx(wanted, rel=1e-5)


def test_keys_that_deepspeed_does_not_read_are_ignored_with_a_line_and_no_other(capsys):
    tree = DOCUMENT | {"_comment": "ours", "compile": {"disable": True}, "zero_optimization": {"_why": "x", "stage": 1}}
    engine = deepspeed.initialize(model=hf("llama"), config=tree)[0]
    assert engine.engine.stage == 1
    assert not engine.is_compiled
    line = "config: ignored, as by DeepSpeed: _comment, compile.disable, zero_optimization._why"
    assert line in capsys.readouterr().out.splitlines()
    with pytest.raises(ConfigError, match=r"config: coment is not a key of DeepSpeed's"):
        deepspeed.initialize(model=hf("llama"), config=DOCUMENT | {"coment": "ours"})


def memory_told():
    with contextlib.redirect_stdout(said := io.StringIO()):
        see_memory_usage("after the model", force=True)
    return said.getvalue().count("after the model: allocated")


def test_memory_is_told_by_one_rank(ranks):
    assert ranks(2, memory_told) == [1, 0]
