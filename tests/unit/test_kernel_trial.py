"""Kernels that mix documents are refused by name before a run packs for them; the CPU stands for the device."""

import inspect

import pytest
import torch
from hybrids import conv_kernel, delta_kernel, hybrid, qwen3_5, with_kernels
from models import adamw

import zero3d
from zero3d.config import Config, Data
from zero3d.errors import ConfigError
from zero3d.models import kernel_trial
from zero3d.models.kernel_trial import try_kernels
from zero3d.models.open import Opened
from zero3d.train.setup import inputs

CPU = torch.device("cpu")
NAMES = {"causal_conv1d_fn": conv_kernel, "torch_chunk_gated_delta_rule": delta_kernel}


@pytest.fixture(autouse=True)
def nothing_found_before(monkeypatch):
    monkeypatch.setattr(kernel_trial, "_found", {})


def deaf_conv(x, weight, bias=None, seq_idx=None, activation=None):
    return conv_kernel(x, weight, bias, None, None, activation)


def deaf_delta(q, k, v, g, beta, initial_state=None, output_final_state=False, use_qk_l2norm_in_kernel=False,
               cu_seqlens=None, **kwargs):  # fmt: skip
    return delta_kernel(q, k, v, g, beta, use_qk_l2norm_in_kernel=use_qk_l2norm_in_kernel)


class Backward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad + grad.roll(1, -1)


def leaking_backward(x, weight, bias=None, seq_idx=None, activation=None):
    return conv_kernel(Backward.apply(x), weight, bias, seq_idx, None, activation)


def failing(x, weight, bias=None, seq_idx=None, activation=None):
    if seq_idx is not None:
        raise RuntimeError("seq_idx is only supported for channel last layout.")
    return conv_kernel(x, weight, bias, activation=activation)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_right_kernels_pass_and_what_that_cost_is_said(monkeypatch, dtype):
    with_kernels(monkeypatch, qwen3_5(), NAMES)
    said = try_kernels(hybrid("qwen3_5_text"), CPU, dtype)
    name = str(dtype).removeprefix("torch.")
    assert said.startswith(
        f"data.packing: kernels of Qwen3_5GatedDeltaNet keep documents apart on cpu in {name}, tried in"
    )


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"causal_conv1d_fn": deaf_conv}, r"test_kernel_trial\.deaf_conv, which Qwen3_5GatedDeltaNet calls"),
        ({"torch_chunk_gated_delta_rule": deaf_delta}, r"test_kernel_trial\.deaf_delta, which Qwen3_5GatedDeltaNet"),
        ({"causal_conv1d_fn": leaking_backward}, r"test_kernel_trial\.leaking_backward, which Qwen3_5GatedDeltaNet"),
        ({"causal_conv1d_fn": failing}, r"does not run where it is told .*RuntimeError: seq_idx is only supported"),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_wrong_one_is_refused_by_name(monkeypatch, wrong, said, dtype):
    """A convolution that begins anew and a scan that does not, and the other way round."""
    with_kernels(monkeypatch, qwen3_5(), NAMES | wrong)
    with pytest.raises(ConfigError, match=rf"documents cannot be packed: on cpu in \w+, .*{said}"):
        try_kernels(hybrid("qwen3_5_text"), CPU, dtype)


def test_a_scan_that_is_told_by_numbers_of_documents_too(monkeypatch):
    import transformers.models.mamba2.modeling_mamba2 as file

    torch_scan, heard = inspect.unwrap(file.mamba2_chunk_scan), [True]

    def scan(x, dt, A, B, C, chunk_size, D=None, z=None, dt_bias=None, seq_idx=None, dt_softplus=False,
             dt_limit=(0.0, float("inf")), return_final_states=False):  # fmt: skip
        more = {"D": D, "dt_bias": dt_bias, "dt_softplus": dt_softplus, "dt_limit": dt_limit}
        if seq_idx is None or not heard[0]:
            return torch_scan(x, dt, A, B, C, chunk_size, **more)
        rows = []
        for row, numbers in enumerate(seq_idx):
            lengths = numbers.bincount().tolist()
            parts = zip(*(t[row : row + 1].split(lengths, 1) for t in (x, dt, B, C)), strict=True)
            made = [torch_scan(x, dt, A, B, C, chunk_size, **more) for x, dt, B, C in parts]
            rows.append(torch.cat([each[0] if isinstance(each, tuple) else each for each in made], 1))
        return torch.cat(rows)

    with_kernels(monkeypatch, file, {"mamba2_chunk_scan": scan})
    assert "keep documents apart" in try_kernels(hybrid("mamba2"), CPU, torch.float32)
    heard[0] = False
    kernel_trial._found.clear()
    with pytest.raises(ConfigError, match=r"scan, which Mamba2Mixer calls, lets documents see each other"):
        try_kernels(hybrid("mamba2"), CPU, torch.float32)


