"""The same losses as transformers' own expert parallelism over FSDP2."""

import os
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from mixtures import engine_of, mixture, summand

STEPS = range(3)


def sgd(parameters):
    return torch.optim.SGD(parameters, lr=0.5)


def theirs(folder):
    """Losses of transformers' dispatch by all-to-all: experts on all ranks, what is left over FSDP2."""
    import transformers
    from transformers.distributed import DistributedConfig

    ranks = dist.get_world_size()
    how = DistributedConfig(fsdp_size=ranks, ep_size=ranks, ep_implementation="all_to_all")
    with patch.dict(os.environ, {name: str(dist.get_rank()) for name in ("RANK", "LOCAL_RANK")}, WORLD_SIZE=str(ranks)):
        model = transformers.AutoModelForCausalLM.from_pretrained(folder, distributed_config=how, dtype=torch.float32)
    optimizer, losses = sgd(model.train().parameters()), []
    for step in STEPS:
        batch = summand(step, dist.get_rank())
        both = torch.tensor([0.0, float((batch["labels"][:, 1:] != -100).sum())])
        weight = float(both[1])
        loss = model(**batch).loss
        both[0] = loss.detach() * weight
        dist.all_reduce(both)
        (loss * weight / both[1] * ranks).backward()  # FSDP2 takes the mean over ranks
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(both[0] / both[1]))
    return losses


def ours(folder, ep):
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).train()
    engine = engine_of(model, ep=ep, optimizer=sgd)
    return [float(engine.train_batch([summand(step, dist.get_rank())])) for step in STEPS]


def compared(folder):
    return theirs(folder), [ours(folder, ep) for ep in (1, dist.get_world_size())]


@pytest.mark.long
@pytest.mark.parametrize("family", ["qwen3_moe", "mixtral", "olmoe"])
@pytest.mark.parametrize("count", [2, 4])
def test_losses_are_those_of_the_native_expert_parallelism(ranks, tmp_path, family, count):
    pytest.importorskip("transformers.distributed.expert_parallel", reason="a transformers without it")
    mixture(family).save_pretrained(tmp_path)
    native, own = ranks(count, compared, str(tmp_path))[0]
    for losses in own:
        assert losses == pytest.approx(native, rel=1e-6)
