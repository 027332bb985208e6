"""Tiny models in folders, adapters on them, and engines that take frozen weights from there."""

from pathlib import Path
from zlib import crc32

import torch
from families import llava
from models import adamw, batch, bits, loss_of
from tensors import tiny

import zero3d
from zero3d.config import Model, load
from zero3d.models.open import open_model
from zero3d.models.trained import open_trained
from zero3d.shards.boxes import slices


def base_folder(folder, name="llama", seed=0, **sizes):
    """Save a tiny model there, another one for every seed."""
    model = llava() if name == "llava" else tiny(name, **sizes)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=generator) * 0.05)
    model.save_pretrained(folder)
    return Path(folder)


class AdaptersOn:
    """Weights of a PEFT model: those of its base from a folder, adapters drawn by their names."""

    def __init__(self, weights, model):
        self.weights, self.folder = weights, weights.folder
        self.shapes = {name: p.shape for name, p in model.named_parameters()}

    def __call__(self, name, box):
        if self.holds(name):
            return self.weights(plain(name), box)
        generator = torch.Generator().manual_seed(crc32(name.encode()))
        return (torch.randn(self.shapes[name], generator=generator) * 0.1)[slices(box)]

    def files(self):
        return self.weights.files()

    def close(self):
        self.weights.close()

    def holds(self, name):
        return self.weights.holds(plain(name))


def plain(name):
    """What the base calls a parameter of a PEFT model."""
    for part in ("base_model.model.", ".base_layer", ".original_module", ".modules_to_save.default"):
        name = name.replace(part, "")
    return name


def with_adapters(folder, also=(), **options):
    """A PEFT model of a folder's, on meta, and its weights; `also`: parameters of the base that are trained, too."""
    import peft

    opened = open_model(Model(path=str(folder)))
    options = {"r": 4, "target_modules": ["q_proj", "o_proj", "down_proj"], "task_type": "CAUSAL_LM"} | options
    model = peft.get_peft_model(opened.module, peft.LoraConfig(**options), low_cpu_mem_usage=True)
    for name in also:
        model.get_base_model().get_parameter(name).requires_grad_(True)
    return model.train(), AdaptersOn(opened.weights, model)


def engine_on(folder, lora=None, also=(), **options):
    """An engine of adapters on the weights of a folder."""
    model, weights = with_adapters(folder, also, **(lora or {}))
    made = {"precision": "fp32", "optimizer": adamw, "clip_norm": 0.5} | options
    return zero3d.Engine(model, weights=weights, **made)


def engine_of(folder, settings, **options):
    """An engine of what a configuration makes of a folder's model."""
    config = load({"model": {"path": str(folder)}, **settings})
    opened = open_trained(config)
    made = {"precision": "fp32", "optimizer": adamw, "clip_norm": 0.5} | options
    return zero3d.Engine(opened.module.train(), weights=opened.weights, **made)


def steps(engine, numbers):
    """Losses of these steps, alike on all ranks."""
    return [float(step(engine, number)) for number in numbers]


def step(engine, number):
    loss = loss_of(engine, batch(number))
    engine.backward(loss)
    engine.step()
    return loss.detach()


def weights(engine):
    """A hash of all weights as the forward has them."""
    with engine.full_params():
        return bits(p.detach() for p in engine.module.parameters())
