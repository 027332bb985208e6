"""Three steps of verl's own batches and loss on our engine, by verl's registry; prints what came of them as JSON.

python tests/verl_peer.py FOLDER [LORA_RANK [TP PLACE]]      in an environment that has verl, on each of TP ranks
"""

import json
import sys
from functools import partial
from types import SimpleNamespace

import torch
import torch.distributed as dist


def batch_of(tensordict_utils):
    """A batch as verl's trainer of supervised fine-tuning makes it: nested tensors, without padding."""
    draw = torch.Generator().manual_seed(1)
    rows = [torch.randint(3, 64, (n,), generator=draw) for n in (5, 3, 6, 4)]

    def nested(tensors):
        return torch.nested.as_nested_tensor(list(tensors), layout=torch.jagged)

    tensors = {
        "input_ids": nested(rows),
        "position_ids": nested(torch.arange(len(row)) for row in rows),
        "loss_mask": nested(torch.ones_like(row) for row in rows),
    }
    settings = {"use_dynamic_bsz": False, "micro_batch_size_per_gpu": 2, "temperature": 1.0, "calculate_entropy": True}
    return tensordict_utils.get_tensordict(tensors, settings)


def sent_of(engine, base_sync_done):
    """Shapes of the tensors that a rollout gets, by name, and what PEFT's config tells it."""
    weights, config = engine.get_per_tensor_param(layered_summon=False, base_sync_done=base_sync_done)
    shapes = {name: list(tensor.shape) for name, tensor in weights}
    told = config and {key: getattr(config[key], "value", config[key]) for key in ("peft_type", "task_type", "r")}
    return {"shapes": shapes, "config": told}


def main(folder, lora_rank=0, tp=1, place=0):
    from verl.utils import tensordict_utils
    from verl.workers.config.model import HFModelConfig
    from verl.workers.engine.base import EngineRegistry
    from verl.workers.utils.losses import sft_loss

    from zero3d.ways.verl import VerlEngine

    VerlEngine.options = {"stage": 3, "tp": tp}
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=place, world_size=tp)
    model = {"path": folder, "load_tokenizer": False, "override_config": {"attn_implementation": "sdpa"}}
    engine = EngineRegistry.new(
        model_type="language_model", backend="zero3d",
        model_config=HFModelConfig(**model, lora_rank=lora_rank),
        engine_config=SimpleNamespace(dtype="float32", param_offload=False, optimizer_offload=False, seed=42),
        optimizer_config=SimpleNamespace(
            lr=1e-2, betas=(0.9, 0.999), weight_decay=0.0, clip_grad=1.0, total_training_steps=3, lr_warmup_steps=0,
            lr_warmup_steps_ratio=0.0, lr_scheduler_type="constant",
        ),
        checkpoint_config=None,
    )  # fmt: skip
    engine.initialize()
    losses = []
    for _ in range(3):
        with engine.train_mode():
            output = engine.train_batch(batch_of(tensordict_utils), partial(sft_loss, None))
        losses.append(sum(output["loss"]))
        engine.lr_scheduler_step()
    with engine.eval_mode():
        told = engine.infer_batch(batch_of(tensordict_utils))
    logs = [len(row) for row in told["model_output"]["log_probs"].unbind()]
    sent = {str(done): sent_of(engine, done) for done in (True, False)}
    print(json.dumps({"losses": losses, "norm": output["metrics"].get("grad_norm"), "logs": logs, "sent": sent}))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
