"""Chunks of models, called one after another in one process, against the whole model."""

import re

import pytest
import torch
import vision
from deep import deep
from families import family
from models import VOCAB, Net, adamw, batch, bits, clone, net
from torch import nn

import zero3d
from zero3d.activations.recomputation import recompute
from zero3d.errors import ConfigError
from zero3d.models.blocks import find_blocks, find_units
from zero3d.models.chain import find_chain
from zero3d.models.images import give_blank_image
from zero3d.pipeline.split import ModelChunk, balance, chain_of, split
from zero3d.pipeline.ties import Tie

FAMILIES = ["llama", "qwen3", "gpt2", "moe"]
COUNTS = [[3, 2], [1, 2, 2], [2, 1, 1, 1]]


def chunks_of(model, counts, **options):
    return [split(clone(model), counts, chunk, **options) for chunk in range(len(counts))]


def packed():
    """Two sequences of two documents each, as a batch carries them: no mask, positions that start again."""
    ids = batch(0, size=2, length=9)
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], [0, 1, 0, 1, 2, 3, 4, 5, 6]])
    return ids, {"labels": ids.clone(), "position_ids": positions}


def run(chunks, ids, given):
    """Call chunk after chunk, as separate graphs; return the last output and the tensors between chunks."""
    between, passed = [], (ids,)
    for chunk in chunks:
        sent = chunk(*passed, **given)
        if chunk.is_last:
            return sent, between
        outputs = sent if isinstance(sent, tuple) else (sent,)
        passed = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in outputs)
        between.append((outputs, passed))


def backward(loss, between):
    loss.backward()
    for outputs, passed in reversed(between):
        pairs = [(sent, came.grad) for sent, came in zip(outputs, passed, strict=True) if sent.is_floating_point()]
        torch.autograd.backward([sent for sent, _ in pairs], [grad for _, grad in pairs])


def grads_of(chunks):
    """Gradients by name; ties summed under their owner's name."""
    grads = {name: p.grad for chunk in chunks for name, p in chunk.named_parameters()}
    for tie in chunks[0].tied:
        other = grads.pop(tie.other_name)
        grads[tie.name] = grads[tie.name] + other
    return grads


def assert_same_step(model, chunks, ids, given):
    torch.manual_seed(0)
    whole = model(ids, use_cache=False, **given)
    whole.loss.backward()
    torch.manual_seed(0)
    output, between = run(chunks, ids, given)
    backward(output.loss, between)
    assert bits([output.logits, output.loss]) == bits([whole.logits, whole.loss])
    grads = grads_of(chunks)
    tied = {tie.name for tie in chunks[0].tied}
    assert set(grads) == {name for name, _ in model.named_parameters()}
    for name, p in model.named_parameters():
        if p.grad is None:  # a layer that this model never calls
            assert grads[name] is None
        elif name in tied:
            torch.testing.assert_close(grads[name], p.grad, rtol=1e-6, atol=1e-7)
        else:
            assert bits([grads[name]]) == bits([p.grad]), name


@pytest.mark.parametrize(("name", "counts"), [
    pytest.param(name, counts, marks=() if number % 3 == place else pytest.mark.long)
    for number, name in enumerate(FAMILIES) for place, counts in enumerate(COUNTS)
], ids=str)  # fmt: skip
def test_chunks_compute_the_whole_models_loss_logits_and_gradients_bit_for_bit(name, counts):
    model = deep(name)  # in training mode: gpt2 and llama draw dropout
    ids, given = packed()
    assert_same_step(model, chunks_of(model, counts), ids, given)


@pytest.mark.parametrize("name", FAMILIES)
def test_recomputing_every_block_changes_no_bit(name):
    model = deep(name)
    chunks = chunks_of(model, [2, 1, 2])
    for chunk in chunks:
        recompute(chunk, "full")
    assert_same_step(model, chunks, *packed())


