"""What the planner says of plans drawn by a seed, before and after a change that is to change none of it (a refactoring).

    python tests/random_plans.py record A       in the checkout before the change: writes a line of JSON for each plan into A
    python tests/random_plans.py record B       in the checkout after it
    python tests/random_plans.py compare A B    prints the first plans that differ, and in what
    python tests/random_plans.py tell 1234      prints one plan and all that is said of it

Every key that a plan takes is drawn (`DRAWN`), over models of several kinds and over clusters. Of each plan all figures are kept to
the digit: memory, seconds, traffic, notes, and the bound that a search looks at first; or the words with which it is refused. Of
each that is not refused, the file that starts it and the plan which that file comes to; of some, what single changes would do,
and what would help if memory were short.
"""

import argparse
import json
import random
import sys
import tempfile
import time
from dataclasses import replace
from math import gcd, inf
from pathlib import Path

HERE = Path(__file__).parent
sys.path[:0] = [str(HERE), str(HERE.parent / "src")]
PLANS, SEED = 5000, 70
SHOWN = 10  # plans that differ, and places of each
CHANGED = 40  # of every so many plans the single changes
SHORT = 200  # of every so many what helps where a tenth of the memory is short
OFTEN, SELDOM = 0.35, 0.08  # how often a key has another value than its default
SIZES = {"hidden_size": 1024, "intermediate_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 64,
         "vocab_size": 32768, "max_position_embeddings": 4096, "use_cache": False, "tie_word_embeddings": False}  # fmt: skip
DELTA = SIZES | {"model_type": "qwen3_5_text", "num_hidden_layers": 4, "linear_num_key_heads": 8, "linear_num_value_heads": 16,
                 "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"]}  # fmt: skip
MAMBA2 = SIZES | {"model_type": "nemotron_h", "num_hidden_layers": 4, "layers_block_type": ["mamba", "mlp", "mamba", "attention"],
                  "mamba_num_heads": 32, "mamba_head_dim": 64, "n_groups": 2}  # fmt: skip
