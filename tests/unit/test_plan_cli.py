"""`zero3d plan` as a user types it: answers, exit codes, and what is said of bad input. Models are traced once."""

import json
import re
from functools import lru_cache
from types import SimpleNamespace

import pytest

from zero3d.config import Lora, load
from zero3d.config.sections import Plan
from zero3d.errors import ConfigError
from zero3d.tools.cli import plan as plan_verb
from zero3d.tools.cli.main import main
from zero3d.tools.cli.plan_options import open_cluster, tokens_of
from zero3d.tools.page.explain_text import shown_instants
from zero3d.tools.plan.emit import ADAPTERS, HELD_OUT, NEW, USUAL, WEIGHTS, planned_for, whole_run
from zero3d.tools.plan.goodput import Goodput
from zero3d.tools.plan.hardware import CATALOGUE, cluster
from zero3d.tools.plan.margin import Range
from zero3d.tools.plan.shapes import gpt
from zero3d.tools.sim import model_spec

DEMO = ["demo", "--gpus", "2", "--gpu", "cpu", "--seq", "128", "--tokens-per-batch", "1024"]
KNOWN = lru_cache(model_spec.open_spec)


@pytest.fixture(autouse=True)
def traced_once(monkeypatch):
    monkeypatch.setattr(model_spec, "open_spec", KNOWN)


@pytest.fixture
def plan(capsys):
    """`plan(*words)` -> (exit code, stdout, stderr)."""

    def run(*words):
        code = main(["plan", *map(str, words)])
        return (code, *capsys.readouterr())

    return run


def refused(plan, *words):
    """The one line of a refusal."""
    code, out, error = plan(*words)
    assert (code, out) == (2, "")
    assert error.count("\n") == 1, error
    return error