@pytest.mark.parametrize("counts", COUNTS, ids=str)
def test_the_auxiliary_loss_of_experts_is_the_whole_models(counts):
    model = deep("moe")
    model.config.output_router_logits, model.router_aux_loss_coef = True, 0.5
    ids, given = packed()
    with torch.no_grad():
        without = model(ids, use_cache=False, output_router_logits=False, **given).loss
        assert model(ids, use_cache=False, **given).loss > without + 0.1
    chunks = chunks_of(model, counts)
    for chunk in chunks[1:]:
        recompute(chunk, "full")
    assert_same_step(model, chunks, ids, given)
    whole, (output, _) = model(ids, use_cache=False, **given), run(chunks, ids, given)
    assert bits(output.router_logits) == bits(whole.router_logits)
    assert float(output.aux_loss.detach()) == float(whole.aux_loss.detach())


def test_the_auxiliary_loss_counts_no_padding_and_some_chunks_have_no_experts():
    import transformers as t

    config = deep("moe").config
    config.output_router_logits, config.mlp_only_layers = True, [0, 1, 4]
    model = t.Qwen3MoeForCausalLM(config).train()
    mask = torch.ones(2, 9, dtype=torch.long)
    mask[0, :4] = 0
    ids, given = packed()
    given = {"labels": given["labels"], "attention_mask": mask}
    assert_same_step(model, chunks_of(model, [2, 1, 1, 1]), ids, given)


def test_layers_of_several_attention_types_keep_their_own_masks():
    import transformers as t

    kinds = ["full_attention", "sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    config = deep("qwen3").config
    config.layer_types, config.sliding_window, config.use_sliding_window = kinds, 3, True
    model = t.Qwen3ForCausalLM(config).train()
    assert_same_step(model, chunks_of(model, [1, 3, 1]), *packed())


@pytest.mark.parametrize("name", ["bamba", "bert", "bart", "jamba"])
def test_models_whose_embeddings_share_a_module_or_whose_layers_are_of_several_classes_are_cut(name):
    model = family(name, num_hidden_layers=4)
    ids = batch(0)
    assert_same_step(model, chunks_of(model, [1, 2, 1]), ids, {"labels": ids})


def test_embeddings_that_a_block_reads_again_are_sent_to_the_stage_that_reads_them():
    model = family("zamba2", num_hidden_layers=4).double()  # its third block reads them
    chain, entry = chain_of(model, None, [1, 2, 1])
    assert "a second tensor with a gradient" in chain.doubt
    assert [(leaf.name, leaf.until) for leaf in entry.leaves] == [("inputs_embeds", 1)]
    ids, chunks = batch(0), chunks_of(model, [1, 2, 1])
    whole = model(ids, labels=ids, use_cache=False).loss
    whole.backward()
    output, between = run(chunks, ids, {"labels": ids})
    backward(output.loss, between)
    assert [len(passed) for _, passed in between] == [3, 2]
    torch.testing.assert_close(output.loss, whole)
    for name, grad in grads_of(chunks).items():
        torch.testing.assert_close(grad, model.get_parameter(name).grad)


@pytest.mark.parametrize(("name", "options", "why"), [
    ("zamba2", {"layers_block_type": ["mamba", "hybrid", "hybrid", "mamba"]}, "blocks of two stages would share it"),
    ("gemma4_text", {}, "a second tensor with a gradient"),
])  # fmt: skip
def test_weights_or_values_that_blocks_of_two_stages_share_are_refused(name, options, why):
    with pytest.raises(ConfigError, match=f"cannot be cut into pipeline stages.*{why}.*Pass pp=1"):
        chain_of(family(name, num_hidden_layers=4, **options), None, [2, 2])


def test_a_model_that_needs_token_ids_on_every_stage_is_refused_before_the_first_step():
    model = family("bert", num_hidden_layers=4)
    base, forward = type(model.bert), type(model.bert).forward

    class Strict(base):
        def forward(self, input_ids=None, **kwargs):
            return forward(self, input_ids + 0, **kwargs)

    model.bert.__class__ = Strict
    with pytest.raises(
        ConfigError, match=r"BertLMHeadModel cannot be cut.*inputs_embeds \[2, 3, 32\].*TypeError.*pp=1"
    ):
        split(model, [2, 2], 0)


def test_a_model_whose_masks_come_from_token_ids_is_refused():
    model = deep("llama")

    class Masked(type(model.model)):
        def forward(self, input_ids=None, attention_mask=None, **kwargs):
            if input_ids is not None:
                attention_mask = torch.ones(input_ids.shape[0], 1, input_ids.shape[1], input_ids.shape[1]) - 0.5
            return super().forward(input_ids=input_ids, attention_mask=attention_mask, **kwargs)

    model.model.__class__ = Masked
    with pytest.raises(ConfigError, match="its blocks get different masks or positions"):
        split(model, [3, 2], 0)


def test_a_model_that_would_write_to_the_hidden_state_it_receives_is_refused():
    import transformers as t

    config = t.CTRLConfig(vocab_size=VOCAB, n_positions=16, n_embd=32, dff=32, n_layer=2, n_head=4)
    with pytest.raises(ConfigError, match=r"CTRLLMHeadModel cannot be cut.*modifies inputs_embeds in place"):
        split(t.CTRLLMHeadModel(config), [1, 1], 0)


def test_layers_that_are_skipped_at_random_are_refused():
    with pytest.raises(ConfigError, match=r"skips layers at random \(decoder_layerdrop=0.1\)"):
        split(family("bart", decoder_layerdrop=0.1), [2, 2], 0)


def test_models_that_scale_embeddings_and_logits_or_whose_blocks_return_tuples_are_cut_too():
    import transformers as t

    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 4, "num_attention_heads": 4}
    more = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 8, "pad_token_id": 0}
    torch.manual_seed(0)
    gemma = t.Gemma2ForCausalLM(t.Gemma2Config(**sizes, **more))  # sqrt(hidden) x embedding, capped logits
    assert find_chain(gemma).tuples == 0
    bloom = t.BloomForCausalLM(t.BloomConfig(vocab_size=VOCAB, hidden_size=32, n_layer=4, n_head=4, use_cache=False))
    assert find_chain(bloom).tuples == 1
    ids, given = packed()
    assert_same_step(gemma.train(), chunks_of(gemma, [1, 2, 1]), ids, given)
    assert_same_step(bloom.train(), chunks_of(bloom, [1, 2, 1]), ids, {"labels": ids})


