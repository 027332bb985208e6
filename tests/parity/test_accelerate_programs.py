"""What programs for Accelerate do around the loop: saves at the end, LocalSGD, compiled models, parts, others' folders."""

import warnings
from functools import partial

import pytest
import torch
from models import hf
from tensors import assert_near
from trainers import Rows, arguments, launched

import zero3d

RATE = 1e-2


def fresh():
    from accelerate.state import AcceleratorState, GradientState

    AcceleratorState._reset_state(reset_partial_state=True)
    GradientState._reset_state()
    torch.manual_seed(0)


def prepared(kind="ours", wrap=lambda model: model, part=lambda name: True, stage=3, rows=16, groups=None):
    """Accelerator, model, optimizer and loader of one epoch, 4 rows a step over all ranks."""
    import accelerate

    from zero3d.ways.huggingface.accelerate import Accelerator

    accelerator = accelerate.Accelerator(cpu=True) if kind == "plain" else Accelerator(cpu=True, stage=stage)
    model = wrap(hf("llama"))
    trained = [p for name, p in model.named_parameters() if part(name)]
    optimizer = torch.optim.AdamW(trained if groups is None else groups(model), lr=1e-2)
    loader = torch.utils.data.DataLoader(Rows(rows), batch_size=4 // accelerator.num_processes)
    return accelerator, *accelerator.prepare(model, optimizer, loader)


def trained(accelerator, model, optimizer, loader, each=lambda: None):
    """Losses of one epoch on this rank."""
    losses = []
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        each()
        losses.append(loss.item())
    return losses


def ended(folder):
    """Whether what all ranks wrote is the model's weights; what a rank alone is told; LocalSGD's losses and others'."""
    from accelerate.local_sgd import LocalSGD
    from transformers import LlamaForCausalLM

    with launched():
        fresh()
        accelerator, model, *others = prepared()
        wanted = trained(accelerator, model, *others)
        unwrapped = accelerator.unwrap_model(model)
        main = accelerator.is_main_process
        unwrapped.save_pretrained(folder, is_main_process=main, save_function=accelerator.save)
        accelerator.wait_for_everyone()
        whole, words = accelerator.get_state_dict(model), ""
        if main:
            written = LlamaForCausalLM.from_pretrained(folder).state_dict()
            assert all(torch.equal(written[name], value) for name, value in whole.items())
            unwrapped.save_pretrained(folder / "given", state_dict=whole)  # one rank may alone
            try:
                unwrapped.save_pretrained(folder)
            except zero3d.ConfigError as error:
                words = str(error)
        accelerator.wait_for_everyone()
        with pytest.raises(zero3d.CheckpointError, match="rank 0 failed: NotADirectoryError"):  # on all ranks
            unwrapped.save_pretrained(folder / "config.json" / "model")
        accelerator.engine.unshard()
        if main:
            unwrapped.save_pretrained(folder / "whole")
        accelerator.free_memory()
        assert "save_pretrained" not in vars(model)
        fresh()
        accelerator, model, *others = prepared()
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            with LocalSGD(accelerator, model, local_sgd_steps=2, enabled=True) as local:
                alike = trained(accelerator, model, *others, local.step)
            with LocalSGD(accelerator, model, local_sgd_steps=2, enabled=True):
                pass
        told = sum("LocalSGD" in str(each.message) for each in said)
        accelerator.free_memory()
        return words, wanted == alike, told


def test_what_all_ranks_save_is_whole_and_local_sgd_has_the_steps_of_every_loop(ranks, tmp_path):
    (words, alike, told), *rest = ranks(2, ended, tmp_path)
    assert "save_pretrained() was called on rank 0, while rank 1 waits in wait_for_everyone()" in words
    assert "on all ranks" in words
    assert (alike, told) == (True, 1)
    assert rest == [("", True, 0)]


def prompts_written(folder):
    """Whether files that all ranks write have the prompt that was trained, with and without weights gathered before."""
    from peft import PromptTuningConfig, get_peft_model
    from safetensors.torch import load_file

    def prompted(model):
        return get_peft_model(model, PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=3))

    def tuned(model):
        return [p for p in model.parameters() if p.requires_grad]

    with launched():
        fresh()
        accelerator, model, *others = prepared(wrap=prompted, groups=tuned)
        trained(accelerator, model, *others)
        main = accelerator.is_main_process
        model.save_pretrained(folder / "gathered", is_main_process=main)
        model.save_pretrained(folder / "given", is_main_process=main, state_dict=accelerator.get_state_dict(model))
        accelerator.wait_for_everyone()
        files = [load_file(folder / how / "adapter_model.safetensors") for how in ("gathered", "given")]
        encoder = model.prompt_encoder["default"]
        with accelerator.engine.full_params():
            return [torch.equal(file["prompt_embeddings"], encoder.embedding.weight) for file in files]


