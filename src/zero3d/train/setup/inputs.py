"""What a run is made of before anything large is allocated: mesh, model without weights, data, batches, steps.

All of it is checked, what would fail only after hours, too.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from zero3d.checkpoint.hub_names import has_adapters
from zero3d.config import Batch, Config, asked_degrees, settle
from zero3d.data.batches import steps_of
from zero3d.data.dataset import DataSet, needs_tokenizer, open_data
from zero3d.data.fetched import Fetched, fetch_data
from zero3d.data.tokenize import Tokenizing
from zero3d.data.tokenizers import Tokenizer, check_length, load_tokenizer
from zero3d.distributed.agreement import agree
from zero3d.distributed.collectives import Comm
from zero3d.distributed.cores import bind_to_device
from zero3d.distributed.determinism import make_deterministic
from zero3d.distributed.devices import without_peer_access
from zero3d.distributed.ledger import Ledger
from zero3d.distributed.mesh import Mesh
from zero3d.engine.checks import check_replay
from zero3d.errors import ConfigError, DataError
from zero3d.memory.arena import Arena
from zero3d.models.bases import config_number
from zero3d.models.kernel_trial import try_kernels
from zero3d.models.open import Opened
from zero3d.models.packing import check_packing, inner_model
from zero3d.models.packing_images import image_packing
from zero3d.models.places import has_base
from zero3d.models.trained import open_trained
from zero3d.pipeline.schedules import Schedule
from zero3d.precision import Precision
from zero3d.train.setup.attention import check_alike, check_kernel, with_attention
from zero3d.train.setup.packages import check_packages
from zero3d.train.setup.text_part import naming_text_part
from zero3d.train.setup.vision import open_vision


@dataclass(frozen=True)
class Inputs:
    """What a run is made of before anything large is allocated.

    packing  of the data, which a model that does not keep documents with images apart has not
    fetched  keeps in the cache what was fetched of the data
    """

    mesh: Mesh
    opened: Opened
    data: DataSet
    packing: bool | str
    batch: Batch
    steps: int
    fetched: Fetched


def open_mesh(config: Config) -> Mesh:
    """Return the mesh that `mesh` asks for, with deterministic algorithms before it where they are asked for.

    Raises MeshError, ConfigError.
    """
    needed = config.zero.exact or config.health.replay > 0
    if config.train.deterministic is True or (config.train.deterministic == "auto" and needed):
        make_deterministic()
    mesh = Mesh(**asked_degrees(config))
    mesh.communicators = config.zero.communicators or mesh.communicators
    return mesh


def open_inputs(
    config: Config, check: Callable[[Mesh], None] = lambda mesh: None, say: Callable[[str], None] = lambda line: None
) -> Inputs:
    """Check everything that can be checked, read headers, tokenize. Raises the same Zero3dError on all ranks.

    `check` comes first, on every rank; `say` is called with lines for people where tokenizing takes long. One rank of
    each machine tokenizes; the others wait for it as long as it takes.
    """
    mesh = open_mesh(config)
    if (near := bind_to_device(mesh.device)) is not None:  # before anything is pinned, and threads are started
        say(near)
    if (apart := without_peer_access(mesh.device)) is not None:
        say(apart)
    with mesh.waiting_room() as everyone:
        comm = Comm(everyone, Arena(torch.device("cpu")), Ledger())
        agree(comm, lambda: check(mesh))
        with mesh.heartbeat.phase("data"):
            fetched = _fetch(config, mesh, comm)
        config = replace(config, data=fetched.data)
        batch, opened, tokenizer = agree(comm, lambda: _open(config, mesh))
        check_alike(opened.module, comm)
        vision = agree(comm, lambda: open_vision(config, opened))
        config, opened = agree(comm, lambda: _packed(config, opened, vision is not None, mesh.device))
        vocabulary = config_number(opened.module, "vocab_size")

        def read(verify: bool) -> DataSet:
            slices = slices_of(config, mesh)
            how = Tokenizing(made=partial(mesh.heartbeat.work, b"tokenizing"), say=say)
            return open_data(config.data, tokenizer, vocabulary, slices, verify, vision, how, batch.micro_batch)

        with mesh.heartbeat.phase("data"):
            first = agree(comm, lambda: read(verify=True) if mesh.local_rank == 0 else None)
            data = agree(comm, lambda: first or read(verify=False))
    return Inputs(mesh, opened, data, config.data.packing, batch, steps_of_run(config, data, batch), fetched)


def _fetch(config: Config, mesh: Mesh, comm: Comm) -> Fetched:
    """Return the data with paths of this host; one rank of each machine fetches what is in stores. Raises DataError."""
    first = agree(comm, lambda: fetch_data(config.data) if mesh.local_rank == 0 else None)
    fetched = agree(comm, lambda: first or fetch_data(config.data))
    if len(set(comm.exchange(torch.tensor([fetched.digest])).flatten().tolist())) > 1:
        raise DataError("the data in object stores were changed while ranks listed them: start again.")
    return fetched


def _open(config: Config, mesh: Mesh) -> tuple[Batch, Opened, Tokenizer | None]:
    """Return the batch, the model without weights and its tokenizer. Raises ConfigError, DataError."""
    _, batch = settle(config, mesh.world)
    if mesh.pp > 1:
        Schedule.of(config.mesh.schedule).check(batch.accumulate, mesh.pp)
    check_packages(config)
    check_replay(config.health.replay, mesh)
    check_kernel(config.model.attn)
    opened = with_attention(config, open_trained(config), mesh.device)
    check_forward(opened.module)
    check_export(config, opened)
    check_length_over_tp(config.data.length, slices_of(config, mesh))
    check_length(config.data.length, config_number(opened.module, "max_position_embeddings"))
    folder = None if opened.folder is None else str(opened.folder)
    tokenizes = needs_tokenizer(config.data) or config.data.tokenizer is not None
    return batch, opened, load_tokenizer(config.data.tokenizer, folder) if tokenizes else None


def _packed(config: Config, opened: Opened, images: bool, device: torch.device) -> tuple[Config, Opened]:
    """Return the run with data.packing off where documents with images cannot be packed, and the model with a note.

    Raises ConfigError where documents of text would see each other.
    """
    if not config.data.packing:
        return config, opened
    if not images:
        with naming_text_part(config):
            note = check_packing(opened.module)
    elif (why := image_packing(opened.module)) is not None:
        config = replace(config, data=replace(config.data, packing=False))
        note = f"data.packing: each document is a sequence, since {why}"
    else:
        note = None
    notes = [note]
    if config.data.packing and device.type != "cpu":
        with naming_text_part(config):
            notes.append(try_kernels(inner_model(opened.module), device, Precision.of(config.precision).dtype))
    return config, replace(opened, notes=(*opened.notes, *filter(None, notes)))


def slices_of(config: Config, mesh: Mesh) -> int:
    """Return how many equal slices a sequence is cut into: one for each tp rank under sequence parallelism."""
    return mesh.tp if config.mesh.sequence_parallel else 1


def steps_of_run(config: Config, data: DataSet, batch: Batch, done: int = 0, taken: int = 0) -> int:
    """Return train.steps, or those of train.epochs (1 where neither is given).

    done    steps so far, which took the first `taken` sequences, perhaps in other batches
    """
    if config.train.steps is not None:
        return config.train.steps
    return done + steps_of(config.train.epochs or 1.0, len(data.train), batch.batch, taken)


def check_length_over_tp(length: int, slices: int) -> None:
    """Refuse sequences that sequence parallelism cannot cut into equal slices."""
    if length % slices:
        fits = [str(n) for n in (length - length % slices, length + -length % slices) if n]
        raise ConfigError(
            f"mesh.sequence_parallel cuts sequences over mesh.tp={slices}, and data.length={length} / {slices} is not "
            f"whole: type data.length={' or '.join(fits)}, or mesh.sequence_parallel=false."
        )


def check_forward(model: nn.Module) -> None:
    """Refuse a model whose forward does not take token ids by name."""
    parameters = inspect.signature(model.forward).parameters
    if "input_ids" not in parameters:
        raise ConfigError(
            f"{type(model).__name__}.forward takes ({', '.join(parameters)}), and a batch is passed by name: call its "
            "first argument input_ids, and if it wants them add position_ids and labels."
        )


def check_export(config: Config, opened: Opened) -> None:
    """Refuse an export that this model has not, and one that could not be loaded again to verify it. ConfigError."""
    kind, model = config.checkpoint.export, opened.module
    adapted = has_adapters(model)
    if isinstance(kind, str) and not adapted:
        raise ConfigError(
            f"checkpoint.export={kind} is for a model with adapters, and {type(model).__name__} has none: type "
            "lora.rank=16, or checkpoint.export=true."
        )
    if not (kind and config.checkpoint.verify):
        return
    alone = kind == "adapter" or (kind is True and has_base(config.model))
    if adapted and alone and (opened.folder is None or config.model.init == "random"):
        raise ConfigError(
            "checkpoint.verify loads an adapter on the folder of its base, and model.path is not a folder with "
            "weights: type checkpoint.export=merged, or checkpoint.verify=false."
        )
    check_verify(model)


def check_verify(model: nn.Module) -> None:
    """Refuse to verify an export that transformers could not load by its config.json after the training."""
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    kind = type(getattr(model, "config", None))
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING and kind not in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING:
        raise ConfigError(
            f"checkpoint.verify loads the export with AutoModelForCausalLM, which does not know {type(model).__name__} "
            "by its config: type checkpoint.verify=false."
        )
