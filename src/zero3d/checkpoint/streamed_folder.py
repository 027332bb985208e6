"""A stream of weights into a folder: the files of an export, in the dtype of the stream.

    send_weights(FolderSender("hf"), dtype="bf16")      on rank 0; others give None, as for any sender

Tensors are verified by their checksums and collected in host memory until they fill a file (export.py). The folder
appears whole, once the stream has come to its end, or not at all.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from zero3d.checkpoint.export import ExportWriter, export_places, finish_export, prepare_export
from zero3d.checkpoint.forms import Form
from zero3d.checkpoint.model_card import Card
from zero3d.errors import StreamError
from zero3d.weights.buckets import Assembler, Bucket


class FolderSender:
    """Writes one stream into a new or empty folder, which `from_pretrained` loads; on rank 0 alone.

    form     writes what lies beside the weights, such as the model's config; the engine that streams says which it is
    card     of the model, as that engine knows it
    current  0: a folder is complete, so that no stream leaves out what an earlier one has sent
    """

    current = 0

    def __init__(self, path: str | Path) -> None:
        self.path, self._temporary = export_places(Path(path))
        self.form: Form | None = None
        self.card: Card | None = None
        self.waiting: Callable[[str], AbstractContextManager[object]] = lambda whom: nullcontext()

    def memory(self, nbytes: int) -> Sequence[Tensor]:
        """Return the memory of one bucket: it has been read when `send` returns."""
        return [torch.empty(nbytes, dtype=torch.uint8)]

    def meet(self) -> None:
        """Do nothing: a folder is always there."""

    def begin(self) -> None:
        """Make the folder that is written. Raises CheckpointError where something is in the place of it."""
        prepare_export(self.path, self._temporary)
        self._writer, self._assembler = ExportWriter(self._temporary, 0), Assembler()
        self._dtype: torch.dtype | None = None

    def send(self, bucket: Bucket) -> None:
        """Take what is whole with a bucket, and write a file once it is full. Raises StreamError, CheckpointError."""
        memory = bucket.memory.untyped_storage().data_ptr()
        for name, tensor in self._assembler.unpack(bucket):
            if self._dtype is None and tensor.is_floating_point():
                self._dtype = tensor.dtype
            own = tensor.untyped_storage().data_ptr() != memory
            self._writer.add({name: tensor if own else tensor.clone()})

    def finish(self, tensors: int, nbytes: int) -> None:
        """Write the last file and what lies beside the weights, and put the folder in its place."""
        if (self._assembler.count, self._assembler.nbytes) != (tensors, nbytes):
            raise StreamError(f"{self._assembler.count} tensors have come to {self.path}, and {tensors} were sent.")
        self._writer.finish()
        beside = None if self.form is None else partial(self.form.finish, dtype=self._dtype or torch.float32)
        kept = None if self.form is None else self.form.kept
        finish_export(self._temporary, self.path, beside, 1, kept=kept, card=self.card)

    def fail(self, why: str) -> None:
        """Remove what was written."""
        shutil.rmtree(self._temporary, ignore_errors=True)
