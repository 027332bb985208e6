"""A micro-batch is weighed by the targets that its model's own loss is the mean of, which the model's code tells."""

import inspect
import warnings
from functools import partial

import peft
import pytest
import torch
import torch.nn.functional as F
from heads import HEADS, Around, OwnLanguageModel, Said, head, rows

import zero3d
from zero3d.engine.losses import Losses
from zero3d.errors import ConfigError
from zero3d.models.targets import Targets
from zero3d.sequence.group import _refuse_labels

OWN = ("of_tokens", "in_a_function", "in_a_method")


def split(batch):
    return [{name: t[i : i + 1] for name, t in batch.items()} for i in range(len(next(iter(batch.values()))))]


def assert_weighed(model, batch):
    """The loss of a micro-batch is that of its rows, weighed by their targets."""
    targets, whole, parts = Targets.of(model), model.eval()(**batch), split(batch)
    outputs = [model(**part) for part in parts]
    counts = [float(targets.count(part, output)) for part, output in zip(parts, outputs, strict=True)]
    total = sum(output.loss * n for output, n in zip(outputs, counts, strict=True) if n)
    assert float(targets.count(batch, whole)) == sum(counts) > 0
    torch.testing.assert_close(total / sum(counts), whole.loss, rtol=1e-5, atol=1e-6)
    if len({*counts} - {0.0}) > 1:
        alike = sum(output.loss for output, n in zip(outputs, counts, strict=True) if n) / sum(n > 0 for n in counts)
        assert abs(alike - whole.loss) > 1e-4, "rows whose losses are alike tell nothing of weights"


@pytest.mark.parametrize("name", HEADS)
def test_the_loss_of_a_micro_batch_is_that_of_its_rows_weighed_by_their_targets(name):
    for number in (2, 3):
        assert_weighed(head(name), rows(HEADS[name][2], number))


@pytest.mark.parametrize("name", ["attended tokens classified", "tokens classified"])
def test_tokens_that_nobody_attends_to_do_not_count_where_the_model_leaves_them_out(name):
    mask = torch.ones(2, 8, dtype=torch.long)
    mask[1, 5:] = 0
    assert_weighed(head(name), rows("kinds", 1) | {"attention_mask": mask})


def test_a_number_that_is_no_target_elsewhere_is_one_where_labels_are_numbers():
    batch = rows("whole numbers", 1)
    batch["labels"][0] = -100
    assert_weighed(head("whole rewards"), batch)


def test_a_micro_batch_without_targets_adds_nothing():
    model, batch = head("next tokens"), rows("tokens", 1)
    batch["labels"][:] = -100
    total, weight = Losses(model, None, Targets.of(model)).sum_and_weight(model(**batch), batch)
    assert float(total) == float(weight) == 0.0


@pytest.mark.parametrize("way", OWN)
def test_a_module_of_ones_own_is_read_wherever_it_computes_its_loss(way):
    assert_weighed(OwnLanguageModel(way), rows("tokens", 1))


@pytest.mark.parametrize("name", ["next tokens", "masked"])
def test_a_module_around_a_model_has_the_targets_of_that(name):
    assert_weighed(Around(head(name)), rows("tokens", 1))


@pytest.mark.parametrize(("name", "task", "labels"), [
    ("next tokens", "CAUSAL_LM", "tokens"), ("sequences classified", "SEQ_CLS", "classes"),
])  # fmt: skip
def test_adapters_do_not_change_the_targets_of_a_model(name, task, labels):
    assert_weighed(peft.get_peft_model(head(name), peft.LoraConfig(task_type=task)).train(), rows(labels, 1))


@pytest.mark.parametrize("kind", [peft.PromptTuningConfig, peft.PrefixTuningConfig])
def test_behind_virtual_tokens_the_first_token_is_a_target_too_and_behind_virtual_keys_it_is_none(kind):
    model = peft.get_peft_model(head("next tokens"), kind(task_type="CAUSAL_LM", num_virtual_tokens=2))
    assert_weighed(model.train(), rows("tokens", 1))