MODELS = {  # a preset or a config, a length, and what else `open_spec` is told: dense ones, tied ones, experts, adapters, packed bases, towers of images, hybrids
    "demo": ("demo", 512, {}),
    "demo-moe": ("demo-moe", 512, {}),
    "gpt2": ("gpt2", 1024, {}),
    "qwen3-0.6b": ("qwen3-0.6b", 4096, {}),
    "llama-3-8b": ("llama-3-8b", 4096, {"packed": True}),
    "mixtral-8x7b": ("mixtral-8x7b", 2048, {}),
    "deepseek-v2-lite": ("deepseek-v2-lite", 2048, {}),
    "llama-3-1b with adapters": ("llama-3-1b", 2048, {"lora": 16}),
    "llama-3-1b in nf4": ("llama-3-1b", 2048, {"lora": 16, "quantize": "nf4"}),
    "llava-1.5-7b with adapters": ("llava-1.5-7b", 2048, {"lora": 16}),
    "delta rules": (DELTA, 1024, {"packed": True, "kernels": True}),
    "mamba 2 of two groups": (MAMBA2, 1024, {"kernels": True}),
}
EXPERTS = ("demo-moe", "mixtral-8x7b", "deepseek-v2-lite")
CLUSTERS = (("a100-80", 8), ("h100", 8), ("a6000", 4), ("cpu", 1), ("v100-32", 8))  # a card, and how many a node has
WORLDS = (1, 2, 3, 4, 6, 8, 16, 32, 64)
DRAWN = {  # by keyword of a plan: how often, and from what, where it is not the default; degrees are drawn apart
    "stage": (1.0, (0, 1, 2, 3, 3)),
    "micro_batch": (0.5, (1, 2, 3, 4, 8)),
    "accumulate": (0.5, (1, 2, 3, 4, 8)),
    "activations": (0.5, ("none", "full", "selective", "every:2")),
    "sequence_parallel": (OFTEN, (True,)),
    "schedule": (OFTEN, ("gpipe", "1f1b", "interleaved", "zero-bubble", "zbv")),
    "virtual": (SELDOM, (2,)),
    "precision": (OFTEN, ("fp32", "bf16", "fp16", "fp64")),
    "autocast": (SELDOM, (True,)),
    "reduce_dtype": (SELDOM, ("bf16", "fp16", "fp64")),
    "release": (OFTEN, ("every_use", "every_step")),
    "reduce": (OFTEN, ("every_micro_batch", "every_step")),
    "offload": (OFTEN, ("host", "disk")),
    "exact": (SELDOM, (True,)),
    "reduce_scatter": (OFTEN, ("native", "all-to-all")),
    "master": (OFTEN, ("split",)),
    "params": (0.2, ("host", "disk")),
    "gradients": (OFTEN, ("device", "host")),
    "fraction": (OFTEN, (0.25, 0.5, 0.9)),
    "moments": (OFTEN, ("bf16",)),
    "executor": (OFTEN, ("device", "host")),
    "partition_activations": (OFTEN, (True,)),
    "offload_activations": (OFTEN, ("host",)),
    "asynchronous_saves": (OFTEN, (True,)),
    "replay": (SELDOM, (2,)),
    "ema": (SELDOM, (0.99,)),
    "experts": (OFTEN, ("fast",)),
    "optimizer": (OFTEN, ("muon", "adamw8bit")),
    "sp_kind": (OFTEN, ("heads", "gather")),
    "tiled_loss": (OFTEN, (True, "auto")),
    "gather_wire": (0.2, ("int8",)),
    "second_shard": (0.2, ("node", 2, 4)),
    "slow_wire": (OFTEN, ("bf16", "int8", "int4")),
    "slow_rounding": (OFTEN, ("stochastic",)),
    "gradient_dtype": (OFTEN, ("bf16",)),
    "compile": (SELDOM, (True,)),
    "linear": (SELDOM, ("fp8",)),
    "quantize": (SELDOM, ("int8",)),
    "weights": (0.2, ("cast",)),
    "sp_mixers": (OFTEN, ("heads", "prefix")),
}
DEGREES = ("dp", "tp", "pp", "ep", "sp", "shard")
NEED = {  # keys that are refused, or do nothing, unless others are so: where they are not, these are drawn seldom
    "sequence_parallel": lambda drawn: drawn["tp"] > 1,
    "schedule": lambda drawn: drawn["pp"] > 1,
    "experts": lambda drawn: drawn.get("ep", 1) > 1,
    "sp_kind": lambda drawn: drawn.get("sp", 1) > 1,
    "sp_mixers": lambda drawn: drawn.get("sp", 1) > 1,
    "slow_wire": lambda drawn: drawn.get("shard", drawn["dp"]) < drawn["dp"],
    "slow_rounding": lambda drawn: "slow_wire" in drawn,
    "gather_wire": lambda drawn: drawn["stage"] == 3,
    "weights": lambda drawn: drawn["stage"] == 3 and "offload" not in drawn,
    "second_shard": lambda drawn: drawn["stage"] == 3,
    "reduce": lambda drawn: drawn["stage"] >= 2,
    "master": lambda drawn: "precision" not in drawn,
    "reduce_dtype": lambda drawn: drawn.get("precision") != "fp32",
    "gradients": lambda drawn: drawn["stage"] >= 2 and "offload" in drawn,
    "params": lambda drawn: drawn["stage"] == 3,
    "offload_activations": lambda drawn: drawn.get("activations") == "full",
    "partition_activations": lambda drawn: drawn["tp"] > 1 and drawn.get("activations") == "full",
    "gradient_dtype": lambda drawn: drawn.get("gradients") == "host",
    **dict.fromkeys(("fraction", "moments", "executor"), lambda drawn: "offload" in drawn),
    "optimizer": lambda drawn: "offload" not in drawn,
}


