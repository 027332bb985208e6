"""Deterministic algorithms on accelerators, and what a checkpoint says of them. A stand-in for CUDA: no GPU is needed."""

import json
import os
import random
import warnings
from types import SimpleNamespace

import numpy
import pytest
import torch

import zero3d
from zero3d import make_deterministic
from zero3d.checkpoint.resume_contract import resume_guarantee
from zero3d.config import load
from zero3d.distributed import determinism
from zero3d.distributed.determinism import device_facts, refusals_named, warn_of_exact
from zero3d.engine.state import who_adds
from zero3d.errors import ConfigError
from zero3d.rng import rng_state, set_rng_state
from zero3d.train import run as train
from zero3d.train.lock import FolderLock
from zero3d.train.setup import inputs
from zero3d.train.start import Start

CUBLAS, GPU = "CUBLAS_WORKSPACE_CONFIG", torch.device("cuda", 1)
SETTINGS = (CUBLAS, "NCCL_ALGO", "NCCL_PROTO", "FLASH_ATTENTION_DETERMINISTIC")


@pytest.fixture
def environment(monkeypatch):
    """The variables of a process without ours, none of which stays; nor do torch's settings."""
    kept = {name: value for name, value in os.environ.items() if name not in SETTINGS}
    monkeypatch.setattr(determinism, "os", SimpleNamespace(environ=kept))
    monkeypatch.setattr(determinism, "dist", SimpleNamespace(is_initialized=lambda: False))
    cudnn, filled = torch.backends.cudnn, torch.utils.deterministic.fill_uninitialized_memory
    flags, products = (cudnn.benchmark, cudnn.deterministic), torch.backends.cuda.matmul.fp32_precision
    cudnn.benchmark = True
    yield kept
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = filled
    cudnn.benchmark, cudnn.deterministic = flags
    torch.backends.cuda.matmul.fp32_precision = products


@pytest.fixture
def in_use(monkeypatch):
    """A GPU on which something was computed."""
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: 512 * device)


# --- what is set --------------------------------------------------------------------------------


def test_on_a_gpu_all_that_bits_depend_on_is_set(environment):
    make_deterministic("cuda")
    assert determinism.mode() == "on"
    assert torch.utils.deterministic.fill_uninitialized_memory is False
    assert (torch.backends.cudnn.benchmark, torch.backends.cudnn.deterministic) == (False, True)
    assert [environment.get(name) for name in SETTINGS] == [":4096:8", "Ring", None, "1"]


def test_on_the_cpu_nothing_is(environment):
    before = dict(environment)
    make_deterministic("cpu")
    make_deterministic()  # there is no accelerator here
    assert environment == before
    assert determinism.mode() == "off"
    assert torch.backends.cudnn.benchmark is True


def test_what_somebody_has_set_stays(environment):
    environment |= {CUBLAS: ":16:8", "NCCL_ALGO": "Tree"}
    make_deterministic("cuda")
    assert (environment[CUBLAS], environment["NCCL_ALGO"]) == (":16:8", "Tree")


def test_a_workspace_with_which_cublas_does_not_repeat_its_bits_is_refused(environment):
    environment[CUBLAS] = ":4096:2:16:8"
    with pytest.raises(ConfigError, match=f"{CUBLAS}=:4096:2:16:8: .* Type {CUBLAS}=:4096:8, or unset it"):
        make_deterministic("cuda")
    assert determinism.mode() == "off"


def test_where_cublas_may_have_started_without_it_the_remedy_is_said(environment, in_use):
    with pytest.warns(UserWarning, match=f"before all others, or type {CUBLAS}=:4096:8 before the command") as warned:
        make_deterministic("cuda")
    assert warned[0].filename == __file__
    assert environment[CUBLAS] == ":4096:8"  # torch says no if it was too late


def test_nothing_is_said_where_it_was_there_in_time(environment, in_use):
    environment[CUBLAS] = ":4096:8"
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        make_deterministic("cuda")


def test_groups_that_are_there_have_read_nccl_s_settings(environment, monkeypatch):
    monkeypatch.setattr(determinism.dist, "is_initialized", lambda: True)
    make_deterministic("cuda")
    assert "NCCL_ALGO" not in environment


