"""An engine of verl's: steps, weights and checkpoints against stand-ins with verl's signatures."""

import copy
import sys
from types import ModuleType, SimpleNamespace
from unittest.mock import patch

import peft
import pytest
import torch
from models import VOCAB, hf
from safetensors.torch import save_file
from tensors import assert_near

from zero3d.errors import ConfigError

LENGTHS = (5, 3, 4, 6)  # of all sequences, each a micro-batch
TOKENS = sum(LENGTHS)
RATE, CLIP = 1e-2, 1.0
MERGED = 1e-6  # how far rounding takes base + B @ A apart, relative to its norm
PLAIN = {  # what verl's config of a model says of adapters
    "lora_rank": 0, "lora_alpha": 16, "target_modules": "all-linear", "target_parameters": None,
    "exclude_modules": None, "lora_adapter_path": None, "lora": {},
}  # fmt: skip
LORA = {"lora_rank": 4, "lora_alpha": 8, "target_modules": ["q_proj", "down_proj"]}


class BaseEngine:
    """As verl's, as far as its workers call it."""

    def train_batch(self, data, loss_function):
        self.optimizer_zero_grad()
        outputs = self.forward_backward_batch(data, loss_function, forward_only=False)
        grad_norm = self.optimizer_step()
        if self.is_mp_src_rank_with_outputs():
            outputs["metrics"]["grad_norm"] = grad_norm
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


def of_base_layer(name, config):
    """As verl's `replace_lora_wrapper`: the name that a rollout's layer with adapters has for its base's weight."""
    module = name.removesuffix(".weight")
    return f"{module}.base_layer.weight" if module in config.target_modules else name


def stand_ins():
    utils, engine = ("verl.utils", "verl.utils.tensordict_utils", "verl.utils.fsdp_utils"), "verl.workers.engine"
    names = ("verl", *utils, "verl.workers", engine, f"{engine}.base", f"{engine}.utils")
    modules = {name: ModuleType(name) for name in names}
    modules["verl.utils.fsdp_utils"].replace_lora_wrapper = of_base_layer
    modules["verl.utils"].tensordict_utils = tu = modules["verl.utils.tensordict_utils"]
    tu.assign_non_tensor = lambda data, **values: data.update(values)
    tu.get_non_tensor_data = lambda data, key, default: data.get(key, default)
    vars(modules["verl.workers.engine.base"]).update(BaseEngine=BaseEngine, EngineRegistry=EngineRegistry)
    utils = {"prepare_micro_batches": prepare_micro_batches, "postprocess_batch_func": postprocess_batch_func}
    vars(modules["verl.workers.engine.utils"]).update(utils)
    return modules


def batch_of(place=0, size=1):
    """The sequences of one of so many ranks."""
    draw = torch.Generator().manual_seed(1)
    count = len(LENGTHS) // size
    ids = [torch.randint(3, VOCAB, (n,), generator=draw) for n in LENGTHS][place * count : (place + 1) * count]
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


def engine_of(folder, options=None, **changed):
    from zero3d.ways.verl import VerlEngine

    config = PLAIN | {"local_path": str(folder), "enable_gradient_checkpointing": True} | changed
    optimizer = SimpleNamespace(
        lr=RATE, betas=(0.9, 0.999), weight_decay=0.01, clip_grad=CLIP, total_training_steps=8, lr_warmup_steps=0,
        lr_warmup_steps_ratio=0.0, lr_scheduler_type="cosine", min_lr_ratio=0.1, num_cycles=0.5,
    )  # fmt: skip
    placed = SimpleNamespace(dtype="float32", param_offload=False, optimizer_offload=True, seed=42)
    with patch.object(VerlEngine, "options", VerlEngine.options | (options or {})):
        engine = VerlEngine(SimpleNamespace(**config), placed, optimizer, None)
    engine.options = VerlEngine.options | (options or {})
    return engine


def trained(folder, checkpoint, options):
    """Two steps by verl's calls, what its rollouts get after them, and the same after a checkpoint was loaded."""
    with patch.dict(sys.modules, stand_ins()):
        engine = engine_of(folder, options)
        assert {key: each for key, each in EngineRegistry.engines.items() if each is type(engine)}.keys() == {
            ("language_model", "zero3d", "cpu"), ("language_model", "zero3d", "cuda"),
        }  # fmt: skip
        data = batch_of(engine.get_data_parallel_rank(), engine.get_data_parallel_size())  # asked before initialize
        engine.initialize()
        losses, rates = [], []
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
        collected = engine.is_mp_src_rank_with_outputs()
        return losses, sent, [t.tolist() for t in told["log_probs"]], told["entropy"][0].tolist(), collected


def alone(folder):
    """The same steps of plain torch on all sequences."""
    model = hf("llama", vocab=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    optimizer = torch.optim.AdamW(model.parameters(), lr=RATE, weight_decay=0.01)
    losses = []
    for step in range(2):
        if step:
            optimizer.param_groups[0]["lr"] = RATE * (0.1 + 0.9 * (1 + torch.cos(torch.tensor(torch.pi / 8))) / 2)
        parts = [loss_of_rows(model, ids) / TOKENS for ids in batch_of()["input_ids"].unbind()]
        optimizer.zero_grad()
        sum(parts).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP)
        optimizer.step()
        losses.append([float(part.detach()) for part in parts])
    return losses, model.state_dict()


def loss_of_rows(model, ids):
    logs = (model(input_ids=ids[None]).logits[0] / 0.7).log_softmax(-1)
    return -logs[:-1].gather(1, ids[1:, None]).sum()


