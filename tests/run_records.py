"""Records of runs that never were, of any length, for pictures and pages of runs."""

import json
import random

MIB = 2**20


def records(steps, held_out=True, norms=True, seed=0):
    """A loss that falls with noise, warm-up and decay; saves and evaluations every tenth of the run; a late peak of memory."""
    drawn, found, tenth = random.Random(seed), [], max(1, steps // 10)
    for step in range(1, steps + 1):
        share = step / steps
        record = {
            "step": step, "loss": 2.5 + 3.5 / (1 + 20 * share) + drawn.gauss(0, 0.12), "lr": 1e-3 * min(1, 20 * share) * (1.02 - share),
            "grad_norm": 0.4 + abs(drawn.gauss(0, 0.2)) if norms else None, "applied": True, "skipped": 0, "seconds": 0.5,
            "tokens": 512 * step, "tokens_per_s": 1000 + drawn.gauss(0, 30) - 600 * (step == 1), "loss_scale": 1.0,
            "memory_bytes": (400 + 60 * (share > 0.7)) * MIB, "traffic_bytes": 10**6,
        }  # fmt: skip
        if held_out and step % tenth == 0:
            record["validation_loss"] = 2.6 + 3.4 / (1 + 20 * share)
        if step > 1 and (step - 1) % tenth == 0:
            record |= {"save_seconds": 0.1, "save_bytes": 10**6}
        found.append(record)
    return found


def skip(found, *steps):
    """Make steps ones that were not applied, whose loss and norm are not finite."""
    for step in steps:
        found[step - 1] |= {"applied": False, "grad_norm": None, "loss": None}
    return found


def resume(found, *steps):
    """Have sessions that went on behind these steps."""
    for step in steps:
        found[step]["resumed_from"] = step
    return found


def slow(found, *steps):
    """Have the records of these steps name a slow rank."""
    for step in steps:
        found[step - 1] |= {"slowest_rank": 1, "slowest_over": 0.4}
    return found


def timed(found):
    """Have the last record tell what the parts of a step take, and which rank is slow."""
    found[-1] |= {"slowest_rank": 3, "slowest_over": 0.08, "slowest_data_s": 0.12}
    for number, part in enumerate(("data", "forward", "backward", "gathers", "reductions", "update", "saves"), 1):
        found[-1] |= {
            f"{part}_s": 0.01 * number,
            f"{part}_s_least": 0.008 * number,
            f"{part}_s_largest": 0.015 * number,
        }
    return found


def written(found, folder):
    """Write them as metrics.jsonl."""
    (folder / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in found))
