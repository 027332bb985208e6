"""Documents packed into one row of a model with recurrences or convolutions, beside the ways to train without that.

    python benchmarks/hybrid_packing.py --rounds 5 --json FILE

    leaky    one row, whose layers take it for one document: what nothing may be compared with but time
    packed   the same row, documents apart
    padded   a row each, as long as the longest
    alone    a row each, one after another
    told     a row of one document, in a model that is told where documents are; unpacked: the same, untold

Documents are 300, 20, 75 and 117 tokens. Printed is the least time of a CPU that a forward and backward takes, in
turns, on one thread; as a part of the leaky row's, of the padded rows', and for a row of one document of the untold's.
The file has, too, how far each token of three documents moves what the model makes of each other one.
"""

from __future__ import annotations

import argparse
import copy
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from zero3d.models.packing import tell

LENGTHS = (300, 20, 75, 117)
SIZES = {
    "vocab_size": 64, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 1024, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
}  # fmt: skip
TYPES = {
    "qwen3_5_text": {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "linear_key_head_dim": 32,
                     "linear_value_head_dim": 32, "head_dim": 64,
                     "layer_types": ["linear_attention", "full_attention"]},
    "mamba2": {"num_heads": 16, "head_dim": 32, "n_groups": 1, "state_size": 32, "expand": 2, "chunk_size": 64},
    "lfm2": {"layer_types": ["conv", "conv"]},
}  # fmt: skip
TARGETS = {"qwen3_5_text": 1.1, "mamba2": 1.4, "lfm2": 1.1}  # of the leaky row's time
OF_PADDED = 0.6


def build(name: str) -> Any:
    """Build a small model of this type with random weights."""
    import transformers as t

    torch.manual_seed(0)
    return t.AutoModelForCausalLM.from_config(t.AutoConfig.for_model(name, **SIZES | TYPES[name])).float().train()


def ways_of(model: Any) -> dict[str, Callable[[], Tensor]]:
    """Return what each way computes, by name; the first of two alike is told."""
    total = sum(LENGTHS)
    ids = torch.randint(3, 60, (1, total), generator=torch.Generator().manual_seed(1))
    positions = torch.cat([torch.arange(length) for length in LENGTHS])[None]
    whole = torch.arange(total)[None]
    padded = torch.nn.utils.rnn.pad_sequence(list(ids[0].split(LENGTHS)), batch_first=True)
    mask = torch.nn.utils.rnn.pad_sequence([torch.ones(length) for length in LENGTHS], batch_first=True).long()

    is_told = copy.deepcopy(model)
    tell(is_told)

    def run(model: Any = model, **given: Tensor) -> Tensor:
        logits: Tensor = model(**given, use_cache=False).logits.sum()
        return logits

    return {
        "leaky": lambda: run(input_ids=ids, position_ids=positions),
        "packed": lambda: run(is_told, input_ids=ids, position_ids=positions),
        "padded": lambda: run(input_ids=padded, attention_mask=mask),
        "alone": lambda: torch.stack([run(input_ids=part) for part in ids.split(LENGTHS, 1)]).sum(),
        "unpacked": lambda: run(input_ids=ids, position_ids=whole),
        "told": lambda: run(is_told, input_ids=ids, position_ids=whole),
    }


def measure(name: str, rounds: int) -> dict[str, float]:
    """Return the least seconds of a CPU that each way takes."""
    ways = ways_of(build(name))
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    for _ in range(rounds + 1):  # the first warms up
        for way, compute in ways.items():
            began = time.process_time()
            compute().backward()  # type: ignore[no-untyped-call]
            seconds[way].append(time.process_time() - began)
    return {way: min(found[1:]) for way, found in seconds.items()}


SHOWN = (13, 7, 13)  # documents of a row in which influence is looked at


def influence(name: str) -> dict[str, list[list[float]]]:
    """Return how far another token at each place [row] moves the logits of each [column]: by one row, and packed."""
    model = build(name).double().eval()
    total = sum(SHOWN)
    ids = torch.randint(3, 60, (1, total), generator=torch.Generator().manual_seed(2))
    positions = torch.cat([torch.arange(length) for length in SHOWN])[None]
    found = {}
    for way in ("leaky", "packed"):
        mixing = tell(model) if way == "packed" else None
        with torch.no_grad():
            before = model(input_ids=ids, position_ids=positions, use_cache=False).logits
            rows = []
            for place in range(total):
                other = ids.clone()
                other[0, place] = 3 + (ids[0, place] - 2) % 57
                moved = model(input_ids=other, position_ids=positions, use_cache=False).logits
                rows.append([float(f"{each:.3g}") for each in (moved - before).abs().amax(-1)[0].tolist()])
        if mixing is not None:
            mixing.close()
        found[way] = rows
    return found


def main(words: list[str] | None = None) -> None:
    """Measure, print a line a type, and write a file if one is named."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--types", default=",".join(TYPES))
    parser.add_argument("--json", type=Path)
    given = parser.parse_args(words)
    torch.set_num_threads(1)
    found = {name: measure(name, given.rounds) for name in given.types.split(",")}
    for name, seconds in found.items():
        ratios = {
            "of leaky": seconds["packed"] / seconds["leaky"],
            "of padded": seconds["packed"] / seconds["padded"],
            "told of untold": seconds["told"] / seconds["unpacked"],
        }
        times = ", ".join(f"{way} {1e3 * each:.0f} ms" for way, each in seconds.items())
        print(f"{name}: {times}; packed {', '.join(f'{ratio:.2f} {what}' for what, ratio in ratios.items())}")
    if given.json is not None:
        targets = {"of_leaky": TARGETS, "of_padded": OF_PADDED}
        made = {"seconds": found, "lengths": LENGTHS, "targets": targets}
        made |= {"influence": influence("qwen3_5_text"), "documents": SHOWN}
        given.json.write_text(json.dumps(made) + "\n")


if __name__ == "__main__":
    main()
