"""The GPU catalogue and cluster files -> ClusterSpec.

    zero3d plan --gpu a100-80 --gpus 128              all from data sheets
    zero3d plan --gpu a100-80 --gpus 128 --cluster cluster.yaml
        gpu: {memory: 79.1e9}                         any field of ClusterSpec replaces the catalogue's: "user"
        across: {bandwidth: 12.5e9}
        provenance: {across.bandwidth: measured}      as `zero3d calibrate` writes it

Memory is what the vendor sells, in GiB (an "80 GB" card has 80 x 2^30 bytes), less a sixteenth where error correction
takes it; rates are decimal and one way. Peaks are dense bf16 without sparsity (fp16 where there is no bf16), products
summed in fp32. Networks are the usual ones of such machines: a cloud's differ. tests/data/cards.yaml has what each data
sheet prints, and where.

A node is what the link `inside` joins: GPUs of a machine, and all 72 of an NVL72 rack, whose machines have 4 each.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any

from zero3d.config.hints import nearest
from zero3d.config.kinds import convert
from zero3d.config.yaml_file import read_yaml
from zero3d.errors import ConfigError, short
from zero3d.tools.plan.constants import constant
from zero3d.tools.plan.spec import ClusterSpec, Gpu, Link
from zero3d.tools.plan.spec_json import from_json, to_json

GIB, GB, TFLOP = 2.0**30, 1e9, 1e12
SHARES = ("spread", "step.hide_dp")  # fields of a cluster that cannot be above 1


@dataclass(frozen=True)
class Card:
    """A row of the catalogue. GiB, TFLOP/s, GB/s; per GPU and one way where it is a link.

    host      GiB of host memory that such a machine has
    watts     that the data sheet allows the card; None of a CPU
    partners  GPUs to each of which it has a link of its own, together `inside`; 0: a switch, or one bus, joins all
    per_host  GPUs of a machine, where a node is several
    bf16      it multiplies in bf16; else plans are in fp16
    """

    memory: float
    tflops: float
    bandwidth: float
    inside: float
    across: float
    host_link: float
    host: float
    watts: float | None
    per_node: int = 8
    partners: int = 0
    per_host: int | None = None
    bf16: bool = True


CATALOGUE = {
    # name          GiB    TFLOP/s  HBM GB/s  inside  across  host link  host GiB  W  GPUs of a node
    "v100-16": Card(16, 125, 900, 150, 3.125, 12, 768, 300, bf16=False),
    "v100-32": Card(32, 125, 900, 150, 6.25, 12, 1536, 300, bf16=False),
    "a100-40": Card(40, 312, 1555, 300, 25, 24, 1024, 400),
    "a100-80": Card(80, 312, 2039, 300, 25, 24, 2048, 400),
    "h100": Card(80, 989, 3352, 450, 50, 50, 2048, 700),
    "h100-96": Card(96, 989, 2400, 450, 50, 50, 2048, 500),  # HBM2e: the torchtitan tables' card
    "h20": Card(96, 148, 4000, 450, 50, 50, 2048, 400),
    "h800": Card(80, 989, 3352, 200, 50, 50, 2048, 700),
    "h200": Card(141, 989, 4800, 450, 50, 50, 2048, 700),
    # Four superchips, each joined to three by links of their own; watts with the CPU; the host link is NVLink-C2C.
    "gh200": Card(96, 989, 4000, 450, 25, 360, 448, 1000, 4, partners=3),
    "b200": Card(180, 2250, 8000, 900, 50, 50, 2048, 1000),
    "b300": Card(270, 2250, 8000, 900, 100, 50, 2048, 1100),
    # Racks of 72, in machines of 4 with two Grace CPUs; two GPUs share a CPU's NVLink-C2C.
    "gb200": Card(186, 2500, 8000, 900, 50, 180, 894, 1200, 72, per_host=4),
    "gb300": Card(279, 2500, 8000, 900, 100, 180, 894, 1400, 72, per_host=4),
    "mi300x": Card(192, 1307, 5300, 448, 50, 50, 2048, 750, partners=7),  # Infinity Fabric: 64 GB/s to each other one
    # PCIe. Consumer cards, A10G and T4 have no access to each other: what they send goes through the host's memory.
    "l4": Card(22.5, 121, 300, 25, 1.25, 24, 192, 72, 4),
    "l40s": Card(45, 362, 864, 25, 6.25, 24, 1536, 350),
    "a10g": Card(22.5, 70, 600, 20, 1.25, 24, 192, 300, 4),
    "t4": Card(15, 65, 320, 10, 1.5625, 12, 192, 70, 4, bf16=False),
    "a6000": Card(48, 155, 768, 25, 3.125, 24, 256, 300, 4),
    "rtx-pro-6000": Card(96, 503.8, 1792, 50, 25, 50, 1024, 600),
    "rtx-5090": Card(32, 209.5, 1792, 25, 1.25, 50, 128, 575, 4),
    "rtx-4090": Card(24, 165, 1008, 20, 1.25, 24, 128, 450, 4),
    "rtx-3090": Card(24, 71, 936, 12, 1.25, 12, 128, 350, 4),
    "cpu": Card(64, 1, 100, 10, 1.25, 50, 64, None, 1),
}
ALIASES = {
    "v100": "v100-32",
    "a100": "a100-80",
    "h100-80": "h100",
    "h200-141": "h200",
    "gb200-nvl72": "gb200",
    "gb300-nvl72": "gb300",
    "rtx5090": "rtx-5090",
    "rtx4090": "rtx-4090",
    "rtx3090": "rtx-3090",
    "rtx-a6000": "a6000",
    "pro-6000": "rtx-pro-6000",
    "rtx-6000-pro": "rtx-pro-6000",
    "5090": "rtx-5090",
    "4090": "rtx-4090",
    "3090": "rtx-3090",
}


def cluster(name: str, gpus: int, nodes: int | None = None, file: Path | str | None = None) -> ClusterSpec:
    """Return `gpus` cards on `nodes` nodes (None: as such cards usually come), a file's fields on top.

    Nodes that are machines of a rack are taken together: 16 of 4 GPUs are one of 64.

    Raises ConfigError for an unknown card, GPUs that do not divide over the nodes, and misfit files.
    """
    row = card(name)
    if gpus < 1 or (nodes is not None and (nodes < 1 or gpus % nodes)):
        raise ConfigError(f"{gpus} GPUs on {nodes} nodes: pass --gpus as a multiple of --nodes, both from 1.")
    machines = nodes is not None and row.per_host is not None and gpus // nodes <= row.per_host
    count = nodes if nodes is not None and not machines else -(-gpus // row.per_node)
    if gpus % count:
        raise ConfigError(
            f"{gpus} GPUs do not fill whole nodes of {row.per_node}: pass --nodes, which divides {gpus}, or --gpus "
            f"{count * row.per_node}."
        )
    spec = _datasheet(_key(name), row, 1, row.per_host or gpus // count)
    return (spec if file is None else _override(spec, file)).sized(count, gpus // count)


def named(device: str) -> str | None:
    """Return the catalogue's name of a device as its driver calls it, None for one that is not there.

    "NVIDIA A100-SXM4-80GB" -> a100-80, "NVIDIA GeForce RTX 4090" -> rtx-4090
    """
    words = device.lower().replace("-", " ").replace("_", " ").split()
    spaced = f" {' '.join(words)} "
    for name in sorted(CATALOGUE, key=len, reverse=True):
        model, _, memory = name.partition("-") if name[0] in "vah" else (name.replace("-", " "), "", "")
        if f" {model} " in spaced and (not memory or f"{memory}gb" in words):
            return name
    return None


def base_of(tree: Mapping[str, Any]) -> str | None:
    """Return the card that a cluster file is about (`gpu: h100`, or gpu.name), None if it names none."""
    gpu = tree.get("gpu")
    if isinstance(gpu, str):
        card(gpu)
        return _key(gpu)
    name = gpu.get("name") if isinstance(gpu, Mapping) else None
    return name if name in CATALOGUE else None


def check_card(file: Path | str, known: Mapping[str, Any], name: str, source: str) -> None:
    """Refuse a cluster file of another card; h100-96 is a kind of h100. Raises ConfigError.

    source  who names the card: "--gpu says"
    """
    described, here = base_of(known), _key(name)
    if described is not None and not (described.startswith(here) or here.startswith(described)):
        raise ConfigError(f"cluster file {file} describes {described}, and {source} {here}: pass a file of such cards.")


def _key(name: str) -> str:
    key = name.strip().lower().replace("_", "-").replace(" ", "-")
    return ALIASES.get(key, key)


def card(name: str) -> Card:
    """Look up a row of the catalogue. Raises ConfigError with the nearest."""
    key = _key(name)
    if key in CATALOGUE:
        return CATALOGUE[key]
    near = nearest(key, [*CATALOGUE, *ALIASES], cutoff=0.3)
    hint = f" Did you mean {ALIASES.get(near, near)}?" if near else ""
    raise ConfigError(
        f"GPU {short(name)!r} is not in the catalogue: {', '.join(CATALOGUE)}; or write a cluster file.{hint}"
    )


def _datasheet(name: str, card: Card, nodes: int, per_node: int) -> ClusterSpec:
    spec = ClusterSpec(
        gpu=Gpu(name, card.memory * GIB, card.tflops * TFLOP, card.bandwidth * GB, power=card.watts, bf16=card.bf16),
        nodes=nodes,
        per_node=per_node,
        inside=replace(_link(card.inside, "inside"), partners=card.partners),
        across=_link(card.across, "across"),
        host_memory=card.host * GIB,
        host_link=card.host_link * GB,
        host_bandwidth=constant("step", "host_bandwidth"),
        per_host=card.per_host,
    )
    sources = {field.name: "datasheet" for field in fields(spec) if field.name != "provenance"}
    return replace(
        spec, provenance=sources | dict.fromkeys(("disk", "host_bandwidth", "step", "communicator"), "assumed")
    )


def _link(gb: float, where: str) -> Link:
    return Link(gb * GB, constant("links", f"latency {where}"), constant("links", f"half {where}"))


def _override(spec: ClusterSpec, file: Path | str) -> ClusterSpec:
    """Return the spec with a file's fields in place of its own; their provenance is "user" if the file names none.

    What it says of hosts is of a machine, or of as many as its nodes have. A card that is not in the catalogue has no
    watts but the file's.
    """
    given = read_file(file)
    if isinstance(given.get("gpu"), str):  # `cluster` has begun with that card
        del given["gpu"]
    elif "name" in given.get("gpu", {}) and _key(given["gpu"]["name"]) not in CATALOGUE:
        spec = replace(spec, gpu=replace(spec.gpu, power=None))
    named = dict(given.get("provenance") or {})
    dotted = _dotted_names({key: value for key, value in given.items() if key != "provenance"})
    sources = {field: str(named.get(field, named.get(field.partition(".")[0], "user"))) for field in dotted}
    tree = _merge(to_json(spec), {**given, "provenance": {**spec.provenance, **named, **sources}})
    return replace(from_json(ClusterSpec, tree), per_host=spec.per_host)


def read_file(file: Path | str) -> dict[str, Any]:
    """Read a cluster file's fields, each of which is known, of its type and possible. Raises ConfigError."""
    path = Path(file)
    try:
        tree = read_yaml(path, "across: {bandwidth: 12.5e9}")
    except ConfigError as error:
        raise ConfigError(f"cluster file {error}") from error
    try:
        given: dict[str, Any] = {key: _numbers(value) for key, value in tree.items()}
        _check(given)
    except ConfigError as error:
        raise ConfigError(f"cluster file {path}: {error}") from error
    return given


