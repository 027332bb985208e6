"""A model cut over tp ranks computes what one process computes."""

import pytest
from tensors import cut_model, logical_gradients, one_process, step
from test_stages import LiftCasts


def loss_and_gradients(name, policy="none", **options):
    """fp64 throughout, as the oracle."""
    with LiftCasts():
        model, sharded, ledger = cut_model(name, **options)
        loss = step(model, policy)
    traffic = {(e.op, e.unit): (e.calls, e.elements) for e in ledger}
    return loss, logical_gradients(model, sharded), sharded.partial, traffic


def compare(results, name, **options):
    with LiftCasts():
        loss, grads = one_process(name, **options)
    for found, joined, _, _ in results:
        assert abs(float(found - loss)) < 1e-10
        assert joined.keys() == grads.keys()
        for key, grad in grads.items():
            assert float((joined[key] - grad).norm() / grad.norm().clamp_min(1e-12)) < 1e-9, key


@pytest.mark.parametrize(("name", "world", "options"), [
    ("llama", 2, {}), ("llama", 2, {"sequence": True}), ("qwen3", 2, {}), ("qwen3", 2, {"sequence": True}),
    ("gpt2", 2, {}), ("gpt2", 4, {"sequence": True}), ("moe", 2, {}), ("llama", 4, {"kv_heads": 4}),
])  # fmt: skip
def test_loss_and_gradients_equal_one_process_in_float64(ranks, name, world, options):
    results = ranks(world, run, name, options)
    compare(results, name, **{key: value for key, value in options.items() if key == "kv_heads"})


def run(name, options, policy="none"):
    return loss_and_gradients(name, policy, **options)