@pytest.mark.parametrize("tied", [False, True])
def test_a_plain_module_that_is_a_chain_is_cut_like_a_hugging_face_model(tied):
    whole = net(layers=4, tied=tied, dropout=0.2).train()
    chunks, ids = chunks_of(whole, [2, 1, 1]), batch(0)
    torch.manual_seed(0)
    logits = whole(ids)
    logits.square().mean().backward()
    torch.manual_seed(0)
    output, between = run(chunks, ids, {})
    backward(output.square().mean(), between)
    assert bits([output]) == bits([logits])
    grads = grads_of(chunks)
    for name, p in whole.named_parameters():
        torch.testing.assert_close(grads[name], p.grad, rtol=1e-6 if tied else 0, atol=1e-7 if tied else 0)


@pytest.mark.parametrize("name", [*FAMILIES, "net"])
def test_a_parameter_is_on_one_chunk_under_the_whole_models_name(name):
    model = deep(name)
    names = [n for chunk in chunks_of(model, [2, 1, 1, 1]) for n, _ in chunk.named_parameters()]
    assert len(names) == len(set(names))
    ties = split(model, [2, 1, 1, 1], 0).tied
    assert set(names) - {tie.other_name for tie in ties} == {n for n, _ in model.named_parameters()}


def test_ties_are_told_and_each_chunk_has_a_copy_of_its_own():
    model = deep("gpt2")
    first, _, last = (split(model, [2, 2, 1], chunk) for chunk in range(3))
    assert first.tied == last.tied == [Tie("transformer.wte.weight", 0, "lm_head.weight", 2)]
    here, there = (
        dict(first.named_parameters())["transformer.wte.weight"],
        dict(last.named_parameters())["lm_head.weight"],
    )
    assert torch.equal(here, there)
    assert here.data_ptr() != there.data_ptr()
    assert here is model.transformer.wte.weight
    assert split(model, [5], 0).tied == []
    assert split(deep("llama"), [3, 2], 1).tied == []