@pytest.mark.parametrize(("options", "dp"), [({}, 2), ({"tp": 2}, 1)])
def test_verls_workers_train_it_and_every_rank_gets_its_weights(ranks, tmp_path, options, dp):
    hf("llama", vocab=64).save_pretrained(tmp_path / "model")
    found = ranks(2, trained, tmp_path / "model", tmp_path / "saved", options)
    losses, weights = alone(tmp_path / "model")
    count = len(LENGTHS) // dp
    for rank, (told, sent, logs, entropy, collected) in enumerate(found):
        place = rank % dp
        own = slice(place * count, (place + 1) * count)
        assert told == pytest.approx([dp * sum(step[own]) for step in losses], rel=1e-5)
        assert_near(sent, weights, 1e-4, rate=RATE)
        assert [len(each) for each in logs] == list(LENGTHS[own])
        assert max(map(max, logs)) < 0 < min(entropy)
        assert collected == (rank < dp)
    assert all(torch.equal(found[0][1][name], found[1][1][name]) for name in weights)


def log_probs_of(engine, data):
    with engine.eval_mode():
        return torch.cat([row.detach() for row in engine.infer_batch(data)["model_output"]["log_probs"]])


def adapted(folder, saved):
    """Adapters trained for a step: what rollouts get by what they have; log-probabilities with and without adapters."""
    with patch.dict(sys.modules, stand_ins()):
        engine = engine_of(folder, **LORA)
        engine.initialize()
        data = batch_of(engine.get_data_parallel_rank(), 2)
        with engine.train_mode():
            engine.train_batch(data, loss_of)
        sent = {asked: engine.get_per_tensor_param(base_sync_done=asked) for asked in (True, False, None)}
        sent = {asked: (dict(weights), config) for asked, (weights, config) in sent.items()}
        logs = log_probs_of(engine, data)
        with engine.disable_adapter():
            of_base = log_probs_of(engine, data)
        assert torch.equal(log_probs_of(engine, data), logs)
        engine.engine.export(saved)
        going_on = engine_of(folder, **LORA | {"lora_adapter_path": str(saved), "lora": {"merge": True}})
        going_on.initialize()
        weights, config = going_on.get_per_tensor_param(base_sync_done=True)
        return sent, (dict(weights), config), logs, of_base


@torch.no_grad()
def plain_log_probs(model, place):
    rows = batch_of(place, 2)["input_ids"].unbind()
    logs = [(model(input_ids=ids[None]).logits[0] / 0.7).log_softmax(-1) for ids in rows]
    return torch.cat([each[:-1].gather(1, ids[1:, None])[:, 0] for each, ids in zip(logs, rows, strict=True)])


def test_rollouts_get_the_adapter_alone_or_merged_and_the_base_once(ranks, tmp_path):
    base = hf("llama")
    base.save_pretrained(tmp_path / "model")
    found = ranks(2, adapted, tmp_path / "model", tmp_path / "saved")
    model = peft.PeftModel.from_pretrained(hf("llama"), tmp_path / "saved")
    alone = peft.get_peft_model_state_dict(model)
    merged = copy.deepcopy(model).merge_and_unload().state_dict()
    for place, (sent, (once_more, no_config), logs, of_base) in enumerate(found):
        adapter, config = sent[True]
        assert adapter.keys() == alone.keys()
        assert all(torch.equal(adapter[name], alone[name]) for name in alone)
        assert (config["peft_type"], config["task_type"]) == (peft.PeftType.LORA, peft.TaskType.CAUSAL_LM)
        assert [config[key] for key in ("r", "lora_alpha", "target_modules")] == [4, 8, ["down_proj", "q_proj"]]
        for asked, weights in ((False, base.state_dict()), (None, merged)):
            got = sent[asked][0]
            assert sum(".base_layer." in name for name in got) == 4
            assert_near(
                {name.replace(".base_layer", ""): t for name, t in got.items()},
                weights,
                0.0 if asked is False else MERGED,
            )
        assert no_config is None
        assert_near(once_more, merged, MERGED)
        kept = torch.cat([torch.arange(n) < n - 1 for n in LENGTHS[2 * place : 2 * place + 2]])
        torch.testing.assert_close(logs[kept], plain_log_probs(model, place))
        torch.testing.assert_close(of_base[kept], plain_log_probs(base, place))
        assert not torch.allclose(logs, of_base)


REFUSED = (
    ({"pp": 2}, {}, "VerlEngine.options has pp: .* Use tp, ep, shard, or leave all ranks to dp"),
    ({}, LORA | {"target_modules": ".*_proj"}, r"target_modules='\.\*_proj': name the modules"),
    ({}, LORA | {"exclude_modules": "lm_head"}, "exclude_modules='lm_head': name the modules"),
)


def test_a_saved_adapter_is_refused_where_verls_rollouts_take_none(tmp_path):
    peft.LoraConfig(r=4, target_modules=["q_proj"]).save_pretrained(tmp_path)
    save_file({}, tmp_path / "adapter_model.safetensors")
    with patch.dict(sys.modules, stand_ins()), pytest.raises(ConfigError, match=r"pass actor\S*\.lora_rank=4\."):
        engine_of(tmp_path, lora_adapter_path=str(tmp_path))


def test_what_it_cannot_do_is_refused_with_what_to_type(tmp_path):
    with patch.dict(sys.modules, stand_ins()):
        for options, changed, said in REFUSED:
            with pytest.raises(ConfigError, match=said):
                engine_of(tmp_path, options, **changed)
