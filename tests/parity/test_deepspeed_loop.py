"""DeepSpeed's loop beside plain PyTorch: what accumulates, what is forgotten, whole batches, weights, fp32 states."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from models import batch, bits, hf, loss_of
from safetensors.torch import load_file

from zero3d.errors import ConfigError
from zero3d.ways import deepspeed

MICRO = 2


def document(stage, **others):
    return {
        "train_micro_batch_size_per_gpu": 2, "gradient_accumulation_steps": MICRO, "gradient_clipping": 0.05,
        "optimizer": {"type": "AdamW", "params": {"lr": 1e-2, "weight_decay": 0.1}},
        "zero_optimization": {"stage": stage}, **others,
    }  # fmt: skip


def opened(stage, **others):
    return deepspeed.initialize(model=hf("llama"), config=document(stage, **others))[0]


def norm_of(terms):
    """The norm of the gradient of a sum of factors times losses of micro-batches, in plain PyTorch."""
    model = hf("llama")
    sum(factor * loss_of(model, batch(number)) for factor, number in terms).backward()
    return torch.nn.utils.clip_grad_norm_(model.parameters(), 1e9).item()


def norm(engine, *numbers, **how):
    """That of a step over micro-batches."""
    for number in numbers:
        engine.backward(loss_of(engine, batch(number)), **how)
        engine.step()
    return engine.get_global_grad_norm()


@pytest.mark.parametrize("stage", [0, 3])
@pytest.mark.filterwarnings("ignore:zero_grad.. forgets 1 micro-batches")
def test_zero_grad_forgets_what_was_accumulated_and_the_boundary_stays(stage):
    engine = opened(stage)
    engine.backward(1000 * loss_of(engine, batch(0)))
    engine.step()
    engine.zero_grad()
    assert (engine.micro_steps, engine.is_gradient_accumulation_boundary()) == (1, True)
    assert norm(engine, 1) == pytest.approx(norm_of([(1 / MICRO, 1)]), rel=1e-5)
    assert engine.was_step_applied()


def test_a_plain_backward_of_a_loss_from_outputs_is_divided_once():
    engine = opened(2)
    for number in range(MICRO):
        ids = batch(number)
        engine(input_ids=ids, labels=ids).loss.backward()
        engine.step()
    wanted = norm_of([(1 / MICRO, number) for number in range(MICRO)])
    assert engine.get_global_grad_norm() == pytest.approx(wanted, rel=1e-5)


def test_a_boundary_without_gradients_applies_nothing():
    engine = opened(1)
    before = bits(engine.module.parameters())
    engine.step()
    engine.backward(loss_of(engine, batch(0)))
    engine.zero_grad()
    engine.step()
    assert not engine.was_step_applied()
    assert (engine.global_steps, engine.skipped_steps) == (1, 1)
    assert bits(engine.module.parameters()) == before


@pytest.mark.parametrize("stage", [0, 3])
def test_scale_wrt_gas_false_adds_the_gradients_of_micro_batches_up(stage):
    engine = opened(stage)
    loss = loss_of(engine, batch(0))
    assert engine.backward(loss, scale_wrt_gas=False).item() == loss.item()
    engine.step()
    assert norm(engine, 1, scale_wrt_gas=False) == pytest.approx(norm_of([(1, 0), (1, 1)]), rel=1e-5)
    other = opened(stage)
    loss = loss_of(other, batch(0))
    assert other.backward(loss).item() == pytest.approx(loss.item() / MICRO)
    other.step()
    assert norm(other, 1, scale_wrt_gas=False) == pytest.approx(norm_of([(0.5, 0), (1, 1)]), rel=1e-5)


FP16 = {"fp16": {"enabled": True, "initial_scale_power": 8}, "gradient_clipping": 0}


@pytest.mark.parametrize("stage", [1, 3])
def test_a_loss_that_is_scaled_by_the_program_trains_in_fp16(stage):
    found = []
    for scales in (False, True):
        engine, norms = opened(stage, **FP16), []
        for number in range(2 * MICRO):
            loss = loss_of(engine, batch(number))
            if scales and number != 1:  # both kinds in one step
                engine.scale(loss).backward()
            else:
                engine.backward(loss)
            engine.step()
            norms += [engine.get_global_grad_norm()]
        found.append(norms[MICRO - 1 :: MICRO])
    assert found[1] == pytest.approx(found[0], rel=1e-2)


def test_a_scaled_loss_is_reduced_behind_no_sync():
    engine = opened(1, **FP16, gradient_accumulation_steps=1)
    with engine.no_sync():
        engine.scale(loss_of(engine, batch(0))).backward()
    engine.scale(loss_of(engine, batch(1))).backward()
    engine.step()
    assert engine.get_global_grad_norm() == pytest.approx(norm_of([(1, 0), (1, 1)]), rel=1e-2)


def test_a_loss_that_nobody_has_scaled_is_refused_in_fp16_also_after_one_that_was():
    engine = opened(1, **FP16)
    engine.scale(loss_of(engine, batch(0))).backward()
    engine.scale(loss_of(engine, batch(1)))  # and no backward
    with pytest.raises(ConfigError, match="fp16' needs a scaled loss"):
        loss_of(engine, batch(1)).backward()
    with pytest.raises(ConfigError, match=r"scale needs one number, and the loss has shape \(2,\)"):
        engine.scale(torch.ones(2))


def test_was_step_applied_is_of_the_latest_step():
    engine = opened(2)
    assert not engine.was_step_applied()
    applied = []
    for number in range(2 * MICRO):
        factor = float("inf") if number == 2 else 1.0
        engine.backward(factor * loss_of(engine, batch(number)))
        engine.step()
        applied.append(engine.was_step_applied())
    assert applied == [False, True, False, False]
    assert (engine.global_steps, engine.skipped_steps) == (2, 1)


@pytest.mark.parametrize("stage", [0, 1])
def test_no_sync_leaves_the_reduction_to_the_backward_behind_it(stage):
    engine = opened(stage, gradient_accumulation_steps=1)
    with engine.no_sync():
        engine.backward(loss_of(engine, batch(0)))
        with pytest.raises(ConfigError, match=r"step\(\) inside no_sync\(\)"):
            engine.step()
        with pytest.raises(ConfigError, match=r"no_sync\(\) inside no_sync\(\)"), engine.no_sync():
            pass
    assert norm(engine, 1) == pytest.approx(norm_of([(1, 0), (1, 1)]), rel=1e-5)
    with engine.no_sync():
        engine.backward(loss_of(engine, batch(2)))
    with pytest.raises(ConfigError, match="1 micro-batches are not reduced yet"):
        engine.step()


@pytest.mark.parametrize("stage", [2, 3])
def test_no_sync_is_refused_where_gradients_are_partitioned(stage):
    with pytest.raises(ConfigError, match=f"no_sync.. at stage {stage}"), opened(stage).no_sync():
        pass


def test_zero_grad_between_micro_batches_tells_what_deepspeed_does_at_stage_3():
    engine = opened(3)
    engine.backward(loss_of(engine, batch(0)))
    with pytest.warns(UserWarning, match="DeepSpeed's own keeps what stage 3 has reduced"):
        engine.zero_grad()


def rows(first):
    return ({"input_ids": (ids := batch(number)), "labels": ids} for number in range(first, 100))


@pytest.mark.parametrize("stage", [0, 3])
def test_train_batch_is_the_loop_over_an_iterator(stage):
    engine, other = opened(stage), opened(stage)
    assert engine.eval_batch(rows(0)).item() == pytest.approx(
        sum(loss_of(hf("llama"), batch(number)).item() for number in range(MICRO)) / MICRO, rel=1e-5
    )
    assert not engine.module.training
    iterator = rows(0)
    for step in range(2):
        mean = engine.train_batch(iterator)
        losses = []
        for number in (2 * step, 2 * step + 1):
            losses.append(loss_of(other, batch(number)))
            other.backward(losses[-1])
            other.step()
        assert mean.item() == pytest.approx((losses[0] + losses[1]).item() / 2, rel=1e-6)
    assert engine.module.training
    assert (engine.global_steps, engine.micro_steps) == (2, 2 * MICRO)
    assert engine.engine.fingerprint() == other.engine.fingerprint()


def test_train_batch_takes_the_programs_loader_and_says_what_it_needs():
    data = [{"input_ids": (ids := batch(number)[0]), "labels": ids} for number in range(8)]
    engine = deepspeed.initialize(model=hf("llama"), config=document(1), training_data=data)[0]
    seen = []
    engine.set_batch_fn(lambda rows: seen.append(rows["input_ids"].shape[0]) or rows)
    engine.train_batch()
    assert seen == [2, 2]
    engine.set_dataiterator(iter([{"input_ids": batch(0)}] * 4))
    with pytest.raises(ConfigError, match=r"output with \.loss"):
        engine.train_batch()
    engine.backward(loss_of(engine, batch(0)))
    with pytest.raises(ConfigError, match=r"train_batch\(\) after 1 micro-batches"):
        engine.train_batch(rows(0))
    with pytest.raises(ConfigError, match="has no data: pass an iterator"):
        opened(1).train_batch()


def test_the_size_of_a_batch_may_change_between_steps():
    engine = opened(1)
    engine.set_train_batch_size(6)
    assert (engine.gradient_accumulation_steps(), engine.train_batch_size()) == (3, 6)
    assert norm(engine, 0, 1, 2) == pytest.approx(norm_of([(1 / 3, 0), (1 / 3, 1), (1 / 3, 2)]), rel=1e-5)
    assert engine.was_step_applied()
    with pytest.raises(ConfigError, match="a batch is a multiple of micro_batch 2 x dp 1 = 2"):
        engine.set_train_batch_size(5)
    engine.set_train_micro_batch_size(4)
    assert (engine.train_batch_size(), engine.train_micro_batch_size_per_gpu()) == (12, 4)


def test_rates_and_momenta_of_groups():
    model = hf("llama")
    groups = [{"params": [p for p in model.parameters() if p.dim() == n], "lr": 0.1 * n} for n in (1, 2)]
    engine = deepspeed.initialize(model=model, model_parameters=groups, config=document(1))[0]
    assert engine.get_lr() == pytest.approx([0.1, 0.2])
    assert engine.get_mom() == [(0.9, 0.999)] * 2
    engine.set_lr(0.5)
    assert engine.get_lr() == [0.5, 0.5]
    assert [group["lr"] for group in engine.optimizer.param_groups] == [0.5, 0.5]
    plain = deepspeed.initialize(model=hf("llama"), optimizer=torch.optim.Adagrad, config=document(1))[0]
    assert plain.get_mom() == [0.0]


@pytest.mark.parametrize("stage", [0, 3])
def test_weights_go_out_and_come_in_whole(stage, tmp_path):
    engine, wanted = opened(stage), hf("llama").state_dict()
    found = engine.module_state_dict(prefix="m.")
    assert found.keys() == {f"m.{name}" for name in wanted}
    assert all(torch.equal(found[f"m.{name}"], wanted[name]) for name in wanted)
    engine.load_module_state_dict({"module": {name: 2 * values for name, values in wanted.items()}})
    assert engine.save_16bit_model(tmp_path, "weights.safetensors")
    written = load_file(tmp_path / "weights.safetensors")
    assert all(torch.equal(written[name], 2 * wanted[name]) for name in wanted)
    with pytest.raises(ConfigError, match=r"would be a pickle, and none is written here"):
        engine.save_16bit_model(tmp_path, "pytorch_model.bin")
    with pytest.raises(ConfigError, match=r"needs the weights as \{'module': WEIGHTS\}"):
        engine.load_module_state_dict(wanted)


def test_frozen_weights_may_be_left_out_of_a_state_dict():
    model = hf("llama")
    model.lm_head.requires_grad_(False)
    engine = deepspeed.initialize(model=model, config=document(2))[0]
    assert engine.module_state_dict().keys() - engine.module_state_dict(exclude_frozen_parameters=True).keys() == {
        "lm_head.weight"
    }


SCHEDULED = {"scheduler": {"type": "WarmupLR", "params": {"warmup_max_lr": 1e-2, "warmup_num_steps": 4}}}


@pytest.mark.parametrize("stage", [pytest.param(0, marks=pytest.mark.long), 3])
def test_parts_of_a_checkpoint_are_taken(stage, tmp_path):
    engine = opened(stage, **SCHEDULED)
    for number in range(3):
        norm(engine, number, number + 1)
    engine.save_checkpoint(tmp_path, client_state={"epoch": 1})
    wanted = engine.module_state_dict()

    def after(**how):
        other = opened(stage, **SCHEDULED)
        assert other.load_checkpoint(tmp_path, **how)[1] == {"epoch": 1}
        assert all(torch.equal(values, wanted[name]) for name, values in other.module_state_dict().items())
        parameter = next(other.module.parameters())
        moment = deepspeed.utils.safe_get_full_optimizer_state(parameter, "exp_avg")
        return other.global_steps, other.get_lr() == engine.get_lr(), bool(moment.any())

    assert after() == (3, True, True)
    assert after(load_lr_scheduler_states=False) == (3, False, True)
    assert after(load_optimizer_states=False) == (3, True, False)
    assert after(load_module_only=True) == (0, False, False)
    with pytest.raises(ConfigError, match="is for load_module_only=True"):
        opened(stage).load_checkpoint(tmp_path, load_module_strict=False)


def test_weights_alone_are_of_the_same_model(tmp_path):
    engine = opened(1)
    engine.save_checkpoint(tmp_path)
    other = deepspeed.initialize(model=hf("gpt2"), config=document(1))[0]
    with pytest.raises(Exception, match="is of another model"):
        other.load_checkpoint(tmp_path, load_module_only=True)


def test_weights_alone_come_with_buffers_of_the_same_shape(tmp_path):
    def with_buffer(size):
        model = hf("gpt2")
        model.register_buffer("seen", torch.ones(size))
        return deepspeed.initialize(model=model, config=document(1))[0]

    with_buffer(1).save_checkpoint(tmp_path)
    grown = with_buffer(0)
    grown.load_checkpoint(tmp_path, load_module_only=True)
    assert grown.module.seen.tolist() == [1.0]
    with pytest.raises(Exception, match="'seen' is float32"):
        with_buffer(5).load_checkpoint(tmp_path, load_module_only=True)


def two_ranks(stage):
    """Norms of three steps of two ranks, and a mean loss, at stages 0 and 1 with the first micro-batch in no_sync()."""
    engine = opened(stage)
    rank, norms = engine.global_rank, []
    for how in ({}, {"scale_wrt_gas": False}):
        for number in range(MICRO):
            with engine.no_sync() if stage < 2 and number == 0 else nullcontext():
                engine.backward(loss_of(engine, batch(number, rank)), **how)
            engine.step()
        norms.append(engine.get_global_grad_norm())
        engine.set_lr(0.0)
    rows = [{"input_ids": batch(number, rank), "labels": batch(number, rank)} for number in range(MICRO)]
    return norms, engine.eval_batch(iter(rows)).item(), engine.train_batch(iter(rows)).item()


@pytest.mark.parametrize("stages", [(1, 3), pytest.param((0, 2), marks=pytest.mark.long)])
def test_ranks_average_what_micro_batches_have_added_up(ranks, stages):
    model = hf("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)
    wanted = []
    for factor in (1 / 4, 1 / 2):  # of two ranks' two micro-batches; without the division by these
        losses = [loss_of(model, batch(number, rank)) for number in range(MICRO) for rank in range(2)]
        (factor * sum(losses)).backward()
        wanted.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05).item())
        optimizer.step()
        optimizer.zero_grad()
        optimizer.param_groups[0]["lr"] = 0.0
    mean = sum(loss_of(model, batch(number, rank)).item() for number in range(MICRO) for rank in range(2)) / 4
    for stage in stages:
        first, second = ranks(2, two_ranks, stage)
        assert first == second
        assert first[0] == pytest.approx(wanted, rel=1e-4)
        assert first[1:] == pytest.approx((mean, mean), rel=1e-5)


def two_ranks_load(stage, folder):
    """Whether two ranks have the weights of a checkpoint that was loaded without its states."""
    engine = opened(stage)
    norm(engine, 0, 1)
    engine.save_checkpoint(f"{folder}/{stage}")
    other = opened(stage)
    other.load_checkpoint(f"{folder}/{stage}", load_optimizer_states=False)
    masters = [
        deepspeed.utils.safe_get_full_fp32_param(next(each.module.parameters())) for each in (engine, other)
    ]  # fmt: skip
    engine.save_16bit_model(f"{folder}/{stage}", "weights.safetensors")
    return torch.equal(*masters), other.global_steps


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
def test_two_ranks_take_weights_of_a_checkpoint_and_write_one_file(ranks, tmp_path, stage):
    assert ranks(2, two_ranks_load, stage, str(tmp_path)) == [(True, 1), (True, 1)]
    assert load_file(tmp_path / str(stage) / "weights.safetensors").keys() == hf("llama").state_dict().keys()


def other_tags(folder):
    """What a rank is told that saves under a tag of its own, and what is in the folder then."""
    engine = opened(1)
    norm(engine, 0, 1)
    with pytest.raises(ConfigError) as told:
        engine.save_checkpoint(folder, tag=f"tag-{engine.global_rank}")
    return str(told.value), sorted(path.name for path in Path(folder).iterdir())


def test_ranks_with_different_tags_write_nothing(ranks, tmp_path):
    (first, nothing), (second, _) = ranks(2, other_tags, str(tmp_path))
    assert "save_checkpoint(tag='tag-0') on rank 0, and 'tag-1' on rank 1: a checkpoint is one folder" in first
    assert "save_checkpoint(tag='tag-1') on rank 1, and 'tag-0' on rank 0" in second
    assert nothing == []


@pytest.mark.parametrize("folder", [None, ""])
def test_a_checkpoint_without_a_folder_is_refused(folder):
    with pytest.raises(ConfigError, match="names no folder"):
        opened(1).save_checkpoint(folder)


def full_states(stage, precision):
    """Masters, gradients and moments of two ranks as whole tensors, before and after a step; what was written is in."""
    utils, tree = deepspeed.utils, document(stage, bf16={"enabled": precision == "bf16"}, gradient_clipping=0)
    engine = deepspeed.initialize(model=hf("llama"), config=tree)[0]
    parameter = engine.module.model.layers[0].mlp.up_proj.weight
    before = utils.safe_get_full_fp32_param(parameter)
    assert utils.safe_get_full_grad(parameter) is None
    for number in range(MICRO):
        engine.backward(loss_of(engine, batch(number, engine.global_rank)))
        if number == 0:
            engine.step()
    gradient = utils.safe_get_full_grad(parameter)
    utils.safe_set_full_grad(parameter, 2 * gradient)
    engine.step()
    moment = utils.safe_get_full_optimizer_state(parameter, "exp_avg")
    assert utils.safe_get_full_optimizer_state(parameter, "none") is None
    utils.safe_set_full_optimizer_state(parameter, torch.ones_like(moment), "exp_avg")
    utils.safe_set_full_fp32_param(parameter, torch.full_like(moment, 0.1))
    with deepspeed.zero.GatheredParameters(parameter):
        weight = parameter.detach().float().clone()
    with deepspeed.zero.GatheredParameters([parameter], modifier_rank=1), torch.no_grad():
        if engine.global_rank == 1:
            parameter.fill_(0.5)
    after = utils.safe_get_full_fp32_param(parameter)
    ones = utils.safe_get_full_optimizer_state(parameter, "exp_avg")
    return before, gradient, moment, weight, after, ones


@pytest.mark.parametrize(("precision", "stages"), [
    ("fp32", (1, 3)), *(pytest.param(*case, marks=pytest.mark.long) for case in (("fp32", (0, 2)), ("bf16", range(4)))),
])  # fmt: skip
def test_masters_gradients_and_moments_are_whole_tensors_at_every_stage(ranks, precision, stages):
    model = hf("llama")
    losses = [loss_of(model, batch(number, rank)) for number in range(MICRO) for rank in range(2)]
    (sum(losses) / len(losses)).backward()
    plain = model.model.layers[0].mlp.up_proj.weight
    for stage in stages:
        first, second = ranks(2, full_states, stage, precision)
        before, gradient, moment, weight, after, ones = first
        assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True] * 6, stage
        assert torch.equal(before, plain)
        near = {"rtol": 1e-3, "atol": 1e-6} if precision == "fp32" else {"rtol": 0.1, "atol": 2e-3}
        torch.testing.assert_close(gradient, plain.grad, **near)
        torch.testing.assert_close(moment, 0.1 * 2 * gradient, rtol=1e-5, atol=1e-8)
        assert (weight - 0.1).abs().max() < 1e-3
        assert (after == 0.5).all()
        assert (ones == 1).all()


def test_destroy_gives_the_module_back():
    engine = opened(3)
    norm(engine, 0, 1)
    wanted = engine.module_state_dict()
    module = engine.module
    engine.destroy()
    assert all(torch.equal(values, wanted[name]) for name, values in module.state_dict().items())
    assert all(p.requires_grad for p in module.parameters())
    assert deepspeed.utils.safe_get_full_fp32_param(next(module.parameters())) is None
