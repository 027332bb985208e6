"""Operations on released parameters: those on values are errors that name them, all others are as of plain ones."""

import copy
import io
import pickle
import re
import warnings

import pytest
import torch
from models import adamw, batch, build, loss_of
from torch import nn
from torch.overrides import get_testing_overrides, resolve_name
from torch.utils.checkpoint import checkpoint
from trainers import Rows, arguments, launched

import zero3d
from zero3d import ReleasedParameterError
from zero3d.nested import tensors_in

SHAPE = (4, 4)


class Square(nn.Module):
    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.frozen = nn.Linear(*SHAPE), nn.Linear(*SHAPE).requires_grad_(False)

    def forward(self, x):
        return self.frozen(self.inner(x))


def released():
    engine = zero3d.Engine(Square(), stage=3, precision="fp32", optimizer=adamw)
    return engine, engine.module.inner.weight


VALUES = torch.linspace(0.1, 0.9, 16).view(SHAPE)
OTHERS = (
    torch.zeros(SHAPE),
    -3 - VALUES.t(),
    *(torch.full(SHAPE, value) for value in (torch.inf, -torch.inf, torch.nan)),
)  # of which no function thinks alike


def answer(function, p):
    torch.default_generator.manual_seed(0)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return function(p)


def views_of(p, value):
    """Those of a function's results that share the memory of its argument."""
    return [t for t in tensors_in(value) if t.untyped_storage()._cdata == p.untyped_storage()._cdata]


