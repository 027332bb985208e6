"""Settings that cannot be together: a case for each rule, in the words of files, engines and plans."""

import json
from dataclasses import asdict, fields, replace
from importlib import import_module
from pathlib import Path

import pytest
from models import build

import zero3d
from zero3d.distributed.degrees import Degrees
from zero3d.errors import ConfigError
from zero3d.spec.declaring import as_keyword, in_file, keyword_of
from zero3d.spec.mesh import Mesh
from zero3d.spec.offload import Offload
from zero3d.spec.rules import RULES, as_markdown, check, refusals
from zero3d.spec.sections import Spec
from zero3d.spec.zero import Zero
from zero3d.tools.cli.main import parse
from zero3d.tools.plan.estimate import evaluate
from zero3d.tools.plan.hardware import cluster
from zero3d.tools.plan.spec import ModelSpec, ParallelPlan

ROOT = Path(__file__).parents[2]
NARROW = Offload("host", gradients="host", gradient_dtype="bf16")
TABLE = [  # for each rule in its place: what breaks it and no other, and how a file's refusal begins and ends
    (Spec(Zero(master="split"), precision="fp32"),
     "zero.master=split stores masters", "precision=fp32 has no bf16 weights: type precision=bf16, or zero.master=fp32."),
    (Spec(Zero(2, weights="cast")),
     "zero.weights=cast is for parameters that are gathered", "type zero.stage=3, or zero.weights=kept."),
    (Spec(Zero(weights="cast", release="every_step")),
     "zero.weights=cast is for gathers", "type zero.release=every_use, or zero.weights=kept."),
    (Spec(Zero(weights="cast"), precision="fp32"),
     "zero.weights=cast makes weights of wider masters", "type precision=bf16, or zero.weights=kept."),
    (Spec(Zero(weights="cast", master="split")),
     "zero.weights=cast makes weights of whole masters", "which takes as much memory then, or zero.weights=kept."),
    (Spec(Zero(weights="cast"), Offload("host")),
     "zero.weights=cast makes weights of masters on the device", "or offload.optimizer=none offload.params=none."),
    (Spec(Zero(1, reduce="every_micro_batch")),
     "zero.reduce=every_micro_batch keeps", "type zero.stage=2, or zero.reduce=every_step."),
    (Spec(Zero(reduce_dtype="bf16"), precision="fp32"),
     "zero.reduce_dtype=bf16 cannot carry", "exactly: type zero.reduce_dtype=fp32."),
    (Spec(Zero(reduce_dtype="bf16", exact=True)),
     "zero.exact=true sums gradients in fp32", "are sent in the compute dtype anyway."),
    (Spec(Zero(reduce="every_micro_batch", exact=True), mesh=Mesh(pp=2)),
     "zero.exact=true in a pipeline (mesh.pp=2)", "leave zero.reduce=every_micro_batch out."),
    (Spec(Zero(gather_budget="64MB", release="every_step")),
     "zero.gather_budget=64MB gathers", "leave one of them out."),
    (Spec(Zero(gather_budget="64MB"), mesh=Mesh(pp=2, schedule="zbv")),
     "zero.gather_budget=64MB does not work with mesh.schedule=zbv", "or leave zero.gather_budget=64MB out."),
    (Spec(Zero(2, gather_wire="int8")),
     "zero.gather_wire=int8 is for parameters that are gathered", "type zero.stage=3, or zero.gather_wire=same."),
    (Spec(Zero(gather_wire="int8", release="every_step")),
     "zero.gather_wire=int8 is for gathers", "type zero.release=every_use, or zero.gather_wire=same."),
    (Spec(Zero(2, second_shard=4)),
     "zero.second_shard=4 is for parameters that are gathered", "type zero.stage=3, or zero.second_shard=null."),
    (Spec(Zero(second_shard="node", release="every_step")),
     "zero.second_shard=node is for gathers", "type zero.release=every_use, or zero.second_shard=null."),
    (Spec(Zero(second_shard="host")),
     "zero.second_shard=host is not a group size", "for the ranks of a host, or zero.second_shard=null."),
    (Spec(Zero(communicators=3)),
     "zero.communicators=3 is not a number of process groups", "or zero.communicators=null for what the machine needs."),
    (Spec(Zero(slow_wire="int8")),
     "zero.slow_wire=int8 says how sums travel", "or the number of ranks of a host, or zero.slow_wire=same."),
    (Spec(Zero(slow_wire="int4", exact=True), mesh=Mesh(shard=2)),
     "zero.slow_wire=int4 rounds partial sums", "zero.exact=true needs the same bits at any dp: type zero.slow_wire=same."),
    (Spec(Zero(slow_wire="bf16", slow_rounding="stochastic"), mesh=Mesh(shard=2)),
     "zero.slow_rounding=stochastic is for sums sent as int8 or int4, and this is zero.slow_wire=bf16", "zero.slow_wire=int4, or zero.slow_rounding=nearest."),
    (Spec(Zero(exact=True), mesh=Mesh(experts="fast")),
     "mesh.experts=fast computes the tokens", "type mesh.experts=exact."),
    (Spec(mesh=Mesh(ep=2, pp=2, schedule="zero-bubble")),
     "mesh.ep=2 does not work yet with mesh.schedule=zero-bubble", "type mesh.schedule=1f1b or mesh.schedule=interleaved."),
    (Spec(mesh=Mesh(tp=2, ep=2, sequence_parallel=True)),
     "mesh.ep=2 does not work yet with mesh.sequence_parallel=true", "type mesh.sequence_parallel=false, or mesh.ep=1."),
    (Spec(mesh=Mesh(tp=2, sp=2, sequence_parallel=True)),
     "mesh.sp=2 already cuts activations", "type mesh.sequence_parallel=false."),
    (Spec(Zero(1, exact=True), mesh=Mesh(sp=2), accumulate=2),
     "zero.exact=true with mesh.sp=2 and train.accumulate=2", "without a pipeline, or train.accumulate=1."),
    (Spec(mesh=Mesh(partition_activations=True)),
     "mesh.partition_activations=true cuts", "or leave it out."),
    (Spec(offload=Offload(activations="host"), activations="none"),
     "offload.activations is about", "type activations=full, or leave it out."),
    (Spec(mesh=Mesh(tp=2, partition_activations=True), activations="none"),
     "mesh.partition_activations is about", "type activations=full, or leave it out."),
    (Spec(mesh=Mesh(ep=2), replay=5),
     "health.replay=5 has a neighbour", "leave health.replay=5 out."),
    (Spec(offload=Offload(params="host"), ema=0.999),
     "train.ema=0.999 keeps averages", "type offload.optimizer=none offload.params=none, or train.ema=null."),
    (Spec(offload=Offload(optimizer="host"), optimizer="adamw8bit"),
     "optimizer.name=adamw8bit keeps 8-bit moments", "or AdamW with offload.moments=bf16."),
    (Spec(precision="fp64", optimizer="adamw8bit"),
     "optimizer.name=adamw8bit updates fp32 masters", "type precision=bf16, or use AdamW."),
    (Spec(precision="fp32", linear="fp8"),
     "model.linear=fp8 converts bf16 matrices", "precision=fp32 has no bf16 matrices: type precision=bf16, or model.linear=null."),
    (Spec(mesh=Mesh(tp=2), linear="fp8"),
     "model.linear=fp8 does not work with mesh.tp=2", "Type mesh.tp=1, or model.linear=null."),
    (Spec(Zero(gather_budget="64MB"), linear="fp8"),
     "model.linear=fp8 needs whole matrices", "type zero.gather_budget=null, or model.linear=null."),
    (Spec(linear="fp8", quantize="nf4"),
     "model.quantize=nf4 decodes frozen matrices", "type model.linear=null, or model.quantize=null."),
    (Spec(mesh=Mesh(tp=2), quantize="nf4-double"),
     "model.quantize=nf4-double scales its scales", "type model.quantize=nf4, or mesh.tp=1."),
    (Spec(Zero(2), Offload(params="host")),
     "offload.params=host needs stage 3, and zero.stage=2", "type zero.stage=3, or offload.params=none."),
    (Spec(Zero(release="every_step"), Offload(params="host")),
     "offload.params=host is for weights that are released after every use, and zero.release=every_step", "type zero.release=every_use, or offload.params=none."),
    (Spec(Zero(1), Offload("host", gradients="host")),
     "offload.gradients=host needs stage 2 or 3, and zero.stage=1", "type zero.stage=2 or 3, or offload.gradients=device."),
    (Spec(Zero(exact=True), Offload("host", gradients="host")),
     "offload.gradients=host takes gradients that are reduced after every micro-batch, and zero.exact=true keeps", "type zero.exact=false, or offload.gradients=device."),
    (Spec(Zero(2, reduce="every_step"), Offload("host", gradients="host")),
     "offload.gradients=host takes gradients that are reduced after every micro-batch, and zero.reduce=every_step keeps", "type zero.reduce=every_micro_batch, or offload.gradients=device."),
    (Spec(offload=Offload("host", gradients="host"), mesh=Mesh(pp=2)),
     "offload.gradients=host takes gradients that are reduced after every micro-batch, and zero.reduce=auto in a pipeline (mesh.pp=2) keeps", "type zero.reduce=every_micro_batch, or offload.gradients=device."),
    (Spec(offload=Offload("disk")),
     "offload.optimizer=disk needs a folder", "type offload.directory=FOLDER on a local disk."),
    (Spec(offload=Offload(params="disk")),
     "offload.params=disk needs a folder", "type offload.directory=FOLDER on a local disk."),
    (Spec(offload=Offload(moments="bf16")),
     "offload.moments=bf16 is for", "type offload.optimizer=host, or leave offload.moments out."),
    (Spec(offload=Offload(executor="host")),
     "offload.executor=host is for", "type offload.optimizer=host, or leave offload.executor out."),
    (Spec(offload=Offload("host", executor="host"), optimizer="muon"),
     "offload.executor=host updates states of AdamW alone, and the optimizer is optimizer.name=muon", "type offload.executor=device, or leave it out."),
    (Spec(offload=Offload("host", executor="host"), precision="fp64"),
     "offload.executor=host updates fp32 states, and those of precision=fp64", "type offload.executor=device, or leave it out."),
    (Spec(offload=Offload(gradients="host")),
     "offload.gradients=host moves gradients", "type offload.optimizer=host, or offload.gradients=device."),
    (Spec(offload=Offload("auto", moments="bf16")),
     "offload.moments=bf16 does not work with offload.optimizer=auto", "Type offload.optimizer=host, or offload.moments=fp32."),
    (Spec(offload=replace(NARROW, optimizer="auto")),
     "offload.gradient_dtype=bf16 does not work with offload.optimizer=auto", "Type offload.optimizer=host, or offload.gradient_dtype=fp32."),
    (Spec(offload=Offload("host", gradient_dtype="bf16")),
     "offload.gradient_dtype=bf16 is for gradients", "type offload.gradients=host, or offload.gradient_dtype=fp32."),
    (Spec(offload=NARROW, precision="fp64"),
     "offload.gradient_dtype=bf16 keeps 8 of the 53", "type offload.gradient_dtype=fp32, which keeps them all."),
    (Spec(offload=NARROW, mesh=Mesh(tp=2)),
     "offload.gradient_dtype=bf16 does not work with tp or pp above 1", "type offload.gradient_dtype=fp32."),
    (Spec(offload=NARROW, optimizer="muon"),
     "offload.gradient_dtype=bf16 does not work with optimizer.name=muon", "type offload.gradient_dtype=fp32."),
    (Spec(offload=Offload("auto", fraction=0.5)),
     "offload.fraction=0.5 does not work with offload.optimizer=auto", "leave offload.fraction=0.5 out, or type offload.optimizer=host."),
    (Spec(precision="fp32", autocast=True),
     "autocast=true computes matrix products in 16 bits", "type precision=bf16, or autocast=false."),
]  # fmt: skip
OF_FILES = [  # not where a folder is named, nor where the key's own bounds refuse first
    row for row in TABLE
    if not (row[0].offload.uses_folder or row[0].offload.directory) and row[0].zero.communicators is None
]  # fmt: skip
OF_ENGINES = [
    row
    for row in TABLE
    if row[0].activations is row[0].optimizer is row[0].mesh.ep is row[0].mesh.pp is row[0].mesh.sp is None
    and not (row[0].mesh.tp and (row[0].linear or row[0].offload == NARROW))
    and not (row[0].mesh.shard and row[0].zero.slow_wire != "same")
    and row[0].quantize is None
]


