"""A run by DeepSpeed's JSON is plain PyTorch's with the same values: rates, betas, clipping, also with states offloaded."""

import json

import pytest
import torch
from models import batch, bits, hf

import zero3d
from zero3d.train.setup.optimizer import optimizer_of, parameter_groups
from zero3d.train.setup.schedule import scheduler
from zero3d.ways.deepspeed.merge import load_merged

STEPS = 6
CYCLE = {
    "cycle_min_lr": 1e-4,
    "cycle_max_lr": 1e-2,
    "cycle_first_step_size": 2,
    "decay_step_size": 1,
    "decay_lr_rate": 0.5,
}
SCHEDULERS = {
    "WarmupDecayLR": {"warmup_max_lr": 1e-2, "warmup_num_steps": 3, "total_num_steps": STEPS},
    "OneCycle": CYCLE | {"decay_mom_rate": 0.1},
}
DOCUMENT = {
    "train_micro_batch_size_per_gpu": 2, "gradient_clipping": 0.05,
    "optimizer": {"type": "Adam", "params": {"lr": 1e-3, "betas": [0.8, 0.99], "weight_decay": 0.1}},
}  # fmt: skip


def rates(name, step):
    """The rate and betas of each step, from DeepSpeed's documentation of both schedules."""
    count = step - 1
    if name == "WarmupDecayLR":
        warm = torch.log(torch.tensor(count + 1.0, dtype=torch.float64)) / torch.log(
            torch.tensor(3.0, dtype=torch.float64)
        )
        share = 0.0 if count < 0 else warm.item() if count < 3 else (STEPS - count) / (STEPS - 3)
        return 1e-2 * share, (0.8, 0.99)
    up = {0: 0.0, 1: 0.5, 2: 1.0, 3: 0.5, 4: 0.0}
    if step in up:
        return 1e-4 + (1e-2 - 1e-4) * up[step], (0.8 if step == 0 else 0.9 - 0.1 * up[step], 0.99)
    return 1e-4 / (1 + 0.5 * (step - 4)), (0.9 * (1 + 0.1 * (step - 4)), 0.99)


def train_plain(name, choice):
    model = hf("llama")
    groups = [{"params": [], "weight_decay": 0.0}, {"params": []}]
    for p in model.parameters():
        groups[p.dim() >= 2]["params"].append(p)
    optimizer = optimizer_of(choice)(groups)
    for step in range(STEPS):
        for group in optimizer.param_groups:
            group["lr"], group["betas"] = rates(name, step)
        model(input_ids=(ids := batch(step)), labels=ids, use_cache=False).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        optimizer.step()
        optimizer.zero_grad()
    return model


@pytest.mark.parametrize("name", SCHEDULERS)
@pytest.mark.parametrize("offload", [None, "cpu"])
def test_one_rank_is_as_plain_pytorch(tmp_path, name, offload):
    section = {"stage": 2} | ({"offload_optimizer": {"device": offload}} if offload else {})
    tree = DOCUMENT | {"scheduler": {"type": name, "params": SCHEDULERS[name]}, "zero_optimization": section}
    (tmp_path / "ds.json").write_text(json.dumps(tree))
    config, _ = load_merged(tmp_path / "ds.json", None, [])
    model = hf("llama")
    engine = zero3d.Engine(
        model, stage=config.zero.stage, precision=config.precision, clip_norm=config.optimizer.clip_norm,
        optimizer=optimizer_of(config.optimizer), param_groups=parameter_groups(model, config.optimizer),
        scheduler=scheduler(config.schedule, STEPS, config.optimizer.lr),
        offload={"optimizer": config.offload.optimizer},
    )  # fmt: skip
    for step in range(STEPS):
        engine.train_batch([{"input_ids": (ids := batch(step)), "labels": ids}])
    plain = train_plain(name, config.optimizer)
    with engine.full_params():
        for found, wanted in zip(engine.module.parameters(), plain.parameters(), strict=True):
            assert torch.equal(found, wanted)
    assert bits(plain.parameters()) != bits(hf("llama").parameters())
