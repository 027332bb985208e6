"""Tiny models of every kind of head, with micro-batches whose rows have unlike numbers of targets."""

import torch
from torch import nn
from torch.nn import functional as F

SIZES = {
    "vocab_size": 64, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "max_position_embeddings": 32, "pad_token_id": 0,
}  # fmt: skip
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "classifier_dropout": 0.0}
BART = {
    "vocab_size": 64, "d_model": 16, "encoder_layers": 1, "decoder_layers": 1, "encoder_attention_heads": 2,
    "decoder_attention_heads": 2, "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "max_position_embeddings": 32,
    "dropout": 0.0,
}  # fmt: skip
T5 = {"vocab_size": 64, "d_model": 16, "d_kv": 4, "d_ff": 16, "num_layers": 1, "num_heads": 2, "dropout_rate": 0.0,
      "decoder_start_token_id": 0}  # fmt: skip
VIT = {
    "image_size": 8, "patch_size": 4, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1,
    "num_attention_heads": 2, "num_labels": 3,
}  # fmt: skip
SEGFORMER = {
    "num_encoder_blocks": 1, "depths": [1], "sr_ratios": [1], "hidden_sizes": [16], "patch_sizes": [3], "strides": [2],
    "num_attention_heads": [2], "mlp_ratios": [2], "decoder_hidden_size": 16, "num_labels": 3,
    "classifier_dropout_prob": 0.0, "drop_path_rate": 0.0,
}  # fmt: skip
# class of transformers, its config's numbers, and what its labels are
HEADS = {
    "next tokens": ("LlamaForCausalLM", SIZES, "tokens"),
    "next tokens, the family's own code": ("ClvpForCausalLM", SIZES | {"resid_pdrop": 0.0, "embd_pdrop": 0.0,
                                           "attention_dropout": 0.0}, "tokens"),
    "masked": ("BertForMaskedLM", SIZES | STILL, "tokens"),
    "masked, by loss_function": ("ModernBertForMaskedLM", SIZES | {"bos_token_id": 1, "eos_token_id": 2,
                                 "cls_token_id": 1, "sep_token_id": 2}, "tokens"),
    "masked, by a module of its own": ("XLMWithLMHeadModel", {"vocab_size": 64, "emb_dim": 16, "n_layers": 1,
                                       "n_heads": 2, "dropout": 0.0, "attention_dropout": 0.0}, "tokens"),
    "encoder-decoder": ("T5ForConditionalGeneration", T5, "tokens"),
    "another encoder-decoder": ("BartForConditionalGeneration", BART, "tokens"),
    "a decoder whose labels are not shifted": ("BartForCausalLM", BART, "tokens"),
    "tokens classified": ("LlamaForTokenClassification", SIZES | {"num_labels": 3, "classifier_dropout": 0.0}, "kinds"),
    "attended tokens classified": ("XLMRobertaXLForTokenClassification", SIZES | STILL | {"num_labels": 3}, "kinds"),
    "sequences classified": ("LlamaForSequenceClassification", SIZES | {"num_labels": 3}, "classes"),
    "rewards": ("LlamaForSequenceClassification", SIZES | {"num_labels": 1}, "numbers"),
    "whole rewards": ("LlamaForSequenceClassification", SIZES | {"num_labels": 1}, "whole numbers"),
    "several labels each": ("BertForSequenceClassification", SIZES | STILL | {"num_labels": 3}, "flags"),
    "choices": ("BertForMultipleChoice", SIZES | STILL, "choices"),
    "answers": ("BertForQuestionAnswering", SIZES | STILL, "answers"),
    "answers, by loss_function": ("LlamaForQuestionAnswering", SIZES, "answers"),
    "images": ("ViTForImageClassification", VIT, "images"),
    "pixels": ("SegformerForSemanticSegmentation", SEGFORMER, "pixels"),
}  # fmt: skip


def head(name):
    """A model in training mode."""
    import transformers as t

    kind, sizes, _ = HEADS[name]
    torch.manual_seed(5)
    model = getattr(t, kind)(getattr(t, kind).config_class(**sizes))
    with torch.no_grad():  # rows must have unlike losses, or any weights would do
        for p in model.parameters():
            p.mul_(8.0 if p.dim() > 1 else 1.0)
    return model.train()


def rows(labels, number, rows=2):
    """A micro-batch, another one for every number; from its third on, and in odd ones, rows have other targets."""
    generator = torch.Generator().manual_seed(number)

    def drawn(high, *sizes, low=0):
        return torch.randint(low, high, sizes, generator=generator)

    batch = {"input_ids": drawn(64, rows, 8, low=3)}
    if labels in ("images", "pixels"):
        batch = {"pixel_values": torch.randn(rows, 3, 8, 8, generator=generator)}
    if labels in ("tokens", "kinds"):
        targets = drawn(64 if labels == "tokens" else 3, rows, 8)
        targets[0, 1 : 4 + number % 4] = -100
        targets[-1, 0] = -100 if number % 2 else targets[-1, 0]
        return batch | {"labels": targets}
    if labels == "choices":
        return {"input_ids": drawn(64, rows, 2, 8, low=3), "labels": drawn(2, rows)}
    if labels == "answers":
        starts = drawn(4, rows)
        starts[0] = 8 if number % 2 else 2  # just beyond the sequence: its answer was cut off
        return batch | {"start_positions": starts, "end_positions": starts + 2}
    if labels == "pixels":
        targets = drawn(3, rows, 8, 8)
        targets[0, : 3 + number % 3] = 255
        return batch | {"labels": targets}
    found = {"flags": drawn(2, rows, 3).float(), "numbers": drawn(9, rows).float(), "whole numbers": drawn(9, rows)}
    targets = found.get(labels, drawn(3, rows))
    if labels == "classes" and number % 2:
        targets[0] = -100
    return batch | {"labels": targets}


class Said:
    """An output with a loss."""

    def __init__(self, loss):
        self.loss = loss


def smoothed(logits, labels):
    """A loss of a file's own, of next tokens."""
    targets = labels[:, 1:]
    return F.cross_entropy(logits[:, :-1].flatten(0, 1), targets.flatten(), label_smoothing=0.1)


class OwnLanguageModel(nn.Module):
    """A module of a user's; `way` is how it computes its loss."""

    def __init__(self, way):
        super().__init__()
        torch.manual_seed(5)
        self.embed, self.head = nn.Embedding(64, 16), nn.Linear(16, 64)
        self.criterion = nn.CrossEntropyLoss()
        self.forward = getattr(self, way)

    def logits(self, input_ids):
        return self.head(self.embed(input_ids).cumsum(1))

    def of_tokens(self, input_ids, labels):
        return Said(self.criterion(self.logits(input_ids).flatten(0, 1), labels.flatten()))

    def in_a_function(self, input_ids, labels):
        return Said(smoothed(self.logits(input_ids), labels))

    def in_a_method(self, input_ids, labels):
        return Said(self.next_tokens(self.logits(input_ids), labels))

    def next_tokens(self, logits, labels):
        rolled = torch.roll(labels, -1, 1)
        rolled[:, -1] = -100
        return F.cross_entropy(logits.flatten(0, 1), rolled.flatten())


class Around(nn.Module):
    """A module of a user's around a model of transformers, whose loss it adds something to."""

    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, **batch):
        extra_loss = 0.0
        return Said(self.inner(**batch).loss + extra_loss)
