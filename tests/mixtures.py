"""Tiny mixtures of experts of several families, and a global list of micro-batches that any mesh trains on.

Experts are 32 wide: of fewer elements the last row of a product may go through the scalar end of a vectorised sigmoid,
whose bits are others, and which row is the last depends on who computes with whom.
"""

import torch

import zero3d

VOCAB, SUMMANDS = 64, 8
SIZES = {
    "vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "intermediate_size": 48, "max_position_embeddings": 64, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2,
    "head_dim": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "output_router_logits": True,
}  # fmt: skip
FAMILIES = {
    "qwen3_moe": {"num_experts": 8},
    "mixtral": {"num_local_experts": 8, "intermediate_size": 32},
    "olmoe": {"num_experts": 8, "intermediate_size": 32},
    "gpt_oss": {"num_local_experts": 8, "intermediate_size": 32, "sliding_window": 4},
    "deepseek_v3": {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 2, "topk_group": 1, "q_lora_rank": 8,
                    "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8, "head_dim": 4,
                    "num_key_value_heads": 4, "first_k_dense_replace": 1},
    "glm4_moe": {"n_routed_experts": 8, "n_shared_experts": 1, "n_group": 1, "topk_group": 1,
                 "first_k_dense_replace": 1},
    "granitemoe": {"num_local_experts": 8, "intermediate_size": 32},
}  # fmt: skip


def mixture(name="qwen3_moe", how="grouped_mm", **options):
    """A model of this type; `how` is transformers' way of computing experts."""
    import transformers as t

    torch.manual_seed(7)
    config = t.AutoConfig.for_model(name, **SIZES | FAMILIES[name] | options, use_cache=False)
    model = t.AutoModelForCausalLM.from_config(config)
    model.set_experts_implementation(how)
    with torch.no_grad():  # routers that choose, biases that matter
        for key, p in model.named_parameters():
            if p.dim() == 1 or key.endswith("bias"):
                p.add_(torch.randn(p.shape) * 0.1)
            elif ".gate." in key or "router" in key:
                p.mul_(20)
    return model.train()


def with_adapters(how="grouped_mm"):
    """A mixture with adapters of attention and of its stacked experts."""
    from peft import LoraConfig, get_peft_model

    from zero3d.models.stacked_adapters import keep_parameters

    config = LoraConfig(
        r=2, target_modules=["q_proj"], target_parameters=["experts.gate_up_proj", "experts.down_proj"],
        init_lora_weights=False, task_type="CAUSAL_LM",
    )  # fmt: skip
    torch.manual_seed(8)
    model = get_peft_model(mixture(how=how), config)
    keep_parameters(model)
    return model


def summand(step, number, length=9):
    """Micro-batch `number` of a step; each has another number of targets."""
    ids = torch.randint(3, VOCAB, (2, length), generator=torch.Generator().manual_seed(1000 * step + number))
    labels = ids.clone()
    labels[0, : 2 + number % 5] = -100
    return {"input_ids": ids, "labels": labels}


def adamw(parameters):
    return torch.optim.AdamW(parameters, lr=1e-2, weight_decay=0.1)


def engine_of(model=None, *, ep=1, dp=None, tp=None, pp=None, **options):
    made = {"optimizer": adamw, "clip_norm": None, "precision": "fp32", "stage": 3} | options
    return zero3d.Engine(mixture() if model is None else model, mesh=zero3d.Mesh(dp, tp, pp, ep), **made)


def own_part(engine, step, length=9, summands=SUMMANDS):
    """This rank's micro-batches of the global list."""
    n, rank = engine.dp.size, engine.dp.rank
    per_rank = summands // n
    in_turn = engine.policy.reduce == "every_micro_batch"
    numbers = [k * n + rank if in_turn else rank * per_rank + k for k in range(per_rank)]
    return [summand(step, number, length) for number in numbers]


def curve(engine, steps, **how):
    """Losses of all digits, and the fingerprint."""
    losses = [float(engine.train_batch(own_part(engine, step, **how))).hex() for step in steps]
    return losses, engine.fingerprint()