@pytest.mark.parametrize("name", [*FAMILIES, "net"])
def test_units_of_the_chunks_are_the_units_of_the_whole(name):
    model = deep(name)
    chunks = chunks_of(model, [2, 1, 1, 1])
    other_names = {tie.other_name for tie in chunks[0].tied}
    specs = [
        (spec.name, {n: p.shape for n, p in spec.params.items() if n not in other_names})
        for chunk in chunks
        for spec in find_units(chunk, None, torch.bfloat16)[0]
    ]
    whole = [
        (spec.name, {n: p.shape for n, p in spec.params.items()}) for spec in find_units(model, None, torch.bfloat16)[0]
    ]
    assert sorted(unit for unit in specs if unit[1]) == sorted(whole)
    assert [len(find_blocks(chunk)) for chunk in chunks] == [2, 1, 1, 1]


def test_units_named_by_class_are_found_or_known_to_be_elsewhere():
    model = deep("llama")
    units = [type(model.model.layers[0]), nn.Embedding, "lm_head"]
    names = [[spec.name for spec in find_units(chunk, units, torch.float32)[0]] for chunk in chunks_of(model, [4, 1])]
    assert names[0] == ["model.embed_tokens", *(f"model.layers.{i}" for i in range(4))]
    assert names[1] == ["model.layers.4", "root", "lm_head"]


@pytest.mark.parametrize("name", ["qwen3", "moe"])
def test_a_model_without_weights_is_cut_and_stays_as_it_is(name):
    from zero3d.models.build import build

    model = build(deep(name).config)
    before = [n for n, _ in model.named_parameters()]
    chunks = [split(model, [3, 2], chunk) for chunk in range(2)]
    assert all(p.is_meta for chunk in chunks for p in chunk.parameters())
    assert [n for n, _ in model.named_parameters()] == before
    assert len(chunks[0].tied) == (name == "qwen3")


def test_a_chunk_can_be_copied_and_follows_train_and_eval_and_knows_the_config():
    model = deep("moe")
    chunks = [clone(chunk) for chunk in chunks_of(model, [3, 2])]
    assert_same_step(model, chunks, *packed())
    assert chunks[0].eval().training is chunks[0].model.training is False
    assert isinstance(chunks[1], ModelChunk)
    assert chunks[1].config.num_hidden_layers == 5


@pytest.mark.parametrize("stage", [pytest.param(1, marks=pytest.mark.long), 3])
def test_an_engine_around_each_chunk_trains_as_one_around_the_whole_does(stage):
    options = {"stage": stage, "precision": "fp32", "clip_norm": None, "optimizer": adamw}
    model = deep("moe")
    chunks = chunks_of(model, [2, 2, 1])
    engines = [zero3d.Engine(chunk, **options) for chunk in chunks]
    whole = zero3d.Engine(clone(model), **options)
    for chunk, engine in zip(chunks, engines, strict=True):
        engine.is_last = chunk.is_last
    ids, given = packed()
    for _ in range(3):
        expected = whole(ids, use_cache=False, **given).loss
        output, between = run(engines, ids, given)
        assert bits([output.loss]) == bits([expected])
        expected.backward()
        backward(output.loss, between)
        for engine in (whole, *engines):
            engine.step()


def test_adapters_are_cut_with_their_model():
    import peft

    config = peft.LoraConfig(target_modules=["q_proj", "down_proj"], init_lora_weights=False, task_type="CAUSAL_LM")
    model = peft.get_peft_model(deep("qwen3"), config).train()
    chunks = chunks_of(model, [2, 2, 1])
    ids, given = packed()
    output, _ = run(chunks, ids, given)
    assert bits([output.loss]) == bits([model(ids, use_cache=False, **given).loss])
    names = [n for chunk in chunks for n, p in chunk.named_parameters() if p.requires_grad]
    assert names == [n for n, p in model.named_parameters() if p.requires_grad]


def test_ties_are_named_as_in_the_whole_model_even_if_its_head_is_registered_first():
    class HeadFirst(nn.Module):
        def __init__(self, inner):
            super().__init__()
            self.head, self.embed, self.layers = inner.head, inner.embed, inner.layers

        def forward(self, ids):
            x = self.embed(ids)
            for layer in self.layers:
                x = layer(x)
            return self.head(x)

    model = HeadFirst(net(tied=True))
    chunks = [split(model, [2, 1], chunk) for chunk in range(2)]
    assert chunks[0].tied == [Tie("head.weight", 1, "embed.weight", 0)]
    assert chunks[1].head.weight is model.embed.weight is not chunks[0].embed.weight


