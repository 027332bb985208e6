"""One rank of DeepSpeed's own engine: `python deepspeed_rank.py RANK WORLD FOLDER`, which has ds.json; writes losses, saves in the middle."""

import json
import os
import sys
from pathlib import Path


def main(rank, world, folder):
    os.environ |= {
        "DS_ACCELERATOR": "cpu", "RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "LOCAL_SIZE": world,
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": (Path(folder) / "port").read_text(),
        "TORCH_EXTENSIONS_DIR": f"{folder}/extensions",
    }  # fmt: skip
    import deepspeed
    import torch
    from models import batch, hf, loss_of

    torch.set_num_threads(1)
    deepspeed.init_distributed(dist_backend="gloo")
    tree = json.loads((Path(folder) / "ds.json").read_text())
    model = hf("llama")
    engine = deepspeed.initialize(model=model, model_parameters=model.parameters(), config=tree)[0]
    losses = []
    for step in range(6):
        values = []
        for micro in range(engine.gradient_accumulation_steps()):
            loss = loss_of(engine, batch(micro, int(rank)))
            engine.backward(loss)
            engine.step()
            values.append(loss.item())
        losses.append(sum(values) / len(values))
        if step == 2:
            engine.save_checkpoint(f"{folder}/saved")
    (Path(folder) / f"losses-{rank}.json").write_text(json.dumps(losses))
    os._exit(0)  # its threads may abort an interpreter that ends


if __name__ == "__main__":
    main(*sys.argv[1:])