def _check(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a field that no cluster has, of another type, or with a number that no machine has."""
    fields = dict(given)
    if isinstance(fields.get("gpu"), str):
        card(fields.pop("gpu"))
    base = _datasheet("cpu", CATALOGUE["cpu"], 1, 1)
    whole = _merge(to_json(base), fields)
    from_json(ClusterSpec, whole)
    sources = fields.pop("provenance", None) or {}
    known = {name for dotted in _dotted_names(whole) for name in (dotted, dotted.partition(".")[0])}
    for name in sources:
        if name not in known:
            near = nearest(str(name), known)
            raise ConfigError(f"provenance names {short(name)}, no field.{f' Did you mean {near}?' if near else ''}")
    for name in _dotted_names(fields):
        _check_number(name, fields)


def _check_number(name: str, fields: Mapping[str, Any]) -> None:
    """Refuse a number that no machine has: what a link, a kernel or a step takes beside may be 0, nothing else."""
    value: Any = fields
    for key in name.split("."):
        value = value[key]
    if isinstance(value, bool):
        return
    if isinstance(value, float | int) and (
        not 0 <= value < 1e30
        or (value == 0 and not name.endswith((".latency", ".half", ".partners")) and "step." not in name)
    ):
        raise ConfigError(f"{name} is {value:g}: give a number above 0, or leave it out.")
    if name in SHARES and value is not None and value > 1:
        raise ConfigError(f"{name} is {value:g}: it is a share, at most 1.")


def _dotted_names(tree: Mapping[str, Any], path: str = "") -> list[str]:
    """Return the dotted names of a tree's values."""
    names = []
    for key, value in tree.items():
        names += _dotted_names(value, f"{path}{key}.") if isinstance(value, Mapping) else [f"{path}{key}"]
    return names


def _merge(base: Mapping[str, Any], over: Mapping[str, Any]) -> dict[str, Any]:
    return {
        **base,
        **{
            k: _merge(base[k], v) if isinstance(base.get(k), dict) and isinstance(v, Mapping) else v
            for k, v in over.items()
        },
    }


def _numbers(tree: Any) -> Any:
    """Make numbers of text such as 12.5e9 again: YAML 1.1 wants a sign in the exponent."""
    if isinstance(tree, Mapping):
        return {key: _numbers(value) for key, value in tree.items()}
    if isinstance(tree, str):
        with suppress(ValueError):
            return convert(tree, (float,))
    return tree