@pytest.mark.parametrize(
    ("train", "zero", "asked"),
    [({}, {}, False), ({}, {"exact": True}, True), ({"deterministic": True}, {}, True),
     ({"deterministic": "auto"}, {"exact": True}, True), ({"deterministic": False}, {"exact": True}, False)],
)  # fmt: skip
def test_a_run_asks_for_it_before_its_mesh(monkeypatch, train, zero, asked):
    done = []

    def mesh(**degrees):
        done.append("mesh")
        return SimpleNamespace(communicators=2)

    monkeypatch.setattr(inputs, "make_deterministic", lambda: done.append("deterministic"))
    monkeypatch.setattr(inputs, "Mesh", mesh)
    inputs.open_mesh(load({"train": train, "zero": zero}))
    assert done == ["deterministic"] * asked + ["mesh"]


NO_WORKSPACE = (
    "Deterministic behavior was enabled with `torch.use_deterministic_algorithms(True)`, but this operation is not "
    "deterministic because it uses CuBLAS and you have CUDA >= 10.2. To enable deterministic behavior in this case, ..."
)  # what torch says


def test_an_operation_without_a_deterministic_form_is_a_clear_error(environment):
    torch.use_deterministic_algorithms(True)
    with pytest.raises(ConfigError, match=r"put_ has no form .* train.deterministic=false") as told, refusals_named():
        torch.zeros(3).put_(torch.tensor([0]), torch.ones(1))
    assert told.value.exit_code == 2
    with pytest.raises(ConfigError, match=f"type {CUBLAS}=:4096:8 before the command, or"), refusals_named():
        raise RuntimeError(NO_WORKSPACE)
    with pytest.raises(RuntimeError, match="another"), refusals_named():
        raise RuntimeError("another")


def test_a_run_says_what_torch_refused_in_one_line(monkeypatch):
    def refused(*_):
        raise RuntimeError("_histc_cuda does not have a deterministic implementation, but you set ...")

    monkeypatch.setattr(train, "_run", refused)
    with pytest.raises(ConfigError, match=r"^train.deterministic .*: _histc_cuda has no form"):
        train.run(load({}), Start("refused"), None, FolderLock())


def test_exact_sums_without_deterministic_kernels_are_warned_of(environment):
    with pytest.warns(UserWarning, match="exact=True on cuda with deterministic algorithms off"):
        warn_of_exact(GPU)
    torch.use_deterministic_algorithms(True, warn_only=True)
    with pytest.warns(UserWarning, match="deterministic algorithms warnings only"):
        warn_of_exact(GPU)
    torch.use_deterministic_algorithms(True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warn_of_exact(GPU)
        torch.use_deterministic_algorithms(False)
        warn_of_exact(torch.device("cpu"))


# --- what is recorded ---------------------------------------------------------------------------


def test_facts_are_those_of_the_device(environment, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, device.index))
    monkeypatch.setattr(torch.backends.cudnn, "version", lambda: 91002)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(torch.cuda.nccl, "version", lambda: (2, 27, 3))
    environment["NCCL_PROTO"] = "Simple"
    make_deterministic("cuda")
    facts = device_facts(GPU, "nccl", 8)
    assert facts == {
        "deterministic": "on", "backend": "nccl", "cublas_workspace": ":4096:8", "capability": "9.1", "cuda": "12.8",
        "cudnn": "91002", "fp32": facts["fp32"], "narrow_sums": "bf16 True, fp16 True, in fp16 False", "nccl": "2.27.3",
        "nccl_algorithm": "Ring", "nccl_protocol": "Simple", "ranks_per_host": 8,
    }  # fmt: skip
    torch.backends.cuda.matmul.fp32_precision = "tf32"
    assert "matmul tf32" in device_facts(GPU, "gloo", None)["fp32"]
    assert "nccl" not in device_facts(GPU, "gloo", None)
    assert device_facts(torch.device("cpu"), "gloo", 2) == {}


def added(dp_algorithm, travels, dp=4, tp=1, exact=False, micro_batches=1, reduce="every_step"):
    """Who adds what ranks have, of an engine whose gradients of one backward travel in these dtypes."""
    axes = SimpleNamespace(
        dp=SimpleNamespace(algorithm=dp_algorithm, size=dp), tp=SimpleNamespace(algorithm="native", size=tp)
    )
    plans = [SimpleNamespace(travels=dtype) for dtype in travels]
    units = [SimpleNamespace(grads=1, gradients=SimpleNamespace(plan=plan)) for plan in plans]
    parts = SimpleNamespace(
        axes=axes,
        order=SimpleNamespace(summands=1 if exact else None),
        policy=SimpleNamespace(often=reduce == "every_micro_batch"),
        units=[*units, SimpleNamespace(grads=None)],
        accumulation=SimpleNamespace(usual=micro_batches),
    )
    return tuple(who_adds(parts).values())


