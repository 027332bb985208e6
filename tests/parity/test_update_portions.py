"""An update in portions has the bits of one of all parameters at once: at all stages, whatever else an engine does."""

import pytest
import torch
import torch.distributed as dist
from buckets import buckets_of
from meshes import micro_batches
from models import bits
from tensors import tiny
from torch.optim.lr_scheduler import StepLR
from torch.utils._python_dispatch import TorchDispatchMode

import zero3d

ROOM, ALL = 256, 1 << 20
GROUPS = [{"match": "*norm*|*.bias", "weight_decay": 0.0}, {"match": "*.mlp.*", "lr": 3e-3, "betas": (0.8, 0.9)}]
CASES = {
    "groups and a schedule": ("llama", {"param_groups": GROUPS, "scheduler": lambda made: StepLR(made, 2, 0.5)}, {}),
    "a maximum": ("llama", {"precision": "fp32"}, {"amsgrad": True, "maximize": True}),
    "adapters": ("lora", {"precision": "bf16"}, {}),
    "experts": ("moe", {"precision": "bf16"}, {}),
    "masters in halves": ("llama", {"precision": "bf16", "master": "split"}, {}),
    "exact sums": ("llama", {"exact": True}, {}),
    "frozen parameters": ("llama", {"param_groups": GROUPS}, {}),
}


class Roots(TorchDispatchMode):
    """Counts multi-tensor square roots, one of each portion."""

    found = 0

    def __torch_dispatch__(self, function, types, arguments=(), named=None):
        self.found += function is torch.ops.aten._foreach_sqrt.default
        return function(*arguments, **(named or {}))


def trained(case, stage, room):
    """The bits of weights and of all states after steps, one of which is skipped; the last step's portions."""
    name, options, of_adamw = CASES[case]
    options = {"precision": "bf16", "clip_norm": 1.0} | options
    lora = name == "lora"
    with buckets_of(room):
        engine = zero3d.Engine(
            tiny("llama" if lora else name, lora=lora), stage=stage, accumulate=1,
            optimizer=lambda groups: torch.optim.AdamW(groups, lr=1e-2, foreach=True, **of_adamw), **options,
        )  # fmt: skip
        before = [group["params"] for group in engine.optimizer.torch.param_groups]
        for number in range(4):
            if number == 2 and case == "frozen parameters":
                engine.freeze("*.mlp.*")
            given = micro_batches(number * 2 + dist.get_rank(), 1)
            output = engine(**given[0])
            engine.backward(output.loss * (float("nan") if number == 1 else 1.0))
            with Roots() as roots:
                assert (engine.step().reason == "applied") == (number != 1)
        groups = engine.optimizer.torch.param_groups
        assert all(group["params"] is params for group, params in zip(groups, before, strict=True))
        with engine.full_params():
            return bits(engine.module.parameters()), engine.fingerprint(), roots.found


def compared(case):
    return [[trained(case, stage, room) for room in (ROOM, ALL)] for stage in range(4)]


SHORT = "groups and a schedule"


@pytest.mark.parametrize(
    "case", [SHORT, *(pytest.param(case, marks=pytest.mark.long) for case in CASES if case != SHORT)]
)
def test_portions_have_the_bits_of_all_at_once(ranks, case):
    found = ranks(2, compared, case)
    for (*portions, _), (*at_once, _) in found[0]:
        assert portions == at_once
    assert len({portions[0] for portions, _ in found[0]}) == 1  # at all stages
    for stage in range(4):
        many, few = (sum(of_rank[stage][way][2] for of_rank in found) for way in (0, 1))
        assert many > 2 * few > 0
