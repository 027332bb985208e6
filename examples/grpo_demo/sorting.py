"""The task: three digits of 0 to 5 and a sign that ends them become the same digits in order; 216 prompts in all.

3 1 2 =  ->  1 2 3        tokens 0 to 5 are digits, 6 is the sign, 7 is never used
"""

from itertools import product

import torch
from transformers import LlamaConfig, LlamaForCausalLM

PLACES, SIGN, VOCABULARY = 3, 6, 8
PATIENCE = 600.0  # seconds that either side waits for the other, whose imports may take a while
PROMPTS, GROUP = 32, 16  # prompts of a step, completions of each


def model():
    """Return a small model whose weights are drawn from torch's generator."""
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=128, intermediate_size=256, num_hidden_layers=2, num_attention_heads=4,
        max_position_embeddings=2 * PLACES + 1, bos_token_id=None, eos_token_id=None,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def all_prompts():
    """Return every prompt, [216, 4]."""
    return torch.tensor([[*digits, SIGN] for digits in product(range(SIGN), repeat=PLACES)])


def rewards(prompts, completions):
    """Return the share of right places of each completion, [n]."""
    return _right(prompts, completions).float().mean(1)


def exact_match(model):
    """Return the share of all prompts that a model completes without a mistake, by the likeliest tokens."""
    prompts = all_prompts()
    completions, _ = sample(model, prompts, greedy=True)
    return float(_right(prompts, completions).all(1).float().mean())


def _right(prompts, completions):
    return completions == prompts[:, :PLACES].sort(1).values


@torch.no_grad()
def sample(model, prompts, greedy=False):
    """Complete prompts with a cache of keys and values; return tokens and their log-probabilities, both [n, 3]."""
    cache, given, tokens, logs = None, prompts, [], []
    for _ in range(PLACES):
        output = model(input_ids=given, past_key_values=cache, use_cache=True)
        cache, log_probabilities = output.past_key_values, output.logits[:, -1].log_softmax(-1)
        given = log_probabilities.argmax(-1, keepdim=True) if greedy else log_probabilities.exp().multinomial(1)
        tokens.append(given)
        logs.append(log_probabilities.gather(1, given))
    return torch.cat(tokens, 1), torch.cat(logs, 1)
