"""The sequence axis in others' loops: ranks of an sp group are handed the same data, and train as one rank would."""

import functools
import json
import types
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.distributed as dist
from models import hf
from torch.nn import functional as F
from trainers import Rows, Seen, arguments, launched

import zero3d

CLOSE = {"rel": 1e-5, "abs": 1e-7}


def degree(sp):
    from accelerate import ParallelismConfig

    return None if sp == 1 else ParallelismConfig(sp_size=sp)


def fresh():
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)


def accelerated(sp, by_mesh=False):
    """Losses and rates of an epoch's steps of 4 sequences, the last of 2; what this rank read; places of the last."""
    from zero3d.ways.huggingface.accelerate import Accelerator

    with launched():
        fresh()
        options = {"options": {"mesh": zero3d.Mesh(sp=sp)}} if by_mesh else {"parallelism_config": degree(sp)}
        accelerator = Accelerator(cpu=True, stage=3, **options)
        model, data = hf("llama"), Seen(14)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, total_iters=8)
        parts = accelerator.num_processes // sp
        loader = torch.utils.data.DataLoader(data, batch_size=4 // parts)
        model, optimizer, loader, schedule = accelerator.prepare(model, optimizer, loader, schedule)
        losses, rates, metrics, names = [], [], [], []
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
            rates.append(optimizer.param_groups[0]["lr"])
            metrics += accelerator.gather_for_metrics(batch["input_ids"][:, 0]).tolist()
            names += accelerator.gather_for_metrics([str(int(first)) for first in batch["input_ids"][:, 0]])
        assert accelerator.engine.mesh.sp == sp
        return losses, rates, data.seen, metrics, names


def replicas(copies, cut, sp=1):
    """Losses and the mesh of an Accelerator that repeats states."""
    from accelerate import ParallelismConfig

    from zero3d.ways.huggingface.accelerate import Accelerator

    with launched():
        fresh()
        config = ParallelismConfig(dp_replicate_size=copies, dp_shard_size=cut, sp_size=sp) if copies * sp > 1 else None
        accelerator = Accelerator(cpu=True, stage=3, parallelism_config=config)
        model = hf("llama")
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        loader, losses = torch.utils.data.DataLoader(Rows(16), batch_size=2 * sp), []
        model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
        for batch in loader:
            loss = model(**batch).loss
            accelerator.backward(loss)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(accelerator.gather(loss.detach().reshape(1)).mean().item())
        mesh = accelerator.engine.mesh
        return losses, (mesh.dp, mesh.shard, mesh.sp)


@pytest.mark.parametrize(("asked", "mesh"), [
    ((2, 2), (4, 2, 1)), pytest.param((2, 1, 2), (4, 2, 2), marks=pytest.mark.long),
    pytest.param((4, 1), (4, 1, 1), marks=pytest.mark.long),
])  # fmt: skip
def test_replicas_and_shards_are_both_levels_of_dp(ranks, asked, mesh):
    wanted, _ = ranks(4, replicas, 1, 1, *asked[2:])[0]
    for losses, found in ranks(4, replicas, *asked):
        assert found == mesh
        assert losses == pytest.approx(wanted, **CLOSE)
    assert len(wanted) == 2


@pytest.mark.parametrize("by_mesh", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_loop_of_accelerates_is_that_of_one_rank(ranks, by_mesh):
    ((losses, rates, seen, metrics, names),) = ranks(1, accelerated, 1)
    assert metrics == [int(Rows(14).ids[row, 0]) for row in range(14)]
    assert names == [str(first) for first in metrics]
    for found in ranks(2, accelerated, 2, by_mesh):
        assert found[0] == pytest.approx(losses, **CLOSE)
        assert found[1:] == (rates, seen, metrics, names)


@pytest.mark.long
def test_groups_have_parts_of_the_data(ranks):
    found = ranks(4, accelerated, 2)
    (metrics,) = {tuple(metrics) for *_, metrics, _ in found}
    seen = [set(each[2]) for each in found]
    assert seen[0] == seen[1] == {0, 1, 4, 5, 8, 9, 12, 13}
    assert seen[2] == seen[3] == {2, 3, 6, 7, 10, 11, 0, 1}  # the last batch is filled up from the beginning
    assert list(metrics) == [int(Rows(14).ids[row, 0]) for row in range(14)]


JSON = {"zero_optimization": {"stage": 2}, "train_batch_size": "auto", "train_micro_batch_size_per_gpu": "auto"}


def trained(folder, sp, by_json=False):
    """What a Trainer logs in an epoch, and what this rank read of it."""
    from zero3d.ways.huggingface.transformers import Trainer

    with launched():
        fresh()
        data, given = Seen(16), {"parallelism_config": degree(sp)}
        if by_json:
            given = {"deepspeed": JSON | {"sequence_parallel_size": sp}}
        args = arguments(
            folder, per_device_train_batch_size=2, max_steps=-1, num_train_epochs=1, per_device_eval_batch_size=4,
            eval_strategy="epoch", include_num_input_tokens_seen="all", **given,
        )  # fmt: skip
        trainer = Trainer(hf("llama"), args, train_dataset=data, eval_dataset=Rows(6, seed=1))
        trainer.train()
        assert trainer.accelerator.engine.mesh.sp == sp
        logs = trainer.state.log_history
        steps = [(log["loss"], float(log["grad_norm"]), log["learning_rate"]) for log in logs if "loss" in log]
        evaluated = [log["eval_loss"] for log in logs if "eval_loss" in log]
        counted = trainer.get_total_train_batch_size(trainer.args), trainer.state.num_input_tokens_seen
        return steps, evaluated, data.seen, counted


@pytest.mark.parametrize("by_json", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_trainer_is_that_of_one_rank(ranks, tmp_path, by_json):
    ((steps, evaluated, seen, counted),) = ranks(1, trained, tmp_path, 1)
    assert (len(steps), len(evaluated), counted) == (4, 1, (4, Rows(16).ids.numel()))
    for found in ranks(2, trained, tmp_path, 2, by_json):
        for one, other in zip(found[0], steps, strict=True):
            assert one == pytest.approx(other, **CLOSE)
        assert found[1] == pytest.approx(evaluated, **CLOSE)
        assert found[2:] == (seen, counted)


def scores():
    """The output of a head that returns numbers of labels in the place of logits."""
    from transformers.utils import ModelOutput

    @dataclass
    class Scores(ModelOutput):
        loss: Any = None
        log_probs: Any = None
        entropy: Any = None
        is_top1: Any = None
        label_mask: Any = None

    return Scores


def score_labels(model):
    """Have a model return numbers of labels when it is asked to, as TRL's trainers do."""
    plain, output = model.forward, scores()

    @functools.wraps(type(model).forward)
    def forward(self, *args, fused_lm_head=False, labels=None, shift_labels=None, num_items_in_batch=None, **options):
        if not fused_lm_head:
            return plain(*args, labels=labels, **options)
        hidden = self.model(*args, **options).last_hidden_state
        hidden, labels = (hidden[:, :-1], labels[:, 1:]) if shift_labels is None else (hidden, shift_labels)
        mask = labels != -100
        every = F.linear(hidden, self.lm_head.weight).log_softmax(-1)
        own = every.gather(-1, labels.clamp(min=0)[..., None])[..., 0].masked_fill(~mask, 0)
        return output(
            loss=-own.sum() / mask.sum().clamp(min=1), log_probs=own, label_mask=mask,
            entropy=-(every.exp() * every).sum(-1).masked_fill(~mask, 0), is_top1=(every.argmax(-1) == labels) & mask,
        )  # fmt: skip

    model.forward = types.MethodType(forward, model)


def fine_tuned(folder, sp, adapters=False):
    """What a trainer logs whose loss is of numbers of labels, as that of TRL's SFTTrainer, with its metrics."""
    import transformers
    from peft import LoraConfig, get_peft_model

    from zero3d.ways.huggingface.transformers import patch

    class Supervised(transformers.Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            output = model(**inputs, use_cache=False, fused_lm_head=True)
            assert output.log_probs.shape == inputs["labels"][:, 1:].shape  # trainers put each beside its label
            summed, counted = -output.log_probs.sum(), output.label_mask.sum()
            gathered = [self.accelerator.gather_for_metrics(t.detach().sum()).sum().item() for t in (
                output.entropy, output.is_top1, counted
            )]  # fmt: skip
            metrics.append([total / gathered[-1] for total in gathered[:-1]])
            assert torch.equal(output.loss, summed / counted)
            return summed / counted if num_items_in_batch is None else summed * dist_size() / num_items_in_batch

        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            with torch.no_grad():
                return self.compute_loss(model, self._prepare_inputs(inputs)), None, None

    undo, metrics = patch(stage=3), []
    try:
        with launched():
            fresh()
            args = arguments(
                folder, per_device_train_batch_size=2, max_steps=2, per_device_eval_batch_size=4,
                parallelism_config=degree(sp),
            )  # fmt: skip
            model = hf("llama")
            score_labels(model)
            if adapters:
                model = get_peft_model(model, LoraConfig(r=4, target_modules=["q_proj"], init_lora_weights="gaussian"))
            trainer = Supervised(model, args, train_dataset=Rows(8), eval_dataset=Rows(6, seed=1))
            trainer.train()
            evaluated = trainer.evaluate()["eval_loss"]
            prompt = Rows(1).ids[:, :4]
            trainer.model.eval()
            written = trainer.model.generate(input_ids=prompt, max_new_tokens=3, do_sample=False).tolist()
            assert trainer.accelerator.alike == sp
            logs = trainer.state.log_history
            steps = [[log["loss"], float(log["grad_norm"])] for log in logs if "loss" in log]
            return [*steps, [evaluated], *metrics], written
    finally:
        undo()


def dist_size():
    return dist.get_world_size() if dist.is_initialized() else 1


@pytest.mark.parametrize("adapters", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_trainer_that_scores_labels_itself_is_that_of_one_rank(ranks, tmp_path, adapters):
    ((wanted, written),) = ranks(1, fine_tuned, tmp_path, 1, adapters)
    assert len(wanted) == 2 + 1 + 4 + 2
    for found, again in ranks(2, fine_tuned, tmp_path, 2, adapters):
        assert again == written
        for one, other in zip(found, wanted, strict=True):
            assert one == pytest.approx(other, **CLOSE)


def of_launcher(**sizes):
    """What `accelerate launch --use_parallelism_config` puts into the environment of ranks."""
    return {"ACCELERATE_USE_PARALLELISM_CONFIG": "true"} | {
        f"PARALLELISM_CONFIG_{name}": size for name, size in sizes.items()
    }


def alike_as_launched(sizes):
    from accelerate.utils import patch_environment

    from zero3d.ways.huggingface.accelerate import Accelerator

    with launched(), patch_environment(**of_launcher(**sizes)):
        fresh()
        accelerator = Accelerator(cpu=True)
        found = accelerator.alike, accelerator.parallelism_config
        fresh()
        return found


@pytest.mark.parametrize(("sizes", "alike"), [({"sp_size": 2}, 2), ({"sp_size": 1}, 1)], ids=str)
def test_accelerates_launcher_may_ask_for_the_axis(ranks, sizes, alike):
    assert ranks(2, alike_as_launched, sizes) == [(alike, None)] * 2


def refused(asked, folder):
    """What a ParallelismConfig, or what is beside one, is refused for."""
    from accelerate import DataLoaderConfiguration, ParallelismConfig
    from accelerate.utils import patch_environment

    from zero3d.ways.huggingface.accelerate import Accelerator
    from zero3d.ways.huggingface.transformers import Trainer

    with launched():
        fresh()
        sizes = {name: value for name, value in asked.items() if name.endswith("_size")}
        given = {"cpu": True, "parallelism_config": None if "launch" in asked else ParallelismConfig(**sizes)}
        if asked.get("mesh"):
            given["options"] = {"mesh": zero3d.Mesh(sp=dist.get_world_size())}
        if asked.get("dispatches"):
            given["dataloader_config"] = DataLoaderConfiguration(dispatch_batches=True)
        try:
            if "json" in asked:
                document = json.dumps(JSON | {"sequence_parallel_size": asked["json"]})
                arguments(folder, parallelism_config=given["parallelism_config"], deepspeed=document)
            elif asked.get("smooths"):
                args = arguments(
                    folder, parallelism_config=given["parallelism_config"], label_smoothing_factor=asked["smooths"]
                )
                Trainer(hf("llama"), args, train_dataset=Rows(16))
            elif asked.get("takes"):
                args = arguments(folder, parallelism_config=given["parallelism_config"])
                Trainer(hf("llama"), args, train_dataset=Rows(16), compute_loss_func=lambda *_, **__: None).train()
            elif asked.get("predicts"):
                args = arguments(folder, parallelism_config=given["parallelism_config"], max_steps=1)
                trainer = Trainer(hf("llama"), args, train_dataset=Rows(16))
                trainer.train()
                trainer.predict(Rows(4))
            else:
                with patch_environment(**of_launcher(**asked["launch"]) if "launch" in asked else {}):
                    Accelerator(**given)
        except zero3d.ConfigError as error:
            return str(error)
        finally:
            fresh()
    return ""


@pytest.mark.parametrize(("asked", "words"), [
    ({"cp_size": 2}, r"ParallelismConfig(cp_size=2) is not supported: the sequence axis is sp_size"),
    ({"tp_size": 2}, "ParallelismConfig(tp_size=2) is not supported"),
    ({"launch": {"tp_size": 2}}, "ParallelismConfig(tp_size=2) is not supported"),
    ({"sp_size": 3}, "2 / 3 is not whole"),
    ({"sp_size": 2, "dp_shard_size": 2}, "dp_shard_size is 2 / 2 = 1"),
    ({"dp_replicate_size": 2, "dp_shard_size": 2}, "2 x 2 is not 2 / 1 = 2. Pass dp_shard_size=2 / dp_replicate_size"),
    ({"sp_size": 2, "mesh": True}, "would cut the model twice"),
    ({"sp_size": 2, "dispatches": True}, "dispatch_batches=True has rank 0 read a batch"),
    ({"sp_size": 2, "json": 4}, "sequence_parallel_size is 4 in the JSON"),
    ({"sp_size": 2, "smooths": 0.1}, "label_smoothing_factor=0.1 takes a loss of whole sequences' logits"),
    ({"sp_size": 2, "takes": True}, "compute_loss_func takes a loss of whole sequences' logits"),
    ({"sp_size": 2, "predicts": True}, "predictions are logits of whole sequences"),
], ids=str)  # fmt: skip
def test_what_does_not_fit_is_refused(ranks, tmp_path, asked, words):
    for told in ranks(2, refused, asked, tmp_path):
        assert words in told
