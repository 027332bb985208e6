"""What `zero3d train` takes beside plain Hugging Face models: recomputed blocks, and modules of your own."""

import itertools
import sys
import textwrap

import numpy
import pytest
import torch
from models import VOCAB
from torch.nn import functional as F
from training import LENGTH, ROWS, field, save_model, save_rows, train, tree

NUMBERS = ("loss", "grad_norm")
STEPS = 3
OWN = """
    import torch
    from torch import nn
    from torch.nn import functional as F

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.norm, self.up, self.down = nn.LayerNorm(24), nn.Linear(24, 48), nn.Linear(48, 24)

        def forward(self, x):
            return x + self.down(F.gelu(self.up(self.norm(x))))

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.head = nn.Embedding(61, 24), nn.Linear(24, 61, bias=False)
            self.layers = nn.ModuleList(Block() for _ in range(3))

        def forward(self, input_ids):
            x = self.embed(input_ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    class Output:
        def __init__(self, loss):
            self.loss = loss

    class Loss(Logits):
        def forward(self, input_ids, labels):
            logits = super().forward(input_ids)
            return Output(F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))

    def logits():
        torch.manual_seed(3)
        return Logits()

    def loss():
        torch.manual_seed(3)
        return Loss()
"""


@pytest.mark.long
@pytest.mark.parametrize(
    ("model", "stage", "policies"),
    [
        ("gpt2", 3, ("selective",)),
        pytest.param("gpt2", 3, ("full", "every:2"), marks=pytest.mark.long),
        *(pytest.param(m, s, ("full", "every:2", "selective"), marks=pytest.mark.long) for m, s in (("gpt2", 0), ("qwen3_moe", 3), ("llama", 0))),
    ],
)  # fmt: skip
def test_recomputation_changes_no_bit(ranks, tmp_path, model, stage, policies):
    dropout = {"resid_pdrop": 0.1, "attn_pdrop": 0.1} if model == "gpt2" else {}
    save_model(tmp_path / "model", model, **dropout)
    save_rows(tmp_path / "rows.npy")
    sections = {"zero": {"stage": stage}, "train": {"steps": 2}}
    actual = {
        policy: ranks(2, train, tree(tmp_path, policy.replace(":", "-"), activations=policy, **sections))[0]
        for policy in ("none", *policies)
    }
    for policy, name in itertools.product(policies, NUMBERS):
        assert field(actual[policy], name) == field(actual["none"], name), policy


def in_folder(folder, made):
    """One rank's run with `folder` as the current directory."""
    import os

    before = os.getcwd()
    os.chdir(folder)
    try:
        return train(made)
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))


def plain(module, rows):
    """Losses and norms of a plain loop with the default groups of AdamW and no schedule."""
    groups = [
        {"params": [p for p in module.parameters() if p.dim() > 1], "weight_decay": 0.1},
        {"params": [p for p in module.parameters() if p.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, betas=(0.9, 0.95), fused=True)
    losses, norms = [], []
    for step in range(STEPS):
        ids = rows[[place % ROWS for place in range(4 * step, 4 * step + 4)]]
        value = F.cross_entropy(module(ids)[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
        value.backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(module.parameters(), 1.0)))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(value.detach()))
    return losses, norms


@pytest.mark.parametrize(("function", "stage"), [
    ("logits", 3), ("loss", 0), *(pytest.param(*case, marks=pytest.mark.long) for case in (("logits", 0), ("loss", 3))),
])  # fmt: skip
def test_a_module_of_your_own_trains_as_in_a_plain_loop(ranks, tmp_path, function, stage):
    name = f"own_{function}_{stage}_{tmp_path.parent.name.replace('-', '_')}"  # the ranks of a session import each module once
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(OWN))
    rows = torch.from_numpy(numpy.load(save_rows(tmp_path / "rows.npy")))
    made = tree(tmp_path, data={"packing": False}, optimizer={"lr": 1e-2}, schedule={"name": "constant", "warmup": 0})
    made["train"]["steps"] = STEPS
    made |= {"zero": {"stage": stage}, "model": {"path": f"{name}:{function}"}}
    records = ranks(2, in_folder, str(tmp_path), made)[0]
    space = {}
    exec(textwrap.dedent(OWN), space)
    assert rows.shape == (ROWS, LENGTH)
    assert rows.max() < VOCAB
    losses, norms = plain(space["logits"](), rows)
    assert field(records, "loss") == pytest.approx(losses, rel=1e-6, abs=0)
    assert field(records, "grad_norm") == pytest.approx(norms, rel=1e-5, abs=0)


def test_a_module_of_your_own_that_takes_other_names_is_refused(ranks, tmp_path):
    name = f"other_{tmp_path.parent.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(OWN).replace("input_ids", "tokens"))
    save_rows(tmp_path / "rows.npy")
    made = tree(tmp_path, data={"packing": False})
    made["model"]["path"] = f"{name}:logits"
    ((_, error),) = ranks(1, in_folder, str(tmp_path), made, check=False)
    assert error.startswith("ConfigError: Logits.forward takes (tokens)")
    assert not (tmp_path / "out").exists()