def same(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and torch.equal(one.nan_to_num(7.0), other.nan_to_num(7.0))
    if isinstance(one, (list, tuple)):
        return isinstance(other, type(one)) and len(one) == len(other) and all(map(same, one, other))
    return one == other


def kind_of(function):
    """What a function of one tensor does: "reads" values, makes a "view", is "free"; "" if it takes no tensor alone."""
    p = nn.Parameter(VALUES.clone())
    try:
        first = answer(function, p)
        if first is p:
            return ""  # a write, or nothing
        if views_of(p, first):
            return "view"
        return "free" if all(same(first, answer(function, nn.Parameter(t.clone()))) for t in OTHERS) else "reads"
    except Exception:
        return ""


def functions():
    """Every function of torch's that a tensor's class may answer, by name; not those of memory that nobody has written.

    `set_` replaces a parameter's memory, which the next gather notices.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        named = {resolve_name(function): function for function in get_testing_overrides()}
    return {name: function for name, function in named.items() if name and not re.search(r"empty|Tensor\.set_$", name)}


MEMORY = re.compile(r"data_ptr|_cdata|_storage|storage_|dim_order|is_contiguous|__repr__|contiguous_format")
COPIES_GAPS = re.compile(r"ravel$|reshape|flatten$|contiguous$")  # views of what has no gaps


def test_of_all_functions_those_that_read_values_are_refused_by_name_and_no_other():
    engine, p = released()
    given = {name: (function, kind_of(function)) for name, function in functions().items()}
    for name, (function, kind) in given.items():
        said = None
        try:
            found = answer(function, p)
        except ReleasedParameterError as error:
            said = str(error)
        except Exception:  # such as one that asks for strides
            assert not kind or COPIES_GAPS.search(name), name
            continue
        if kind == "reads":
            assert (said is not None) != bool(MEMORY.search(name) is not None), name
        elif kind:
            assert said is None or COPIES_GAPS.search(name), name
        if said is not None:
            assert "of parameter 'inner.weight', which has no values" in said
            assert "with engine.full_params():" in said
        elif kind == "view":
            for view in views_of(p, found):
                with pytest.raises(ReleasedParameterError, match=r"clone\(\) of parameter 'inner\.weight'"):
                    view.clone()
    kinds = [kind for _, kind in given.values()]
    assert kinds.count("reads") > 350
    assert kinds.count("view") > 20
    assert kinds.count("free") > 90
    engine.backward(engine(torch.ones(2, 4)).sum())
    assert engine.step().applied  # no write has reached it


FREE = {
    "repr": lambda p: repr(p) == "Parameter 'inner.weight' (released: shape (4, 4), torch.float32, cpu)",
    "of a view": lambda p: (
        repr(p.detach().t()[1]) == "Tensor 'inner.weight' (released: shape (4,), torch.float32, cpu)"
    ),
    "hash": lambda p: hash(p) == id(p) and p in {p} and {p: 1}[p],
    "is": lambda p: p is not None and isinstance(p, nn.Parameter) and isinstance(p.data, torch.Tensor),
    "its own data": lambda p: (setattr(p, "data", p.data), type(p) is not nn.Parameter)[1],
    "no parameter": lambda p: not isinstance(p.view(-1), nn.Parameter),
    "None": lambda p: p != None and (p == None) is False,  # noqa: E711
    "gradient": lambda p: p.grad is None and p.requires_grad and p.is_leaf,
    "freezing": lambda p: p.requires_grad_(True) is p,
    "length": lambda p: len(p) == 4 and [len(row) for row in p] == [4] * 4,
    "to where it is": lambda p: p.to(p.device) is p and p.to(p.dtype) is p,
    "edge": lambda p: torch.autograd.graph.get_gradient_edge(p) is not None,
    "like it": lambda p: torch.zeros_like(p).sum() == 0 and p.new_ones(2).sum() == 2,
    "hook": lambda p: p.register_hook(lambda grad: None).remove() is None,
}


@pytest.mark.parametrize("ask", FREE.values(), ids=FREE.keys())
def test_what_needs_no_values_is_answered_as_by_a_plain_parameter(ask):
    assert ask(released()[1])


REFUSED = {
    "item": lambda p: p[0, 0].item(), "tolist": lambda p: p.tolist(), "numpy": lambda p: p.detach().numpy(),
    "float": lambda p: float(p[0, 0]), "bool": lambda p: bool(p[0, 0]), "cpu": lambda p: p.cpu(),
    "dtype": lambda p: p.to(torch.float64), "half": lambda p: p.half(), "device": lambda p: p.to("meta"),
    "deepcopy": copy.deepcopy, "copy": copy.copy, "pickle": pickle.dumps,
    "save": lambda p: torch.save({"w": p.data}, io.BytesIO()), "of a view": lambda p: copy.deepcopy(p.detach()[0]),
    "vector": lambda p: nn.utils.parameters_to_vector([p]), "foreach": lambda p: torch._foreach_mul([p, p], 2.0),
    "in a list": lambda p: torch.stack([torch.zeros(SHAPE), p.data]), "in": lambda p: 1.0 in p,
    "fill_": lambda p: p.data.fill_(0.0), "add_": lambda p: p.data.add_(1.0), "mul_": lambda p: p.data.mul_(0.5).add_(p.data),
    "copy_": lambda p: p.data.copy_(torch.zeros(SHAPE)), "into": lambda p: torch.zeros(SHAPE).copy_(p),
    "init": lambda p: nn.init.normal_(p), "item set": lambda p: p.data.__setitem__(0, 1.0),
    "out": lambda p: torch.add(torch.zeros(SHAPE), 1, out=p.data), "autograd": lambda p: (p * 2).sum(),
    "linear": lambda p: nn.functional.linear(torch.zeros(1, 4), p), "equal": lambda p: torch.equal(p, torch.zeros(SHAPE)),
}  # fmt: skip


REFUSED |= {
    "Parameter": nn.Parameter, "Parameter of data": lambda p: nn.Parameter(p.data), "storage": lambda p: p.storage(),
    "set_": lambda p: torch.zeros(SHAPE).set_(p.data), "tensor": lambda p: torch.tensor(p.detach()),
    "vmap": lambda p: torch.vmap(lambda row: row.unsqueeze(0).sum())(p.data),
    "vmap's own": lambda p: torch.vmap(lambda row: row @ p)(torch.zeros(SHAPE)),
    "of a gradient": lambda p: torch.func.grad(lambda own: own.square().sum())(p.data),
    "another class": lambda p: p.data.as_subclass(torch.Tensor).sum(),
}  # fmt: skip


@pytest.mark.parametrize("use", REFUSED.values(), ids=REFUSED.keys())
def test_a_read_a_copy_or_a_write_is_refused_by_name_and_training_goes_on(use):
    engine, p = released()
    with pytest.raises(ReleasedParameterError, match=r"of parameter 'inner\.weight', which has no values.*full_params"):
        use(p)
    engine.backward(engine(torch.ones(2, 4)).sum())
    assert engine.step().applied


class Lender(nn.Module):
    """Reads what another block has in a way that no hook sees."""

    def __init__(self, read):
        super().__init__()
        self.first, self.second, self.read = nn.Linear(4, 4), nn.Linear(4, 4), read

    def forward(self, x):
        return self.read(self, self.first(x))


READS = {
    "frozen": lambda m, x: x @ next(m.second.parameters()),
    "a sum": lambda m, x: x + next(m.second.parameters()).sum(),
    "in a checkpoint": lambda m, x: checkpoint(lambda x: x @ next(m.second.parameters()), x, use_reentrant=False),
    "in a reentrant checkpoint": lambda m, x: checkpoint(
        lambda x: x @ next(m.second.parameters()), x, use_reentrant=True
    ),
}


@pytest.mark.parametrize("grad", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_a_forward_that_reads_another_modules_parameters_is_refused(read, frozen, grad):
    model = Lender(read)
    model.second.requires_grad_(not frozen)
    engine = zero3d.Engine(model, stage=3, precision="fp32", units=["first", "second"])
    with torch.set_grad_enabled(grad), pytest.raises(ReleasedParameterError, match=r"of parameter 'second\.weight'"):
        engine(torch.ones(2, 4, requires_grad=True))
    with engine.full_params():
        assert engine(torch.ones(2, 4)).isfinite().all()


def around_a_gather(stage):
    """Whether a parameter is a plain one while it is gathered, and refuses before and after; on each rank."""
    model = build("net")
    p, seen = model.layers[0].up.weight, []
    kept = list(vars(p))
    engine = zero3d.Engine(model, stage=stage, precision="bf16", optimizer=adamw)
    model.layers[0].up.register_forward_hook(lambda *_: seen.append((type(p), list(vars(p)) == kept)))
    for step in range(2):
        engine.backward(loss_of(engine, batch(step)))
        engine.step()
    with pytest.raises(ReleasedParameterError):
        p.norm()
    with engine.full_params():
        seen.append((type(p), list(vars(p)) == kept))
        norm, copied = p.norm().item(), copy.deepcopy(p)
    with pytest.raises(ReleasedParameterError):
        p.norm()
    assert set(seen) == {(nn.Parameter, True)}, seen
    engine.close()
    assert type(p) is nn.Parameter
    return norm, p.norm().item(), copied.float().norm().item()


def test_parameters_are_plain_ones_while_they_are_gathered_and_after_the_close(ranks):
    found = ranks(2, around_a_gather, 3)
    assert found[0] == found[1]
    assert len({round(value, 2) for value in found[0]}) == 1


def views_beyond_a_block(precision):
    """Sums of a view that is kept beyond full_params(): there, after a step; and memory that is kept with and without."""
    engine = zero3d.Engine(build("net"), stage=3, precision=precision, optimizer=adamw)
    full = [unit.weights.full.untyped_storage() for unit in engine._parts.units]
    for each in range(2):
        with engine.full_params():
            view = engine.module.layers[0].up.weight.data
            assert view.isfinite().all()
        sums = [view.float().sum().item()]
        engine.backward(loss_of(engine, batch(each)))
        assert engine.step().applied
        sums.append(view.float().sum().item())
        kept = sum(storage.nbytes() > 0 for storage in full)
    del view
    engine.backward(loss_of(engine, batch(2)))
    engine.step()
    return sums, kept, sum(storage.nbytes() for storage in full)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_view_that_is_kept_beyond_full_params_is_nan_and_ends_no_process(ranks, precision):
    for sums, kept, left in ranks(2, views_beyond_a_block, precision):
        assert all(value != value for value in sums)
        assert (kept, left) == (1, 0)


def a_callback_of_trls(follows):
    """TRL's callback in short: it knows no engine."""
    from transformers import TrainerCallback

    class SyncRefModelCallback(TrainerCallback):
        def sync_target_model(self, model, target, alpha):
            for to, of in zip(target.parameters(), model.parameters(), strict=True):
                to.data.mul_(1.0 - alpha).add_(of.data, alpha=alpha)

        def on_step_end(self, args, state, control, model=None, **others):
            self.sync_target_model(model, follows, 0.5)

    return SyncRefModelCallback


def following(stage, folder, of_trl):
    """A reference model that follows the one in training, or what is said."""
    from models import hf

    from zero3d.ways.huggingface.transformers import Trainer

    with launched():
        reference = hf("llama")
        callback = a_callback_of_trls(reference)
        callback.__module__ = "trl.trainer.callbacks" if of_trl else "own"
        args = arguments(folder, max_steps=2, gradient_accumulation_steps=1)
        trainer = Trainer(hf("llama"), args, train_dataset=Rows(16), callbacks=[callback()], stage=stage)
        try:
            trainer.train()
        except ReleasedParameterError as error:
            return str(error)
        return [p.detach().numpy() for p in reference.parameters()]


def test_a_reference_model_follows_by_trls_callback_and_by_ones_own_with_whole_weights(ranks, tmp_path):
    wanted = ranks(2, following, 2, tmp_path, True)[0]
    for found in ranks(2, following, 3, tmp_path, True):
        for ours, theirs in zip(found, wanted, strict=True):
            assert torch.equal(torch.tensor(ours), torch.tensor(theirs))
    for said in ranks(2, following, 3, tmp_path, False):
        assert "trainer.accelerator.engine.full_params()" in said


class Behind(nn.Module):
    """An embedding that is not the first of its parameters."""

    def __init__(self):
        super().__init__()
        self.up, self.embed = nn.Linear(4, 4), nn.Embedding(8, 4)

    def forward(self, ids):
        return self.up(self.embed(ids))


class Without(nn.Sequential):
    """A module without an embedding."""

    def forward(self, ids):
        return super().forward(VALUES[ids % 4])


ATTACKED = {  # what makes a model, and which of its parameters an attack is on
    "embedding": (lambda: nn.Sequential(nn.Embedding(8, 4), nn.Linear(4, 4)), lambda model: [model[0].weight]),
    "embedding behind": (Behind, lambda model: [model.embed.weight]),
    "all": (lambda: Without(nn.Linear(4, 4), nn.Linear(4, 4)), lambda model: [*model.parameters()]),
}


def in_two_losses(accelerator, attacks, on):
    """What a loop of two backwards a step has learnt. attacks: shift parameters along their gradients between them."""
    torch.manual_seed(0)
    make, attacked = ATTACKED[on]
    model = make()
    model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
    for step in range(3):
        for part in range(2):
            for p in attacked(model) if attacks and part else ():
                if p.grad is not None:
                    p.data.add_(p.grad)
            accelerator.backward(model(torch.arange(4) + step + part).square().mean())
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()]


