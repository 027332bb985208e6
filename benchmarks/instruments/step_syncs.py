"""What the steps of an engine make the host wait for, on the stand-in accelerator, in a process of their own.

    python benchmarks/instruments/step_syncs.py --layers 32 --stage 3

The model is a Llama with so many blocks; the group stands for 8 data-parallel ranks that do alike. The third step is
counted: the first two learn an order. All values are JSON; a wait is (what, line, how often).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

BENCHMARKS = Path(__file__).resolve().parents[1]
STEPS = 3


class Options(NamedTuple):
    """The engine that is counted."""

    layers: int = 32
    hidden: int = 64
    vocab: int = 512
    dp: int = 8
    stage: int = 3
    micro_batches: int = 1
    exact: bool = False
    precision: str = "bf16"


def step_syncs(options: Options = Options()) -> dict[str, Any]:  # noqa: B008 (immutable)
    """Return what `measure` finds, in a new process: a stand-in accelerator is for ever. Raises CalledProcessError."""
    words = [f"--{name.replace('_', '-')}={value}" for name, value in options._asdict().items()]
    command = [sys.executable, str(Path(__file__).resolve()), *words]
    done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return found


def measure(options: Options) -> dict[str, Any]:
    """Count the third step of an engine, phase by phase, in this process.

    forward, backward   of all micro-batches
    off_the_boundary    a `step()` that is not due, of the first micro-batch; nothing where there is one only
    step                the `step()` that is
    train_batch         the same as one call, a step later
    evaluate            likewise
    step_syncs          the waits of `step`, as a number
    """
    from instruments import accelerator, groups, host_traffic

    device = accelerator.register()
    found: dict[str, Any] = {"options": options._asdict()}
    with groups.alike(options.dp, device=accelerator.NAME), host_traffic.counted() as traffic:
        import torch

        engine = engine_of(options, device)
        given = torch.randint(0, options.vocab, (2, 16)).to(device)
        batch = {"input_ids": given, "labels": given}

        def counted(name: str, call: Callable[[], Any]) -> Any:
            traffic.clear()
            result = call()
            waits = [(what, line, n) for (what, line), n in traffic.waits.most_common()]
            copies = [(what, line, n) for (what, line), n in traffic.copies.most_common()]
            phase = found.setdefault(name, {"waits": [], "copies": []})
            phase["waits"] += waits
            phase["copies"] += copies
            return result

        for _ in range(STEPS):
            for name in ("forward", "backward", "off_the_boundary", "step"):
                found[name] = {"waits": [], "copies": []}
            for k in range(options.micro_batches):
                loss = counted("forward", lambda: engine(**batch).loss)
                counted("backward", lambda loss=loss: engine.backward(loss))
                last = k == options.micro_batches - 1
                counted("step" if last else "off_the_boundary", engine.step)
        batches = [batch] * options.micro_batches
        for name, call in (("train_batch", engine.train_batch), ("evaluate", engine.evaluate)):
            call(batches)
            counted(name, lambda call=call: call(batches))
    found["step_syncs"] = sum(n for *_, n in found["step"]["waits"])
    return found


def engine_of(options: Options, device: Any) -> Any:
    """Return the engine, a Llama's."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    import zero3d

    torch.manual_seed(0)
    config = LlamaConfig(
        hidden_size=options.hidden, intermediate_size=2 * options.hidden, num_hidden_layers=options.layers,
        num_attention_heads=4, num_key_value_heads=2, vocab_size=options.vocab, max_position_embeddings=64,
        tie_word_embeddings=False, use_cache=False,
    )  # fmt: skip
    return zero3d.Engine(
        LlamaForCausalLM(config).to(device), stage=options.stage, mesh=zero3d.Mesh(device=device),
        precision=options.precision, clip_norm=1.0, accumulate=options.micro_batches, exact=options.exact,
    )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, value in Options()._asdict().items():
        kind: Any = (lambda text: text == "True") if isinstance(value, bool) else type(value)
        parser.add_argument(f"--{name.replace('_', '-')}", type=kind, default=value)
    print(json.dumps(measure(Options(**vars(parser.parse_args())))))


if __name__ == "__main__":
    sys.path.insert(0, str(BENCHMARKS))
    main()
