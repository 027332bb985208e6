"""What a run is: typed sections, read from YAML and dotted overrides. No torch.

sections    the dataclasses; each field says its meaning, range and choices
            (those of who holds what, and where: zero3d/spec)
sources     where training data come from, with weights
kinds       one row per type: its words, its conversion, its JSON Schema
keys        every dotted key with its type and range, made from the sections
hints       the key or choice that was probably meant
read        load and check: a YAML file or a dict, and overrides such as zero.stage=2
retired     keys of an earlier version, and what to type now
batch       batch = micro_batch x accumulate x dp
problems    what keys cannot be together; sections optimizer and offload, as an engine takes them
settled     the degrees and the batch on so many ranks, and what cannot be together then
own_code    what module:name names, imported; an error of it in one line
shrinking   the degrees that ranks must form, and how many of those that are there train, under health.min_ranks
deepspeed_schedules   DeepSpeed's schedules of the learning rate: names, options, defaults
describe    a Config as a dict or YAML; the keys as text, markdown and JSON Schema
"""

from zero3d.config.batch import Batch, resolve_batch
from zero3d.config.describe import as_markdown, bits_as_markdown, explain, schema, to_dict, to_yaml
from zero3d.config.problems import offload_of
from zero3d.config.read import check, given_keys, load, split_words
from zero3d.config.sections import (
    Checkpoint,
    Config,
    Data,
    Evaluate,
    Health,
    Log,
    Lora,
    LossScale,
    Model,
    Optimizer,
    Plan,
    Profile,
    Schedule,
    Train,
)
from zero3d.config.settled import settle
from zero3d.config.shrinking import EXACT_DP, asked_degrees, degrees_of, fitting_dp, fitting_ranks, zero_of
from zero3d.config.sources import DataSource
from zero3d.spec.mesh import Mesh
from zero3d.spec.offload import Offload
from zero3d.spec.zero import PRECISIONS, Zero

__all__ = [
    "EXACT_DP",
    "PRECISIONS",
    "Batch",
    "Checkpoint",
    "Config",
    "Data",
    "DataSource",
    "Evaluate",
    "Health",
    "Log",
    "Lora",
    "LossScale",
    "Mesh",
    "Model",
    "Offload",
    "Optimizer",
    "Plan",
    "Profile",
    "Schedule",
    "Train",
    "Zero",
    "as_markdown",
    "bits_as_markdown",
    "asked_degrees",
    "check",
    "degrees_of",
    "explain",
    "fitting_dp",
    "fitting_ranks",
    "given_keys",
    "load",
    "offload_of",
    "resolve_batch",
    "schema",
    "settle",
    "split_words",
    "to_dict",
    "to_yaml",
    "zero_of",
]
