"""`zero3d generate OUTPUT TEXT ...`: what the model of a run, a checkpoint or an exported folder goes on with."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from zero3d.errors import ConfigError
from zero3d.tools.cli.rank_environment import join_environment
from zero3d.tools.cli.train import quiet_libraries
from zero3d.tools.cli.worker import quiet_environment

if TYPE_CHECKING:
    import torch

    from zero3d.tools.cli.generate_source import Source

TOKENS = 200
DTYPES = ("fp32", "bf16", "fp16")
RANKS = "zero3d.tools.cli.generate_ranks"
STDIN = "-"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument(
        "output",
        metavar="OUTPUT",
        help="a run's output folder (its export once it has finished, before that its newest checkpoint), one "
        "checkpoint of any mesh, or a folder of a Hugging Face model or of an adapter",
    )
    parser.add_argument("words", nargs="*", metavar="TEXT", help="what to continue, each by itself; - reads stdin")
    parser.add_argument("--chat", action="store_true", help="the text is a user's message: apply the chat template")
    parser.add_argument(
        "--image", metavar="FILE", action="append", default=[], help="an image before the text; several may be given"
    )
    parser.add_argument(
        "--max-tokens", type=int, metavar="N", default=TOKENS, help="the most tokens to make (default: %(default)s)"
    )
    parser.add_argument(
        "--temperature",
        type=float,
        metavar="T",
        default=0.0,
        help="0: always the most likely token (default); above 0: tokens are drawn",
    )
    parser.add_argument("--top-k", type=int, metavar="K", help="draw among the K most likely tokens")
    parser.add_argument("--top-p", type=float, metavar="P", help="draw among the likeliest that make up P of 1")
    parser.add_argument("--seed", type=int, default=0, help="of the draws (default: 0)")
    parser.add_argument(
        "--ranks",
        type=int,
        metavar="N",
        help="cut the model over N ranks of this machine, for one that does not fit on a device: as at ZeRO stage 3, "
        "each layer is gathered when it is used. The text is that of one rank; every token moves all weights",
    )
    parser.add_argument("--base", metavar="FOLDER", help="the model that training began with, if it was moved")
    parser.add_argument("--tokenizer", metavar="FOLDER", help="another tokenizer than the folder's; bytes: of the demo")
    parser.add_argument("--dtype", choices=DTYPES, help="of the weights (default: as they were exported)")
    parser.add_argument("--device", help="such as cpu or cuda:1 (default: this machine's accelerator, if it has one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Find the model and print what it goes on with; notes are on stderr. Raises ConfigError, CheckpointError."""
    quiet_environment()
    check(arguments)
    if join_environment():
        raise ConfigError("zero3d generate starts its ranks itself: type --ranks N, without torchrun or srun.")
    texts = [sys.stdin.read().rstrip("\n") if word == STDIN else word for word in arguments.words]
    from zero3d.tools.cli.generate_source import Wanted, open_source

    quiet_libraries()
    many = (arguments.ranks or 1) > 1
    with open_source(arguments.output, Wanted(arguments.base, merged=many)) as source:
        print(f"generating from {source.said}", file=sys.stderr, flush=True)
        if many:
            return _on_ranks(arguments, texts, source)
        return _here(arguments, texts, source)


def check(arguments: argparse.Namespace) -> None:
    """Refuse options that cannot be. Raises ConfigError."""
    if not arguments.words:
        raise ConfigError(
            'no text to continue: type one, as in zero3d generate OUTPUT "Once upon a time", or - for stdin.'
        )
    for option, value, least in (
        ("--max-tokens", arguments.max_tokens, 1),
        ("--ranks", arguments.ranks, 1),
        ("--top-k", arguments.top_k, 1),
        ("--seed", arguments.seed, 0),
    ):
        if value is not None and value < least:
            raise ConfigError(f"{option} {value}: type a whole number from {least}.")
    if not 0 <= arguments.temperature < float("inf"):
        raise ConfigError(f"--temperature {arguments.temperature}: type 0, or a number above it such as 0.7.")
    if arguments.top_p is not None and not 0 < arguments.top_p <= 1:
        raise ConfigError(f"--top-p {arguments.top_p}: type a number above 0 and up to 1.")
    drawn = [f"--{name}" for name in ("top-k", "top-p") if getattr(arguments, name.replace("-", "_")) is not None]
    if drawn and arguments.temperature == 0:
        raise ConfigError(f"{' and '.join(drawn)}: at --temperature 0 nothing is drawn; type --temperature 0.7, say.")
    if arguments.image and len(arguments.words) > 1:
        raise ConfigError(f"--image goes with one text, not with {len(arguments.words)}: type a command for each.")


def _here(arguments: argparse.Namespace, texts: Sequence[str], source: Source) -> int:
    """Generate in this process."""
    from zero3d.precision import DTYPES as OF_NAMES
    from zero3d.tools.cli.generate_text import check_chat, load_model, say, tokenizer_of

    device = _device(arguments.device)
    tokenizer = tokenizer_of(source, arguments.tokenizer)
    if arguments.chat and not arguments.image:  # before weights are read
        check_chat(tokenizer)
    model = load_model(source, OF_NAMES.get(arguments.dtype), device)

    def generate(ids: torch.Tensor, **options: Any) -> torch.Tensor:
        moved = {name: _moved(value, device, model.dtype) for name, value in options.items()}
        out: torch.Tensor = model.generate(ids.to(device), **moved)
        return out

    say(generate, model, texts, vars(arguments), tokenizer, source)
    return 0


def _moved(value: Any, device: torch.device, dtype: torch.dtype) -> Any:
    """Return a tensor on the device, pixels in the model's dtype; anything else as it is."""
    if not hasattr(value, "is_floating_point"):
        return value
    return value.to(device, dtype) if value.is_floating_point() else value.to(device)


def _device(typed: str | None) -> torch.device:
    """Return the device that was typed, or this machine's accelerator. Raises ConfigError."""
    import torch

    try:
        if typed is not None:
            torch.empty(0, device=typed)
            return torch.device(typed)
    except (RuntimeError, AssertionError) as error:  # torch's own words for one that is not there
        raise ConfigError(f"--device {typed}: {str(error).splitlines()[0]}") from error
    return torch.accelerator.current_accelerator(check_available=True) or torch.device("cpu")


def _on_ranks(arguments: argparse.Namespace, texts: Sequence[str], source: Source) -> int:
    """Start ranks that read what is asked for in a file; texts are no words of a command line there."""
    from zero3d.tools.cli.workers import launch

    asked = {name: value for name, value in vars(arguments).items() if name not in ("parser", "words", "verb")}
    request = asked | {
        "texts": texts,
        "source": {k: str(v) if isinstance(v, Path) else v for k, v in source._asdict().items()},
    }
    with TemporaryDirectory(prefix="zero3d-generate-") as place:
        file = Path(place) / "request.json"
        file.write_text(json.dumps(request))
        return launch([str(file)], arguments.ranks, module=RANKS, saves=False)