def test_a_models_own_forward_sees_whether_its_chunk_trains():
    class Signed(Net):
        def forward(self, ids):
            return super().forward(ids) if self.training else -super().forward(ids)

    chunk = split(Signed(), [2, 1], 1)
    hidden = torch.ones(2, 3, 24)
    assert torch.equal(chunk.eval()(hidden), -chunk.train()(hidden))


def test_positions_of_images_are_sent_though_the_smallest_one_of_the_processor_is_a_token():
    model = vision.model("qwen3_vl")
    give_blank_image(
        model, {"pixel_values": torch.ones(4, 3 * 2 * 14 * 14), "image_grid_thw": torch.tensor([[1, 2, 2]])}
    )
    _, entry = chain_of(model, None, [1, 1])
    assert "position_ids" in {leaf.name for leaf in entry.leaves}


def test_a_forward_leaves_no_tensor_behind():
    chunk = split(deep("llama"), [3, 2], 0)
    ids, given = packed()
    chunk(ids, **given)
    assert vars(chunk._tensors) == {"received": None, "routed": None, "sent": None}


def test_cutting_draws_no_random_number():
    model = deep("gpt2")
    torch.manual_seed(3)
    before = torch.random.get_rng_state()
    split(model, [3, 2], 1)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_a_large_vocabulary_gives_the_last_stage_fewer_blocks():
    counts = balance(deep("qwen3"), 2, tokens=4096)
    assert sum(counts) == 5
    assert counts[0] > counts[1]
    assert sum(balance(deep("moe"), 3, tokens=64)) == 5


class Residual(nn.Module):
    """Not a chain: every block sees the embedding again."""

    def __init__(self, kind):
        super().__init__()
        inner = net(layers=3)
        self.embed, self.layers, self.head, self.kind = inner.embed, inner.layers, inner.head, kind

    def forward(self, ids):
        x = first = self.embed(ids)
        for layer in reversed(self.layers) if self.kind == "order" else self.layers:
            x = layer(x) + first if self.kind == "sum" else layer(x)
        return self.head(x)


def test_rope_that_reads_positions_and_writes_its_buffers_is_cut():
    import transformers as t

    sizes = {"vocab_size": VOCAB, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4}
    more = {"intermediate_size": 48, "pad_token_id": 0, "max_position_embeddings": 16, "attention_dropout": 0.0}
    rope = {"type": "longrope", "long_factor": [2.0] * 4, "short_factor": [1.0] * 4, "rope_theta": 1e4}
    long = t.Phi3Config(**sizes, **more, original_max_position_embeddings=8, rope_scaling=rope)
    model = t.Phi3ForCausalLM(long).train()
    assert_same_step(model, chunks_of(model, [1, 2]), *packed())


@pytest.mark.parametrize(("kind", "text"), [("sum", "between blocks 0 and 1"), ("order", r"in the order \[2, 1, 0\]")])
def test_a_model_that_is_no_chain_is_refused(kind, text):
    with pytest.raises(ConfigError, match=f"Residual cannot be cut into pipeline stages.*{text}.*pp=1"):
        split(Residual(kind), [2, 1], 0)


def test_parameters_of_the_model_itself_are_refused_by_name():
    model = net()
    model.scale = nn.Parameter(torch.ones(1))
    with pytest.raises(ConfigError, match=r"scale is a parameter of Net itself.*module of its own"):
        split(model, [2, 1], 0)


class Mixing(nn.Module):
    """Wraps a block; adds what it is given beside the hidden state."""

    def __init__(self, block):
        super().__init__()
        self.block = block

    def forward(self, x, more):
        return self.block(x) + more["first"]


