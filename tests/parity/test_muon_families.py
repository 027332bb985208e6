"""Muon on models with fused matrices, convolutions, ties and adapters: in one process the bits of torch.optim.Muon."""

import fnmatch

import mixtures
import pytest
import torch
from meshes import sum_of
from models import batch
from muon import BETAS, DECAY, LR
from tensors import tiny

import zero3d
from zero3d.optim import muon

STEPS = range(3)


def neox():
    import transformers as t

    torch.manual_seed(7)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    return t.GPTNeoXForCausalLM(t.GPTNeoXConfig(**sizes, num_attention_heads=4, use_cache=False)).train()


def phi3():
    import transformers as t

    torch.manual_seed(7)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "pad_token_id": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2}
    return t.Phi3ForCausalLM(t.Phi3Config(**sizes, **heads, use_cache=False)).train()


# Views of parameters that are matrices, written down for each family: [outputs, inputs] one by one.
VIEWS = {
    "llama": (lambda: tiny("llama"), {}),
    "tied": (lambda: tiny("qwen3"), {}),
    "adapters": (lambda: tiny("llama", lora=True), {}),
    "phi3": (phi3, {"*.qkv_proj.weight": lambda p: [p[:32], p[32:48], p[48:]], "*.gate_up_proj.weight": lambda p: p.chunk(2)}),
    "gpt_neox": (neox, {"*.query_key_value.weight": lambda p: list(p.view(4, 3, 8, 32).unbind(1))}),
    "gpt2": (lambda: tiny("gpt2"), {"*.c_attn.weight": lambda p: p.chunk(3, 1)}),
    "qwen3_moe": (
        lambda: mixtures.mixture("qwen3_moe"),
        {"*.gate_up_proj": lambda p: [half for e in p for half in e.chunk(2)], "*.down_proj": list},
    ),
    "gpt_oss": (
        lambda: mixtures.mixture("gpt_oss"),
        {"*.gate_up_proj": lambda p: [half for e in p for half in (e[:, ::2], e[:, 1::2])], "*.down_proj": list},
    ),
}  # fmt: skip


def views_of(name, p, given):
    """The matrices of a parameter, or none."""
    if p.dim() < 2 or not any(part in f".{name}" for part in (".layers.", ".h.", ".blocks.")) or name.endswith("_bias"):
        return None
    return next((of for pattern, of in given.items() if fnmatch.fnmatchcase(name, pattern)), lambda p: [p])


def given_of(step):
    ids = batch(step, size=2, length=8)
    labels = ids.clone()
    labels[0, :3] = -100
    return {"input_ids": ids, "labels": labels}


def flat(view):
    """A view of a matrix as two dimensions."""
    return view.reshape(-1, view.shape[-1])


def written_out(model, given, norms, clip):
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    views = {name: of for name, p in named.items() if (of := views_of(name, p, given)) is not None}
    split = {
        name: [torch.nn.Parameter(flat(v).clone()) for v in of(named[name].detach())] for name, of in views.items()
    }
    usual = {"lr": LR, "weight_decay": DECAY}
    first = torch.optim.Muon([p for ps in split.values() for p in ps], adjust_lr_fn="match_rms_adamw", **usual)
    rest = [p for name, p in named.items() if name not in views]
    second = torch.optim.AdamW(rest, betas=BETAS, fused=True, **usual) if rest else None
    losses = []
    for step, norm in zip(STEPS, norms, strict=True):
        total, targets = sum_of(model(input_ids=given_of(step)["input_ids"]), given_of(step))
        total.backward()
        losses.append(float(total.double() / targets))
        factor = torch.clamp(torch.tensor(clip) / (torch.tensor(norm) + 1e-6), max=1.0)
        for name, p in named.items():
            p.grad.mul_(1.0 / targets).mul_(factor)
            for part, view in zip(split.get(name, ()), views[name](p.grad) if name in views else (), strict=True):
                part.grad = flat(view).clone()
        first.step()
        if second is not None:
            second.step()
        with torch.no_grad():
            for name, parts in split.items():
                for view, part in zip(views[name](named[name]), parts, strict=True):
                    view.copy_(part.view(view.shape))
        model.zero_grad()
    return losses, {name: p.detach() for name, p in named.items()}


def beside(family):
    """Names of parameters whose bits differ, after an engine's steps and the written-out loop's; losses of both."""
    build, given = VIEWS[family]
    engine = zero3d.Engine(
        build(), precision="fp32", loss=sum_of, clip_norm=0.5, optimizer=muon(LR, weight_decay=DECAY, betas=BETAS)
    )
    losses, norms = [], []
    for step in STEPS:
        losses.append(float(engine.train_batch([given_of(step)])))
        norms.append(float(engine.last_step.grad_norm))
    wanted, masters = written_out(build(), given, norms, 0.5)
    found = {owned.name: owned.read() for owned in engine.optimizer.pieces if owned.piece.start == 0}
    whole = {name: torch.cat([o.read() for o in engine.optimizer.pieces if o.name == name]) for name in found}
    return [name for name in masters if not torch.equal(whole[name], masters[name].flatten())], losses, wanted


OFTEN = ("phi3", "gpt2", "gpt_oss", "adapters")


@pytest.mark.parametrize("family", [
    family if family in OFTEN else pytest.param(family, marks=pytest.mark.long) for family in VIEWS
])  # fmt: skip
def test_in_one_process_bits_are_torchs(ranks, family):
    different, losses, wanted = ranks(1, beside, family)[0]
    assert different == []
    assert losses == pytest.approx(wanted, rel=1e-6)
