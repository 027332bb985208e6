"""Loading by slices on several ranks: the same bits as loading everything, in the memory of a shard."""

import ctypes
import gc
from pathlib import Path

import pytest
import torch
from models import adamw, batch, hf, train_engine

import zero3d
from zero3d.config import Model, load
from zero3d.models.open import open_model
from zero3d.models.trained import open_trained
from zero3d.tools.cli.worker import M_MMAP_THRESHOLD


def train_both(folder, stage, precision):
    """Two steps of a model loaded whole and of one loaded by slices; losses, norms and weights of each."""
    from transformers import AutoModelForCausalLM

    batches = [batch(step) for step in range(2)]
    whole = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    opened = open_model(Model(path=str(folder)))
    results = []
    for module, weights in ((whole, None), (opened.module, opened.weights)):
        engine = zero3d.Engine(module, stage=stage, precision=precision, optimizer=adamw, weights=weights)
        results.append(train_engine(engine, batches, through_engine=True))
    return results


@pytest.mark.parametrize(
    ("family", "world", "stage", "precision"),
    [
        ("gpt2", 2, 0, "bf16"),
        ("qwen3_moe", 2, 3, "fp32"),
        ("llama", 1, 0, "fp32"),
        *(
            pytest.param(*case, marks=pytest.mark.long)
            for case in (("llama", 2, 3, "bf16"), ("qwen3", 4, 1, "fp32"), ("qwen3_moe", 4, 2, "bf16"))
        ),
    ],
)
def test_slices_train_like_the_whole_model(ranks, tmp_path, family, world, stage, precision):
    hf(family).save_pretrained(tmp_path, max_shard_size="20KB")
    for whole, slices in ranks(world, train_both, tmp_path, stage, precision):
        assert slices == whole


def new_weights(stage):
    opened = open_model(Model(path="demo"), seed=5)
    engine = zero3d.Engine(opened.module, stage=stage, precision="fp32", weights=opened.weights)
    with engine.full_params():
        return [float(p.detach().double().sum()) for p in engine.module.parameters()]


def test_new_weights_are_the_same_for_every_dp_degree_and_stage(ranks):
    assert ranks(1, new_weights, 0)[0] == ranks(2, new_weights, 3)[1]


def status(what):
    """A line of /proc/self/status in bytes."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(what))


def load_and_measure(folder, stage=3, rank=0):
    """Peak growth of resident memory while an engine is built, what it then holds, its largest parameter."""
    # By itself glibc raises the size from which memory is mapped, and given back at once, with what was freed before.
    ctypes.CDLL(None).mallopt(M_MMAP_THRESHOLD, 128 << 10)
    opened = open_trained(load({"model": {"path": str(folder)}, **({"lora": {"rank": rank}} if rank else {})}))
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # a rank that ran before has no memory of that left to use again
    Path("/proc/self/clear_refs").write_text("5")  # the peak restarts from what is resident now
    before = status("VmRSS")
    engine = zero3d.Engine(opened.module, stage=stage, precision="bf16", weights=opened.weights)
    peak = status("VmHWM") - before
    held = sum(entry.measured for entry in engine.memory)
    return peak, held, max(4 * p.numel() for p in engine.module.parameters())


measured = pytest.mark.skipif(not Path("/proc/self/clear_refs").exists(), reason="needs /proc to measure peaks")


def save_a_large_one(folder):
    """Save a model of 240 MB in fp32; return how many parameters it has."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=2048, hidden_size=768, intermediate_size=2048, num_hidden_layers=8,
                         num_attention_heads=12, max_position_embeddings=64)  # fmt: skip
    model = LlamaForCausalLM(config)
    model.save_pretrained(folder, max_shard_size="60MB")
    return sum(p.numel() for p in model.parameters())


@measured
def test_no_rank_ever_holds_the_model(ranks, tmp_path):
    """The peak is what a rank keeps, a few tensors' worth, and a file's pages."""
    from zero3d.models.files import REOPEN_BYTES

    params = save_a_large_one(tmp_path)
    for peak, held, largest in ranks(2, load_and_measure, tmp_path):
        beyond = 4 * largest + REOPEN_BYTES
        assert peak < held + beyond
        assert beyond < 2 * params / 2, "holding even the bf16 model's other half would be seen"


@measured
@pytest.mark.long
@pytest.mark.parametrize("stage", [0, 2, 3])
def test_a_ranks_peak_does_not_grow_with_ranks_under_adapters(ranks, tmp_path, stage):
    """The frozen base is in bf16, at stage 3 the less of it the more ranks there are."""
    params = save_a_large_one(tmp_path)

    def most(n):
        """The peak of any rank, the lesser one of two runs: other processes can only make an allocator take more."""
        return min(max(peak for peak, _, _ in ranks(n, load_and_measure, tmp_path, stage, 4)) for _ in range(2))

    peaks = list(map(most, (1, 2, 4)))
    assert max(peaks[1:]) < 1.1 * peaks[0]
    if stage == 3:
        assert peaks[0] - peaks[2] > params