def learnt(stage, attacks, on="embedding"):
    import accelerate

    from zero3d.ways.huggingface.accelerate import Accelerator

    with launched():
        own = accelerate.Accelerator(cpu=True) if stage is None else Accelerator(stage=stage)
        try:
            return in_two_losses(own, attacks, on)
        except zero3d.ConfigError as error:
            return str(error)


@pytest.mark.parametrize("stage", [0, 2])
def test_two_losses_of_a_step_count_as_torch_adds_them_and_an_attack_between_them_is_refused(alone, stage):
    for ours, theirs in zip(alone(learnt, stage, False), alone(learnt, None, False), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-6)
    for on in ATTACKED:
        said = alone(learnt, stage, True, on)
        assert re.match(
            r"p\.grad was read between two backwards of a step.*remove it.*engine\.grad_norm\(\).*FGM.*inputs_embeds",
            said,
        ), on


class Looking(nn.Linear):
    """Asks for its gradient in a forward, as a compiler does of all that it compiles."""

    def forward(self, x):
        assert self.weight.grad is None
        return super().forward(x)


def windows_of_what_looks():
    """Losses of two windows of two micro-batches each."""
    from zero3d.ways.huggingface.accelerate import Accelerator

    with launched():
        accelerator = Accelerator(stage=0, gradient_accumulation_steps=2)
        torch.manual_seed(0)
        model = Looking(*SHAPE)
        model, optimizer = accelerator.prepare(model, torch.optim.SGD(model.parameters(), lr=0.5))
        losses = []
        for _ in range(4):
            with accelerator.accumulate(model):
                losses.append(model(VALUES).square().mean())
                accelerator.backward(losses[-1])
                optimizer.step()
                optimizer.zero_grad()
        return [loss.item() for loss in losses]


def test_a_forward_that_looks_at_gradients_as_a_compiler_does_is_no_attack(alone):
    first, second, third, fourth = alone(windows_of_what_looks)
    assert first == second > third == fourth
