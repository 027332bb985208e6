"""Tiny models of five blocks, and what one training step of them computes and keeps."""

import torch
from models import VOCAB, batch, bits, clone, loss_of, net
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from zero3d.activations.recomputation import recompute

LAYERS = 5


def deep(name, layers=LAYERS, inner=48):
    """A tiny model of five blocks in training mode; net and gpt2 with dropout. inner: as in models.hf."""
    if name == "net":
        return net(layers=layers, dropout=0.2).train()
    import transformers as t

    torch.manual_seed(7)
    common = {"vocab_size": VOCAB, "hidden_size": 32, "intermediate_size": inner, "num_hidden_layers": layers}
    common |= {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    common |= {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "use_cache": False}
    if name == "llama":
        model = t.LlamaForCausalLM(t.LlamaConfig(**common, attention_dropout=0.1))
    elif name == "qwen3":
        model = t.Qwen3ForCausalLM(t.Qwen3Config(**common, head_dim=8, tie_word_embeddings=True))
    elif name == "moe":
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "head_dim": 8}
        model = t.Qwen3MoeForCausalLM(t.Qwen3MoeConfig(**common, **experts))
    else:
        sizes = {"n_embd": 32, "n_layer": layers, "n_head": 4, "n_positions": 64, "use_cache": False}
        model = t.GPT2LMHeadModel(t.GPT2Config(vocab_size=VOCAB, bos_token_id=0, eos_token_id=1, **sizes))
    return model.train()


def train(model, loss=loss_of):
    """Losses and gradients of two micro-batches, and the random number drawn after them."""
    torch.manual_seed(0)
    losses = [loss(model, batch(step)) for step in range(2)]
    for value in losses:
        value.backward()
    grads = [p.grad for p in model.parameters() if p.grad is not None]
    return bits(losses), len(grads), bits(grads), float(torch.rand(()))


def recomputed(model, policy, **options):
    copy = clone(model)
    recompute(copy, policy, **options)
    return copy


def kept_inputs(model):
    """(block inputs saved, all bytes saved) by one forward, parameters left out; distinct storages."""
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    saved = {}

    def pack(t):
        saved[t.untyped_storage()._cdata] = t
        return t

    inputs = []
    blocks = next(m for m in model.modules() if isinstance(m, nn.ModuleList))
    for block in blocks:
        block.register_forward_pre_hook(lambda _, args: inputs.append(args[0].untyped_storage()))
    torch.manual_seed(0)
    with saved_tensors_hooks(pack, lambda t: t):
        loss = loss_of(model, batch(0))
    loss.backward()
    count = len({s._cdata for s in inputs if s._cdata in saved})
    return count, sum(t.untyped_storage().nbytes() for key, t in saved.items() if key not in weights)
