"""The plugin for Axolotl against the interface of its package, which is installed without its requirements."""

from importlib import import_module
from importlib.util import find_spec

import pytest
from models import hf
from trainers import arguments, launched

import zero3d

pytestmark = [pytest.mark.long, pytest.mark.skipif(find_spec("axolotl") is None, reason="needs axolotl's own package")]


def test_the_plugin_is_one_of_axolotls(tmp_path):
    import transformers
    from axolotl.integrations.base import BasePlugin, load_plugin
    from axolotl.utils.dict import DictDefault

    from zero3d.integrations.accelerate import Accelerator

    plugin = load_plugin("zero3d.integrations.axolotl.Zero3dPlugin")
    assert isinstance(plugin, BasePlugin)
    module, _, name = plugin.get_input_args().rpartition(".")
    keys = getattr(import_module(module), name)
    assert keys(zero3d_stage=2).zero3d_stage == 2
    with pytest.raises(ValueError, match="zero3d_stage"):
        keys(zero3d_stage=4)
    for key, value in {"deepspeed": "ds.json", "dp_shard_size": 2, "context_parallel_size": 2}.items():
        with pytest.raises(zero3d.ConfigError, match=f"{key} and zero3d_stage would shard the model twice"):
            plugin.get_trainer_cls(DictDefault({"zero3d_stage": 2, key: value}))
    try:
        assert plugin.get_trainer_cls(DictDefault({"zero3d_stage": 2})) is None
        with launched():
            trainer = transformers.Trainer(hf("llama"), arguments(tmp_path))
        assert trainer.zero3d.stage == 2
        assert isinstance(trainer.accelerator, Accelerator)
    finally:
        transformers.Trainer.zero3d_undo()