@pytest.mark.parametrize("options", [
    lambda labels: {"shift_labels": torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].roll(1, 0)},
    lambda labels: {"ignore_index": 7, "labels": torch.where(labels == -100, 7, labels)},
], ids=["shift_labels", "ignore_index"])  # fmt: skip
def test_what_a_micro_batch_tells_the_loss_of_its_targets_is_heard(options):
    given = rows("tokens", 1)
    given |= options(given["labels"])
    loss, targets = head("next tokens")(**given).loss, Targets.of(head("next tokens"))
    told = {"num_items_in_batch": targets.count(given)}
    torch.testing.assert_close(head("next tokens")(**given, **told).loss, loss)


def test_of_several_kinds_of_labels_together_each_example_counts_alike():
    import transformers as t

    config = t.BertConfig(
        vocab_size=64, hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2
    )
    both = rows("tokens", 1) | {"next_sentence_label": torch.tensor([0, 1])}
    assert Targets.of(t.BertForPreTraining(config)).count(both) == 2.0


def test_labels_in_a_list_count_by_example():
    assert Targets("Boxes", shifts=None).count({"labels": [{}, {}, {}]}) == 3.0


def test_a_loss_that_cannot_be_read_counts_next_tokens_and_says_so():
    class Hidden(torch.nn.Module):
        def __init__(self, compute):
            super().__init__()
            self.compute, self.p = compute, torch.nn.Parameter(torch.zeros(()))

        def forward(self, labels):
            return Said(self.compute(labels) * self.p)

    targets = Targets.of(Hidden(compute=len))
    with pytest.warns(UserWarning, match=r"Hidden computes its loss .*pass Engine\(loss=lambda output, batch:"):
        assert targets.count(rows("tokens", 1)) == (rows("tokens", 1)["labels"][:, 1:] != -100).sum()
    with warnings.catch_warnings(action="error"):
        assert Targets.of(Hidden(compute=len)).count({"labels": torch.zeros(3)}) == 3.0


PAD = 0


def pads(head, labels):
    return F.cross_entropy(head.flatten(0, 1), labels.flatten(), ignore_index=PAD)


class Own(torch.nn.Module):
    """A module of a user's, whose losses ignore what its forward says; `me` and not self, as some write."""

    def __init__(me, way, shift=False, **options):
        super().__init__()
        me.crit, me.way, me.shift, me.pad = torch.nn.CrossEntropyLoss(**options), way, shift, PAD
        me.head = torch.nn.Embedding(64, 64)
        me.forward = getattr(me, way)

    def in_a_module(me, input_ids, labels):
        return Said(me.crit(me.head(input_ids).flatten(0, 1), labels.flatten()))

    def under_another_name(me, input_ids, labels):
        mean = me.crit
        return Said(mean(me.head(input_ids).flatten(0, 1), labels.flatten()))

    def built_there(me, input_ids, labels):
        loss_fct = torch.nn.CrossEntropyLoss(None, None, PAD)
        return Said(loss_fct(me.head(input_ids).flatten(0, 1), labels.flatten()))

    def by_an_attribute(me, input_ids, labels):
        return Said(F.cross_entropy(me.head(input_ids).flatten(0, 1), labels.flatten(), ignore_index=me.pad))

    def in_a_function(me, input_ids, labels=None):
        return Said(pads(me.head(input_ids), labels)) if labels is not None else None

    def shifts_by_an_attribute(me, input_ids, labels=None):
        head = me.head(input_ids)
        if labels is not None and me.shift:
            labels, head = labels[:, 1:], head[:, :-1]
        return Said(pads(head, labels))

    def shifts_where_it_is_told(me, input_ids, labels, shift=False):
        head = me.head(input_ids)
        if shift:
            labels, head = labels[:, 1:], head[:, :-1]
        return Said(me.crit(head.flatten(0, 1), labels.flatten()))

    def shifts_in_one_of_two_losses(me, input_ids, labels, short=True):
        head = me.head(input_ids)
        if short:
            return Said(me.crit(head[:, :-1].flatten(0, 1), labels[:, 1:].flatten()))
        return Said(me.crit(head.flatten(0, 1), labels.flatten()))

    def shifts_by_an_index(me, input_ids, labels):
        index = torch.arange(1, labels.shape[1])
        return Said(me.crit(me.head(input_ids)[:, :-1].flatten(0, 1), labels[:, index].flatten()))

    def handed_on(me, input_ids, labels, ignored=PAD):
        return Said(F.cross_entropy(me.head(input_ids).flatten(0, 1), labels.flatten(), ignore_index=ignored))

    def of_two_kinds(me, input_ids, labels):
        head = me.head(input_ids)
        return Said(me.crit(head.flatten(0, 1), labels.flatten()) + pads(head, labels))

    def added_up(me, input_ids, labels):
        return Said(F.cross_entropy(me.head(input_ids).flatten(0, 1), labels.flatten(), reduction="sum"))

    def of_whom_knows(me, input_ids, labels, loss_of=pads):
        return Said(loss_of(me.head(input_ids), labels))


