"""The frozen dataclasses, one per section of the YAML file.

    output, seed, precision, autocast, ...    of the whole run
    model    lora    data    train            what is trained, on what, how long
    optimizer    schedule    loss_scale       the update
    health                                    what becomes of steps that are not finite, and of silence
    zero    offload    mesh                   who holds what, and where
    evaluate    checkpoint    log    profile    plan    what is done on the way

Every field says its meaning, range and choices in its metadata, from which `check`, `explain`
and `schema` are made; nothing about a key is written twice. Building one checks nothing: `load`
and `check` do.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from zero3d.config.deepspeed_schedules import OPTIONS
from zero3d.config.sources import FORMATS, DataSource
from zero3d.spec import formats
from zero3d.spec.bits import FACTS, Bits
from zero3d.spec.declaring import key
from zero3d.spec.mesh import Mesh
from zero3d.spec.offload import Offload
from zero3d.spec.optimizer import ADAMW, NAMES, OPTIMIZERS
from zero3d.spec.zero import PRECISIONS, Zero
from zero3d.stores.cache import LIMIT

WARN, STOP = ON_ERROR = ("warn", "stop")
EXPORTS = ("adapter", "merged", "both")
ENDPOINTS = PROMETHEUS, OTEL = "prometheus", "otel"  # trackers that others ask, or that send to a collector
TRACKERS = ("tensorboard", "wandb", "swanlab", "mlflow", "trackio", *ENDPOINTS)  # and the extras of these names
EVENTS = STRAGGLER, NONFINITE, END = "straggler", "nonfinite", "end"  # of log.on
SHORT, FULL = "short", "full"  # reports at the end of a run
GIVEN, NARROW = "given", "narrow"  # of plan.links: what the file says; among all ways, those that round, too


PARTS = WHOLE, TEXT = "whole", "text"  # of model.part


@dataclass(frozen=True)
class Model:
    """What is trained."""

    path: str = key(
        "demo",
        "a Hugging Face folder, a config.json, a preset, or module:function that returns a module",
        bits=FACTS["model"],
    )
    init: str = key(
        "weights", "from the folder's weights, or random from its config", bits=None, choices=("weights", "random")
    )
    part: str = key(
        WHOLE,
        "whole: the class that config.json names, with its towers for images; text: the language model in it alone, "
        "which is trained and exported as one of text",
        bits=FACTS["model"],
        choices=PARTS,
    )
    attn: str | None = key(
        "auto",
        "implementation of attention, by its name in transformers: eager, sdpa, flash_attention_2, flash_attention_3, "
        "flex_attention, or a kernel of the Hub as owner/name; auto: an installed flash kernel that fits the GPU, "
        "else sdpa, and the run prints its choice; null: transformers' own choice",
        bits=FACTS["attention"],
    )
    linear: str | None = key(
        None,
        "fp8: linear layers of blocks multiply in fp8 by torchao, on GPUs that support it; the run prints which "
        "layers do",
        bits="factors of products are rounded differently",
        choices=("fp8",),
    )
    quantize: str | None = key(
        None,
        f"format of the frozen linear layers and stacked experts of blocks: {formats.described()}; forward and "
        "backward decode each matrix when they use it",
        bits="frozen weights are rounded differently",
        choices=tuple(formats.FORMATS),
    )


ALL_LINEAR = "all-linear"  # of lora.targets
GAUSSIAN = "gaussian"  # of lora.init


@dataclass(frozen=True)
class Lora:
    """Low-rank adapters (PEFT's LoRA) beside frozen weights; without a rank there are none."""

    rank: int | None = key(
        None,
        "rank of the adapters; an adapter has rank x (inputs + outputs) parameters; null: no adapters",
        bits=FACTS["model"],
        least=1,
    )
    alpha: float | None = key(
        None,
        "adapters' outputs are multiplied by alpha / rank; by default twice the rank",
        bits=FACTS["modules"],
        above=0,
    )
    targets: tuple[str, ...] | None = key(
        None,
        "matrices that get an adapter, as names or patterns of modules (q_proj, *.mlp.*) or of stacked experts "
        "(gate_up_proj); all-linear: every linear layer of the language model's blocks; by default PEFT's choice for "
        "this type of model, else all-linear",
        bits=FACTS["model"],
    )
    dropout: float = key(
        0.0, "probability with which an adapter's inputs are dropped", bits=FACTS["modules"], least=0, below=1
    )
    train_also: tuple[str, ...] | None = key(
        None,
        "modules or parameters that are trained in full beside the adapters, as names or patterns: "
        "multi_modal_projector",
        bits=FACTS["model"],
    )
    rslora: bool = key(False, "rsLoRA: adapters' outputs are multiplied by alpha / sqrt(rank)", bits=FACTS["modules"])
    dora: bool = key(
        False,
        "DoRA: adapters change the direction of a matrix's rows, and a magnitude per row is trained, too",
        bits=FACTS["model"],
    )
    init: str | None = key(
        None,
        "how A is drawn: gaussian is normal with deviation 1 / rank; by default uniform in +-1 / sqrt(inputs)",
        bits=None,
    )


@dataclass(frozen=True)
class Data:
    """Names the data for training and validation, and how sequences are made of it."""

    train: tuple[DataSource, ...] | tuple[str, ...] = key(
        ("stdlib",),
        "files or folders, or URLs of object stores (s3://bucket/corpus); stdlib: the text of Python's standard "
        "library; or a list of sources with weights",
        bits=FACTS["data"],
    )
    validation: float | tuple[DataSource, ...] | tuple[str, ...] = key(
        0.0,
        "files or folders, or the fraction of documents held out of each source",
        bits=FACTS["data"],
        least=0,
        most=0.5,
    )
    format: str = key("auto", "what the files are", bits=FACTS["data"], choices=FORMATS)
    tokenizer: str | None = key(
        None,
        "a tokenizer's folder, or bytes; by default the model's own, or bytes where the model is no folder",
        bits=FACTS["data"],
    )
    length: int = key(
        1024, "tokens per sequence; where it is not given, at most the model's positions", bits=FACTS["data"], least=2
    )
    packing: bool | str = key(
        True,
        "put several documents into one sequence, where they do not see each other; best_fit: without cutting a "
        "document that fits into a sequence",
        bits=FACTS["data"],
        choices=("best_fit",),
    )
    images: str | None = key(
        None,
        "folder of the data's images; by default the folder of the data; needs a vision-language model",
        bits=FACTS["data"],
    )
    group_by_modality: bool = key(
        True,
        "with images: the sequences of a step all have images, or none has, except for the last steps of an epoch; "
        "packed ones are of documents of one kind",
        bits=FACTS["data"],
    )
    patches: int | None = key(
        None,
        "with images: most patches in a micro-batch, or tiles where the processor makes those; each sequence has at "
        "most its equal share",
        bits=FACTS["data"],
        least=1,
    )
    group_by_length: bool = key(
        False,
        "without packing: sequences of similar length in each batch, and batches in random order",
        bits=FACTS["data"],
    )
    streaming: bool = key(
        False,
        "without packing: tokenize records when a batch needs them, and store no tokens; a record is a sequence",
        bits=FACTS["data"],
    )
    shuffle: bool = key(True, "a new order in every epoch", bits=FACTS["data"])
    skip_bad_lines: bool = key(False, "leave out lines that do not parse, and count them", bits=FACTS["data"])
    workers: int = key(0, "processes per rank that prepare batches", bits=None, least=0)
    processes: int | None = key(
        None,
        "processes per host that tokenize; by default as many as its cores and the size of the data suggest",
        bits=None,
        least=1,
    )
    cache: str | None = key(None, "where tokens are kept between runs; by default ~/.cache/zero3d", bits=None)
    cache_limit: str = key(
        f"{LIMIT // 10**9}GB",
        "largest size of the files that are cached from object stores; the least recently used go first",
        bits=None,
    )


@dataclass(frozen=True)
class Train:
    """Sets how long a run trains, and its batch: batch = micro_batch x accumulate x dp, in sequences."""

    steps: int | None = key(None, "optimizer steps; or give epochs", bits=FACTS["scheduler"], least=1)
    epochs: float | None = key(
        None, "passes over the training data; by default 1 if steps are not given", bits=FACTS["scheduler"], above=0
    )
    batch: int | None = key(None, "sequences per step over all ranks", bits=FACTS["batch"], least=1)
    micro_batch: int | None = key(None, "sequences per rank in one forward", bits=FACTS["micro_batch"], least=1)
    accumulate: int | None = key(None, "micro-batches per rank and step", bits=FACTS["accumulate"], least=1)
    compile: bool = key(False, "torch.compile the blocks", bits=FACTS["compiled"])
    ema: float | None = key(
        None,
        "decay of an exponential moving average of the weights, such as 0.999; the average is evaluated beside the "
        "weights and exported in their place",
        bits=None,
        above=0,
        below=1,
    )
    expert_bias_rate: float = key(
        0.0,
        "by how much a step changes the bias of routers that have one (DeepSeek-V3, GLM-4-MoE): down for experts with "
        "more tokens than the mean, up for the others, such as 0.001; 0 leaves the bias as it was loaded",
        bits="biases of routers move by other amounts",
        least=0,
    )
    tiled_loss: bool | str = key(
        "auto",
        "compute the next-token loss in tiles, without logits of the whole vocabulary, equal up to rounding; auto: if "
        "logits of a micro-batch take more than 4 GB and tp is 1, and the run prints its choice",
        bits=FACTS["tiled_loss"],
        choices=("auto",),
    )
    deterministic: bool | str = key(
        "auto",
        "on accelerators, use only algorithms that give the same bits in every run, and end with an error at an "
        "operation that has none; auto: with zero.exact and with health.replay",
        bits=FACTS["deterministic"],
        choices=("auto",),
    )


@dataclass(frozen=True)
class Optimizer:
    """The optimizer, its parameter groups, and clipping."""

    name: str = key(
        ADAMW,
        "; ".join(f"{row.name}: {row.text}" for row in OPTIMIZERS.values() if row.text),
        bits=FACTS["optimizer"],
        choices=NAMES,
    )
    lr: float = key(3e-4, "peak learning rate", bits=FACTS["options"], above=0)
    betas: tuple[float, float] = key(
        (0.9, 0.95), "decay of Adam's two averages", bits=FACTS["options"], least=0, below=1
    )
    eps: float = key(1e-8, "added to the square root of v", bits=FACTS["options"], above=0)
    weight_decay: float = key(
        0.1, "decay of weights per step, multiplied by the learning rate", bits=FACTS["options"], least=0
    )
    no_decay: str | None = key(
        "auto",
        "parameters without weight decay, as name patterns; auto: norms and biases, rates and short convolutions "
        "of recurrences, and all of one dimension; null: those of one dimension alone, the default of older versions",
        bits=FACTS["groups"],
    )
    groups: tuple[Mapping[str, str | float], ...] | None = key(
        None,
        "parameters with a learning rate or weight decay of their own, as {match: NAME, lr: NUMBER, weight_decay: "
        "NUMBER}, with Muon also name: adamw or muon; the first group that matches counts, and all follow the same "
        "schedule",
        bits=FACTS["groups"],
    )
    muon: Mapping[str, float | str | bool | None] | None = key(
        None,
        "options of Muon: lr of matrices (by default optimizer.lr), momentum (0.95), nesterov (true), ns_steps (5), "
        "adjust_lr (original, or by default match_rms_adamw, with which AdamW's lr and weight decay can be kept)",
        bits=FACTS["options"],
    )
    split: Mapping[str, str] | None = key(
        None,
        "for Muon: how a parameter that fuses matrices is split along its outputs, as {NAME: STYLE}, instead of the "
        "model's own plan: none, equal:2, sizes:256,64,64 or in_turn:64,64,64",
        bits=FACTS["groups"],
    )
    clip_norm: float | None = key(
        1.0, "largest global gradient norm; null: no clipping", bits=Bits("gradients are scaled differently"), above=0
    )


@dataclass(frozen=True)
class Schedule:
    """The learning rate over the run; a pipeline's schedule is mesh.schedule."""

    name: str = key(
        "cosine",
        "shape of the learning rate after warm-up; wsd stays at the peak until the final decay, inverse_sqrt falls "
        "from the end of warm-up; or one of DeepSpeed's schedules, with its own warm-up",
        bits=FACTS["scheduler"],
        choices=("cosine", "linear", "constant", "wsd", "inverse_sqrt", *OPTIONS),
    )
    options: Mapping[str, float | str | bool | None] | None = key(
        None,
        "options of DeepSpeed's schedules, by their names there (total_num_steps); those left out have DeepSpeed's "
        "defaults",
        bits=FACTS["scheduler"],
    )
    warmup: float = key(0.0, "steps of warm-up; below 1, a fraction of all steps", bits=FACTS["scheduler"], least=0)
    decay: float = key(
        0.1, "wsd only: steps of the final decay; below 1, a fraction of all steps", bits=FACTS["scheduler"], above=0
    )
    final: float = key(
        0.1,
        "cosine, linear, wsd: the last learning rate as a fraction of the peak",
        bits=FACTS["scheduler"],
        least=0,
        most=1,
    )


@dataclass(frozen=True)
class LossScale:
    """fp16 only."""

    initial: float = key(65536.0, "first scale", bits=None, above=0)
    window: int = key(1000, "steps without overflow after which it doubles", bits=FACTS["loss_scale"], least=1)
    hysteresis: int = key(2, "overflows before it halves", bits=FACTS["loss_scale"], least=1)
    minimum: float = key(1.0, "it never falls below", bits=FACTS["loss_scale"], above=0)


@dataclass(frozen=True)
class Health:
    """What ends a run: gradients that are NaN or infinite (not fp16's overflows) or computed wrongly, and silence."""

    nonfinite: str = key(
        "skip",
        "skip a step whose gradients are NaN or infinite and go on, or stop at the first one with exit code 1 (stop "
        "looks at every step's gradients)",
        bits=None,
        choices=("skip", "stop"),
    )
    max_skips: int = key(
        20,
        "after so many of these steps in a row, or in a shorter run if no step was applied, end with exit code 1 and "
        "the first unit's name",
        bits=None,
        least=1,
    )
    min_ranks: int | None = key(
        None,
        "if ranks are lost, go on with as few as this: dp shrinks, train.batch stays and accumulation grows; needs "
        "train.batch and train.micro_batch, and mesh.dp is then the largest dp; by default a run needs all its ranks",
        bits=None,
        least=1,
    )
    timeout: float = key(
        300.0,
        "seconds without a sign of life from a rank, after which the watchdog says who waits for whom and ends the "
        "run with exit code 1; must be longer than the longest forward or backward of a unit; 0: never, for debuggers",
        bits=None,
        least=0,
    )
    slow_timeout: float = key(
        3600.0,
        "the same while any rank starts, reads data, saves, loads, evaluates, exports or compiles, and moves no bytes "
        "to or from a disk; 0: never",
        bits=None,
        least=0,
    )
    replay: int = key(
        0,
        "every so many steps, a neighbour computes one micro-batch of each rank again; if a bit of a gradient "
        "differs, the step is not applied, and the run ends and names the rank; 0: never; turns on "
        "train.deterministic",
        bits=None,
        least=0,
    )


@dataclass(frozen=True)
class Evaluate:
    """The held-out loss, values of your own, the best checkpoint, and early stopping."""

    every: int = key(0, "steps between evaluations; 0: only at the end", bits=None, least=0)
    batches: int | None = key(
        None,
        "micro-batches per rank (with zero.exact: over all ranks); by default all held-out data",
        bits=None,
        least=1,
    )
    function: str | None = key(
        None,
        "module:function(engine, step), called on every rank at each evaluation; returns {name: number}",
        bits=None,
    )
    best: str = key(
        "validation_loss",
        "the value that decides which checkpoint is the best: the held-out loss, or a value of the function",
        bits=None,
    )
    highest: bool = key(False, "the highest value is the best, as for an accuracy; else the lowest", bits=None)
    patience: int | None = key(
        None,
        "end the run early, as complete, after so many evaluations in a row without a new best value",
        bits=None,
        least=1,
    )
    prompt: bool | str | None = key(
        True,
        "a text that the trained model continues at the end; true: the first words of a held-out text, or a held-out "
        "chat up to its answer, for a few tokens; false or null: none",
        bits=None,
    )


@dataclass(frozen=True)
class Checkpoint:
    """Checkpoints during a run, and the export at its end."""

    every: int = key(0, "steps between checkpoints; 0: only at the end", bits=None, least=0)
    keep: int = key(2, "how many of the newest checkpoints are kept", bits=None, least=1)
    best: bool = key(True, "keep also the checkpoint with the best evaluation (evaluate.best)", bits=None)
    asynchronous: bool = key(
        False,
        "write checkpoints in the background while training goes on, from a copy of the states in host memory; a run "
        "waits for its last one",
        bits=None,
    )
    on_error: str | None = key(
        None,
        "if a checkpoint cannot be written: print a warning and go on, or end the run; by default warn if it is "
        "written in the background, else end; the last checkpoint of a run, and one at a stop, must be written",
        bits=None,
        choices=ON_ERROR,
    )
    export: bool | str = key(
        True,
        "write the final weights as a Hugging Face folder; for a model with adapters: true and adapter write the "
        "adapters for PEFT, merged writes full weights with the adapters merged in, both writes both; on new weights, "
        "which no folder has, true is merged",
        bits=None,
        choices=EXPORTS,
    )
    verify: bool = key(False, "load the export on one rank, as a user would, and compare its held-out loss", bits=None)
    to: str | None = key(
        None,
        "a URL of an object store (s3://bucket/run) that gets a copy of every checkpoint and of what is exported; "
        "--resume auto looks there, too",
        bits=None,
    )


@dataclass(frozen=True)
class Log:
    """Chooses what is printed, and which trackers get the values; metrics.jsonl is always written."""

    every: int | None = key(
        None,
        "steps between printed lines; null: about 20 lines a run, none on a terminal, which has a progress bar",
        bits=None,
        least=1,
    )
    to: tuple[str, ...] | None = key(
        None,
        "trackers that get every step's values and the run's configuration, from rank 0",
        bits=None,
        choices=TRACKERS,
    )
    project: str = key("zero3d", "the project that trackers show the run in", bits=None)
    report: str = key(
        SHORT,
        "what a run prints of memory and traffic at its end: short, whether they are those of the formulas; full, its "
        "tables to the byte, which zero3d report prints in any case",
        bits=None,
        choices=(SHORT, FULL),
    )
    port: int | None = key(
        None,
        "with prometheus: the port where rank 0 answers scrapes; null: none, and OUTPUT/metrics.prom alone",
        bits=None,
        least=1,
        most=65535,
    )
    host: str = key(
        "127.0.0.1",
        "with log.port: the address that is listened on; who reaches it reads all values, 0.0.0.0 is every network",
        bits=None,
    )
    on: Mapping[str, str] | None = key(
        None,
        "shell commands, as {EVENT: COMMAND}, that rank 0 starts with facts in their environment and never waits for: "
        "straggler, a rank that makes the others wait; nonfinite, a step skipped for a loss or norm that is not "
        "finite, and giving up; end, a run that has finished, ended early, was stopped or failed",
        bits=None,
        choices=EVENTS,
    )

    @property
    def trackers(self) -> Mapping[str, str]:
        """The key and value that ask for each tracker, by its name."""
        return {name: f"log.to={name}" for name in self.to or ()}


@dataclass(frozen=True)
class Profile:
    """A trace for chrome://tracing or Perfetto."""

    steps: int = key(0, "steps that are traced", bits=None, least=0)
    after: int = key(2, "steps before them", bits=None, least=0)


@dataclass(frozen=True)
class Plan:
    """The run's third step beside its plan, settings for slow links chosen by the plan, and what it is planned for."""

    cluster: str | None = key(
        None,
        "file that describes the cluster, as zero3d calibrate writes it; by default the data sheet of the device",
        bits=None,
    )
    links: str = key(
        GIVEN,
        "how to use slow links between hosts: given, as this file says; auto, the fastest of mesh.shard and "
        "zero.second_shard by plan.cluster; narrow, also with zero.gather_wire and zero.slow_wire, which round what "
        "is sent; zero3d train prints what it chooses and why",
        bits=None,
        choices=(GIVEN, "auto", NARROW),
    )
    gpus: int | None = key(
        None,
        "GPUs that the run is planned for: zero3d plan, explain, simulate and launch take this, gpu and nodes where no "
        "option says others; a run goes by the ranks that it is started on",
        bits=None,
        least=1,
    )
    gpu: str | None = key(None, "their card, by its name in the planner's catalogue, such as h100", bits=None)
    nodes: int | None = key(
        None, "machines of these GPUs; by default as many as such cards usually come in", bits=None, least=1
    )


@dataclass(frozen=True)
class Config:
    """A whole run."""

    output: str | None = key(
        None, "a new folder for everything the run writes; by default the first free zero3d-NAME-N", bits=None
    )
    seed: int = key(0, "seed of data order, dropout and random weights", bits=FACTS["data"], least=0, most=2**32 - 1)
    precision: str = key(
        "bf16", "dtype in which the model computes; masters are fp32", bits=FACTS["precision"], choices=PRECISIONS
    )
    autocast: bool = key(
        False,
        "run the forward in torch's autocast: matrix products in `precision`, which is bf16 or fp16, and what torch "
        "keeps wide in fp32, as Accelerate and Lightning do for mixed precision; the model's outputs are fp32",
        bits="what autocast keeps in fp32 is rounded otherwise",
    )
    activations: str = key(
        "none",
        "recomputation in the backward: full, of every block; every:K, of segments of K blocks; selective, of "
        "what mixes tokens only: attention, recurrences, short convolutions",
        bits=None,
        choices=("none", "full", "selective", "every:K"),
    )
    freeze: tuple[str, ...] | None = key(
        None,
        "modules or parameters that are not trained, as names or patterns: vision_tower, *.embed_tokens",
        bits=FACTS["model"],
    )
    callbacks: tuple[str, ...] | None = key(
        None,
        "classes as module:Class, whose methods are called on every rank: on_start, on_step, on_evaluate, "
        "on_save, on_end",
        bits=None,
    )
    model: Model = field(default_factory=Model)
    lora: Lora = field(default_factory=Lora)
    data: Data = field(default_factory=Data)
    train: Train = field(default_factory=Train)
    optimizer: Optimizer = field(default_factory=Optimizer)
    schedule: Schedule = field(default_factory=Schedule)
    loss_scale: LossScale = field(default_factory=LossScale)
    health: Health = field(default_factory=Health)
    zero: Zero = field(default_factory=Zero)
    offload: Offload = field(default_factory=Offload)
    mesh: Mesh = field(default_factory=Mesh)
    evaluate: Evaluate = field(default_factory=Evaluate)
    checkpoint: Checkpoint = field(default_factory=Checkpoint)
    log: Log = field(default_factory=Log)
    profile: Profile = field(default_factory=Profile)
    plan: Plan = field(default_factory=Plan)