def draw(number):
    """Draw a plan by its number: the model's name, the card, its nodes and GPUs of a node, settings by keyword."""
    dice = random.Random(f"{SEED} {number}")
    model, (card, per_node) = dice.choice(list(MODELS)), dice.choice(CLUSTERS)
    world = dice.choice(WORLDS)
    tp = dice.choice([n for n in (1, 1, 1, 2, 4) if world % n == 0])
    pp = dice.choice([n for n in (1, 1, 1, 2, 3) if world % (tp * n) == 0])
    dp = world // (tp * pp)
    settings = {"dp": dp, "tp": tp, "pp": pp}
    for name, often in (("ep", 0.6 if model in EXPERTS else SELDOM), ("sp", 0.2), ("shard", 0.2)):
        if dice.random() < often:
            settings[name] = dice.choice([n for n in range(1, dp + 1) if dp % n == 0])
    for name, (often, values) in DRAWN.items():
        if name in NEED and not NEED[name](settings):
            often /= 20
        if dice.random() < often:
            settings[name] = dice.choice(values)
    if pp > 1:
        settings["accumulate"] = pp * settings.get("accumulate", 1)  # a micro-batch for each stage
    if "nf4" in model:
        settings["quantize"] = "nf4"
    per_node = gcd(world, per_node)
    return model, card, world // per_node, per_node, settings


def models():
    """Trace the models, each once."""
    from zero3d.config import Lora, Model
    from zero3d.tools.plan.spec import Forward
    from zero3d.tools.sim.model_spec import open_spec

    found = {}
    for name, (model, length, settings) in MODELS.items():
        given = {key: value for key, value in settings.items() if key == "packed"}
        given |= {"forward": Forward(on_card=True)} if "kernels" in settings else {}
        given |= {"lora": Lora(rank=settings["lora"])} if "lora" in settings else {}
        given |= {"chosen": Model(quantize=settings["quantize"])} if "quantize" in settings else {}
        with tempfile.TemporaryDirectory() as folder:
            path = model if isinstance(model, str) else str(Path(folder, "config.json"))
            if path is not model:
                Path(path).write_text(json.dumps(model))
            spec = open_spec(path, length, **given)
        found[name] = spec if path is model else replace(spec, name=name)
    return found


def tell(number, specs):
    """Say of a plan all that is kept of it."""
    from zero3d.errors import ConfigError
    from zero3d.tools.plan.estimate import BOUNDS, evaluate
    from zero3d.tools.plan.hardware import cluster
    from zero3d.tools.plan.spec import ParallelPlan

    name, card, nodes, per_node, settings = draw(number)
    model, place = specs[name], cluster(card, nodes * per_node, nodes)
    said = {"number": number, "model": name, "cluster": [card, nodes, per_node], "settings": settings}
    plan = ParallelPlan(**{"shard": settings["dp"], **settings})
    try:
        estimate = evaluate(model, place, plan)
        figures = {
            part: getattr(estimate, part) for part in ("memory", "seconds", "traffic", "tokens", "flops", "notes")
        }
        said |= {part: plain(value) for part, value in figures.items()}
        settled = BOUNDS.settled(model, place, plan)
        said["at least"] = BOUNDS.at_least(model, place, settled, inf)
        said["at most"] = BOUNDS.at_most(model, place, settled)
    except ConfigError as error:
        return said | {"refused": str(error)}
    said["file"], said["file as plan"] = file_of(model, plan)
    if number % CHANGED == 0:
        said["single changes"] = changes_of(model, place, plan, estimate)
    if number % SHORT == 0:
        said["what helps"] = helping(model, place, plan, estimate)
    return said