def padded():
    batch = rows("tokens", 1)
    return batch | {"labels": torch.where(batch["labels"] < 20, PAD, batch["labels"])}


@pytest.mark.parametrize(("way", "options"), [
    ("in_a_module", {"ignore_index": PAD}), ("under_another_name", {"ignore_index": PAD}), ("built_there", {}),
    ("by_an_attribute", {}), ("in_a_function", {}), ("shifts_by_an_attribute", {"shift": True}),
    ("shifts_by_an_attribute", {}),
])  # fmt: skip
def test_labels_that_a_criterion_of_ones_own_ignores_do_not_count(way, options):
    with warnings.catch_warnings(action="error", category=UserWarning):
        assert_weighed(Own(way, **options), padded())


@pytest.mark.parametrize(("way", "options", "words"), [
    ("shifts_where_it_is_told", {}, "in several ways"),
    ("shifts_in_one_of_two_losses", {}, "in several ways"),
    ("shifts_by_an_index", {}, "in several ways"),
    ("handed_on", {}, "the ignore_index of cross_entropy cannot be read"),
    ("of_two_kinds", {}, "its criteria ignore -100 and 0"),
    ("added_up", {}, "cross_entropy has a reduction 'sum'"),
    ("in_a_module", {"reduction": "none"}, "crit has a reduction 'none'"),
    ("in_a_module", {"weight": torch.ones(64)}, "crit weighs labels"),
    ("of_whom_knows", {}, r"loss_of\(\) cannot be read"),
])  # fmt: skip
def test_a_loss_of_ones_own_that_may_be_another_mean_is_warned_of(way, options, words):
    with pytest.warns(UserWarning, match=rf"^Own.*{words}.*pass Engine\(loss=lambda output, batch:"):
        Targets.of(Own(way, **options)).count(padded())


# --- engines --------------------------------------------------------------------------------------

sgd = partial(torch.optim.SGD, lr=0.1)


def engine_of(model, **options):
    return zero3d.Engine(model, precision="fp32", clip_norm=None, optimizer=sgd, **options)


def test_num_items_in_batch_changes_neither_loss_nor_gradients():
    batches = [rows("tokens", 1), rows("tokens", 2)]
    means = []
    for extra in ({}, {"num_items_in_batch": 3}):
        engine = engine_of(head("next tokens"))
        given = [batch | extra for batch in batches]
        means.append([engine.evaluate(given), engine.train_batch(given), engine.evaluate(given)])
        engine.close()
    assert means[0] == means[1]


def test_a_loss_of_ones_own_is_given_all_of_a_micro_batch():
    seen = []

    def loss(output, batch):
        seen.append(batch["num_items_in_batch"])
        return output.loss * 3, 3

    engine = engine_of(head("next tokens"), loss=loss)
    engine.evaluate([rows("tokens", 1) | {"num_items_in_batch": 3}])
    engine.close()
    assert seen == [3]


