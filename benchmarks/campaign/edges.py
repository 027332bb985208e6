"""What programs do beyond a forward, a backward and a step, at stage 3 against stage 0; and other people's loops."""

from __future__ import annotations

import tempfile
from collections import deque
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from campaign.account import Account, Place
from campaign.loopback import Loopback
from zero3d import Engine, make_deterministic
from zero3d.activations.recomputation import recompute
from zero3d.distributed.mesh import Mesh

STEPS = 4
Case = tuple[Callable[[], nn.Module], Callable[[Engine, Tensor], Tensor]]


class Box:
    """An object of slots that a block returns its tensor in."""

    __slots__ = ("held",)

    def __init__(self, held: Tensor) -> None:
        self.held = held


class Boxed(nn.Module):
    """A block whose tensor hides in an object, in a deque, and in a generator, in turns."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.kind, self.norm, self.linear, self.act = kind, nn.GroupNorm(2, 16), nn.Linear(16, 16), nn.PReLU(16)

    def forward(self, x: Any) -> Any:
        """[B, 16], hidden or not -> [B, 16], hidden."""
        x = opened(x)
        out = x + self.act(self.linear(self.norm(x)))
        return (Box(out), deque([out]), (part for part in (out,)))[self.kind]


def opened(x: Any) -> Tensor:
    """Return the tensor in what `Boxed` returns."""
    if isinstance(x, Tensor):
        return x
    found: Tensor = x.held if isinstance(x, Box) else next(iter(x))
    return found


class Net(nn.Module):
    """Some blocks, one after the other."""

    def __init__(self, *blocks: nn.Module) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Any) -> Tensor:
        """[B, 16] -> [B, 16]."""
        for block in self.blocks:
            x = block(x)
        return opened(x)


def square(engine: Engine, x: Tensor) -> Tensor:
    """Return the mean square of what the model gives."""
    out: Tensor = engine(x)
    return out.square().mean()


def penalty(engine: Engine, x: Tensor) -> Tensor:
    """Return a loss with the gradient of the output in it (WGAN-GP; Gulrajani et al., 2017, equation 3)."""
    x = x.clone().requires_grad_()
    out = engine(x)
    (slope,) = torch.autograd.grad(out.sum(), x, create_graph=True)
    return F.softplus(out).mean() + (slope.norm(dim=1) - 1).square().mean()


def normed() -> nn.Module:
    """Make a block with statistics of its own."""
    return nn.Sequential(nn.Linear(16, 16), nn.BatchNorm1d(16), nn.Tanh())


def recomputed(model: nn.Module) -> nn.Module:
    """Return the model with what its blocks save recomputed in backward."""
    recompute(model, "full")
    return model


CASES: dict[str, Case] = {
    "gradient penalty": (lambda: Net(*(nn.Sequential(nn.Linear(16, 16), nn.Tanh()) for _ in range(3))), penalty),
    "hidden outputs": (lambda: Net(*map(Boxed, range(3))), square),
    "statistics, recomputed": (lambda: recomputed(Net(*(normed() for _ in range(3)))), square),
}


def edges(place: Place, account: Account) -> None:
    """Train every case at stage 0 and 3: equal losses, to the bit; and freeze a block for a while."""
    make_deterministic(place.device)
    account.ran("shape", f"nets of three blocks of width 16, {STEPS} steps")
    mesh = Loopback(place.device)
    for name, case in CASES.items():
        curves = [curve(mesh, stage, case) for stage in (0, 3)]
        account.ran(name, curves, "" if curves[0] == curves[1] else "stage 3 is not stage 0")
    curves = [curve(mesh, stage, CASES["statistics, recomputed"], frozen="blocks.1.*") for stage in (0, 3)]
    account.ran("frozen for a while", curves, "" if curves[0] == curves[1] else "stage 3 is not stage 0")


def curve(mesh: Mesh, stage: int, case: Case, frozen: str = "") -> list[float]:
    """Return the losses, and at last the sum of all buffers; parameters `frozen` in the second and third step."""
    torch.manual_seed(0)
    build, loss_of = case
    model = build()
    engine = Engine(
        model, stage=stage, mesh=mesh, precision="fp32", clip_norm=None,
        optimizer=lambda params: torch.optim.AdamW(params, lr=1e-2),
    )  # fmt: skip
    losses = []
    for step in range(STEPS):
        if frozen and step in (1, 3):
            (engine.freeze if step == 1 else engine.unfreeze)(frozen)
        x = torch.randn(8, 16, generator=torch.Generator().manual_seed(step)).to(mesh.device)
        loss = loss_of(engine, x)
        engine.backward(loss)
        engine.step()
        losses.append(float(loss))
    return [*losses, float(sum(buffer.double().sum() for buffer in model.buffers()))]


# --- other people's loops -----------------------------------------------------------------------


def loops(place: Place, account: Account) -> None:
    """Train a small Llama by transformers' Trainer and by Accelerate with one line changed, at stage 0 and 3."""
    make_deterministic(place.device)
    account.ran("shape", "Llama of 2 blocks of width 64, 4 steps of 4 x 32 tokens in bf16")
    for name, train in (("Trainer", by_trainer), ("Accelerate", by_accelerate)):
        curves = [train(stage, place.on_cpu) for stage in (0, 3)]
        same = all(a == a and a == b for a, b in zip(*curves, strict=True))
        account.ran(name, curves, "" if same else "stage 3 is not stage 0, or neither is a number")


