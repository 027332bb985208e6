"""Chooses a model's implementation of attention: model.attn, and the meaning of "auto" on a device. No torch at import.

    kernel               of                                   cards
    flash_attention_3    the package flash_attn_interface     Hopper
    flash_attention_2    the package flash_attn               Ampere and newer
    the Hub's            the package kernels, and a copy      Ampere and newer
                         in the Hub's cache: no run fetches one

"auto" takes the first installed one if it computes the same as torch's own attention (sdpa) up to rounding: in bf16 or
fp16, for a model and a head size that it knows, without deterministic algorithms. Packed documents are allowed: their
micro-batches are then one row (models/packing.py). Elsewhere, as on CPUs, it is sdpa.
"""

from __future__ import annotations

import zlib
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from zero3d.config import Config
from zero3d.errors import ConfigError, short
from zero3d.spec.offload import AUTO
from zero3d.train.setup.packages import is_installed

if TYPE_CHECKING:
    import torch
    from torch import nn

    from zero3d.distributed.collectives import Comm
    from zero3d.models.open import Opened

LARGEST_HEAD = 256  # numbers of a head that flash attention takes
HALVES = ("bf16", "fp16")


class Kernel(NamedTuple):
    """An implementation of attention that is installed apart.

    name     as transformers has it
    package  that is imported
    install  what to type for it
    cards    compute capabilities, from the first up to below the second
    """

    name: str
    package: str
    install: str
    cards: tuple[tuple[int, int], tuple[int, int]]

    @property
    def from_hub(self) -> bool:
        """Return whether it is a repository of the Hub, and not a package."""
        return "/" in self.name

    @property
    def installed(self) -> bool:
        """Return whether it can be loaded without a download."""
        return is_installed(self.package) and (not self.from_hub or _in_cache(self.name))


def hub_kernel(name: str) -> Kernel:
    """Return what a kernel of the Hub needs. name: owner/name, perhaps with @revision and :function."""
    repository = name.partition("@")[0].partition(":")[0]
    return Kernel(name, "kernels", f"pip install kernels, and once: hf download {repository}", ((8, 0), (99, 0)))


KERNELS = (
    Kernel("flash_attention_3", "flash_attn_interface", "install flash-attn-3 for this GPU", ((9, 0), (10, 0))),
    Kernel("flash_attention_2", "flash_attn", "install flash-attn for this GPU", ((8, 0), (99, 0))),
    hub_kernel("kernels-community/flash-attn2"),
)


class Attention(NamedTuple):
    """A model's new implementation, None to leave it as it is, and the reason in a line; "" where nobody asked."""

    name: str | None
    why: str


def check_kernel(attn: str | None) -> None:
    """Refuse an implementation by name whose kernel is not installed. Raises ConfigError."""
    found = next((kernel for kernel in KERNELS if kernel.name == attn), None)
    found = hub_kernel(attn) if found is None and attn is not None and "/" in attn else found
    if found is None or found.installed:
        return
    needs = f"the package {found.package}, which is not installed"
    if found.from_hub:
        needs = "the package kernels and a copy in the Hub's cache, and a run downloads none"
    raise ConfigError(f"model.attn={short(attn)} needs {needs}: {found.install}, or set model.attn=sdpa.")


def choose_attention(config: Config, model: nn.Module, card: tuple[int, int] | None) -> Attention:
    """Say what model.attn means for a model, and why.

    card  its compute capability; None for what is no CUDA device
    """
    asked = config.model.attn
    if asked != AUTO:
        return Attention(None, "" if asked is None else f"attention: {asked}, as model.attn says")
    if card is None or not hasattr(getattr(model, "config", None), "_attn_implementation"):
        return Attention(None, "")
    if why := _why_not(config, model):
        return Attention(None, f"attention: torch's own (model.attn=auto): {why}")
    fitting = [kernel for kernel in KERNELS if kernel.cards[0] <= card < kernel.cards[1]]
    for kernel in fitting:
        if kernel.installed:
            return Attention(
                kernel.name,
                f"attention: {kernel.name} (model.attn=auto): it is installed; its bits differ from torch's",
            )
    names = " or ".join(kernel.name for kernel in fitting)
    missing = f"{names} would be faster: {fitting[0].install}" if fitting else "no kernel supports this GPU"
    return Attention(None, f"attention: torch's own (model.attn=auto): {missing}")


def _why_not(config: Config, model: Any) -> str | None:
    """Return why no kernel computes the same as torch's own attention; None where kernels do."""
    text = model.config.get_text_config()
    head = getattr(text, "head_dim", None) or text.hidden_size // text.num_attention_heads
    fixed = config.zero.exact or config.health.replay > 0 or config.train.deterministic is True
    reasons = {
        f"kernels compute in {' or '.join(HALVES)}, and precision is {config.precision}": config.precision
        not in HALVES,
        "algorithms are deterministic": fixed,
        "mesh.sp works with torch's own": (config.mesh.sp or 1) > 1,
        f"{type(model).__name__} does not support flash attention": not getattr(model, "_supports_flash_attn", False),
        f"its heads have {head} channels, and kernels support at most {LARGEST_HEAD}": head > LARGEST_HEAD,
    }
    return next((reason for reason, holds in reasons.items() if holds), None)


def with_attention(config: Config, opened: Opened, device: torch.device) -> Opened:
    """Return a model with the attention that `choose_attention` finds for it, and a note of that."""
    from zero3d.models.build import offline
    from zero3d.models.packing import inner_model

    model: Any = inner_model(opened.module)
    name, why = choose_attention(config, model, card_of(device))
    if name is not None:
        before = model.config._attn_implementation
        try:
            with offline():
                model.set_attn_implementation(name)
        except (ImportError, OSError, RuntimeError, ValueError) as error:  # of the kernel, or of a part of the model
            model.set_attn_implementation(before)
            line = (str(error).strip().splitlines() or [type(error).__name__])[0]
            why = f"attention: torch's own (model.attn=auto): {name} is installed and cannot be used: {line[:300]}"
    return replace(opened, notes=(*opened.notes, *filter(None, [why])))


def check_alike(model: nn.Module, everyone: Comm) -> None:
    """Refuse ranks that would compute with different kernels, of hosts that have other packages or cards.

    Raises ConfigError on all ranks. Moves a number per rank.
    """
    import torch

    from zero3d.models.packing import inner_model

    name = str(getattr(getattr(inner_model(model), "config", None), "_attn_implementation", ""))
    found = everyone.exchange(torch.tensor([zlib.crc32(name.encode())])).flatten()
    if len(set(found.tolist())) > 1:
        other = int((found != found[everyone.rank]).nonzero()[0])
        raise ConfigError(
            f"rank {everyone.rank} computes attention with {name}, and rank {other} with another kernel: install the "
            "same packages on all hosts, or type model.attn=sdpa."
        )


def card_of(device: torch.device) -> tuple[int, int] | None:
    """Return a CUDA device's compute capability, None for another device."""
    import torch

    return torch.cuda.get_device_capability(device) if device.type == "cuda" else None


def _in_cache(repository: str) -> bool:
    """Return whether some version of a kernel is in the Hub's cache."""
    from huggingface_hub import constants

    cache = Path(constants.HF_HUB_CACHE)
    name = repository.partition("@")[0].partition(":")[0].replace("/", "--")
    return any(any(cache.glob(f"{kind}--{name}/snapshots/*")) for kind in ("kernels", "models"))
