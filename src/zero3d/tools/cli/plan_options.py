"""What the options of `zero3d plan` say: a cluster, a size, a number."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace

from zero3d.config import Lora
from zero3d.config.sections import ALL_LINEAR, Plan
from zero3d.errors import ConfigError, short
from zero3d.spec.formats import FORMATS
from zero3d.tools.cli.plan_theory import MOST_PARAMS, parse_gpus, parse_params
from zero3d.tools.plan.hardware import base_of, card, check_card, cluster, read_file
from zero3d.tools.plan.kernels import FP8
from zero3d.tools.plan.spec import ClusterSpec, Patches

GPU, GPUS = "a100-80", 64  # where nothing is said
MOST_PATCHES = 1 << 20  # of a sequence
MOST_PRICE = 1e9  # of a GPU-hour; more is a typing error
BINARY = {"k": 1 << 10, "m": 1 << 20}
UNITS = {"GB": 1e9, "GIB": 2**30, "MB": 1e6, "MIB": 2**20, "TB": 1e12}


def open_cluster(arguments: argparse.Namespace, planned: Plan = Plan()) -> ClusterSpec:  # noqa: B008 (frozen)
    """Return the cluster of --gpu, --gpus, --nodes and --cluster; a calibrated file says all. Raises ConfigError.

    planned  what the file of a run says, of which an option displaces what it says itself: another card is measured by
             another file, and other numbers of GPUs and nodes go together
    """
    gpus = parse_gpus(arguments.gpus) if arguments.gpus else None
    nodes = parse_gpus(arguments.nodes, "--nodes") if arguments.nodes else None
    if gpus is None and nodes is None:
        gpus, nodes = planned.gpus, planned.nodes
    file = arguments.cluster or (None if arguments.gpu else planned.cluster)
    known = read_file(file) if file else {}
    name = arguments.gpu or (base_of(known) if arguments.cluster else planned.gpu or base_of(known)) or GPU
    if arguments.gpu:
        card(arguments.gpu)
        check_card(arguments.cluster, known, arguments.gpu, "--gpu says")
    if gpus is None and nodes is None and "per_node" in known:
        nodes = int(known.get("nodes", 1))
        gpus = nodes * int(known["per_node"])
    if gpus is None:
        gpus = GPUS if nodes is None else nodes * card(name).per_node
    found = cluster(name, gpus, nodes, file)
    if arguments.watts is None:
        return found
    if not 0 < arguments.watts < 1e6:
        raise ConfigError(f"--watts {arguments.watts:g}: type the watts of a GPU, above 0.")
    sources = {**found.provenance, "gpu.power": "--watts"}
    return replace(found, gpu=replace(found.gpu, power=arguments.watts), provenance=sources)


def remembered_of(planned: Plan, words: Sequence[str]) -> Plan:
    """Return what a file remembers of its cluster: a mesh that is typed is for as many GPUs as it has itself."""
    return replace(planned, gpus=None, nodes=None) if any(word.startswith("mesh.") for word in words) else planned


def patches_of(arguments: argparse.Namespace) -> Patches | None:
    """Return the patches of a sequence that --patches says. Raises ConfigError."""
    patches = number(arguments.patches, "--patches")
    if patches is None:
        return None
    if not 1 <= patches <= MOST_PATCHES:
        raise ConfigError(
            f"--patches {arguments.patches}: type how many patches a sequence has, from 1 to {MOST_PATCHES:,}."
        )
    return Patches(int(patches), asked=True)


def price_of(arguments: argparse.Namespace) -> float | None:
    """Return the price of a GPU-hour. Raises ConfigError for one that nobody asks."""
    price: float | None = arguments.price
    if price is not None and not 0 <= price < MOST_PRICE:
        raise ConfigError(f"--price {price:g}: a GPU-hour costs 0 or more, and less than {MOST_PRICE:g}.")
    return price


def number(text: str | None, option: str) -> float | None:
    """Return the number that 4096, 4e6 or 4M is. Raises ConfigError."""
    if text is None:
        return None
    try:
        return float(parse_params(text))
    except ConfigError as error:
        raise ConfigError(
            f"{option} {short(text)!r} is not a whole number from 1 to {MOST_PARAMS:.0e}: type 4096, 4e6 or 4M."
        ) from error


def tokens_of(text: str) -> int:
    """Return the tokens of a sequence that 4096, 4e3, 32k or 1m is: k are 1024, m 1024^2. Raises ConfigError."""
    scale = BINARY.get(text[-1:].lower(), 1)
    try:
        tokens = float(text[:-1] if scale > 1 else text) * scale
    except ValueError:
        tokens = 0.0
    if not (0 < tokens < 1 << 40 and tokens == int(tokens)):
        raise ConfigError(
            f"--seq {short(text)!r} is not a whole number from 1: type 4096, 32k (x 1024) or 1m (x 1024^2)."
        )
    return int(tokens)


def parse_size(text: str) -> float:
    """Return the bytes that 78GB or 80GiB is. Raises ConfigError."""
    digits = text.strip().rstrip("GMTBIgmtbi")
    unit = text.strip()[len(digits) :].upper()
    try:
        value = float(digits) * UNITS[unit]
    except (ValueError, KeyError):
        value = 0.0
    if not 0 < value < 1e18:
        raise ConfigError(f"{short(text)!r} is not a size: type 78GB, 72.5GiB or 800MB.")
    return value


def margin_of(text: str | None) -> float | None:
    """Return the share of planned memory that 10% or 0.1 is; None where nothing is said. Raises ConfigError."""
    if text is None:
        return None
    digits = text.strip()
    try:
        share = float(digits.removesuffix("%")) / (100 if digits.endswith("%") else 1)
    except ValueError:
        share = -1.0
    if not 0 <= share < 1:
        raise ConfigError(f"--margin {short(text)!r} is no share of memory below 1: type 10% or 0.1.")
    return share


def room_of(arguments: argparse.Namespace, cluster: ClusterSpec) -> float:
    """Return the bytes of a GPU for a plan and its margin: --assert-fits, or the card's. Raises ConfigError."""
    return parse_size(arguments.assert_fits) if arguments.assert_fits else cluster.gpu.memory


def lora_of(asked: str) -> Lora:
    """Return the section `lora` that --lora asks for: every linear layer of the blocks. Raises ConfigError."""
    key, _, rank = asked.partition("=")
    if key != "r" or not rank.isdecimal() or int(rank) < 1:
        raise ConfigError(f"--lora {asked!r} is unknown: pass the rank of the adapters, such as --lora r=128.")
    return Lora(rank=int(rank), targets=(ALL_LINEAR,), dropout=0.05)


def linear_of(asked: str | None) -> str | None:
    """Return what --linear asks for. Raises ConfigError for anything but fp8."""
    if asked not in (None, FP8):
        raise ConfigError(f"--linear {short(asked)!r} is unknown: pass {FP8}, or leave it out.")
    return asked


def format_of(asked: str | None) -> str | None:
    """Return the format that --quantize asks for. Raises ConfigError for an unknown one."""
    if asked is not None and asked not in FORMATS:
        raise ConfigError(f"--quantize {short(asked)!r} is unknown: pass one of {', '.join(FORMATS)}.")
    return asked
