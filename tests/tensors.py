"""Tiny models that a tp axis can cut, and what one step of theirs computes: whole, or joined from the ranks.

`assert_near` compares tensors that kernels, cuts or machines computed otherwise.
"""

import math

import torch
import torch.distributed as dist
from families import family
from models import batch

from zero3d.activations.recomputation import recompute
from zero3d.distributed.axis import Axis
from zero3d.distributed.ledger import Ledger

LAYERS = 2


def tiny(name, dropout=0.0, kv_heads=2, lora=False, layers=LAYERS, **sizes):
    """A model of vocabulary 64, width 32, 4 heads and 2 layers, in training mode.

    name    llama, qwen3 and gemma2 (tied), gpt2 (tied), apertus, mla, next, llama4 or moe; or a type, as of `families`
    lora    True, or options of it
    sizes   other than that, as configs call them (not GPT-2's)
    """
    import transformers as t

    torch.manual_seed(7)
    common = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": layers}
    common |= {"num_attention_heads": 4, "num_key_value_heads": kv_heads, "max_position_embeddings": 64}
    common |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "use_cache": False} | sizes
    if name == "llama":
        model = t.LlamaForCausalLM(
            t.LlamaConfig(**common, attention_dropout=dropout, attention_bias=True, mlp_bias=True)
        )
    elif name == "qwen3":
        model = t.Qwen3ForCausalLM(t.Qwen3Config(**common, head_dim=8, tie_word_embeddings=True))
    elif name == "gemma2":
        model = t.Gemma2ForCausalLM(t.Gemma2Config(**common, head_dim=8, attn_implementation="eager"))
    elif name == "apertus":  # its activation has weights
        model = t.ApertusForCausalLM(t.ApertusConfig(**common))
    elif name == "mla":  # its attention has projections of low rank
        ranks = {"q_lora_rank": 8, "kv_lora_rank": 8, "qk_rope_head_dim": 4, "qk_nope_head_dim": 4, "v_head_dim": 8}
        model = t.DeepseekV2ForCausalLM(t.DeepseekV2Config(**common, **ranks, first_k_dense_replace=layers))
    elif name == "next":  # linear attention, whose three matrices are joined; then the usual one
        experts = {"num_experts": 0, "head_dim": 8, "layer_types": ["linear_attention", "full_attention"]}
        heads = {"linear_num_key_heads": 2, "linear_num_value_heads": 4}
        heads |= {"linear_key_head_dim": 8, "linear_value_head_dim": 8}
        model = t.Qwen3NextForCausalLM(t.Qwen3NextConfig(**common, **experts, **heads))
    elif name == "llama4":  # every expert computes all tokens
        experts = {"num_local_experts": 4, "intermediate_size_mlp": 48, "head_dim": 8}
        model = t.Llama4ForCausalLM(t.Llama4TextConfig(**common, **experts))
    elif name == "moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
        model = t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**experts | common, output_router_logits=True))
        model.set_experts_implementation("eager")
    elif name != "gpt2":
        model = family(name, **sizes)
        return adapted(model, **(lora if isinstance(lora, dict) else {})) if lora else model
    else:
        shape = {"n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 64, "use_cache": False}
        drops = {"resid_pdrop": dropout, "embd_pdrop": dropout, "attn_pdrop": dropout}
        model = t.GPT2LMHeadModel(
            t.GPT2Config(vocab_size=64, bos_token_id=0, eos_token_id=1, pad_token_id=2, **shape, **drops)
        )
    with torch.no_grad():  # biases and norms that matter
        for p in model.parameters():
            if p.dim() == 1:
                p.add_(torch.randn(p.shape) * 0.1)
    return (adapted(model, **(lora if isinstance(lora, dict) else {})) if lora else model).train()


def adapted(model, **options):
    """LoRA over a frozen model, on a colwise and on a rowwise matrix."""
    import peft

    names = ["c_attn", "c_proj"] if model.config.model_type == "gpt2" else ["q_proj", "o_proj", "down_proj"]
    options = {"r": 4, "target_modules": names, "task_type": "CAUSAL_LM", "init_lora_weights": False} | options
    config = peft.LoraConfig(**options)
    return peft.get_peft_model(model, config)


def axis():
    """The whole world as a tp axis."""
    group = dist.group.WORLD
    return Axis("tp", dist.get_rank(), dist.get_world_size(), group, group)


def ids(length=8):
    """Token ids [2, length], the padding token (2) and, 32 rows further on, its like among them."""
    tokens = batch(3, size=2, length=length)
    tokens[1, :2] = torch.tensor([2, 34])
    return tokens


def step(model, policy="none"):
    """Loss of one batch, some labels left out, and its gradients."""
    if policy != "none":
        recompute(model, policy)
    tokens = ids()
    labels = tokens.clone()
    labels[0, :3] = -100
    loss = model(input_ids=tokens, labels=labels, use_cache=False).loss
    loss.backward()
    return loss.detach()


def one_process(name, dtype=torch.float64, policy="none", **options):
    model = tiny(name, **options)
    for p in model.parameters():
        p.data = p.data.to(dtype)
    loss = step(model, policy)
    return loss, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


def cut_model(name, dtype=torch.float64, sequence=False, plan=None, local_logits=True, **options):
    """(model, what was cut, ledger) on a rank; ranks other than 0 begin with other weights."""
    from zero3d.tensor_parallel.parallelize import parallelize

    model = tiny(name, **options)
    for p in model.parameters():
        p.data = (p.data + 3.0 * dist.get_rank()).to(dtype)
    ledger = Ledger()
    sharded = parallelize(model, axis(), ledger, plan=plan, sequence=sequence, local_logits=local_logits)
    ledger.reset()
    return model, sharded, ledger


def logical_gradients(model, sharded):
    """Every gradient put together from the ranks': joined where cut, summed where partial."""
    found = {}
    for name, p in model.named_parameters():
        if p.grad is None:
            continue
        parts = [torch.empty_like(p.grad) for _ in range(dist.get_world_size())]
        dist.all_gather(parts, p.grad.contiguous())
        if name in sharded.cuts:
            found[name] = sharded.cuts[name].join(parts)
        elif name in sharded.partial:
            found[name] = torch.stack(parts).sum(0)
        else:
            assert all(torch.equal(part, parts[0]) for part in parts), name
            found[name] = parts[0]
    return found


FEW = 4  # elements of a model that rounding may send the other way


def assert_near(found, wanted, most, rate=0.0):
    """Fail unless every tensor is as near to the wanted one of its name as rounding leaves it: ||a - b|| <= most * ||b||.

    rate    the largest learning rate of steps of an adaptive optimizer behind the tensors. Where a gradient is zero but for
            rounding it moves an element by +-rate, as this CPU happens to round: FEW elements may be that far apart, by
            2 * rate. Parameters are never compared element by element after such a step.
    """
    assert found.keys() == wanted.keys()
    beyond = {}
    for name, tensor in found.items():
        norm = wanted[name].double().norm()
        beyond[name] = float((tensor.double() - wanted[name].double()).norm() - most * norm)
    far = {name: apart for name, apart in beyond.items() if not apart <= 0}
    assert math.hypot(*far.values()) <= 2 * rate * FEW**0.5, f"beyond {most:.0e} of their norms: {far}"
