"""Checkpoints and weights under DeepSpeed's methods. What is written is a checkpoint of ours.

    load_checkpoint(...)                               weights, masters, states, schedule, counters
    load_checkpoint(load_lr_scheduler_states=False)    the same, and the schedule and its rates stay
    load_checkpoint(load_optimizer_states=False)       weights, schedule, counters; states stay
    load_checkpoint(load_module_only=True)             weights

Masters of weights that come alone are made of them, in the dtype of the forward, as in DeepSpeed.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from zero3d.checkpoint.compatibility import buffer_problem, fill_buffer
from zero3d.checkpoint.fields import quote_name
from zero3d.checkpoint.folders import find
from zero3d.checkpoint.integrity import verify
from zero3d.checkpoint.json_values import from_json
from zero3d.checkpoint.manifest import BUFFER
from zero3d.checkpoint.offline_export import weight
from zero3d.checkpoint.stored_states import StoredStates
from zero3d.checkpoint.writing import told
from zero3d.distributed.agreement import agree, exchange_texts
from zero3d.errors import CheckpointError, ConfigError, short
from zero3d.models.names import persistent_buffers
from zero3d.watchdog.own_files import write_whole
from zero3d.ways.deepspeed.client_state import decode, encode
from zero3d.ways.deepspeed.questions import Questions

SUFFIX = ".safetensors"
LATEST = "latest"  # the file of a folder of checkpoints that names the last one, as DeepSpeed writes it


class Checkpoints(Questions):
    """Saves and loads the engine, or its weights alone."""

    def save_checkpoint(
        self,
        save_dir: str | Path,
        tag: str | None = None,
        client_state: Mapping[str, Any] | None = None,
        save_latest: bool = True,
        exclude_frozen_parameters: bool = False,
    ) -> bool:
        """Write SAVE_DIR/TAG/step-N, a checkpoint of ours, which resumes on any shape.

        client_state  numbers, texts, lists, tuples, dicts and small tensors: `load_checkpoint` gives them back
        Raises ConfigError.
        """
        if exclude_frozen_parameters:
            raise ConfigError(
                "save_checkpoint(exclude_frozen_parameters=True) is not supported: leave it out, or have "
                "module_state_dict(exclude_frozen_parameters=True) for weights alone."
            )
        folder, tag = self._named(save_dir, tag)
        loop = {
            "client_state": encode(client_state or {}),
            "micro_steps": self.micro_steps,
            "skipped": self.skipped_steps,
            "loaded": self._loaded_steps,
        }
        self.engine.save(folder / tag, loop)
        if save_latest and self.global_rank == 0:
            with told(folder / LATEST):
                write_whole(folder / LATEST, tag)
        return True

    def _named(self, save_dir: str | Path, tag: str | None) -> tuple[Path, str]:
        """Return the folder of checkpoints and the tag of one. Raises ConfigError where ranks have several tags."""
        if not save_dir:
            raise ConfigError(
                f"save_checkpoint(save_dir={save_dir!r}) names no folder: pass one, such as 'checkpoints'."
            )
        mine = str(tag or f"global_step{self.global_steps}")
        for rank, other in enumerate(exchange_texts(self.engine.world.patient, mine)):
            if other != mine:
                raise ConfigError(
                    f"save_checkpoint(tag={short(mine)!r}) on rank {self.global_rank}, and {short(other)!r} on rank "
                    f"{rank}: a checkpoint is one folder of all ranks, so pass the same tag on each."
                )
        return Path(save_dir), mine

    def load_checkpoint(
        self,
        load_dir: str | Path,
        tag: str | None = None,
        load_module_strict: bool = True,
        load_optimizer_states: bool = True,
        load_lr_scheduler_states: bool = True,
        load_module_only: bool = False,
        custom_load_fn: Any = None,
    ) -> tuple[str | None, dict[str, Any] | None]:
        """Go on from what `save_checkpoint` wrote; return its path and the client_state.

        Where there is no checkpoint yet it warns and returns (None, None), as DeepSpeed does.

        load_module_strict  False, with weights alone: parameters that one of both does not have are left out
        Raises ConfigError for custom_load_fn, CheckpointError.
        """
        whole = load_optimizer_states and not load_module_only
        if custom_load_fn is not None:
            raise ConfigError(
                "load_checkpoint(custom_load_fn=...) is not supported: load_module_state_dict({'module': WEIGHTS}) "
                "takes weights of any source."
            )
        if whole and not load_module_strict:
            raise ConfigError("load_checkpoint(load_module_strict=False) is for load_module_only=True: add that.")
        latest = Path(load_dir) / LATEST
        if tag is None and not latest.is_file():
            if self.global_rank == 0:
                warnings.warn(
                    f"load_checkpoint() loads nothing: there is no file {latest}, which names the last checkpoint. "
                    "Pass the folder that save_checkpoint() was given, or tag=NAME.",
                    stacklevel=2,
                )
            return None, None
        path = find(Path(load_dir) / (tag or latest.read_text().strip()))
        if whole:
            loop = self._load_all(path, load_lr_scheduler_states)
        else:
            stored = agree(self.engine.world.patient, lambda: self._verified(path))
            self._load_weights(stored, load_module_strict)
            loop = stored.manifest.value("loop")
            if load_module_only:
                return str(path), decode(loop["client_state"])
            if load_lr_scheduler_states and self.lr_scheduler is not None:
                self._schedule_goes_on(from_json(stored.manifest.value("scheduler"), self.lr_scheduler.state_dict()))
        self.micro_steps, self.skipped_steps = int(loop["micro_steps"]), int(loop["skipped"])
        self._loaded_steps = int(loop.get("loaded", 0))
        if not whole:
            self._loaded_steps += stored.manifest.step - self.engine.steps
        return str(path), decode(loop["client_state"])

    def module_state_dict(
        self,
        destination: None = None,
        prefix: str = "",
        keep_vars: bool = False,
        exclude_frozen_parameters: bool = False,
    ) -> dict[str, Tensor]:
        """Return whole weights in the dtype of the forward, in rank 0's host memory; {} on the other ranks."""
        if destination is not None or keep_vars:
            raise ConfigError(
                "module_state_dict(destination=...) and (keep_vars=True) are not supported: leave them out."
            )
        weights = self.engine.whole_state_dict()
        frozen = {name for name, p in self.module.named_parameters() if not p.requires_grad}
        left_out = frozen if exclude_frozen_parameters else set()
        return {f"{prefix}{name}": values for name, values in weights.items() if name not in left_out}

    def load_module_state_dict(
        self, checkpoint: Mapping[str, Any], strict: bool = True, custom_load_fn: Any = None
    ) -> None:
        """Take weights of checkpoint['module'], the same on all ranks; masters are made of them.

        custom_load_fn  called as custom_load_fn(src=weights, dst=module) in place of module.load_state_dict
        """
        if "module" not in checkpoint:
            raise ConfigError("load_module_state_dict() needs the weights as {'module': WEIGHTS}, as DeepSpeed does.")
        weights = checkpoint["module"]
        with torch.no_grad(), self.engine.full_params():
            if custom_load_fn is None:
                self.module.load_state_dict(weights, strict=strict)
            else:
                custom_load_fn(src=weights, dst=self.module)

    def save_16bit_model(
        self, save_dir: str | Path, save_filename: str | None = None, exclude_frozen_parameters: bool = False
    ) -> bool:
        """Write the weights: as a Hugging Face folder, or in a file of this name, which ends in .safetensors.

        Raises ConfigError for other names, such as DeepSpeed's pytorch_model.bin: that is a pickle.
        """
        if save_filename is None and not exclude_frozen_parameters:
            self.engine.export(save_dir)
            return True
        if save_filename is not None and not save_filename.endswith(SUFFIX):
            raise ConfigError(
                f"save_16bit_model(save_filename={save_filename!r}) would be a pickle, and none is written here: pass "
                f"a name that ends in {SUFFIX}, or none for a folder that from_pretrained loads."
            )
        weights = self.module_state_dict(exclude_frozen_parameters=exclude_frozen_parameters)
        agree(self.engine.world.patient, lambda: self._write(weights, Path(save_dir), save_filename))
        return True

    save_fp16_model = save_16bit_model

    def _write(self, weights: Mapping[str, Tensor], folder: Path, name: str | None) -> None:
        if self.global_rank == 0:
            path = folder / (name or f"model{SUFFIX}")
            with told(path):
                folder.mkdir(parents=True, exist_ok=True)
                unfinished = path.with_name(f"{path.name}.tmp")
                save_file({key: value.clone() for key, value in weights.items()}, unfinished)  # tied ones apart
                unfinished.replace(path)

    def _load_all(self, path: Path, with_schedule: bool) -> Any:
        kept = None if with_schedule or self.lr_scheduler is None else copy.deepcopy(self.lr_scheduler.state_dict())
        rates = self.get_lr()
        loop = self.engine.load(path)
        if kept is not None:
            self.lr_scheduler.load_state_dict(kept)
            for group, lr in zip(self.optimizer.param_groups, rates, strict=True):
                group["lr"] = lr
            self.engine.checkpoints.compare({}, {})  # with the schedule that counts
        return loop

    def _schedule_goes_on(self, state: Any) -> None:
        self.lr_scheduler.load_state_dict(state)
        for group, lr in zip(self.optimizer.param_groups, self.lr_scheduler.get_last_lr(), strict=True):
            group["lr"] = lr

    def _verified(self, path: Path) -> StoredStates:
        """Open a checkpoint on every rank; the first one reads all of it."""
        if self.mp_world_size > 1:
            raise ConfigError(
                f"weights alone are not loaded over tp={self.mp_world_size}: zero3d ckpt export writes them as a "
                "folder for from_pretrained."
            )
        stored = StoredStates(path)
        if self.global_rank == 0:
            verify(path)
        return stored

    @torch.no_grad()
    def _load_weights(self, stored: StoredStates, strict: bool) -> None:
        """Take the weights of a checkpoint, one parameter after another. Raises CheckpointError for another model's."""
        shapes, saved = self.engine.full_model.shapes, stored.parameters
        if strict and (apart := sorted(shapes.keys() ^ saved.keys())):
            where = "the model has it" if apart[0] in shapes else "the checkpoint has it"
            raise CheckpointError(
                f"{stored.folder} is of another model: {quote_name(apart[0])} is in only one of them ({where}). Build "
                "the model that was saved, or pass load_module_strict=False."
            )
        for name in shapes.keys() & saved.keys():
            if tuple(saved[name].shape) != tuple(shapes[name]):
                raise CheckpointError(
                    f"{stored.folder}: {quote_name(name)} has shape {list(saved[name].shape)} there and "
                    f"{list(shapes[name])} here: build the model that was saved."
                )
        saved_buffers = stored.own[0].buffers
        buffers = {name: one for name, one in persistent_buffers(self.module).items() if name in saved_buffers}
        for name, buffer in buffers.items():
            if problem := buffer_problem(name, saved_buffers[name], buffer):
                raise CheckpointError(f"{stored.folder / stored.own[0].file}: {problem}")
        with self.engine.full_params():
            for name, p in self.module.named_parameters():
                if name in saved and not saved[name].in_base:
                    p.copy_(weight(stored, name))
            for name, buffer in buffers.items():
                fill_buffer(buffer, stored.own_tensor(0, f"{BUFFER}{name}"))
