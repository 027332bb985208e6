"""LoRA's dropout over tp: the common input of colwise matrices is dropped alike, a rowwise one's own slice is not."""

import pytest
import torch
from tensors import cut_model, step


def masks(policy, sequence):
    """What each dropout of LoRA let through, call by call, by layer and matrix."""
    lora = {"lora_dropout": 0.5, "target_modules": ["q_proj", "v_proj", "o_proj"]}
    model, _, _ = cut_model("llama", dtype=torch.float32, sequence=sequence, lora=lora)
    seen = {}
    for name, module in model.named_modules():
        if name.endswith("lora_dropout.default"):
            matrix = ".".join(name.split(".")[-5:-2])

            def note(module, args, output, matrix=matrix):
                seen.setdefault(matrix, []).append((output != 0).detach())

            module.register_forward_hook(note)
    torch.manual_seed(5)
    for _ in range(2):
        step(model, policy)
        policy = "none"
    return seen


@pytest.mark.parametrize(("policy", "sequence"), [("none", False), ("full", False), ("none", True), ("full", True)])
def test_lora_drops_a_common_input_alike_and_a_slice_of_ones_own(ranks, policy, sequence):
    first, second = ranks(2, masks, policy, sequence)
    calls = 4 if policy == "full" else 2
    for matrix, mine in first.items():
        assert len(mine) == calls
        common = [torch.equal(a, b) for a, b in zip(mine, second[matrix], strict=True)]
        assert common == [not matrix.endswith("o_proj")] * calls, matrix
        if policy == "full":  # a replay lets the same through
            assert torch.equal(mine[0], mine[1])
            assert torch.equal(mine[2], mine[3])
        assert not torch.equal(mine[0], mine[-1])
    shown = [first[f"{layer}.self_attn.{x}_proj"][0] for layer in (0, 1) for x in "qv"]
    assert not any(torch.equal(a, b) for i, a in enumerate(shown) for b in shown[:i])