class Again(Residual):
    """Hands every block the embedding, or the token ids, beside the hidden state."""

    def __init__(self, kind):
        super().__init__(kind)
        self.layers = nn.ModuleList(Mixing(layer) for layer in self.layers)

    def forward(self, ids):
        x = self.embed(ids)
        more = {"first": x if self.kind == "embedding" else ids}
        for layer in self.layers:
            x = layer(x, more)
        return self.head(x)


@pytest.mark.parametrize(
    ("kind", "text"),
    [("embedding", "block 1 takes a second tensor with a gradient"), ("ids", "block 0 takes the token ids")],
)
def test_blocks_that_see_the_embedding_or_the_token_ids_are_refused(kind, text):
    with pytest.raises(ConfigError, match=text):
        split(Again(kind), [2, 1], 0)


def test_missing_or_doubtful_lists_of_blocks_are_told_with_what_to_type():
    with pytest.raises(ConfigError, match=r"Its lists: none\. Put its blocks in an nn\.ModuleList, or pass pp=1"):
        split(nn.Linear(2, 2), [1, 1], 0)
    with pytest.raises(ConfigError, match=r"Its lists: mixed \(2\)\. Pass blocks='NAME'"):
        split(nn.ModuleDict({"mixed": nn.Sequential(nn.Linear(2, 2), nn.ReLU())}), [1, 1], 0)
    with pytest.raises(ConfigError, match=r"blocks='layer' names no list.*layers \(3\)"):
        split(net(), [2, 1], 0, blocks="layer")
    two = nn.ModuleDict({"a": net(), "b": net()})
    with pytest.raises(ConfigError, match=r"2 lists of blocks: a\.layers, b\.layers\. None of them.*Pass pp=1"):
        split(two, [2, 1], 0)


def named(error):
    return re.search(r"blocks='(\S+)'", str(error.value))[1]


def test_of_several_lists_of_blocks_one_that_can_be_cut_is_proposed():
    model = net(layers=3)
    model.embed = nn.Sequential(model.embed, nn.Sequential(*net(layers=2).layers))
    with pytest.raises(ConfigError, match="2 lists of blocks") as error:
        split(model, [2, 1], 0)
    assert named(error) == "layers"
    output, _ = run(chunks_of(model, [2, 1], blocks=named(error)), batch(0), {})
    assert bits([output]) == bits([model(batch(0))])


@pytest.mark.parametrize("model", [net(layers=1), deep("llama", layers=1)], ids=["net", "llama"])
def test_one_block_is_found_and_cannot_make_two_stages(model):
    with pytest.raises(
        ConfigError, match=r"pp=2 pipeline stages need a block each, and [a-z.]*layers has 1: pass pp=1"
    ):
        balance(model, 2, tokens=8)


def test_a_list_of_one_among_several_is_no_list_of_blocks():
    model = nn.ModuleDict({"a": net(layers=1), "b": net(layers=1)})
    with pytest.raises(ConfigError, match=r"no list of two or more blocks.*a\.layers \(1\), b\.layers \(1\)"):
        balance(model, 2, tokens=8)


def test_a_named_list_of_blocks_is_taken():
    model = net(layers=2)
    chunks = chunks_of(model, [1, 1], blocks="layers")
    output, _ = run(chunks, batch(0), {})
    assert bits([output]) == bits([model(batch(0))])


def test_counts_that_do_not_fit_are_refused_with_the_arithmetic():
    model = net(layers=2)
    with pytest.raises(ConfigError, match=r"sum to the 2 blocks of layers, and sum to 4: pass balance\(model, 4"):
        split(model, [1, 1, 1, 1], 0)
    with pytest.raises(ConfigError, match="pp=4 pipeline stages need a block each, and layers has 2: pass pp=2"):
        balance(model, 4, tokens=8)
    with pytest.raises(
        ConfigError, match="'zbv' puts 2 model chunks on each of 2 pipeline stages = 4 chunks, and layers has 2"
    ):
        balance(model, 2, tokens=8, schedule="zbv")
    with pytest.raises(ConfigError, match=r"counts=\[2, 1\].*sum to the 2 blocks of layers, and sum to 3"):
        split(model, [2, 1], 0)
    with pytest.raises(ConfigError, match="chunk=2 is none of 2 chunks: pass 0 to 1"):
        split(model, [1, 1], 2)
