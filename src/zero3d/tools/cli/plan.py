"""`zero3d plan MODEL`: how to train a model on a cluster, what it needs and how long it takes, before it is rented.

zero3d plan qwen2.5-72b --gpus 128 --gpu a100-80        ranked plans, what was rejected, what if, the ladder
zero3d plan explain train.yaml --gpu a100-80            one given configuration, term by term
zero3d plan --theory --params 7.5e9 --gpus 64           the ZeRO paper's figures
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from math import ceil
from pathlib import Path
from typing import Any

import yaml

from zero3d.config import Config, Model, to_dict
from zero3d.config.sections import Plan as PlannedFor
from zero3d.data.files import FILL_ME
from zero3d.data.tokenizers import BYTES, OF_BYTES
from zero3d.errors import ConfigError, short
from zero3d.spec.formats import FORMATS
from zero3d.spec.optimizer import ADAMW, NAMES
from zero3d.tools.cli import plan_theory
from zero3d.tools.cli.kept_specs import open_spec
from zero3d.tools.cli.plan_options import (
    format_of,
    linear_of,
    lora_of,
    margin_of,
    number,
    open_cluster,
    patches_of,
    price_of,
    room_of,
    tokens_of,
)
from zero3d.tools.cli.plan_theory import parse_params
from zero3d.tools.cli.planned_file import RunFile
from zero3d.tools.cli.planned_images import evaluated_by, images_of
from zero3d.tools.cli.progress import STOPPED, ProgressLine, time_left
from zero3d.tools.page import plan_json, plan_text
from zero3d.tools.plan import images
from zero3d.tools.plan.choice import choose
from zero3d.tools.plan.emit import ADAPTERS, NEW, WEIGHTS, deepspeed_config, planned_for, train_config, whole_run
from zero3d.tools.plan.estimate import BOUNDS, evaluate
from zero3d.tools.plan.goodput import goodput
from zero3d.tools.plan.images import FileImages
from zero3d.tools.plan.ladder import ladder
from zero3d.tools.plan.links import Way, crosses, ways
from zero3d.tools.plan.margin import MARGIN, ends
from zero3d.tools.plan.network import CPU
from zero3d.tools.plan.rollout import EXAMPLE
from zero3d.tools.plan.search import (
    GOALS,
    LONG,
    OFFLOADS,
    Bounds,
    Packed,
    Progress,
    Row,
    SearchResult,
    Target,
    resized,
    search,
)
from zero3d.tools.plan.spec import ClusterSpec, Evaluate, Forward, ModelSpec
from zero3d.tools.plan.what_if import what_if

USAGE = "zero3d plan qwen2.5-72b --gpus 128 --gpu a100-80, or zero3d plan --theory --params 7.5e9 --gpus 64"
TOKENS = 4 * 2**20  # of a step of pretraining, where nothing is said
TUNED = 64 * 2**10, 128 * 2**10  # of a fine-tune's, least and most
SHAPE = {
    "layers": "number of layers",
    "hidden": "width of a layer",
    "batch": "sequences of a GPU at a time, of --seq tokens",
    "heads": "attention heads",
    "tp": f"tensor-parallel ranks (default: {plan_theory.TP}, or the most below that divide --heads)",
}
OF_PLANS = (  # options that --theory has no use for
    *("gpu", "nodes", "cluster", "patches", "tokens_per_batch", "tokens", "price", "watts", "lora", "quantize"),
    *("linear", "compile", "goal", "offload", "optimizer", "assert_fits", "margin", "rl", "top"),
    *("emit", "emit_deepspeed"),
)
MOST = 4096  # tokens of a sequence, where nothing is said
LARGER = 64  # times the cluster, up to which one that fits is looked for


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options of the verb."""
    parser.add_argument(
        "words",
        nargs="*",
        metavar="MODEL",
        help="a folder, config.json, preset, module:function or a run's train.yaml; or: explain CONFIG KEY=VALUE ...",
    )
    parser.add_argument("--theory", action="store_true", help="the ZeRO paper's formulas for --params and --gpus")
    for name, what in SHAPE.items():
        parser.add_argument(f"--{name}", help=f"for --theory, its activations: {what}")
    parser.add_argument("--params", help="a number of parameters in place of MODEL: 7.5e9, 7.5B, 1500M")
    parser.add_argument("--gpus", help="how many GPUs (default: 64; or nodes x GPUs of a node)")
    parser.add_argument("--gpu", help="which GPU: v100-32, a100-80, h100, a6000, ... (default: a100-80)")
    parser.add_argument("--nodes", help="number of machines (default: as many as the GPUs fill)")
    parser.add_argument("--cluster", metavar="FILE", help="file that describes the cluster: YAML, or JSON of calibrate")
    parser.add_argument(
        "--seq", help=f"tokens of a sequence: 4096, 32k (x 1024), 1m (x 1024^2) (default: the model's, at most {MOST})"
    )
    parser.add_argument(
        "--patches",
        metavar="N",
        help="patches of a sequence's images (default: those of a run's data, else one image of 1024 x 1024 pixels)",
    )
    parser.add_argument("--tokens-per-batch", metavar="T", help=f"tokens of a step (default: about {TOKENS:,})")
    parser.add_argument("--tokens", metavar="T", help="tokens of the whole training, for its GPU-hours: 1e12")
    parser.add_argument("--price", type=float, metavar="P", help="price of a GPU-hour, in any currency")
    parser.add_argument("--watts", type=float, metavar="W", help="watts of a GPU, for its energy (default: the card's)")
    parser.add_argument("--lora", metavar="r=R", help="train low-rank adapters of this rank only: r=128")
    parser.add_argument(
        "--quantize", metavar="F", help=f"hold frozen linear layers in {' or '.join(FORMATS)} (beside --lora)"
    )
    parser.add_argument("--linear", metavar="F", help="multiply linear layers in fp8 (model.linear), on cards that can")
    parser.add_argument(
        "--compile",
        action=argparse.BooleanOptionalAction,
        help="compile the blocks (train.compile), or not (default: if it is faster, where all batches have one shape)",
    )
    parser.add_argument("--goal", default="fastest", help=f"{', '.join(GOALS)} (default %(default)s)")
    parser.add_argument(
        "--offload",
        default="auto",
        help=f"how far states may leave the GPU: {', '.join(OFFLOADS[1:])}, or auto: only if nothing fits otherwise",
    )
    parser.add_argument("--optimizer", default=ADAMW, help=f"{' or '.join(NAMES)} (default %(default)s)")
    parser.add_argument("--assert-fits", metavar="SIZE", help="exit code 1 if no plan fits this memory of a GPU: 78GB")
    parser.add_argument(
        "--margin",
        metavar="M",
        help=f"share of planned memory that must stay free: 10%%, 0.1 (default: {MARGIN:g}, more for LoRA and offload)",
    )
    parser.add_argument(
        "--rl", metavar="WHAT", help=f"for explain: estimate a step of reinforcement learning and its stream: {EXAMPLE}"
    )
    parser.add_argument("--top", type=int, default=10, help="plans shown (default %(default)s)")
    parser.add_argument("--emit", metavar="FILE", help="write the best plan as a file for zero3d train")
    parser.add_argument(
        "--emit-deepspeed", metavar="FILE", help="write the best plan without a pipeline as DeepSpeed JSON"
    )
    parser.add_argument("--html", metavar="FILE", help="write the result as an HTML page with charts")
    parser.add_argument("--json", action="store_true", help="print one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Show theory, explain one plan, or search."""
    words = arguments.words
    if arguments.html and (arguments.theory or words[:1] == ["explain"]):
        raise ConfigError(f"--html writes what a search finds, and this is none. Type {USAGE.partition(', or')[0]}")
    if arguments.theory:
        if words:
            raise ConfigError(f"--theory takes --params or --layers, and no MODEL (and got {short(' '.join(words))}).")
        seq = None if arguments.seq is None else str(tokens_of(arguments.seq))
        names = "params", "gpus", *SHAPE
        _refuse_beside_theory(arguments)
        plan_theory.show({name: getattr(arguments, name) for name in names} | {"seq": seq}, arguments.json)
        return 0
    if said := [f"--{name}" for name in SHAPE if getattr(arguments, name) is not None]:
        raise ConfigError(f"{said[0]} is for --theory, and a plan takes it from its MODEL. Type {USAGE}")
    if words[:1] == ["explain"]:
        from zero3d.tools.cli import plan_explain  # with all that opens the file of a run

        return plan_explain.run(arguments, words[1:])
    if arguments.rl:
        raise ConfigError("--rl prices one given run: zero3d plan explain train.yaml --gpu h100 --rl " + EXAMPLE)
    if len(words) > 1 or bool(words) == bool(arguments.params):
        raise ConfigError(
            f"zero3d plan takes one MODEL, or --params (and got {short(' '.join(words)) or 'none'}). Type {USAGE}"
        )
    with _uncollected():
        return _search(arguments, words[0] if words else None)


@contextmanager
def _uncollected() -> Iterator[None]:
    """Let Python look for no cycles: there are none among a million small objects, and caches keep most of them."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def _refuse_beside_theory(arguments: argparse.Namespace) -> None:
    """Raise ConfigError for an option that formulas do not heed."""
    for name in OF_PLANS:
        if getattr(arguments, name) != arguments.parser.get_default(name):
            raise ConfigError(f"--{name.replace('_', '-')} is for plans, and --theory is formulas alone: leave it out.")


def _search(arguments: argparse.Namespace, path: str | None) -> int:
    """Find plans, print them, write the files that options name."""
    if arguments.top < 1:
        raise ConfigError(f"--top {arguments.top}: type how many plans to show, from 1.")
    price = price_of(arguments)
    file = RunFile.of(path)
    cluster = open_cluster(arguments, file.config.plan if file else PlannedFor())
    if arguments.goal not in GOALS:
        raise ConfigError(f"--goal {short(arguments.goal)!r} is unknown: pass one of {', '.join(GOALS)}.")
    if arguments.offload not in OFFLOADS:
        raise ConfigError(f"--offload {short(arguments.offload)!r} is unknown: pass one of {', '.join(OFFLOADS)}.")
    if arguments.optimizer not in NAMES:
        raise ConfigError(f"--optimizer {short(arguments.optimizer)!r} is unknown: pass one of {', '.join(NAMES)}.")
    if file is not None:
        file.check(cluster.gpu.precision)
    quantize = format_of(arguments.quantize) or (file.config.model.quantize if file else None)
    optimizer = file.config.optimizer.name if file and arguments.optimizer == ADAMW else arguments.optimizer
    room, margin = room_of(arguments, cluster), margin_of(arguments.margin)
    pictures, why = images_of(file.config if file else None)
    model = open_model(arguments, path, file, cluster.gpu.name != CPU, pictures=pictures)
    lengths, unknown = file.lengths(model) if file else (None, "")
    tokens = number(arguments.tokens, "--tokens") or (file.tokens(model, lengths) if file else None)
    tuned = bool(arguments.lora) or (is_tuned(file.config) if file else path is not None and has_weights(path))
    sequences, batch = sequences_of(arguments, model, cluster, file, tuned)
    target = Target(sequences, room, arguments.goal, arguments.offload, optimizer, quantize, margin)
    linear = linear_of(arguments.linear) or (file.config.model.linear if file else None)
    adapted = arguments.lora or (file and file.config.lora.rank is not None)
    if linear is not None and (adapted or quantize):
        raise ConfigError(f"--linear {linear} is for models of which all is trained: leave out --lora and --quantize.")
    target = target._replace(linear=linear, compile=compiles(arguments, model, file))
    by_data = evaluated_by(lengths, None if arguments.patches else pictures)
    priced = cache(by_data)  # knobs and rungs are in part what the search has tried
    bounds = BOUNDS if by_data is evaluate else BOUNDS._replace(later=priced)
    packed = partial(open_model, arguments, path, file, cluster.gpu.name != CPU, pictures=pictures)
    result = _searched(model, cluster, target, priced, bounds, packed if path else None)
    if not result.whole:
        print(f"stopped: the best of {result.tried:,} plans follow, and others may be better", file=sys.stderr)
    if not result.rows:
        if arguments.assert_fits:
            print(plan_text.nothing_fits(model, cluster, target, result, None))
            return 1
        raise ConfigError(plan_text.nothing_fits(model, cluster, target, result, _larger(model, cluster, target)))
    best = choose(result.rows, target.goal).row
    model = result.models[best.plan.quantize]
    used = resized(cluster, best.plan.world)
    limit = target.usable(model, best.plan)
    rungs = ladder(model, used, target, priced)
    knobs = what_if(best, model, used, priced)
    links = _over_links(model, used, result.rows, priced) if arguments.cluster else ()
    end = None if best.lacks else ends(model, used, best.plan, limit, priced)
    answer = plan_text.Answer(
        model, used, target, result, rungs, knobs, tokens, price, links, end, batch, lengths, unknown
    )
    _write(arguments, answer, path, file)
    about = best.estimate, best.plan, pictures
    if arguments.json:
        told = images.as_json(model, *about)
        print(json.dumps(plan_json.as_json(answer) | ({} if told is None else {"images": told}), indent=2))
    else:
        print(plan_text.as_text(answer, arguments.top))
        for line in plan_text.folded(images.lines(model, *about, arguments.patches is not None, why)):
            print(line)
    if arguments.assert_fits and best.lacks:
        return 1
    return 0 if result.whole else STOPPED


def _searched(
    model: ModelSpec, cluster: ClusterSpec, target: Target, priced: Evaluate, bounds: Bounds, packed: Packed | None
) -> SearchResult:
    """Search, with a line on how far that is."""
    with ProgressLine() as line:
        return search(model, cluster, target, priced, bounds, partial(_show, line), packed)


def _show(line: ProgressLine, progress: Progress) -> None:
    """Write how far a search is, where a line is due."""
    if line.due:
        line.show(search_text(progress, line.seconds))


def search_text(progress: Progress, seconds: float) -> str:
    """Return a line on a search: how many plans are priced, the time left, and the best plan so far."""
    text = f"{progress.priced:,} plans priced, {time_left(progress.done, progress.all, seconds)}"
    if progress.best is None:
        return f"{text}; none fits yet"
    best = progress.best
    return f"{text}; best so far {best.estimate.seconds.mid:.3g} s a step: {plan_text.short(best.plan)}"


def open_model(
    arguments: argparse.Namespace,
    path: str | None,
    file: RunFile | None = None,
    on_card: bool = False,
    quantize: str | None = None,
    pictures: FileImages | None = None,
) -> ModelSpec:
    """Trace a model where there is one, else take a typical shape of that many parameters. Raises ConfigError.

    file     a run's, whose model it is
    on_card  its mixers call kernels, as on a card
    quantize the format of frozen layers, in the place of what was asked
    pictures  of the file's data, where --patches says nothing
    """
    patches = patches_of(arguments) or (None if pictures is None else pictures.patches)
    length = None if arguments.seq is None else tokens_of(arguments.seq)
    if length is not None and length < 2:
        raise ConfigError(f"--seq {arguments.seq}: a sequence has 2 tokens or more.")
    if path is None:
        if arguments.lora:
            raise ConfigError("--lora needs a MODEL whose matrices it can adapt, not --params.")
        if arguments.quantize:
            raise ConfigError("--quantize needs a MODEL whose frozen layers it packs, not --params.")
        from zero3d.tools.plan.shapes import of_params

        return of_params(parse_params(arguments.params), length or MOST)
    lora = lora_of(arguments.lora) if arguments.lora else None
    if file is not None:
        return file.model(length, lora, on_card, quantize, patches)
    if arguments.quantize and lora is None:
        raise ConfigError("--quantize packs frozen layers, and all layers are trained: pass --lora r=128, too.")
    packed = False if length is not None and length >= LONG else None  # as zero3d train does by default
    chosen = Model(quantize=quantize or format_of(arguments.quantize))
    forward = Forward(on_card, patches=patches)
    return open_spec(path, length, chosen=chosen, lora=lora, packed=packed, beyond=True, forward=forward)


def compiles(arguments: argparse.Namespace, model: ModelSpec, file: RunFile | None) -> bool | None:
    """Return whether blocks are compiled, as is said; else None, where it is faster, if all batches have one shape."""
    said = arguments.compile if file is None or arguments.compile is not None else file.compiles
    if said is not None:
        return said
    return None if "packed" in model.provenance and not model.patches else False


def _over_links(model: ModelSpec, cluster: ClusterSpec, rows: Sequence[Row], priced: Evaluate) -> Sequence[Way]:
    """Price the ways to train over the links between nodes, from the best plan whose dp has several ranks on each."""
    plan = next((row.plan for row in rows if crosses(row.plan, cluster)), None)
    return () if plan is None else ways(model, plan, cluster, priced, any_stage=True)


def is_tuned(config: Config) -> bool:
    """Return whether a run adapts a model, or starts from weights."""
    return config.lora.rank is not None or (config.model.init == "weights" and has_weights(config.model.path))


def sequences_of(
    arguments: argparse.Namespace, model: ModelSpec, cluster: ClusterSpec, file: RunFile | None, tuned: bool
) -> tuple[int, str]:
    """Return sequences of a step, and who says so many. Raises ConfigError for tokens that are no whole ones."""
    tokens = number(arguments.tokens_per_batch, "--tokens-per-batch")
    if tokens is None:
        if file and file.config.train.batch:
            return file.config.train.batch, "train.batch of the file"
        what = "a fine-tune's default, 64k to 128k" if tuned else "pretraining's default, about 4 M"
        sequences = tuning_batch(model, cluster) if tuned else _typical_batch(model, cluster)
        return sequences, f"{what} (--tokens-per-batch)"
    sequences = int(tokens) // model.length
    if sequences < 1 or tokens != sequences * model.length:
        near = max(1, sequences) * model.length
        raise ConfigError(
            f"--tokens-per-batch {arguments.tokens_per_batch} is not a multiple of sequences of {model.length}: "
            f"{int(tokens)} / {model.length} = {tokens / model.length:.4g}. Type {near} or {near + model.length}."
        )
    return sequences, ""


def tuning_batch(model: ModelSpec, cluster: ClusterSpec) -> int:
    """Return the fewest sequences for all GPUs that have as many tokens as TUNED says, else the most; one each."""
    least, most = (tokens / model.length / cluster.gpus for tokens in TUNED)
    each = ceil(least)
    return max(1, each if each <= most else int(most)) * cluster.gpus


def _typical_batch(model: ModelSpec, cluster: ClusterSpec) -> int:
    """Return the multiple of the GPUs that is nearest to TOKENS."""
    return max(1, round(TOKENS / model.length / cluster.gpus)) * cluster.gpus


def _larger(model: ModelSpec, cluster: ClusterSpec, target: Target) -> tuple[int, Row] | None:
    """Return the smallest power-of-two multiple of this cluster that can do it, and its best plan."""
    times = 2
    while times <= LARGER:
        bigger = resized(cluster, cluster.gpus * times)
        sequences = -(-target.sequences // bigger.gpus) * bigger.gpus
        offload = "none" if target.offload == "auto" else target.offload
        wanted = target._replace(sequences=sequences, goal="fastest", offload=offload, rounds=False)
        with ProgressLine() as line:
            result = search(model, bigger, wanted, evaluate, BOUNDS, partial(_show, line))
        if result.rows and not result.rows[0].lacks:
            return bigger.gpus, result.rows[0]
        times *= 2
    return None


def _write(arguments: argparse.Namespace, answer: plan_text.Answer, path: str | None, file: RunFile | None) -> None:
    """Write the files that --emit, --emit-deepspeed and --html name. Raises ConfigError before any is written."""
    rows, best = answer.result.rows, answer.best
    texts: dict[str, str] = {}
    if arguments.emit:
        if path is None:
            raise ConfigError("--emit writes a file for `zero3d train`, which needs a MODEL, not --params.")
        known = file.config.model.path if file else path
        tree = train_config(answer.model, best.plan, known, None if file else _tokenizer(path, answer.model))
        tree["plan"] = planned_for(answer.cluster, arguments.cluster)
        asks = not file and _asks_for_data(answer.model)
        if asks:
            tree["data"] = {"train": FILL_ME} | tree["data"]
        adapters = _adapters(arguments.lora)
        if file:
            tree = file.with_plan(tree) | adapters
        else:
            save = goodput(answer.model, answer.cluster)
            trained = ADAPTERS if adapters else WEIGHTS if has_weights(path) else NEW
            tree = whole_run(tree | adapters, trained, best.estimate, save, answer.tokens)
        bare = bool(adapters) and not file and not has_weights(path)
        texts[arguments.emit] = plan_text.head(answer, asks, bare) + yaml.safe_dump(tree, sort_keys=False)
    if arguments.emit_deepspeed:
        flat = next(
            (row for row in (best, *rows) if row.plan.pp == row.plan.sp == 1 and not row.plan.mesh.sequence_parallel),
            best,
        )
        texts[arguments.emit_deepspeed] = json.dumps(deepspeed_config(flat.plan), indent=2) + "\n"
    if arguments.html:
        from zero3d.tools.page.plan_page import plan_page

        texts[arguments.html] = plan_page(answer, arguments.top)
    for name, text in texts.items():
        try:
            Path(name).write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"{name}: cannot be written ({error.strerror}).") from error
        print(f"written: {name}", file=sys.stderr)
    if arguments.emit_deepspeed and flat.plan != best.plan:
        print(
            f"DeepSpeed's JSON has no pipelines, so it has another plan: {plan_text.short(flat.plan)}", file=sys.stderr
        )
    if arguments.emit_deepspeed and flat.plan.activations != "none":
        print(
            f"It has no key for activations: {flat.plan.activations}, without which the plan may not fit",
            file=sys.stderr,
        )


def _adapters(asked: str | None) -> dict[str, Any]:
    """Return the section `lora` of a file, where --lora asks for one."""
    if asked is None:
        return {}
    choice, plain = to_dict(Config(lora=lora_of(asked)))["lora"], to_dict(Config())["lora"]
    return {"lora": {key: value for key, value in choice.items() if value != plain[key]}}


def has_weights(path: str) -> bool:
    """Return whether a run starts from weights: a folder has some."""
    folder = Path(path)
    return folder.is_dir() and any(any(folder.glob(f"*{ending}")) for ending in (".safetensors", ".bin"))


def _tokenizer(path: str, model: ModelSpec) -> str | None:
    """Return the tokenizer to write down for a model that comes without one: bytes, where its vocabulary is theirs."""
    if Path(path).is_dir() and any(Path(path).glob("tokenizer*")):
        return None
    return FILL_ME if _asks_for_data(model) else BYTES


def _asks_for_data(model: ModelSpec) -> bool:
    """Return whether a model's vocabulary is more than bytes, so that the default text teaches it nothing."""
    return model.vocab > OF_BYTES