@pytest.fixture
def config(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model: {path: demo}\ndata: {length: 128}\ntrain: {micro_batch: 1}\n")
    return file


def test_an_unknown_gpu_is_answered_with_the_catalogue(plan):
    said = refused(plan, "demo", "--gpus", 2, "--gpu", "a9000")
    assert all(name in said for name in CATALOGUE)
    assert "Did you mean a6000?" in said


@pytest.mark.parametrize(("text", "why"), [
    (b"disk: 0", "disk is 0"), (b"across: {bandwidth: -5}", "across.bandwidth is -5"), (b"gpu: {memory: .inf}", "gpu.memory is inf"),
    (b"host_memory: .nan", "host_memory is nan"), (b"\xff\xfe", "is not UTF-8 text"), (b"gpu: [1,2", "expected ',' or ']'"),
    (b"gpu: b100", "not in the catalogue"), (b"disks: 1", "Did you mean 'disk'?"),
    (b"gpu: {matrix: 010}", "line 1: 010 is read in two ways"), (b"provenance: 3", "provenance=3: expected an object"),
    (b"provenance: {disc: user}", "provenance names disc, no field. Did you mean disk?"), (b"provenance: {disk: 3}", "disk=3: expected text"),
    (b"nodes: 1.5", "nodes=1.5: expected a whole number"), (b"per_node: many", "expected a whole number"), (b"nodes: 0", "nodes is 0"),
    (b"across: 3", "across=3: expected an object"), (b"gpu: {memory: [1]}", "memory=[1]: expected a number"),
    (b"a: &a [1]\nb: [*a, *a]", "'a' is unknown"), (b"gpu: !!timestamp x", "the tag !!timestamp"), (b"[" * 9999, "16 levels"),
    (b"? " + b"k" * 2000 + b"\n: 1", "kkk..."), (b"disk: " + b"9" * 400, "a float can be"), (b"1: 2", "1 is unknown"),
    (b"step: {fixed: -1}", "step.fixed is -1"), (b"step: {blok: 1}", "Did you mean 'block'?"), (b"step: fast", "step='fast': expected an object"),
])  # fmt: skip
def test_a_misfit_cluster_file_is_refused_with_the_field(plan, tmp_path, text, why):
    file = tmp_path / "cluster.yaml"
    file.write_bytes(text)
    assert why in refused(plan, "--params", "1e9", "--gpus", 16, "--cluster", file)


def test_a_cluster_file_can_name_a_card(plan, tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("gpu: h100\nacross: {bandwidth: 12.5e9}")
    words = ["--params", "1e8", "--gpus", 2, "--seq", 512, "--tokens-per-batch", 1024, "--cluster", file]
    assert "2 x h100" in plan(*words)[1]


def test_a_file_of_another_card_than_gpu_says_is_refused_and_one_of_its_kind_is_not(plan, tmp_path):
    file = tmp_path / "profile.json"
    file.write_text('{"gpu": {"name": "h100-96", "matrix": 0.6, "flash": 0.4}}')
    words = ["--params", "1e8", "--gpus", 2, "--seq", 512, "--tokens-per-batch", 1024, "--cluster", file]
    assert "describes h100-96, and --gpu says a6000" in refused(plan, *words, "--gpu", "a6000")
    assert plan(*words, "--gpu", "h100")[0] == 0


@pytest.mark.parametrize(("words", "why"), [
    (["demo", "--seq", 1024], "sequences of 1,024 tokens are more than the model's 512 positions: pass --seq 512"),
    (["demo", "--nodes", 0], "--nodes '0' is not a number of nodes"), (["demo", "--price", "nan"], "--price nan"),
    (["demo", "--goal", "cheapest"], "fastest, fewest-gpus, largest-batch"), (["demo", "--lora", "rank=8"], "--lora r=128"),
    (["demo", "--seq", 128, "--gpus", 8, "--tokens-per-batch", 384], "Pass --tokens-per-batch 1024 (8 sequences"),
    (["demo", "--seq", 128, "--tokens-per-batch", 100], "Type 128 or 256"),
])  # fmt: skip
def test_what_cannot_be_is_refused_with_what_can(plan, words, why):
    assert why in refused(plan, *words)


def test_a_model_that_cannot_be_built_is_refused_with_the_reason(plan, tmp_path):
    broken, strange, empty = tmp_path / "config.json", tmp_path / "strange", tmp_path / "empty"
    broken.write_text('{"model_type": "llama", "hidden_size": "wide"}')
    for folder in (strange, empty):
        folder.mkdir()
    odd = tmp_path / "odd.json"
    odd.write_text('{"model_type": "llama", "hidden_size": 100, "num_attention_heads": 7, "num_hidden_layers": 2}')
    negative = tmp_path / "negative.json"
    negative.write_text('{"model_type": "llama", "hidden_size": -7, "num_attention_heads": 7}')
    (strange / "config.json").write_text('{"model_type": "no-such-kind"}')
    for path, why in ((broken, "wide"), (strange, "no-such-kind"), (empty, "has no config.json"), (odd, "not a multiple"), (negative, "negative"),
                      ("demos", "Did you mean 'demo'?"), ("math:sqrt", "sqrt() raised TypeError"),
                      ("nowhere:model", "No module named 'nowhere'")):  # fmt: skip
        assert why in refused(plan, path, "--gpus", 2)


@pytest.mark.parametrize(("words", "why"), [
    (["mesh.tp=5"], "tp=5 cannot split num_attention_heads=6: 6 / 5 is not a whole number"),
    (["mesh.pp=99", "train.accumulate=99"], "pp=99 pipeline stages need a block each, and demo has 3: pass pp=3 or less"),
    (["--gpus", "3", "mesh.dp=2"], "3 ranks cannot form dp=2"),
])  # fmt: skip
def test_degrees_that_do_not_divide_the_model_are_refused(plan, config, words, why):
    assert why in refused(plan, "explain", config, *words)


def test_a_plan_needs_no_weights(plan, config, tmp_path):
    shape = {
        "model_type": "llama",
        "hidden_size": 48,
        "num_attention_heads": 6,
        "num_hidden_layers": 2,
        "vocab_size": 64,
    }
    (tmp_path / "bare").mkdir()
    (tmp_path / "bare" / "config.json").write_text(json.dumps({**shape, "intermediate_size": 64}))
    code, out, _ = plan("explain", config, f"model.path={tmp_path / 'bare'}", "--gpu", "a6000")
    assert code == 0
    assert "Memory of the fullest GPU" in out


@pytest.mark.parametrize(("words", "why"), [
    (["--seq", "64"], "--seq is an option of a search: type data.length=TOKENS"),
    (["--tokens-per-batch", "1024"], "type train.batch=SEQUENCES"),
    (["--goal", "largest-batch"], "--goal is an option of a search, and one plan is explained: leave it out"),
    (["--emit", "planned.yaml"], "--emit is an option of a search"),
    (["--tokens", "-3"], "--tokens '-3' is not a whole number"),
])  # fmt: skip
def test_explain_refuses_what_it_would_not_heed(plan, config, words, why):
    assert why in refused(plan, "explain", config, *words)


@pytest.mark.parametrize(("words", "why"), [
    (["--gpus", "0"], "type a whole number from 1"),
    (["--gpus", "two"], "type a whole number from 1"),
    (["--gpus", "3", "--nodes", "2"], "pass --gpus as a multiple of --nodes"),
    (["--seq", "1"], "a sequence has 2 tokens or more"),
    (["--seq", "long"], "is not a whole number"),
    (["--tokens-per-batch", "1000"], "Type 896 or 1024."),
    (["--tokens-per-batch", "0"], "is not a whole number"),
    (["--assert-fits", "lots"], "is not a size: type 78GB"),
    (["--quantize", "nf4"], "all layers are trained: pass --lora r=128, too"),
    (["--lora", "r=8", "--quantize", "int4"], "pass one of nf4, nf4-double, int8, fp8"),
    (["--lora", "r=0"], "pass the rank of the adapters, such as --lora r=128"),
    (["--goal", "cheapest"], "pass one of fastest, fewest-gpus, largest-batch"),
    (["--top", "0"], "--top 0"),
    (["--price", "-1"], "--price -1"),
    (["--price", "1e9"], "--price 1e+09: a GPU-hour costs 0 or more, and less than 1e+09"),
    (["--tokens", "1e40"], "--tokens '1e40' is not a whole number from 1 to 1e+18"),
    (["--watts", "0"], "--watts 0: type the watts of a GPU"),
    (["--cluster", "nowhere.yaml"], "cluster file nowhere.yaml"),
    (["--emit", "nowhere/train.yaml"], "cannot be written"),
])  # fmt: skip
def test_nonsense_is_refused_in_one_line(plan, words, why):
    assert why in refused(plan, *DEMO, *words)


def test_one_model_is_wanted(plan):
    for words in ([], ["demo", "gpt2"], ["demo", "--params", "7e9"]):
        assert "takes one MODEL, or --params" in refused(plan, *words)
    assert "--lora needs a MODEL" in refused(plan, "--params", "7e9", "--lora", "r=8")
    assert "--quantize needs a MODEL" in refused(plan, "--params", "7e9", "--quantize", "nf4")
    assert "needs a MODEL, not --params" in refused(plan, "--params", "1e8", "--gpus", 1, "--emit", "train.yaml")


def test_an_impossible_goal_is_told_with_the_nearest_and_what_would_do(plan):
    said = refused(
        plan, "--params", "7e9", "--gpus", 1, "--gpu", "rtx-3090", "--seq", 1024, "--tokens-per-batch", 16384,
        "--offload", "none",
    )  # fmt: skip
    assert re.search(r"Nearest: the GPU's memory is short by [\d.]+ GiB with pp 1 x dp 1 x tp 1", said)
    assert re.search(r"It fits on --gpus 8: pp \d x dp \d x tp \d", said)


def test_assert_fits_is_an_exit_code(plan, config):
    assert plan(*DEMO, "--assert-fits", "8GB")[0] == 0
    code, out, _ = plan(*DEMO, "--assert-fits", "20MB")
    assert code == 1
    assert "Nearest: " in out
    assert plan("explain", config, "--gpu", "cpu", "--assert-fits", "8GB")[0] == 0
    code, out, _ = plan("explain", config, "--gpu", "cpu", "--assert-fits", "20MB")
    assert code == 1
    assert "Does not fit" in out


def test_assert_fits_goes_by_what_is_alive_at_one_time(plan, config):
    """Gradients count beside activations where a step has several micro-batches, and with one where it ends alone."""
    words = ["explain", config, "--gpu", "cpu", "--margin", "0", "train.micro_batch=16"]
    device, codes = {}, {}
    for count in (1, 4):
        device[count] = json.loads(plan(*words, f"train.accumulate={count}", "--json")[1])["memory"]["device"]
    assert device[1] < device[4]
    for count in (1, 4):
        codes[count] = plan(
            *words, f"train.accumulate={count}", "--assert-fits", f"{sum(device.values()) / 2e9:.6f}GB"
        )[0]
    assert codes == {1: 0, 4: 1}


def test_json_has_everything_that_the_text_has(plan):
    told = json.loads(plan(*DEMO, "--json")[1])
    assert told["plans"]
    assert told["tried"] > len(told["plans"])
    assert {"reason", "plans", "excess_bytes", "nearest", "of_host"} == set(told["rejected"][0])
    assert {"change", "memory_bytes", "seconds", "moved"} == set(told["what_if"][0])
    assert [rung["rung"] for rung in told["ladder"]] == ["1", "2", "3", "2 + offload", "3 + offload"]
    first = told["plans"][0]
    assert sum(first["seconds"]["parts"].values()) == pytest.approx(first["seconds"]["mid"])
    text = plan(*DEMO)[1]
    assert f"{told['tried']:,} plans" in text
    for heading in ("Plans that fit", "Why the others do not", "What if", "The ladder", "GPU-hours", "Checkpoints"):
        assert heading in text


def test_explain_s_json_has_everything_that_its_text_has(plan, config):
    words = ["explain", config, "--gpu", "a6000", "--gpus", 2, "train.batch=4", "train.steps=100", "--price", "2"]
    text, told = plan(*words)[1], json.loads(plan(*words, "--json")[1])
    device = told["memory"]["device"]
    assert told["device_range_bytes"] == Range.of(device, told["margin"])._asdict()
    assert (told["fits"], told["gpu"], told["gpus"], told["model"]["blocks"]) == (True, "a6000", 2, 3)
    assert set(told["fits_up_to"]) == {"length", "micro_batch"}
    assert f"MFU {100 * told['mfu']:.0f} %" in text
    assert f"margin of {100 * told['margin']:g} %, {told['margin_from']}" in " ".join(text.split())
    first = told["what_if"][0]
    assert re.search(rf"{re.escape(first['change'])} +{first['memory_bytes'] / 2**30:+.1f} GiB", text)
    assert told["cost"]["training"]["tokens"] == 100 * 4 * 128
    tight = json.loads(plan(*words, "--json", "--assert-fits", "20MB")[1])
    assert (tight["fits"], tight["fits_up_to"]) == (False, None)


@pytest.mark.parametrize("peak", range(5))
def test_the_fullest_instant_is_listed_also_where_it_is_the_backward_of_an_inner_block(peak):
    names = ["logits and loss", *(f"backward of blocks.{number}" for number in (2, 1, 0)), "end of the backward"]
    found = list(shown_instants([(name, {"activations": 1.0 + (at == peak)}) for at, name in enumerate(names)]))
    assert [name for name, _ in found] == [name for at, name in enumerate(names) if at in (0, 1, 3, 4, peak)]


def test_hours_are_energy_and_money_where_watts_and_a_price_are_known(plan):
    on_card = ["--params", "1e8", "--gpus", 1, "--gpu", "a6000", "--seq", 512, "--tokens-per-batch", 8192]
    words = [*on_card, "--tokens", "4e9", "--price", "3"]
    text, cost = plan(*words)[1], json.loads(plan(*words, "--json")[1])["cost"]
    assert (cost["watts"], cost["watts_from"], cost["price"]) == (300, "datasheet", 3)
    training = cost["training"]
    assert training["hours"] == pytest.approx(4 * cost["per_billion_tokens"]["hours"])
    assert training["days"] == pytest.approx(training["hours"] / 24)
    assert training["kwh"] == pytest.approx(training["hours"] * 0.3)
    assert training["money"] == pytest.approx(training["hours"] * 3)
    assert re.search(
        r"GPU-hours per billion tokens, [\d.]+ kWh at full power \(300 W a card, datasheet\), [\d,]+ at 3 each", text
    )
    less = json.loads(plan(*words, "--watts", "150", "--json")[1])["cost"]
    assert (less["training"]["kwh"], less["watts_from"]) == (pytest.approx(training["kwh"] / 2), "--watts")
    assert json.loads(plan(*DEMO, "--json")[1])["cost"]["per_billion_tokens"]["kwh"] is None  # of a CPU nobody knows


def test_deepspeed_json_says_what_the_best_plan_says(plan, tmp_path):
    file = tmp_path / "ds.json"
    best = json.loads(plan(*DEMO, "--json", "--emit-deepspeed", file)[1])["recommended"]["plan"]
    tree = json.loads(file.read_text())
    assert tree["train_batch_size"] == 8
    assert tree["train_micro_batch_size_per_gpu"] == best["micro_batch"]
    assert tree["gradient_accumulation_steps"] == best["accumulate"]
    assert tree["zero_optimization"]["stage"] == best["stage"]
    assert tree["bf16"] == {"enabled": True}
    assert set(tree) == {"train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps",
                         "gradient_clipping", "zero_optimization", "optimizer", "bf16"}  # fmt: skip


def test_a_plan_with_adapters_is_written_as_a_file_that_trains_them(plan, tmp_path):
    file = tmp_path / "lora.yaml"
    words = ["demo", "--lora", "r=8", "--gpus", 2, "--gpu", "a6000", "--seq", 64, "--tokens-per-batch", 512]
    code, out, _ = plan(*words, "--emit", file, "--json")
    told = json.loads(out)
    assert code == 0
    assert 0 < told["model"]["trainable"] < 0.1 * told["model"]["params"]
    for row in told["plans"]:
        assert row["plan"]["dp"] * row["plan"]["tp"] * row["plan"]["pp"] == 2
        assert 0 < row["memory"]["device"] < 0.95 * 48 * 2**30
        assert row["memory"]["host"] > 0
    assert load(file).lora == Lora(rank=8, targets=("all-linear",), dropout=0.05)
    assert "# model.path has random weights, which adapters learn little on: name a folder" in file.read_text()


def test_a_plan_on_a_base_of_four_bits_needs_less_and_is_written_as_a_file(plan, tmp_path):
    file = tmp_path / "qlora.yaml"
    words = ["demo", "--lora", "r=8", "--gpus", 2, "--gpu", "a6000", "--seq", 64, "--tokens-per-batch", 512]
    told, packed = (
        json.loads(plan(*words, *more, "--json")[1]) for more in ([], ["--quantize", "nf4", "--emit", file])
    )
    assert packed["model"]["params"] == told["model"]["params"]
    assert packed["plans"][0]["memory"]["parts"]["parameters"] < told["plans"][0]["memory"]["parts"]["parameters"]
    assert load(file).model.quantize == packed["plans"][0]["plan"]["quantize"] == "nf4"
    assert "base in nf4" in plan(*words, "--quantize", "nf4")[1]


@pytest.mark.long
@pytest.mark.parametrize("gpus", [1, 2, 4])
def test_llava_with_adapters_is_planned_with_gpu_and_host_memory(plan, gpus):
    words = ["llava-1.5-7b", "--lora", "r=128", "--gpus", gpus, "--gpu", "a6000", "--seq", 2048]
    words += ["--tokens-per-batch", 32768]
    told = json.loads(plan(*words, "--json")[1])
    assert told["model"]["params"] - told["model"]["trainable"] == 7_063_427_072  # of llava-hf/llava-1.5-7b-hf
    assert told["model"]["trainable"] == 32 * 128 * (4 * 2 * 4096 + 3 * (4096 + 11008))  # r (in + out) of 7 matrices
    for row in told["plans"]:
        assert row["plan"]["dp"] * row["plan"]["tp"] * row["plan"]["pp"] == gpus
        assert 14.1e9 / gpus < row["memory"]["device"] < 0.95 * 48 * 2**30
        assert row["memory"]["host"] > 0


@pytest.fixture
def long_demo(tmp_path):
    """A Llama of two blocks with 64k positions."""
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 64, "intermediate_size": 128}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "num_hidden_layers": 2, "vocab_size": 256}
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"max_position_embeddings": 1 << 16}))
    return str(path)