def test_what_is_sent_in_16_bits_is_added_in_rank_order_and_wide_gradients_by_the_backend():
    narrow, wide = torch.bfloat16, torch.float32
    assert added("all-to-all", [narrow, narrow]) == ("in rank order", "none")
    assert added("all-to-all", [narrow], micro_batches=2) == ("by the backend", "none")  # a sum of several backwards
    assert added("all-to-all", [narrow], micro_batches=2, reduce="every_micro_batch") == ("in rank order", "none")
    assert added("all-to-all", [narrow, wide]) == ("by the backend", "none")
    assert added("native", [narrow]) == ("by the backend", "none")
    assert added("pairwise", [wide]) == ("in rank order", "none")
    for dp in (1, 2):  # one rank has summands, too
        assert added("native", [wide], dp=dp, exact=True) == ("in exact mode's tree", "none")
    assert added("native", [wide], dp=1, tp=2) == ("none", "by the backend")


HERE = {"stage": 3, "reduce": "every_step", "accumulate": 1, "dp": 4, "tp": 1, "pp": 1, "precision": "bf16", "wire": "bfloat16",
        "algorithm": "pairwise", "torch": "2.13", "kernels": "NVIDIA H100", "threads": 1, "leaves": None,
        "deterministic": "on", "backend": "nccl", "dp_sums": "in rank order", "tp_sums": "none", "cublas_workspace": ":4096:8", "capability": "9.0",
        "cuda": "12.8", "cudnn": "91002", "fp32": "matmul none, conv tf32, rnn tf32", "narrow_sums": "bf16 True",
        "nccl": "2.27.3", "nccl_algorithm": "Ring", "nccl_protocol": "chosen by NCCL", "ranks_per_host": 8}  # fmt: skip
OLD = {name: HERE[name] for name in list(HERE)[: list(HERE).index("deterministic")]}  # as manifests were
NATIVE, OVER_TP = HERE | {"dp_sums": "by the backend"}, HERE | {"tp_sums": "by the backend"}


@pytest.mark.parametrize("about", [HERE, NATIVE, OVER_TP])
def test_on_a_gpu_a_resume_is_bitwise_where_all_of_it_is_equal(about):
    assert resume_guarantee(about, about).startswith("bitwise: ")


@pytest.mark.parametrize(
    ("name", "value"),
    [("deterministic", "off"), ("cublas_workspace", ":16:8"), ("capability", "8.0"), ("cuda", "12.6"), ("cudnn", "90000"),
     ("fp32", "matmul tf32"), ("narrow_sums", "bf16 False"), ("dp_sums", "by the backend")],
)  # fmt: skip
@pytest.mark.parametrize("exact", [None, 8])
def test_on_a_gpu_what_differs_is_named(name, value, exact):
    about = HERE | {"leaves": exact}
    told = resume_guarantee(about | {name: value}, about)
    assert told.startswith(f"not bitwise: {name} {value} -> {HERE[name]}")


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("backend", "gloo"),
        ("nccl", "2.28.1"),
        ("nccl_algorithm", "Tree"),
        ("nccl_protocol", "LL"),
        ("ranks_per_host", 4),
        ("stage", 2),
    ],
)
def test_nccl_matters_where_it_adds(name, value):
    for adds in (NATIVE, OVER_TP):
        assert resume_guarantee(adds, adds | {name: value}) == (
            f"not bitwise: {name} {adds[name]} -> {value} (sums may be taken in another order)"
        )
    for dp_sums in ("in rank order", "none", "in exact mode's tree"):
        about = HERE | {"dp_sums": dp_sums}
        assert resume_guarantee(about, about | {name: value}).startswith("bitwise: ")


@pytest.mark.parametrize(
    ("fact", "reason"),
    [({"deterministic": "off"}, "deterministic algorithms are off (pass train.deterministic=true)"),
     ({"deterministic": "warnings only"}, "deterministic algorithms are warnings only"),
     ({"nccl_algorithm": "chosen by NCCL"}, "NCCL chooses how it adds the ranks' terms (set NCCL_ALGO=Ring"),
     ({"backend": "xccl"}, "xccl adds the ranks' terms in an unknown order")],
)  # fmt: skip
def test_bits_that_nobody_repeats_are_not_called_bitwise_even_where_nothing_has_changed(fact, reason):
    about = NATIVE | fact
    assert resume_guarantee(about, about).startswith(f"not bitwise: {reason}")


