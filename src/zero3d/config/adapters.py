"""What section `lora` asks for that cannot be, across its keys."""

from __future__ import annotations

from collections.abc import Iterator

from zero3d.config.sections import Config, Lora


def adapter_problems(config: Config) -> Iterator[tuple[str, str]]:
    """Yield each key of section `lora` that this run cannot have, and why."""
    choice, plain = config.lora, Lora()
    if choice.rank is not None:
        return
    for name in ("alpha", "targets", "dropout", "train_also", "dora"):
        if getattr(choice, name) != getattr(plain, name):
            text = f"lora.{name} is of adapters, and lora.rank is null, so there are none: type lora.rank=16, too."
            yield f"lora.{name}", text
