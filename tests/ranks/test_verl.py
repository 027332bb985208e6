"""An engine of verl's: steps, weights and checkpoints against stand-ins with verl's signatures."""

import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from models import VOCAB, hf

from zero3d.errors import ConfigError

LENGTHS = ((5, 3), (4, 6))  # of each rank's sequences, two micro-batches of one
TOKENS = sum(sum(lengths) for lengths in LENGTHS)
RATE, CLIP = 1e-2, 1.0


class BaseEngine:
    """As verl's, as far as its workers call it."""

    def train_batch(self, data, loss_function):
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)
        outputs["metrics"]["grad_norm"] = self.optimizer_step()
        return outputs

    def infer_batch(self, data, loss_function=None):
        with torch.no_grad():
            return self.forward_backward_batch(data, loss_function, forward_only=True)


class EngineRegistry:
    """As verl's: engines by what they train, the name of a strategy, and the device."""

    engines: dict = {}  # noqa: RUF012

    @classmethod
    def register(cls, model_type, backend, device="cuda", vendor=None):
        def keep(engine_class):
            assert issubclass(engine_class, BaseEngine)
            cls.engines |= {(model_type, backend, each): engine_class for each in device}
            return engine_class

        return keep


class Batch(dict):
    """As a TensorDict."""

    def to(self, device):
        return Batch({name: v.to(device) if torch.is_tensor(v) else v for name, v in self.items()})


def prepare_micro_batches(data, dp_group=None, same_micro_num_in_dp=True):
    """A sequence each."""
    rows = {name: nested.unbind() for name, nested in data.items() if torch.is_tensor(nested)}
    others = {name: value for name, value in data.items() if name not in rows}
    count = len(rows["input_ids"])
    return [Batch(others | {name: of_rows([each[i]]) for name, each in rows.items()}) for i in range(count)], None


def postprocess_batch_func(output_lst, indices, data):
    names = output_lst[0]["model_output"]
    joined = {name: [t for o in output_lst for t in o["model_output"][name].unbind()] for name in names}
    return {"model_output": joined, "loss": [o["loss"] for o in output_lst], "metrics": {}}


def of_rows(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def stand_ins():
    names = ("verl", "verl.utils", "verl.utils.tensordict_utils", "verl.workers", "verl.workers.engine")
    modules = {name: ModuleType(name) for name in (*names, "verl.workers.engine.base", "verl.workers.engine.utils")}
    modules["verl.utils"].tensordict_utils = tu = modules["verl.utils.tensordict_utils"]
    tu.assign_non_tensor = lambda data, **values: data.update(values)
    tu.get_non_tensor_data = lambda data, key, default: data.get(key, default)
    vars(modules["verl.workers.engine.base"]).update(BaseEngine=BaseEngine, EngineRegistry=EngineRegistry)
    utils = {"prepare_micro_batches": prepare_micro_batches, "postprocess_batch_func": postprocess_batch_func}
    vars(modules["verl.workers.engine.utils"]).update(utils)
    return modules


def batch_of(rank):
    draw = torch.Generator().manual_seed(rank)
    ids = [torch.randint(3, VOCAB, (n,), generator=draw) for n in LENGTHS[rank]]
    return Batch(
        input_ids=of_rows(ids),
        position_ids=of_rows([torch.arange(len(each)) for each in ids]),
        loss_mask=of_rows([torch.ones_like(each) for each in ids]),
        temperature=0.7,
        calculate_entropy=True,
    )


def loss_of(model_output, data, dp_group=None):
    """As verl's of supervised fine-tuning: over tokens of all ranks, times the ranks over which it is averaged."""
    given = model_output["log_probs"].values()
    return -given[:-1].sum() / data["batch_num_tokens"] * data["dp_size"], {}


def engine_of(folder, **options):
    from zero3d.integrations.verl import VerlEngine

    config = {"lora_rank": 0, "local_path": str(folder), "enable_gradient_checkpointing": True} | options
    optimizer = SimpleNamespace(
        lr=RATE, betas=(0.9, 0.999), weight_decay=0.01, clip_grad=CLIP, total_training_steps=8, lr_warmup_steps=0,
        lr_warmup_steps_ratio=0.0, lr_scheduler_type="cosine", min_lr_ratio=0.1, num_cycles=0.5,
    )  # fmt: skip
    placed = SimpleNamespace(dtype="float32", param_offload=False, optimizer_offload=True)
    return VerlEngine(SimpleNamespace(**config), placed, optimizer, None)


def trained(folder, checkpoint):
    """Two steps by verl's calls, what its rollouts get after them, and the same after a checkpoint was loaded."""
    with patch.dict(sys.modules, stand_ins()):
        engine = engine_of(folder)
        assert {key: each for key, each in EngineRegistry.engines.items() if each is type(engine)}.keys() == {
            ("language_model", "zero3d", "cpu"), ("language_model", "zero3d", "cuda"),
        }  # fmt: skip
        engine.initialize()
        data, losses, rates = batch_of(engine.get_data_parallel_rank()), [], []
        for number in range(2):
            with engine.train_mode():
                outputs = engine.train_batch(data, loss_of)
            losses.append(sum(outputs["loss"]))
            rates.append(engine.lr_scheduler_step())
            if not number:
                engine.save_checkpoint(str(checkpoint), global_step=1)
        weights, adapter = engine.get_per_tensor_param(layered_summon=False, base_sync_done=True)
        sent = dict(weights)
        with engine.eval_mode():
            told = engine.infer_batch(data)["model_output"]
        engine.load_checkpoint(str(checkpoint))
        assert engine.lr_scheduler_step() == rates[1]
        assert adapter is None
        return losses, sent, [t.tolist() for t in told["log_probs"]], told["entropy"][0].tolist()


def alone(folder):
    """The same steps of plain torch on all sequences."""
    model = hf("llama")
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    batches, losses = [batch_of(0), batch_of(1)], []
    for step in range(2):
        if step:
            optimizer.param_groups[0]["lr"] = RATE * (0.1 + 0.9 * (1 + torch.cos(torch.tensor(torch.pi / 8))) / 2)
        parts = [loss_of_rows(model, ids) / TOKENS for batch in batches for ids in batch["input_ids"].unbind()]
        optimizer.zero_grad()
        sum(parts).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append([float(part.detach()) for part in parts])
    return losses, model.state_dict()


def loss_of_rows(model, ids):
    logs = (model(input_ids=ids[None]).logits[0] / 0.7).log_softmax(-1)
    return -logs[:-1].gather(1, ids[1:, None]).sum()


def test_verls_workers_train_it_and_every_rank_gets_its_weights(ranks, tmp_path):
    hf("llama").save_pretrained(tmp_path / "model")
    found = ranks(2, trained, tmp_path / "model", tmp_path / "saved")
    losses, weights = alone(tmp_path / "model")
    for rank, (told, sent, logs, entropy) in enumerate(found):
        assert told == pytest.approx([2 * sum(step[2 * rank : 2 * rank + 2]) for step in losses], rel=1e-5)
        assert sent.keys() == weights.keys()
        for name, tensor in sent.items():
            torch.testing.assert_close(tensor, weights[name], rtol=1e-4, atol=1e-5)
        assert [len(each) for each in logs] == list(LENGTHS[rank])
        assert max(map(max, logs)) < 0 < min(entropy)
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in weights)


def test_adapters_are_refused_with_what_to_type(tmp_path):
    with patch.dict(sys.modules, stand_ins()), pytest.raises(ConfigError, match=r"lora_rank=8: .* leave it 0"):
        engine_of(tmp_path, lora_rank=8)
