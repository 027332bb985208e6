"""One rank of `zero3d generate --ranks N`: the model cut over them as at stage 3, each layer gathered when it is used.

Nothing is trained: all weights but the smallest are frozen, since an engine trains one at least, and none has states.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from zero3d.tools.cli.generate_source import Source
from zero3d.tools.cli.train import quiet_libraries
from zero3d.tools.cli.worker import as_worker, quiet_environment


def main(words: Sequence[str] | None = None) -> int:
    """Be a rank of the request in a file; end the process."""
    quiet_environment()
    quiet_libraries()
    file = Path((sys.argv[1:] if words is None else words)[0])
    as_worker(lambda: work(json.loads(file.read_text())))


def work(request: dict[str, Any]) -> None:
    """Build the engine and take part in every token; rank 0 prints."""
    from zero3d.distributed.mesh import Mesh
    from zero3d.tools.cli.generate_text import say, tokenizer_of

    source = Source(**request["source"])
    source = source._replace(folder=Path(source.folder))
    tokenizer = tokenizer_of(source, request["tokenizer"])
    engine = engine_of(source.folder, request["dtype"], Mesh(device=request["device"]))

    def generate(ids: Any, **options: Any) -> Any:
        chosen = options["generation_config"]
        given = options | {"do_sample": chosen.do_sample}
        return engine.generate(ids, chosen.max_new_tokens, keep_full=False, **given)

    first = os.environ["RANK"] == "0"
    say(generate, engine.module, request["texts"], request, tokenizer, source, first)
    engine.mesh.close()


def engine_of(folder: Path, dtype: str | None, mesh: Any) -> Any:
    """Return the engine of a folder's model, whose weights each rank reads its share of. Raises ConfigError."""
    import torch

    from zero3d.config import Model
    from zero3d.engine.engine import Engine
    from zero3d.models.open import open_model
    from zero3d.precision import NAMES

    opened = open_model(Model(path=str(folder)))
    model = opened.module
    smallest = min(model.parameters(), key=lambda p: p.numel())
    for parameter in model.parameters():
        parameter.requires_grad_(parameter is smallest)
    config: Any = model.config
    saved = NAMES.get(getattr(config, "dtype", None) or torch.float32, "fp32")
    return Engine(model, stage=3, mesh=mesh, precision=dtype or saved, weights=opened.weights)


if __name__ == "__main__":
    sys.exit(main())
