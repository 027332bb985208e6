"""Contract 1: one rank equals plain PyTorch bit for bit, clipping active."""

import pytest
import torch
from models import adamw, batch, bits, build, clone, loss_of, train_engine, train_masters, train_plain

import zero3d

BATCHES = [batch(step) for step in range(4)]
MODELS = ["net", "tied", "llama", "qwen3", "gpt2"]


@pytest.mark.parametrize(
    ("model", "stage"), [("net", 0), ("tied", 1), ("llama", 2), ("qwen3", 3), ("gpt2", 3), ("net", 3)]
)
def test_fp32_equals_plain_adamw_bit_for_bit(model, stage):
    plain = build(model)
    engine = zero3d.Engine(clone(plain), stage=stage, precision="fp32", clip_norm=0.5, optimizer=adamw)
    losses, norms = train_plain(plain, [[ids] for ids in BATCHES], clip=0.5)
    assert train_engine(engine, BATCHES) == (losses, norms, bits(plain.parameters()))
    assert min(norms) > 0.5  # clipping was active


@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 1, 2, 3])
@pytest.mark.parametrize("model", MODELS)
def test_fp32_equals_plain_adamw_for_all_pairs(model, stage):
    test_fp32_equals_plain_adamw_bit_for_bit(model, stage)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
@pytest.mark.parametrize("make", [
    lambda ps: torch.optim.AdamW(ps, lr=1e-2, fused=False, foreach=False),
    lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9, nesterov=True),
    lambda ps: torch.optim.RMSprop(ps, lr=1e-3),
    lambda ps: torch.optim.Adam(ps, lr=1e-2, amsgrad=True),
], ids=["adamw-not-fused", "sgd", "rmsprop", "amsgrad"])  # fmt: skip
def test_other_element_wise_optimizers_keep_their_bits(make, stage):
    plain = build("net")
    engine = zero3d.Engine(clone(plain), stage=stage, precision="fp32", clip_norm=0.5, optimizer=make)
    losses, norms = train_plain(plain, [[ids] for ids in BATCHES], clip=0.5, make=make)
    assert train_engine(engine, BATCHES) == (losses, norms, bits(plain.parameters()))


@pytest.mark.parametrize(("model", "stage"), [("llama", 0), ("net", 1), ("gpt2", 2), ("qwen3", 3)])
def test_bf16_equals_a_written_out_loop_with_masters(model, stage):
    plain = build(model)
    engine = zero3d.Engine(clone(plain), stage=stage, precision="bf16", clip_norm=0.5, optimizer=adamw)
    losses, norms = train_masters(plain, BATCHES, torch.bfloat16, 0.5)
    assert train_engine(engine, BATCHES) == (losses, norms, bits(plain.parameters()))


@pytest.mark.parametrize("stage", [0, 3])
def test_fp16_equals_a_written_out_loop_with_a_loss_scale(stage):
    plain = build("net")
    precision = zero3d.precision.Precision("fp16", zero3d.precision.LossScaling(initial=256.0))
    engine = zero3d.Engine(clone(plain), stage=stage, precision=precision, clip_norm=0.5, optimizer=adamw)
    losses, norms = train_masters(plain, BATCHES, torch.float16, 0.5, scale=256.0)
    assert train_engine(engine, BATCHES, through_engine=True) == (losses, norms, bits(plain.parameters()))


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1, 2)), 3])
def test_param_groups_and_a_ready_optimizer_with_a_scheduler(stage):
    """Groups change the layout, and still the norm is stacked in model order: plain PyTorch's bits."""
    groups = [{"match": "*norm*|*.bias", "weight_decay": 0.0}]

    def grouped(model):
        named = list(model.named_parameters())
        bare = [p for n, p in named if "norm" in n or n.endswith(".bias")]
        rest = [p for n, p in named if not ("norm" in n or n.endswith(".bias"))]
        return adamw([{"params": bare, "weight_decay": 0.0}, {"params": rest}])

    def schedule(optimizer):
        return torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)

    plain, by_match, ready = (build("tied", layers=12) for _ in range(3))
    optimizer = grouped(plain)
    scheduler = schedule(optimizer)
    norms = []
    for ids in BATCHES:
        loss_of(plain, ids).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5)))
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    common = {"stage": stage, "precision": "fp32", "clip_norm": 0.5}
    theirs = grouped(ready)
    engines = [
        zero3d.Engine(by_match, optimizer=adamw, param_groups=groups, scheduler=schedule, units=[], **common),
        zero3d.Engine(ready, optimizer=theirs, scheduler=schedule(theirs), **common),
    ]
    for engine in engines:
        assert train_engine(engine, BATCHES)[1:] == (norms, bits(plain.parameters()))
        assert engine.optimizer.torch.param_groups[0]["lr"] == pytest.approx(1e-2 * 0.5**4)