def told(spec, write):
    ((_, words),) = refusals(spec, write)
    return words


@pytest.mark.parametrize("number", range(len(RULES)), ids=[rule.key for rule in RULES])
def test_a_rule_is_broken_alone_and_says_what_to_type(number):
    spec, begins, ends = TABLE[number]
    assert [rule.broken(spec) for rule in RULES].index(True) == number
    words = told(spec, in_file)
    assert words.startswith(begins)
    assert words.endswith(ends)
    with pytest.raises(ConfigError) as refused:
        check(spec, in_file)
    assert str(refused.value) == words


def test_every_rule_has_its_case_and_the_defaults_break_none():
    assert len(TABLE) == len(RULES)
    assert not list(refusals(Spec()))
    for optimizer in ("adamw", "muon", "adamw8bit"):
        assert not list(refusals(Spec(activations="none", optimizer=optimizer)))


VERBS = {
    "train": ["train"], "plan": ["plan", "explain"], "launch": ["launch", "torchrun"], "config": ["config", "show"],
}  # fmt: skip


def file_of(spec):
    """What a run's file says of settings: those that are not as by default."""
    tree = {
        name: {key: value for key, value in asdict(section).items() if value != getattr(type(section)(), key)}
        for name, section in (("zero", spec.zero), ("offload", spec.offload), ("mesh", spec.mesh))
    }
    return tree | {
        "precision": spec.precision,
        "autocast": spec.autocast,
        "activations": spec.activations or "full",
        "optimizer": {"name": spec.optimizer or "adamw"},
        "train": {"ema": spec.ema, "accumulate": spec.accumulate},
        "health": {"replay": spec.replay},
        "model": {"linear": spec.linear, "quantize": spec.quantize},
    }