def test_there_is_one_trial_for_a_config_its_kernels_and_a_dtype(monkeypatch):
    tried = []
    monkeypatch.setattr(kernel_trial, "_tried", lambda *what: tried.append(what) or "")
    assert try_kernels(hybrid("qwen3_5_text"), CPU, torch.float32) is None  # no kernel is installed
    with_kernels(monkeypatch, qwen3_5(), {"causal_conv1d_fn": conv_kernel})
    for _ in range(2):
        try_kernels(hybrid("qwen3_5_text"), CPU, torch.float32)
    assert len(tried) == 1
    try_kernels(hybrid("qwen3_5_text"), CPU, torch.bfloat16)
    try_kernels(hybrid("qwen3_5_text", linear_key_head_dim=16), CPU, torch.float32)
    assert len(tried) == 3
    with_kernels(monkeypatch, qwen3_5(), {"causal_conv1d_fn": deaf_conv})
    try_kernels(hybrid("qwen3_5_text"), CPU, torch.float32)
    assert len(tried) == 4


def test_what_cannot_be_tried_is_said(monkeypatch):
    with_kernels(monkeypatch, qwen3_5(), NAMES)
    monkeypatch.setattr(kernel_trial, "LEAKS", 1e9)
    said = try_kernels(hybrid("qwen3_5_text"), CPU, torch.float32)
    assert "was not tried (Qwen3_5GatedDeltaNet that is told nothing is off by" in said


def test_a_run_that_packs_tries_them_on_an_accelerator(monkeypatch):
    asked = []
    monkeypatch.setattr(inputs, "try_kernels", lambda model, *place: asked.append(place) or "a line")
    packing, padding = (Config(precision="bf16", data=Data(packing=packs)) for packs in (True, False))
    opened = Opened(hybrid("qwen3_5_text"), None)
    for run, device, notes in ((packing, "cpu", ()), (padding, "cuda", ()), (packing, "cuda", ("a line",))):
        _, found = inputs._packed(run, opened, False, torch.device(device))
        assert found.notes == notes
    assert asked == [(torch.device("cuda"), torch.bfloat16)]


def test_an_engine_tries_them_on_an_accelerator_and_refuses_packed_rows_alone(monkeypatch):
    with_kernels(monkeypatch, qwen3_5(), NAMES | {"causal_conv1d_fn": deaf_conv})
    monkeypatch.setattr(kernel_trial, "CPU", "elsewhere")
    engine = zero3d.Engine(hybrid("qwen3_5_text"), optimizer=adamw, precision="fp32")
    ids = torch.arange(3, 15)[None]
    engine.train_batch([{"input_ids": ids, "labels": ids}])
    positions = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with pytest.raises(ConfigError, match=r"documents cannot be packed: on cpu in float32, .*deaf_conv"):
        engine.train_batch([{"input_ids": ids, "labels": ids, "position_ids": positions}])


def test_an_engine_on_the_host_tries_none(monkeypatch):
    with_kernels(monkeypatch, qwen3_5(), NAMES | {"causal_conv1d_fn": deaf_conv})
    monkeypatch.setattr(kernel_trial, "_tried", lambda *what: pytest.fail("tried"))
    assert kernel_trial.wrong_kernels(hybrid("qwen3_5_text"), CPU, torch.float32) is None