def test_prompts_that_all_ranks_save_are_those_that_were_trained(ranks, tmp_path):
    assert ranks(2, prompts_written, tmp_path) == [[True, True]] * 2


def in_part(kind):
    fresh()
    accelerator, model, *others = prepared(kind, part=lambda name: "mlp" in name)
    losses = trained(accelerator, model, *others)
    if kind == "ours":
        accelerator.free_memory()
    return losses, [p.requires_grad for p in model.parameters()]


def test_an_optimizer_of_a_part_of_the_model_trains_that_part():
    (wanted, trains), (losses, trains_after) = in_part("plain"), in_part("ours")
    assert losses == pytest.approx(wanted, rel=1e-5)
    assert trains == trains_after
    assert all(trains)


@pytest.mark.long
def test_a_model_that_was_compiled_before_has_compiled_blocks(capsys):
    fresh()
    wanted = trained(*prepared())
    fresh()
    accelerator, model, *others = prepared(wrap=partial(torch.compile, backend="eager"))
    assert trained(accelerator, model, *others) == wanted
    assert not hasattr(model, "_orig_mod")
    said = capsys.readouterr().out
    assert "torch.compile(LlamaForCausalLM) before prepare(): the engine compiles its blocks" in said
    assert any("compile" in note for note in accelerator.engine.notes)


def as_a_trainer(model):
    """The groups that the error names."""
    from transformers import Trainer

    decay = Trainer.get_decay_parameter_names(None, model)
    return [
        {"params": [p for n, p in model.named_parameters() if n in decay]},
        {"params": [p for n, p in model.named_parameters() if n not in decay], "weight_decay": 0.0},
    ]


@pytest.mark.long
def test_a_folder_of_a_plain_trainer_goes_on_in_a_loop_of_accelerates(tmp_path):
    from transformers import Trainer

    fresh()
    args = arguments(tmp_path, max_steps=4, save_strategy="steps", save_steps=4, learning_rate=1e-2, report_to="none")
    Trainer(hf("llama"), args, train_dataset=Rows(64)).train()
    fresh()
    folder = tmp_path / "checkpoint-4"
    accelerator, *_ = prepared()
    with pytest.raises(zero3d.CheckpointError, match=r"groups of \[16, 5\].*get_decay_parameter_names\(None, model\)"):
        accelerator.load_state(str(folder))
    fresh()
    accelerator, model, optimizer, loader = prepared(groups=as_a_trainer)
    schedule = accelerator.prepare(torch.optim.lr_scheduler.LambdaLR(optimizer.optimizer, lambda step: 1 / (1 + step)))
    with pytest.raises(zero3d.ConfigError, match=r"accelerator\.load_state\(FOLDER\)"):
        optimizer.load_state_dict(torch.load(folder / "optimizer.pt"))
    accelerator.load_state(str(folder))
    assert accelerator.engine.steps == 4
    assert schedule.scheduler.last_epoch == 4
    assert optimizer.param_groups[0]["lr"] == schedule.get_last_lr()[0] != 1e-2
    moments = optimizer.state_dict()["state"]
    assert all(state["exp_avg"].abs().sum() > 0 for state in moments.values())
    trained(accelerator, model, optimizer, loader)