def refused_by(arguments):
    """What a verb says when it refuses."""
    with pytest.raises(ConfigError) as refused:
        import_module(f"zero3d.tools.cli.{arguments.verb}").run(arguments)
    return str(refused.value)


def test_verbs_refuse_a_file_in_these_words(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    parsed = [parse([*words, "run.yaml"]) for words in VERBS.values()]
    for spec, *_ in OF_FILES:
        Path("run.yaml").write_text(json.dumps(file_of(spec)))
        said = {refused_by(arguments) for arguments in parsed}
        assert len(said) == 1
        assert said.pop().startswith(f"run.yaml: {told(spec, in_file)}")


@pytest.mark.parametrize(
    ("words", "begins"),
    [
        (["mesh.shard=2", "offload.optimizer=host", "offload.gradients=host", "offload.gradient_dtype=bf16"],
         "offload.gradient_dtype=bf16 does not work with tp or pp above 1 or mesh.shard below dp"),
        (["mesh.shard=4", "zero.slow_wire=int8"], "zero.slow_wire=int8 says how sums travel between copies"),
        (["mesh.sp=2", "zero.exact=true", "zero.stage=1", "train.batch=4", "train.micro_batch=1"],
         "zero.exact=true with mesh.sp=2 and train.accumulate=2 needs"),
    ],
)  # fmt: skip
def test_verbs_refuse_in_these_words_what_follows_from_the_number_of_ranks(words, begins, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("zero3d.tools.cli.train.run_job", lambda *_: pytest.fail("ranks were started"))
    Path("run.yaml").write_text("{model: {path: demo}, data: {train: stdlib, tokenizer: bytes, length: 64}, output: a}")
    ranks = {"train": ["--ranks=4"], "plan": ["--gpus=4"], "launch": ["--nodes=1", "--gpus-per-node=4"]}
    asked = {verb: parse([*VERBS[verb], "run.yaml", *words, *of_verb]) for verb, of_verb in ranks.items()}
    said = {verb: refused_by(arguments) for verb, arguments in asked.items()}
    assert said["train"].startswith(begins)
    assert said["plan"] == said["train"]
    assert said["launch"] == f"nodes x GPUs = 1 x 4 = 4 processes: {said['train']}"


@pytest.mark.parametrize(("spec", "begins", "_"), OF_ENGINES)
def test_an_engine_is_refused_in_these_words_as_keywords(spec, begins, _):
    of_mesh = {key: value for key, value in asdict(spec.mesh).items() if key not in Degrees._fields}
    of_zero = {keyword_of("zero", key): value for key, value in asdict(spec.zero).items()}
    keywords = of_zero | of_mesh | {"precision": spec.precision, "ema": spec.ema, "replay": spec.replay}
    keywords |= {"linear": spec.linear, "autocast": spec.autocast}
    with pytest.raises(ConfigError) as refused:
        zero3d.Engine(build("net"), offload=spec.offload, **keywords)
    assert str(refused.value) == told(spec, as_keyword)


def test_a_plan_is_refused_in_these_words():
    plan = ParallelPlan(master="split", precision="fp32")
    model = ModelSpec("none", (), 8, 8, 8, 8, 8)
    with pytest.raises(ConfigError) as refused:
        evaluate(model, cluster("a100-80", 1), plan)
    assert str(refused.value) == told(TABLE[0][0], in_file)


def test_settings_are_written_as_they_are_typed():
    assert in_file("zero.exact", True) == "zero.exact=true"
    assert in_file("train.ema", None) == "train.ema=null"
    assert as_keyword("zero.exact", True) == as_keyword("zero.exact", "true") == "exact=True"
    assert as_keyword("train.ema", "null") == "ema=None"
    assert as_keyword("zero.weights", "cast") == "weight_shards='cast'"
    assert as_keyword("mesh.tp", "2") == as_keyword("mesh.tp", 2) == "tp=2"
    assert as_keyword("offload.params", "none") == "offload.params=none"


def test_a_choice_that_is_none_is_named_with_those_that_are():
    with pytest.raises(
        ConfigError, match=r"^zero\.release=never is unknown: type one of auto, every_use, every_step\.$"
    ):
        check(Spec(Zero(release="never")), in_file)
    with pytest.raises(ConfigError, match=r"^schedule='dualpipe' is unknown: type one of gpipe, 1f1b, "):
        check(Spec(mesh=Mesh(schedule="dualpipe")))


def test_what_a_rule_names_is_a_setting():
    known = {f"{name}.{field.name}" for name, kind in (("zero", Zero), ("offload", Offload), ("mesh", Mesh))
             for field in fields(kind)} | {"precision", "autocast", "train.accumulate", "train.ema", "health.replay", "optimizer.name", "model.linear", "model.quantize"}  # fmt: skip
    assert {rule.key for rule in RULES} <= known


def test_the_page_of_configurations_has_all_rules():
    assert as_markdown() in (ROOT / "docs" / "config.md").read_text()


def test_rules_ask_whether_there_are_several_micro_batches_and_not_how_many():
    """By which the planner asks them once for all plans that differ in that."""
    for spec, *_ in TABLE:
        found = [[key for key, _ in refusals(replace(spec, accumulate=many))] for many in (2, 3, 64)]
        assert found[0] == found[1] == found[2]