def test_long_sequences_are_planned_over_sp_and_said_to_be(plan, long_demo, tmp_path):
    emitted = tmp_path / "train.yaml"
    words = [long_demo, "--seq", "32k", "--gpus", 2, "--tokens-per-batch", 2 << 15]
    code, out, _ = plan(*words, "--emit", emitted)
    assert code == 0
    assert "sequences of 32,768 tokens" in out
    assert "(sp 2)" in out
    assert "Where the 32,768 tokens of a sequence are" in out
    assert "loss in tiles" in out
    config = load(emitted)
    assert (config.data.length, config.data.packing, config.train.tiled_loss) == (32768, False, True)
    told = json.loads(plan(*words, "--json")[1])
    assert {row["plan"]["sp"] for row in told["plans"]} == {1, 2}


def test_sequences_beyond_computed_positions_are_planned_with_a_note(plan, long_demo):
    code, out, _ = plan(long_demo, "--seq", "128k", "--gpus", 2, "--tokens-per-batch", 2 << 17)
    assert code == 0
    assert "traced, beyond its 65,536 positions" in out
    assert "config.json with 131,072 or more max_position_embeddings" in " ".join(out.split())


@pytest.mark.parametrize(("text", "tokens"), [
    ("4096", 4096), ("4e3", 4000), ("32k", 32768), ("32K", 32768), ("1m", 1 << 20), ("0.5m", 1 << 19),
])  # fmt: skip
def test_lengths_are_read(text, tokens):
    assert tokens_of(text) == tokens