def llama() -> Any:
    """Make the model, on the host, as programs do."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(
            hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=256,
        )
    )  # fmt: skip


def rows(steps: int) -> Iterator[dict[str, Tensor]]:
    """Yield samples for so many steps of four."""
    for row in range(4 * steps):
        ids = torch.randint(0, 256, (32,), generator=torch.Generator().manual_seed(row))
        yield {"input_ids": ids, "labels": ids}


def summed(model: nn.Module) -> float:
    """Return the sum of the squares of all weights, read as any program reads them."""
    return float(sum(p.detach().double().square().sum() for p in model.parameters()))


def by_trainer(stage: int, on_cpu: bool) -> list[float]:
    """Return the logged losses, and the weights' sum after the training."""
    from transformers import TrainingArguments

    from zero3d.ways.huggingface.transformers import Trainer

    with tempfile.TemporaryDirectory() as folder:
        arguments = TrainingArguments(
            folder, max_steps=STEPS, per_device_train_batch_size=4, logging_steps=1, bf16=True, report_to=[],
            save_strategy="no", use_cpu=on_cpu, seed=0, disable_tqdm=True,
        )  # fmt: skip
        trainer = Trainer(model=llama(), args=arguments, train_dataset=list(rows(STEPS)), stage=stage)
        trainer.train()
        losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
        total = summed(trainer.model)
        trainer.accelerator.close_engine()
    return [*losses, total]


def by_accelerate(stage: int, on_cpu: bool) -> list[float]:
    """Return the losses, and the weights' sum after the training."""
    from zero3d.ways.huggingface.accelerate import Accelerator

    accelerator = Accelerator(mixed_precision="bf16", stage=stage, cpu=on_cpu)
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    loader = torch.utils.data.DataLoader(list(rows(STEPS)), batch_size=4)  # type: ignore[arg-type, var-annotated]
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    losses = []
    for samples in loader:
        loss = model(**samples).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss))
    total = summed(accelerator.unwrap_model(model)) if stage == 0 else whole(accelerator, model)
    accelerator.free_memory()
    return [*losses, total]


def whole(accelerator: Any, model: Any) -> float:
    """Return the weights' sum from the state dict, which gathers."""
    return float(sum(value.double().square().sum() for value in accelerator.get_state_dict(model).values()))
