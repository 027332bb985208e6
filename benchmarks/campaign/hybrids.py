"""Models with recurrences and convolutions on packed rows: kernels where they are installed, else torch's own code.

apart   by type and dtype: documents in rows against documents alone, as zero3d tries kernels before a run
waits   a packed forward and backward of blocks in which nothing may wait for the card
speed   tokens/s of a packed row beside the leaky row, which is told of no documents
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from campaign.account import Account, Place
from zero3d.errors import ConfigError
from zero3d.models.kernel_trial import kernels_in, try_kernels
from zero3d.models.packed_documents import Documents
from zero3d.models.packing import tell
from zero3d.precision import dtype_name

HEAD = {"head_dim": 64, "num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "pad_token_id": 2}
TYPES: Mapping[str, dict[str, Any]] = {
    "qwen3_5_text": HEAD
    | {"layer_types": ["linear_attention", "full_attention"], "linear_num_key_heads": 4, "linear_num_value_heads": 8,
       "linear_key_head_dim": 64, "linear_value_head_dim": 64},
    "kimi_linear": HEAD
    | {"layer_types": ["linear_attention", "full_attention"], "linear_num_heads": 4, "linear_head_dim": 64,
       "num_key_value_heads": 4, "kv_lora_rank": 32, "q_lora_rank": None, "qk_nope_head_dim": 32,
       "qk_rope_head_dim": 32, "v_head_dim": 64, "first_k_dense_replace": 2},
    "mamba2": {"num_heads": 8, "head_dim": 64, "n_groups": 1, "state_size": 64, "expand": 2, "chunk_size": 256},
    "falcon_mamba": {"state_size": 16, "time_step_rank": 16},
    "lfm2": HEAD | {"layer_types": ["conv", "conv"]},
}  # fmt: skip
TIMED: Mapping[str, dict[str, Any]] = {
    "qwen3_5_text": {"linear_num_key_heads": 16, "linear_num_value_heads": 32, "linear_key_head_dim": 128,
                     "linear_value_head_dim": 128, "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "mamba2": {"num_heads": 64, "head_dim": 64, "state_size": 128},
}  # fmt: skip
LARGE = {"hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 4}
LENGTHS, ROW = (300, 20, 75, 117), 8192  # tokens of documents, again and again, and of a row
LEAST = 0.9  # of the leaky row's tokens/s
WARM_UP = 2


def hybrids(place: Place, account: Account) -> None:
    """Try kernels of every type, then that nothing waits, then what packing costs."""
    device = torch.device(place.device)
    for name in TYPES:
        apart(account, name, device)
    for name in TIMED:
        if place.on_cpu:
            account.skipped(f"{name}: waits, tokens/s", "a CPU has nothing to wait for, and no kernels")
        else:
            timed(account, name, device, place.seconds / len(TIMED))


def apart(account: Account, name: str, device: torch.device) -> None:
    """Try a type's kernels in two dtypes; said as skipped where none is installed."""
    model = build(name, TYPES[name], device)
    if not (kernels := kernels_in(model)):
        account.skipped(f"{name}: packed against alone", "no kernel of its mixers is installed")
        return
    for dtype in (torch.bfloat16, torch.float32):
        try:
            said, wrong = str(try_kernels(model, device, dtype)), ""
        except ConfigError as error:
            said = wrong = str(error)
        account.ran(f"{name} in {dtype_name(dtype)}", {"kernels": kernels, "found": said}, wrong)


def timed(account: Account, name: str, device: torch.device, seconds: float) -> None:
    """Measure tokens/s of a packed row and of the leaky one, in turns, and let no layer wait for the card."""
    model = build(name, {**LARGE, **TIMED[name]}, device).to(torch.bfloat16)
    lengths = [length for _ in range(ROW // sum(LENGTHS)) for length in LENGTHS]
    positions = torch.cat([torch.arange(length) for length in [*lengths, ROW - sum(lengths)]])[None]
    ids = torch.randint(3, 500, (1, ROW), generator=torch.Generator().manual_seed(0)).to(device)
    packed = {"input_ids": ids, "position_ids": positions.to(device), "documents": Documents.of(positions)}
    leaky = {"input_ids": ids, "position_ids": torch.arange(ROW, device=device)[None]}
    told = tell(model)
    assert told is not None
    try:
        with waiting_forbidden(model, device) as fault:
            for _ in range(WARM_UP):
                step(model, packed)
        account.ran(f"{name}: waits inside of layers", "none" if not fault else fault[0], "".join(fault[:1]))
        spent = {"packed": [], "leaky": []}  # type: dict[str, list[float]]
        ends = time.monotonic() + seconds
        while time.monotonic() < ends or len(spent["leaky"]) < WARM_UP:
            for way, batch in (("packed", packed), ("leaky", leaky)):
                torch.cuda.synchronize(device)
                begun = time.monotonic()
                step(model, batch)
                torch.cuda.synchronize(device)
                spent[way].append(time.monotonic() - begun)
    finally:
        told.close()
    rates = {way: ROW / sorted(times)[len(times) // 2] for way, times in spent.items()}
    account.ran(f"{name}: tokens/s", {**rates, "kernels": kernels_in(model)})
    account.goal(f"{name}, packed: tokens/s / leaky", LEAST, rates["packed"] / rates["leaky"])


def step(model: nn.Module, batch: Mapping[str, Any]) -> None:
    """Make a forward and a backward."""
    model.zero_grad(set_to_none=True)
    made: Tensor = model(**batch, use_cache=False).logits
    made.float().logsumexp(-1).sum().backward()


@contextmanager
def waiting_forbidden(model: nn.Module, device: torch.device) -> Iterator[list[str]]:
    """Have operations that synchronise raise inside of layers, after a step that warms up; yields what did."""
    fault: list[str] = []
    layers = next(each for each in model.modules() if isinstance(each, nn.ModuleList))
    hooks = [
        hook
        for layer in layers
        for hook in (
            layer.register_forward_pre_hook(lambda *_: torch.cuda.set_sync_debug_mode("error" if warm else "default")),
            layer.register_forward_hook(lambda *_: torch.cuda.set_sync_debug_mode("default"), always_call=True),
        )
    ]
    warm = 0

    def next_step(*_: Any) -> None:
        nonlocal warm
        warm += 1

    hooks.append(model.register_forward_hook(next_step))
    try:
        yield fault
    except RuntimeError as error:
        if "synchroniz" not in str(error):
            raise
        fault.append(str(error).splitlines()[0])
    finally:
        torch.cuda.set_sync_debug_mode("default")
        for hook in hooks:
            hook.remove()


def build(name: str, options: Mapping[str, Any], device: torch.device) -> Any:
    """Build a model of a type with random weights."""
    import transformers as t

    torch.manual_seed(0)
    config = t.AutoConfig.for_model(name, **{**SIZES, **options})
    return t.AutoModelForCausalLM.from_config(config).to(device).train()