def test_manifests_from_before_say_nothing_of_gpus():
    assert resume_guarantee(OLD, HERE).startswith("not bitwise: not known of the checkpoint: deterministic, dp_sums")
    on_cpu = OLD | {"kernels": "AVX2"}
    assert resume_guarantee(on_cpu, on_cpu).startswith("bitwise: ")
    assert resume_guarantee(on_cpu, HERE) == "not bitwise: kernels AVX2 -> NVIDIA H100 (they sum in another order)"
    assert resume_guarantee(HERE, on_cpu) == "not bitwise: kernels NVIDIA H100 -> AVX2 (they sum in another order)"


def test_a_checkpoint_holds_the_facts_and_its_resume_names_what_differs(tmp_path, monkeypatch):
    facts = {name: HERE[name] for name in ("deterministic", "backend", "cuda", "ranks_per_host")}

    def resumed(of_device):
        monkeypatch.setattr("zero3d.engine.state.device_facts", lambda *_: of_device)
        engine.load(tmp_path / "new" if of_device is not old else tmp_path / "old")
        return engine.resumed

    engine, old = zero3d.Engine(torch.nn.Linear(4, 4), precision="fp32"), dict(facts)
    engine.save(tmp_path / "old")
    monkeypatch.setattr("zero3d.engine.state.device_facts", lambda *_: facts)
    about = json.loads((engine.save(tmp_path / "new") / "manifest.json").read_text())["about"]
    assert about.items() >= facts.items()
    assert resumed(facts).startswith("bitwise: ")
    assert resumed(facts | {"cuda": "12.9"}).startswith("not bitwise: cuda 12.8 -> 12.9 (sums may be taken in another")
    assert resumed({}).startswith("bitwise: ")  # as on the CPU, which compares what it said before
    assert resumed(old).startswith("not bitwise: not known of the checkpoint: deterministic, cuda")


@pytest.mark.parametrize("alone", ["saved", "live"])
def test_an_exact_run_on_gpus_goes_on_bitwise_on_one_and_back(alone):
    several = HERE | {"leaves": 8, "dp_sums": added("all-to-all", [torch.bfloat16], exact=True)[0]}
    one = several | {"dp": 1, "backend": "none", "dp_sums": added("native", [torch.bfloat16], dp=1, exact=True)[0]}
    one = {name: value for name, value in one.items() if not name.startswith("nccl") and name != "ranks_per_host"}
    saved, live = (one, several) if alone == "saved" else (several, one)
    assert resume_guarantee(saved, live).startswith("bitwise: ")


# --- random states ------------------------------------------------------------------------------


class Generators:
    """A device module with a random state for each device, the current one being the first."""

    def __init__(self):
        self.states = {0: torch.tensor([1], dtype=torch.uint8), 1: torch.tensor([7], dtype=torch.uint8)}

    def get_rng_state(self, device=torch.device("cuda", 0)):  # noqa: B008
        return self.states[device.index].clone()

    def set_rng_state(self, state, device=torch.device("cuda", 0)):  # noqa: B008
        self.states[device.index] = state.clone()


def test_the_random_state_is_that_of_the_mesh_s_device_not_of_the_current_one(monkeypatch):
    generators = Generators()
    monkeypatch.setattr(torch, "get_device_module", lambda device: generators)
    tensors, plain = rng_state(GPU)
    assert tensors["accelerator"].tolist() == [7]
    generators.states[1] += 1
    set_rng_state(tensors, plain, GPU)
    assert [state.tolist() for state in generators.states.values()] == [[1], [7]]


def test_a_run_on_the_cpu_leaves_accelerators_alone(monkeypatch):
    monkeypatch.setattr(torch, "get_device_module", None)
    cpu = torch.device("cpu")
    tensors, plain = rng_state(cpu)
    assert set(tensors) == {"torch", "numpy"}
    drawn = torch.rand(1), numpy.random.rand(), random.random()
    set_rng_state(tensors | {"accelerator": torch.zeros(1, dtype=torch.uint8)}, plain, cpu)
    assert (torch.rand(1), numpy.random.rand(), random.random()) == drawn