def file_of(model, plan):
    """Return the file that starts a plan, and the plan that it comes to or the words with which it is refused."""
    from zero3d.config import load
    from zero3d.errors import ConfigError
    from zero3d.tools.plan.emit import plan_of, train_config

    tree = train_config(model, plan, "demo", None)
    try:
        return tree, plan_of(load(tree), plan.world).as_dict()
    except ConfigError as error:
        return tree, str(error)


def changes_of(model, place, plan, estimate):
    """Return what each change of a single setting would do."""
    from zero3d.tools.plan.estimate import evaluate
    from zero3d.tools.plan.search import Row
    from zero3d.tools.plan.what_if import what_if

    return [[knob.change, knob.memory, knob.seconds] for knob in what_if(Row(plan, estimate), model, place, evaluate)]


def helping(model, place, plan, estimate):
    """Return what would help if a tenth of the device's bytes were not there."""
    from zero3d.tools.plan.estimate import evaluate
    from zero3d.tools.plan.relief import device_bytes, reliefs
    from zero3d.tools.plan.search import Row

    missing = estimate.memory.allocated / 10
    found = reliefs(Row(plan, estimate), model, place, evaluate, missing, device_bytes)
    return [[*relief.settings, relief.saved, relief.slower] for relief in found]


def plain(value):
    """Return an estimate's part for JSON: records as mappings."""
    return vars(value) if hasattr(value, "__dict__") else value


def record(into, plans):
    """Write a line for each plan."""
    from zero3d.tools.plan.spec import PLAN_KEYWORDS

    if undrawn := set(PLAN_KEYWORDS) ^ {*DRAWN, *DEGREES}:
        raise SystemExit(f"DRAWN must have the keys that a plan takes, and differs in {', '.join(sorted(undrawn))}")
    begin, refused = time.monotonic(), 0
    specs = models()
    print(f"{len(specs)} models traced in {time.monotonic() - begin:.0f} s", flush=True)
    into.parent.mkdir(parents=True, exist_ok=True)
    with into.open("w") as file:
        for number in range(plans):
            said = tell(number, specs)
            refused += "refused" in said
            file.write(json.dumps(said, sort_keys=True, default=dict) + "\n")
    print(f"{plans} plans, {refused} of them refused, in {time.monotonic() - begin:.0f} s")


def compare(before, after):
    """Print the first plans that differ; return how many do."""
    from characterize import in_order, leaves

    told = [[json.loads(line) for line in path.read_text().splitlines()] for path in (before, after)]
    differing = abs(len(told[0]) - len(told[1]))
    for first, second in zip(*told, strict=False):
        if first == second:
            continue
        differing += 1
        if differing <= SHOWN:
            print(f"plan {first['number']} of {first['model']} on {first['cluster']}: {first['settings']}")
            was, now = dict(leaves(first)), dict(leaves(second))
            places = [place for place in {**was, **now} if was.get(place, ...) != now.get(place, ...)]
            for place in sorted(places, key=in_order)[:SHOWN]:
                print(f"  {' '.join(map(str, place))}: {was.get(place)!r} -> {now.get(place)!r}")
    print(f"{differing} of {max(map(len, told))} plans differ")
    return differing


def main():
    """Record, compare or tell; exit code 1 where something differs."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    verbs = parser.add_subparsers(dest="verb", required=True)
    verb = verbs.add_parser("record")
    verb.add_argument("into", type=Path)
    verb.add_argument("--plans", type=int, default=PLANS)
    verb = verbs.add_parser("compare")
    verb.add_argument("before", type=Path)
    verb.add_argument("after", type=Path)
    verbs.add_parser("tell").add_argument("number", type=int)
    given = parser.parse_args()
    if given.verb == "compare":
        return 1 if compare(given.before, given.after) else 0
    if given.verb == "tell":
        print(json.dumps(tell(given.number, models()), indent=1, default=dict))
    else:
        record(given.into, given.plans)
    return 0


if __name__ == "__main__":
    sys.exit(main())