@pytest.mark.parametrize("text", ["k", "0.3k", "-1k", "1g", "nan", "infk"])
def test_what_is_no_length_is_refused(text):
    with pytest.raises(ConfigError, match=r"^--seq .* is not a whole number from 1: type 4096, 32k \(x 1024\) or 1m"):
        tokens_of(text)


@pytest.mark.parametrize("optimizer", ["adamw", "muon", "adamw8bit"])
def test_every_optimizer_has_plans(plan, optimizer):
    code, out, _ = plan(*DEMO, "--optimizer", optimizer, "--json")
    assert code == 0
    assert {row["plan"]["optimizer"] for row in json.loads(out)["plans"]} == {optimizer}


def test_a_preset_is_written_as_a_whole_file_that_remembers_its_cluster(plan, tmp_path, capsys):
    file = tmp_path / "train.yaml"
    words = ["demo", "--gpus", 2, "--gpu", "a6000", "--seq", 64, "--tokens-per-batch", 1024, "--tokens", 1e6]
    assert plan(*words, "--emit", file)[0] == 0
    config = load(file)
    assert (config.train.steps, config.train.epochs) == (977, None)  # of 1,024 tokens
    assert config.evaluate.every == config.checkpoint.every == 977  # 35 hours of such steps are more
    assert (config.data.validation, config.schedule.warmup, config.optimizer.lr) == (HELD_OUT, 0.01, 3e-4)
    assert (config.plan.gpus, config.plan.gpu, config.plan.nodes) == (2, "a6000", None)
    explained = plan("explain", file, "--json")[1]
    assert explained == plan("explain", file, "--json", "--gpus", 2, "--gpu", "a6000")[1]
    assert json.loads(explained)["gpu"] == "a6000"
    alone = json.loads(plan("explain", file, "--json", "mesh.dp=1", "train.batch=8")[1])
    assert (alone["gpu"], alone["gpus"]) == ("a6000", 1)  # a mesh that is typed is for its own GPUs
    again = json.loads(plan(file, "--json")[1])
    assert (again["gpu"], again["gpus"], again["cost"]["training"]["tokens"]) == ("a6000", 2, 977 * 1024)