def test_a_sum_in_the_place_of_a_mean_is_refused():
    engine = engine_of(head("next tokens"))
    with pytest.raises(ConfigError, match=r"reduction='sum'.*leave it out, or pass Engine\(loss="):
        engine.train_batch([rows("tokens", 1) | {"reduction": "sum"}])
    engine.close()


def test_a_loss_of_inputs_that_are_no_labels_is_refused_with_what_to_pass():
    engine = engine_of(OwnLanguageModel("of_tokens"))
    engine.module.forward = lambda input_ids: Said(engine.module.logits(input_ids).mean())
    with pytest.raises(ConfigError, match=r"loss=lambda output, batch: \(output.loss \* n, n\)"):
        engine.train_batch([{"input_ids": rows("tokens", 1)["input_ids"]}])


def train(name, stage, size):
    """Losses of two steps, evaluations before them, and weights."""
    rank, labels, engine = torch.distributed.get_rank(), HEADS[name][2], engine_of(head(name), stage=stage)
    found = []
    for step in range(2):
        mine = [rows(labels, 4 * step + 2 * rank + k, size) for k in range(2)]
        found += [float(engine.evaluate(mine)), float(engine.train_batch(mine))]
    with engine.full_params():
        weights = [p.detach().clone() for p in engine.module.parameters()]
    engine.close()
    return found, weights


def train_pipeline(name, number):
    """Losses of an evaluation and a step of four micro-batches, which say num_items_in_batch."""
    engine = engine_of(head(name), mesh=zero3d.Mesh(pp=2))
    batches = [rows(HEADS[name][2], k, 2) | {"num_items_in_batch": number} for k in range(4)]
    found = [float(engine.evaluate(batches)), float(engine.train_batch(batches))]
    engine.close()
    return found


def train_plain(name, size):
    """The same by hand: the model's loss of a step's examples together."""
    model, labels, found = head(name), HEADS[name][2], []
    optimizer = sgd(model.parameters())
    for step in range(2):
        all_of_them = [rows(labels, 4 * step + k, size) for k in range(4)]
        whole = {name: torch.cat([batch[name] for batch in all_of_them]) for name in all_of_them[0]}
        loss = model(**whole).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found += [loss.item()] * 2
    return found, [p.detach() for p in model.parameters()]


EVERY = [name for name in HEADS if name != "pixels"]  # whose head normalises over a batch
ALL = [(name, 3, 1) if i % 2 else (name, 0, 2) for i, name in enumerate(EVERY)]
SHORT = [("rewards", 0, 1), ("masked", 3, 2), ("encoder-decoder", 3, 1)]


@pytest.mark.parametrize(("name", "stage", "size"), [
    *SHORT, *(pytest.param(*case, marks=pytest.mark.long) for case in ALL if case not in SHORT),
])  # fmt: skip
def test_steps_of_ranks_and_micro_batches_are_those_of_all_examples_together(ranks, name, stage, size):
    want, weights = train_plain(name, size)
    for found, own in ranks(2, train, name, stage, size):
        torch.testing.assert_close(found, want, rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(own, weights, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", [
    "next tokens", *(pytest.param(name, marks=pytest.mark.long) for name in ("sequences classified", "masked")),
])  # fmt: skip
def test_a_pipeline_weighs_micro_batches_alike(ranks, name):
    want, _ = train_plain(name, 2)
    for found in ranks(2, train_pipeline, name, 3):
        torch.testing.assert_close(found, want[:2], rtol=1e-5, atol=1e-5)


def test_sequences_that_ranks_share_have_no_answers_in_them():
    model = head("answers, by loss_function")
    given = rows("answers", 1)
    with pytest.raises(
        ConfigError, match="LlamaForQuestionAnswering computes a loss of its own from its start_positions"
    ):
        _refuse_labels(inspect.signature(model.forward), model, (), given)
