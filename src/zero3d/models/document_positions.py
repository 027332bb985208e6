"""Positions of documents with images, each made by itself by the model's own function: [4, L] of M-RoPE models.

    tokens          a [A A A A] a | b b [B B B B]         two documents of a row; images of 2 x 2 tokens in brackets
    of the text     0  1 2 3 4  5 | 0 1  2 3 4 5          it starts again: where documents begin is read from here
    in time         0  1 1 1 1  3 | 0 1  2 2 2 2
    of height       0  1 1 2 2  3 | 0 1  2 2 3 3
    of width        0  1 2 1 2  3 | 0 1  2 3 2 3

Nothing of a model is needed but its class and config, so they are made where batches are: in a data worker.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zero3d.models.bases import base_of


class DocumentPositions:
    """Makes positions [4, L] of a document. Pickling carries a class and a config.

    kind    class of the model below the head
    """

    def __init__(self, kind: type[nn.Module], config: Any) -> None:
        self._kind, self._config = kind, config
        base: Any = kind.__new__(kind)
        nn.Module.__init__(base)
        base.config = config
        self._index = base.get_rope_index
        self._takes = frozenset(inspect.signature(self._index).parameters)

    @classmethod
    def of(cls, model: nn.Module) -> DocumentPositions | None:
        """Return what makes positions of a model's documents; None where they are places in a document."""
        base = base_of(model)
        return cls(type(base), base.config) if hasattr(base, "get_rope_index") else None

    def __reduce__(self) -> tuple[type[DocumentPositions], tuple[type[nn.Module], Any]]:
        return DocumentPositions, (self._kind, self._config)

    def __call__(self, ids: Tensor, kinds: Mapping[str, Tensor], images: Mapping[str, Tensor] | None = None) -> Tensor:
        """Return the positions [4, L] of a document.

        ids     [L]
        kinds   what tells tokens of images from others [L]
        images  what a processor has made of them; None of text alone
        """
        text = torch.arange(len(ids))
        if not images:
            return text.expand(4, -1)
        given = {name: values[None] for name, values in kinds.items()} | dict(images)
        made, _ = self._index(input_ids=ids[None], **{name: t for name, t in given.items() if name in self._takes})
        return torch.cat([text[None], made[-3:, 0]])