def two_at_once(together):
    """Losses of two models that two Accelerators train, by turns or one after the other."""
    fresh()
    first, second = prepared(stage=2), prepared(stage=3, rows=8)
    loops = [trained_by_turns(each) for each in (first, second)]
    found = [[], []]
    order = [0, 1] * 2 + [0] * 2 if together else [0] * 4 + [1] * 2
    for which in order:
        found[which].append(next(loops[which]))
    return found


def trained_by_turns(parts):
    accelerator, model, optimizer, loader = parts
    for batch in loader:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        yield loss.item()


@pytest.mark.long
def test_two_accelerators_train_two_models_by_turns():
    assert two_at_once(together=True) == two_at_once(together=False)


def adversaries(kind, stage=2):
    """Losses of a generator and a discriminator, each with an Accelerator, whose gradients `zero_grad` of the modules
    forgets: those that the discriminator gets of the generator's losses, too.
    """
    import accelerate

    from zero3d.ways.huggingface.accelerate import Accelerator

    with launched():
        fresh()
        nets = [torch.nn.Sequential(torch.nn.Linear(3, 8), torch.nn.Tanh(), torch.nn.Linear(8, n)) for n in (3, 1)]
        optimizers = [torch.optim.AdamW(net.parameters(), lr=RATE) for net in nets]
        loader = torch.utils.data.DataLoader(torch.randn(12, 3), batch_size=2)
        plain = kind == "plain"
        of_g, of_d = (accelerate.Accelerator(cpu=True) if plain else Accelerator(cpu=True, stage=stage) for _ in nets)
        make, for_make, loader = of_g.prepare(nets[0], optimizers[0], loader)
        judge, for_judge = of_d.prepare(nets[1], optimizers[1])
        softplus, losses = torch.nn.functional.softplus, []
        with of_d.join_uneven_inputs([judge]):
            for step, real in enumerate(loader):
                fake = make(real.flip(0))
                judge.zero_grad()
                losses.append(softplus(-judge(real)).mean() + softplus(judge(fake.detach())).mean())
                of_d.backward(losses[-1])
                for_judge.step()
                make.zero_grad()
                verdict = judge(fake)
                losses.append(softplus(-verdict).mean())
                if plain:  # a second backward of a graph averages nothing under DistributedDataParallel
                    of_g.backward(losses[-1] + verdict.pow(2).mean())
                else:
                    of_g.backward(losses[-1], retain_graph=True)
                    of_g.backward(verdict.pow(2).mean())
                if step != 1:  # a step is left out, and its gradients are forgotten
                    for_make.step()
        weights = [of.get_state_dict(net) for of, net in ((of_g, make), (of_d, judge))]
        return [of_g.gather(loss.detach().reshape(1)).mean().item() for loss in losses], weights


@pytest.mark.parametrize("stage", [*(pytest.param(stage, marks=pytest.mark.long) for stage in (0, 1, 2)), 3])
@pytest.mark.filterwarnings("ignore:.*[Jj]oin")
def test_two_models_that_train_against_each_other_have_accelerates_curve(ranks, stage):
    wanted, there = ranks(2, adversaries, "plain")[0]
    found, weights = ranks(2, adversaries, "ours", stage)[0]
    assert found == pytest.approx(wanted, rel=1e-5)
    for ours, plain in zip(weights, there, strict=True):
        assert_near(ours, plain, 1e-4, rate=RATE)


def test_uneven_inputs_are_told_that_they_are_even():
    fresh()
    accelerator, model, *_ = prepared()
    with pytest.warns(UserWarning, match="join_uneven_inputs changes nothing"), accelerator.join_uneven_inputs([model]):
        pass