@pytest.mark.parametrize(("vocabulary", "asked"), [(256, False), (50257, True)])
def test_a_file_for_a_vocabulary_beyond_bytes_asks_for_data_and_tokenizer(vocabulary, asked):
    """Also where a preset leaves its vocabulary to transformers' default, as gpt2 does."""
    model = gpt(2, 64, 4, vocabulary, 64)
    assert plan_verb._asks_for_data(model) is asked
    assert plan_verb._tokenizer("nowhere", model) == ("FILL-ME" if asked else "bytes")


@pytest.mark.parametrize(("trained", "lr"), [(NEW, 3e-4), (WEIGHTS, 2e-5), (ADAPTERS, 2e-4)])
def test_what_is_trained_decides_the_rates_of_a_first_run(trained, lr):
    estimate = SimpleNamespace(tokens=1000, seconds=SimpleNamespace(mid=7.0))
    tree = {"output": "out", "data": {"length": 8, "train": "a"}, "train": {"batch": 4}, "optimizer": {"name": "muon"}}
    found = whole_run(tree, trained, estimate, Goodput(1e5, 10.0, 1e6, 0.9), None)
    assert found["optimizer"] == {"name": "muon", **USUAL[trained]["optimizer"]}
    assert found["optimizer"]["lr"] == lr
    assert (found["train"], list(found["data"])) == ({"epochs": 1, "batch": 4}, ["train", "validation", "length"])
    assert found["checkpoint"]["every"] == found["evaluate"]["every"] == 500  # an hour of 7 s: 514
    rare = whole_run(tree, trained, estimate, Goodput(1e5, 3000.0, 1e6, 0.9), 30_000_500)
    assert rare["checkpoint"]["every"] == 2000  # ten times as long as a save takes: 4285
    assert rare["train"]["steps"] == 30_001
    often = whole_run(tree, trained, estimate, Goodput(100.0, 1.0, 1e6, 0.9), None)
    assert often["checkpoint"]["every"] == 10  # 14 steps until a failure is as dear


