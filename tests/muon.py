"""Loops of torch's own Muon and AdamW, written out, and engines that they are compared with."""

import torch
from models import Net
from summands import SUMMANDS, Given, loss, summand

import zero3d
from zero3d.optim import muon
from zero3d.precision import joined

LR, DECAY = 0.02, 0.1
BETAS = (0.9, 0.95)
STAGES = ((0, "every_step"), (1, "every_step"), (2, "every_micro_batch"), (3, "every_micro_batch"), (3, "every_step"))


def build(width=96, layers=2):
    torch.manual_seed(7)
    return Given(Net(width=width, layers=layers))


def engine_of(model=None, *, stage=3, reduce="auto", exact=True, rule=None, summands=SUMMANDS, **options):
    accumulate = summands // torch.distributed.get_world_size()
    made = {"precision": "fp32", "clip_norm": 0.5, "loss": loss} | options
    rule = muon(lr=LR, weight_decay=DECAY, betas=BETAS) if rule is None else rule
    model = build() if model is None else model
    return zero3d.Engine(model, stage=stage, reduce=reduce, accumulate=accumulate, exact=exact, optimizer=rule, **made)


def micro_batches_of(engine, step, summands=SUMMANDS):
    """This rank's micro-batches of the global list."""
    n, rank = engine.dp.size, engine.dp.rank
    every = engine.policy.reduce == "every_micro_batch"
    return [summand(step, k * n + rank if every else rank * summands // n + k) for k in range(summands // n)]


def train(engine, steps, summands=SUMMANDS):
    """Losses and norms, all digits."""
    curve = []
    for step in steps:
        value = engine.train_batch(micro_batches_of(engine, step, summands))
        curve.append((float(value).hex(), float(engine.last_step.grad_norm).hex()))
    return curve


def go_on(folder, stage, reduce, steps, rule=None):
    """Load if there is something, train some steps, save."""
    engine = engine_of(stage=stage, reduce=reduce, precision="bf16", rule=rule)
    if steps.start:
        engine.load(folder)
    curve = train(engine, steps)
    engine.save(folder)
    return curve, engine.fingerprint(), engine.resumed


def check_going_on(ranks, folder, rule=None):
    """Runs that go on at other dp and stages have the curve and the states of the uninterrupted one."""
    straight, states, _ = ranks(2, go_on, str(folder / "straight"), 3, "auto", range(4), rule)[0]
    parts, curve = [(4, 3, "auto", 0, 2), (1, 0, "auto", 2, 3), (2, 2, "every_step", 3, 4)], []
    for dp, stage, reduce, first, stop in parts:
        outcome = ranks(dp, go_on, str(folder / "cut"), stage, reduce, range(first, stop), rule)[0]
        curve += outcome[0]
        assert outcome[2].startswith("bitwise") or not first
    assert curve == straight
    assert outcome[1] == states


def states_of(engine):
    """This rank's pieces: (name, state, start, values)."""
    found = []
    for owned in engine.optimizer.pieces:
        states = {k: v for k, v in engine.optimizer.states_of(owned).items() if v.dim() == 1}
        for key, values in ({"master": joined(owned.read())} | states).items():
            found.append((owned.name, key, owned.piece.start, values.clone()))
    return found


# --- written out ------------------------------------------------------------------------------------


def halves(values):
    """(v0 + v1) + (v2 + v3), written down."""
    return values[0] if len(values) == 1 else halves(values[: len(values) // 2]) + halves(values[len(values) // 2 :])


def gradients_of(model, named, step, norm, clip, count=SUMMANDS):
    """The clipped gradients of a step, by name: of so many micro-batches, summed in halves."""
    summands, weight = [], 0
    for number in range(count):
        batch = summand(step, number)
        total, targets = loss(model(*batch), batch)
        total.backward()
        weight += int(targets)
        summands.append({name: p.grad.clone() for name, p in named.items()})
        model.zero_grad()
    factor = torch.clamp(torch.tensor(clip) / (torch.tensor(norm) + 1e-6), max=1.0)
    means = {name: halves([one[name] for one in summands]) * (1.0 / weight) for name in named}
    return {name: grad * factor if factor != 1.0 else grad for name, grad in means.items()}


def written_out(model, matrices, norms, clip=0.5, steps=3, count=SUMMANDS, **options):
    """The loop with torch.optim.Muon and AdamW. Returns masters and states by (name, state), flat.

    matrices  name -> views of the parameter that are 2-D matrices, of a tensor of its shape
    norms     of every step's gradients, as the engine had them
    count     of micro-batches
    """
    named = {name: p for name, p in model.named_parameters() if p.requires_grad}
    split = {
        name: [torch.nn.Parameter(view.clone()) for view in of(named[name].detach())] for name, of in matrices.items()
    }
    others = [p for name, p in named.items() if name not in matrices]
    decayed = {"weight_decay": DECAY, "lr": LR}
    muon_options = {"adjust_lr_fn": "match_rms_adamw"} | decayed | options
    first = torch.optim.Muon([p for ps in split.values() for p in ps], **muon_options)
    second = torch.optim.AdamW(others, betas=BETAS, fused=True, **decayed)
    for step, norm in zip(range(steps), norms, strict=True):
        grads = gradients_of(model, named, step, norm, clip, count)
        for name, p in named.items():
            if name in matrices:
                for part, view in zip(split[name], matrices[name](grads[name]), strict=True):
                    part.grad = view.clone()
            else:
                p.grad = grads[name]
        first.step()
        second.step()
        with torch.no_grad():
            for name, parts in split.items():
                for view, part in zip(matrices[name](named[name]), parts, strict=True):
                    view.copy_(part)
        model.zero_grad()
    return gathered(named, matrices, split, first, second)


def gathered(named, matrices, split, first, second):
    states = {}
    for name, p in named.items():
        states[name, "master"] = p.detach().flatten()
        if name in matrices:
            whole = torch.zeros_like(p)
            for view, part in zip(matrices[name](whole), split[name], strict=True):
                view.copy_(first.state[part]["momentum_buffer"])
            states[name, "momentum_buffer"] = whole.detach().flatten()
        else:
            states |= {(name, key): second.state[p][key].flatten() for key in ("exp_avg", "exp_avg_sq")}
    return states