def test_the_cluster_of_a_plan_is_remembered_where_it_is_unusual(tmp_path):
    file = tmp_path / "cluster.yaml"
    file.write_text("gpu: {name: my-card, memory: 48e9, flops: 100e12, bandwidth: 900e9}")
    assert planned_for(cluster("h100", 16)) == {"gpus": 16, "gpu": "h100"}
    assert planned_for(cluster("gb200", 64)) == {"gpus": 64, "gpu": "gb200"}
    assert planned_for(cluster("h100", 16, 4)) == {"gpus": 16, "gpu": "h100", "nodes": 4}
    own = {"gpus": 16, "nodes": 2, "cluster": str(file)}
    assert planned_for(cluster("a100", 16, 2, file), str(file)) == own
    for planned in (Plan(gpus=16, gpu="h100", nodes=4), Plan(**own)):
        found = open_cluster(SimpleNamespace(gpus=None, nodes=None, gpu=None, cluster=None, watts=None), planned)
        assert planned_for(found, planned.cluster) == {k: v for k, v in vars(planned).items() if v and k != "links"}


def test_options_displace_what_a_file_remembers(tmp_path):
    planned = Plan(gpus=16, gpu="h100", nodes=4, cluster=str(tmp_path / "is not read"))

    def opened(planned=planned, **said):
        usual = dict.fromkeys(("gpus", "nodes", "gpu", "cluster", "watts"))
        found = open_cluster(SimpleNamespace(**{**usual, **said}), planned)
        return found.gpu.name, found.gpus, found.nodes

    assert opened(gpu="b200") == ("b200", 16, 4)
    assert opened(gpu="b200", gpus="8") == ("b200", 8, 1)
    assert opened(gpu="b200", nodes="2") == ("b200", 16, 2)
    other = tmp_path / "other.yaml"
    other.write_text("gpu: a6000")
    assert opened(cluster=str(other), gpus="4") == ("a6000", 4, 1)
    assert opened(Plan(cluster=str(other))) == ("a6000", 64, 16)
