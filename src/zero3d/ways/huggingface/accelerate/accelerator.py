"""`Accelerator` for loops that are written for Accelerate: model and optimizer that it prepares are an engine's.

    from accelerate import Accelerator        from zero3d.ways.huggingface.accelerate import Accelerator
    accelerator = Accelerator()               accelerator = Accelerator(stage=3)

The loop stays: `prepare`, `accumulate`, `backward`, `clip_grad_norm_`, `gather`, `save_state`, `load_state`.
Gradients are added up over a window and averaged over ranks, as with DistributedDataParallel.
"""

from __future__ import annotations

import itertools
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

import accelerate
import torch
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.scheduler import AcceleratedScheduler
from accelerate.utils import RNG_STATE_NAME, parse_choice_from_env, parse_flag_from_env, patch_environment, save
from torch import Tensor, nn
from torch.distributed.distributed_c10d import _get_default_store
from torch.optim import Optimizer

from zero3d.distributed.agreement import agree
from zero3d.distributed.mesh import Mesh
from zero3d.engine.engine import Engine
from zero3d.engine.whole_parameters import is_open
from zero3d.errors import ConfigError, OutOfBudget
from zero3d.nested import map_tensors
from zero3d.precision import Precision
from zero3d.spec.offload import Offload
from zero3d.ways.checkpoints.plain import schedule_in
from zero3d.ways.huggingface.accelerate.compiled import is_compiled, uncompiled
from zero3d.ways.huggingface.accelerate.generation import generation, refuse_batch
from zero3d.ways.huggingface.accelerate.keywords import autocast_of, check_keywords
from zero3d.ways.huggingface.accelerate.local_sgd import join_even, leave_alike, no_sync_of
from zero3d.ways.huggingface.accelerate.meeting import WAITS, Meeting
from zero3d.ways.huggingface.accelerate.optimizer import TOGETHER, EngineOptimizer, LoneOptimizer, shares
from zero3d.ways.huggingface.accelerate.others import Order, go_on, reader_of, take_rates
from zero3d.ways.huggingface.accelerate.prompts import whole_prompts
from zero3d.ways.huggingface.accelerate.world import alike, check_parts, must_say_cpu, refuse_other_world, shards

FROM_LAUNCHER = "ACCELERATE_USE_PARALLELISM_CONFIG"
OTHERS = (  # what shards or cuts a model in another way
    "deepspeed_plugin",
    "deepspeed_plugins",
    "fsdp_plugin",
    "megatron_lm_plugin",
    "torch_tp_plugin",
)
TORCH = ("backend", "mode", "fullgraph", "dynamic", "options", "disable")  # keywords of torch.compile
PRECISIONS = {"no": "fp32", "bf16": "bf16", "fp16": "fp16"}
STATES = "zero3d"  # the folder of a saved state that has the engine's checkpoint


def save_engine(engine: Engine, folder: Path, loop: Mapping[str, Any] | None = None) -> None:
    """Write FOLDER/zero3d, which has one checkpoint; `loop` is for `load_engine`."""
    saved = engine.save(folder / STATES, loop)
    if engine.mesh.rank == 0:
        for earlier in set(saved.parent.glob("step-*")) - {saved}:  # of another run in the same place
            shutil.rmtree(earlier)


def load_engine(engine: Engine, folder: Path) -> Any:
    """Go on from FOLDER/zero3d; return what was given as `loop`. Raises CheckpointError."""
    return engine.load(folder / STATES)


def states_in(folder: Path) -> Path | None:
    """Return FOLDER/zero3d; None where it is not there."""
    return folder / STATES if (folder / STATES).is_dir() else None


_NUMBERS = itertools.count()  # of engines whose ranks meet, counted alike on all ranks
TAKE_BACK = "zero3d_take_back"  # an attribute of modules in an Accelerator's engine: a function that closes it


class Accelerator(accelerate.Accelerator):  # type: ignore[misc]
    """`accelerate.Accelerator` whose model and optimizer train on a `zero3d.Engine`, which is `engine`.

    stage            of ZeRO. On one rank, which has all weights anyway, 3 is 2, with the same bits: they stay whole
    options          more of `zero3d.Engine`, such as {"offload": {"optimizer": "host"}}
    mixed_precision  as there: "no", "bf16", "fp16"; weights are in that dtype, and masters in fp32. The forward runs in
                     autocast, and its outputs are fp32, unless options have autocast=False. A model that is loaded in
                     bf16 stays so with "no", too
    parallelism_config  Accelerate's, of which are taken sp_size: the sequence axis, whose ranks are handed the same
                        data; and dp_replicate_size with dp_shard_size: states are cut over some neighbours alone.
                        None: as `accelerate launch --use_parallelism_config` was told
    gather_for_generation  whether `generate` at stage 3 gathers the whole weights before the first token, or each layer
                        for each token; None: whole ones where every rank has room for them
    others           Accelerate's own
    Ranks that torchrun starts on CPUs are processes of it without `cpu=True`, too. Raises ConfigError for plugins that
    shard in another way, a stage or an option that there is not, and a state made before that knows of fewer processes.
    """

    def __init__(
        self,
        *,
        stage: int = 3,
        options: Mapping[str, Any] | None = None,
        mixed_precision: str | None = None,
        parallelism_config: Any = None,
        gather_for_generation: bool | None = None,
        **others: Any,
    ) -> None:
        if asked := [name for name in OTHERS if others.get(name) is not None]:
            raise ConfigError(f"Accelerator({asked[0]}=...) would shard the model a second time: leave it out.")
        chosen = str(mixed_precision or parse_choice_from_env("ACCELERATE_MIXED_PRECISION", "no"))
        if chosen not in PRECISIONS:
            raise ConfigError(f"mixed_precision={chosen!r}: one of {', '.join(PRECISIONS)}.")
        options = check_keywords(stage, options, "Accelerator")
        if parallelism_config is None and parse_flag_from_env(FROM_LAUNCHER):
            parallelism_config = accelerate.ParallelismConfig()  # reads what `accelerate launch` was told
        self._alike, self._shards = alike(parallelism_config, options.get("mesh")), shards(parallelism_config)
        self._counts_parts = False  # processes are counted as parts of the data
        if must_say_cpu():
            others.setdefault("cpu", True)
        with patch_environment(**{FROM_LAUNCHER: False}):  # Accelerate would cut the model itself
            super().__init__(mixed_precision="no", **others)  # its scaler is not used, and autocast is the engine's
        refuse_other_world(
            self.num_processes,
            "Pass cpu=True (use_cpu=True to TrainingArguments) where ranks compute on CPUs, and make no PartialState "
            "before the Accelerator.",
        )
        check_parts(self.num_processes, self._alike, parallelism_config, self.dispatch_batches)
        if self._alike > 1:  # rank 0 would read a batch, and cut it for all ranks
            self.dataloader_config.dispatch_batches = False
        self._stage = stage
        self._options = options
        self._gather = gather_for_generation
        self._precision = chosen
        handler = self.autocast_handler
        self._autocast = autocast_of(chosen != "no" and (handler is None or handler.enabled), options)
        self.engine: Engine | None = None
        self._order = Order([])
        self._built: tuple[Engine, Mesh | None] | None = None  # the last engine, and the mesh that was made for it
        self._meeting: Meeting | None = None  # of ranks that have parts of one model's weights
        self._left_out: list[nn.Parameter] = []  # frozen for that engine: its optimizer has not got them
        self._compiled: Mapping[str, Any] | None = None  # how the model that comes next was compiled

    @property
    def mixed_precision(self) -> str:
        """What was asked for."""
        return self._precision

    @property
    def alike(self) -> int:
        """Return how many neighbouring ranks are handed the same data."""
        return self._alike

    # --- what is prepared -----------------------------------------------------------------------

    def prepare(self, *objects: Any, device_placement: list[bool] | None = None) -> Any:
        """Return the objects prepared: a model together with its optimizer as an engine's, all else as Accelerate does.

        A model alone is for evaluation: it is moved to the device, whole. An optimizer alone may be read and pickled,
        and takes no step. One that has none of the model's parameters steps, and trains nothing of it, as torch's does.
        Raises ConfigError.
        """
        models = [one for one in objects if isinstance(one, nn.Module)]
        optimizers = [one for one in objects if isinstance(one, Optimizer)]
        if len(models) == len(optimizers) == 1 and self._trains_nothing(models[0], optimizers[0]):
            prepared = super().prepare_optimizer(optimizers[0])
            objects = tuple(prepared if one is optimizers[0] else one for one in objects)
        elif models and optimizers:
            objects = self._uncompiled(objects)
            models = [one for one in objects if isinstance(one, nn.Module)]
            if len(models) != 1 or len(optimizers) != 1:
                raise ConfigError(
                    f"prepare() was given {len(models)} models and {len(optimizers)} optimizers: pass one model with "
                    "its optimizer, and models that are not trained in a call of their own. Of two models that are "
                    "trained, such as a generator and a discriminator, each has an Accelerator of its own: "
                    "Accelerator().prepare(model, optimizer), whose backward() takes that model's losses."
                )
            prepared = self._prepared(models[0], optimizers[0])
            self._compiled = None  # of a model whose engine is there already
            objects = tuple(prepared if one is optimizers[0] else one for one in objects)
        return super().prepare(*objects, device_placement=device_placement)

    def _trains_nothing(self, model: nn.Module, optimizer: Optimizer) -> bool:
        """Return whether an optimizer has none of the model's parameters, and say so.

        Raises ConfigError where it has those of a model that was prepared without it.
        """
        if isinstance(optimizer, AcceleratedOptimizer) or shares(optimizer, model):
            return False
        if any(shares(optimizer, one) for one in self._models):
            raise ConfigError(TOGETHER)
        if self.is_main_process:
            print(
                f"zero3d: the optimizer has none of the {len(list(model.parameters()))} parameters of "
                f"{type(model).__name__}: its steps train nothing of it. Build it from model.parameters()."
            )
        return True

    def _uncompiled(self, objects: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return the objects, compiled models as they were before; the engine will compile their blocks."""
        found = [one for one in objects if is_compiled(one)]
        for one in found:
            module, self._compiled = uncompiled(one)
            if self.is_main_process:
                print(
                    f"zero3d: torch.compile({type(module).__name__}) before prepare(): the engine compiles its blocks, "
                    "and prepare() returns the model without a graph around it"
                )
        return tuple(uncompiled(one)[0] if is_compiled(one) else one for one in objects)

    def _prepared(self, model: nn.Module, optimizer: Optimizer) -> EngineOptimizer:
        """Return the optimizer of a new engine, or that of the model's engine."""
        alone = optimizer
        self._refuse_second(model)
        if isinstance(optimizer, LoneOptimizer):
            optimizer = optimizer.optimizer
        elif isinstance(optimizer, EngineOptimizer) and optimizer.engine.closed:
            optimizer = optimizer.optimizer  # of the plain model again
        if not isinstance(optimizer, EngineOptimizer):
            optimizer = EngineOptimizer(self._build(model, optimizer))
        if optimizer.engine.module is not model:
            raise ConfigError("the optimizer belongs to the engine of another model: build one for this model.")
        known: list[Any] = self._optimizers  # type: ignore[has-type]
        self._optimizers = [one for one in known if one is not alone]
        self.engine = optimizer.engine
        self.engine.reshard()
        self.engine.zero_grad()  # of a window that a failure has ended
        self.engine.release()
        return optimizer

    def _refuse_second(self, model: nn.Module) -> None:
        """Raise ConfigError where the engine trains a model that has no part in common with this one."""
        if self.engine is None or self.engine.closed:
            return
        trained = self.engine.module
        if not any(one is trained for one in model.modules()) and not any(one is model for one in trained.modules()):
            raise ConfigError(
                f"prepare() was given a {type(model).__name__} with its optimizer, and this Accelerator trains a "
                f"{type(trained).__name__} already: one model is trained by an Accelerator. Make a second Accelerator "
                "for it, or call accelerator.free_memory() before."
            )

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> nn.Module:
        """Return the engine's model as it is, and another, which is for evaluation alone, on the device.

        Raises ConfigError where its optimizer was prepared without it.
        """
        if self.engine is None or model is not self.engine.module:
            if any(shares(one, model) for one in self._optimizers if not isinstance(one, EngineOptimizer)):
                raise ConfigError(TOGETHER)
            return super().prepare_model(model, device_placement, evaluation_mode=True)  # type: ignore[no-any-return]
        if model not in self._models:
            self._models.append(model)
        return model

    def prepare_optimizer(self, optimizer: Optimizer, device_placement: bool | None = None) -> AcceleratedOptimizer:
        """Return a prepared optimizer as it is, and another as one that takes no step.

        Raises ConfigError where its model was prepared without it.
        """
        if not isinstance(optimizer, AcceleratedOptimizer):
            if any(shares(optimizer, model) for model in self._models):
                raise ConfigError(TOGETHER)
            optimizer = LoneOptimizer(optimizer)
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        return optimizer

    def _build(self, model: nn.Module, optimizer: Optimizer) -> Engine:
        take_back(model)  # from an engine whose training is over, or has failed
        self._order = Order.of(model, optimizer)
        left_out = self._freeze_rest(model, optimizer)
        chosen = {"precision": self._precision_of(model), "autocast": self._autocast}
        options: dict[str, Any] = {**chosen, **self._compile(), **self._options}
        mesh = None if "mesh" in options else Mesh(sp=self._alike, shard=self._shards, device=self.device)
        options.setdefault("mesh", mesh)
        leaves = Offload.of(options.get("offload")).params != "none"
        stage = 2 if self._stage == 3 and options["mesh"].dp == 1 and not leaves else self._stage
        try:
            engine = Engine(model, stage=stage, optimizer=optimizer, clip_norm=None, **options)
        except BaseException:
            _train_again(left_out)
            raise
        self._left_out = left_out
        self._built = engine, mesh
        self._lend(model, engine, mesh)
        if self.is_main_process:
            print("\n".join([introduced(engine), *engine.notes]))
        return engine

    def _freeze_rest(self, model: nn.Module, optimizer: Optimizer) -> list[nn.Parameter]:
        """Freeze what no group of the optimizer has, which it would never change; return these parameters."""
        own = {id(p) for group in optimizer.param_groups for p in group["params"]}
        rest = [(name, p) for name, p in model.named_parameters() if p.requires_grad and id(p) not in own]
        if rest and self.is_main_process:
            print(
                f"zero3d: {len(rest)} parameters are not in the optimizer, first {rest[0][0]!r}: they stay as they "
                "are, and have no gradient that a norm could count"
            )
        for _, p in rest:
            p.requires_grad_(False)
        return [p for _, p in rest]

    def _compile(self) -> dict[str, Any]:
        """Return what torch_compile or dynamo_backend mean for an engine: its blocks are compiled, one by one."""
        compiled, self._compiled = self._compiled, None
        if compiled is not None:
            return {"compile": dict(compiled) or True}
        plugin = self.state.dynamo_plugin
        if str(plugin.backend.value).lower() == "no":
            return {}
        return {"compile": {name: value for name, value in plugin.to_kwargs().items() if name in TORCH}}

    def _lend(self, model: nn.Module, engine: Engine, mesh: Mesh | None) -> None:
        """Note how to take a model back, and have it generate and load as its engine needs it until then."""

        def load_state_dict(*args: Any, **options: Any) -> Any:
            with engine.full_params():
                return type(model).load_state_dict(model, *args, **options)

        engine.put("no_sync", no_sync_of(self.is_main_process))
        self._meeting = None
        if engine.stage == 3 and engine.mesh.world > 1 and engine.has_whole_model:
            self._meeting = Meeting(_get_default_store(), f"{next(_NUMBERS)}", engine.mesh.rank, engine.mesh.world)
            if hasattr(model, "save_pretrained"):
                engine.put("save_pretrained", partial(_save_pretrained, engine, self._meeting, model))
        engine.put(TAKE_BACK, partial(self._close, engine, mesh), everywhere=True)
        engine.put("load_state_dict", load_state_dict)
        alone = engine.dp.size == 1 or (engine.stage < 3 and engine.sequence is None)
        if not alone and hasattr(model, "generate"):
            own = getattr(model, "generate")  # noqa: B009
            engine.put("generate", generation(engine, own, self._gather, self.is_main_process))
        if engine.stage == 3 and engine.mesh.world > 1 and hasattr(model, "generate_batch"):
            engine.put("generate_batch", refuse_batch)

    def _precision_of(self, model: nn.Module) -> str:
        dtypes = {p.dtype for p in model.parameters() if p.is_floating_point()}
        return "bf16" if self._precision == "no" and dtypes == {torch.bfloat16} else PRECISIONS[self._precision]

    def free_memory(self, *objects: Any) -> Any:
        """Close the engine, so that its model is a plain one again, and let go of all that was prepared.

        An engine whose model has no room, or is cut over tp, pp or ep, is not closed: only the reference is dropped.
        """
        if self._built is not None and self._built[0].has_whole_model:
            with suppress(OutOfBudget):
                self.close_engine()
        self.engine = self._built = None
        return super().free_memory(*objects)

    def close_engine(self) -> None:
        """Close the engine: its model is a plain one again. Raises OutOfBudget where some rank has no room for it."""
        if self._built is not None:
            self._close(*self._built)

    def _close(self, engine: Engine, mesh: Mesh | None) -> None:
        """Close an engine, and the mesh that was made for it. Raises ConfigError over tp, pp and ep."""
        if not engine.closed:
            if not engine.has_whole_model:
                raise ConfigError(
                    "the model is cut over tp, pp or ep by the engine that trains it, and no rank has the whole: write "
                    "it with engine.export(FOLDER), and train what from_pretrained loads from there."
                )
            module = engine.module
            for one in self._optimizers:
                if isinstance(one, EngineOptimizer) and one.engine is engine:
                    one.reads.end()
            engine.close()
            _train_again(self._left_out)
            self._left_out, self._meeting = [], None
            models: list[Any] = self._models  # type: ignore[has-type]
            optimizers: list[Any] = self._optimizers
            self._models = [one for one in models if one is not module]
            self._optimizers = [one for one in optimizers if getattr(one, "engine", None) is not engine]
        if mesh is not None:
            mesh.close()
        if self._built == (engine, mesh):
            self.engine = self._built = None

    # --- data, of which ranks that share sequences are handed the same ---------------------------

    @property
    def num_processes(self) -> int:
        """Return the number of processes; while data are shared out, the number of parts of a batch."""
        processes: int = super().num_processes
        return processes // self._alike if self._counts_parts else processes

    @property
    def process_index(self) -> int:
        """Return this process's number; while data are shared out, that of its part."""
        index: int = super().process_index
        return index // self._alike if self._counts_parts else index

    @contextmanager
    def _counting_parts(self) -> Iterator[None]:
        self._counts_parts = True
        try:
            yield
        finally:
            self._counts_parts = False

    def prepare_data_loader(self, data_loader: Any, *given: Any, **options: Any) -> Any:
        """Return a loader of this rank's part of the data."""
        with self._counting_parts():
            return super().prepare_data_loader(data_loader, *given, **options)

    def prepare_scheduler(self, scheduler: Any) -> Any:
        """Return a schedule that goes on once for each part of the data, as Accelerate's do for each process."""
        if self._alike == 1 or isinstance(scheduler, AcceleratedScheduler):
            return super().prepare_scheduler(scheduler)
        found = next((one for one in self._optimizers if one.optimizer is getattr(scheduler, "optimizer", None)), None)
        parts = 1 if self.split_batches else self.num_processes // self._alike
        optimizers = self._optimizers if found is None else found
        prepared = PartsScheduler(scheduler, optimizers, self.step_scheduler_with_optimizer, parts)
        self._schedulers.append(prepared)
        return prepared

    def gather(self, tensor: Any) -> Any:
        """Gather tensors of all processes; for metrics, those of each part of the data once."""
        gathered = super().gather(tensor)
        return map_tensors(gathered, self._of_parts) if self._counts_parts else gathered

    def _of_parts(self, gathered: Tensor) -> Tensor:
        size = len(gathered) // super().num_processes
        by_rank = gathered.reshape(self.num_processes, self._alike, size, *gathered.shape[1:])
        return by_rank[:, 0].flatten(0, 1)

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Gather what a batch has given, from one of the ranks that are handed the same."""
        if self._alike == 1:
            return super().gather_for_metrics(input_data, use_gather_object)
        if (use_gather_object or not only_tensors(input_data)) and super().process_index % self._alike:
            input_data, use_gather_object = [], True
        with self._counting_parts():
            return super().gather_for_metrics(input_data, use_gather_object)

    # --- the loop -------------------------------------------------------------------------------

    @contextmanager
    def autocast(self, autocast_handler: Any = None) -> Iterator[None]:
        """Compute inside in autocast, where the model does: a loss of one's own, for one.

        autocast_handler  Accelerate's AutocastKwargs, such as enabled=False for parts that are to be in fp32
        """
        handler = self.autocast_handler if autocast_handler is None else autocast_handler
        asked = {} if handler is None else handler.to_kwargs()
        dtype = Precision.of(self._options.get("precision", PRECISIONS[self._precision])).dtype
        with torch.autocast(self.device.type, dtype=dtype, **asked) if self._autocast else nullcontext():
            yield

    def backward(self, loss: Tensor, **options: Any) -> None:
        """Back-propagate a micro-batch's loss: it is divided by the micro-batches of a window, as by Accelerate.

        retain_graph  keep what a later backward needs of the graph
        """
        if self.engine is None:
            super().backward(loss, **options)
            return
        kept = options.pop("retain_graph", False)
        if asked := [name for name, value in options.items() if name != "learning_rate" and value]:
            raise ConfigError(f"accelerator.backward({asked[0]}=...) is not supported: leave it out.")
        last, reads = self.sync_gradients, self._optimizer.reads
        reads.refuse()
        weight = float(last and not self.engine.accumulation.reached)  # of several losses in a step one counts
        run = partial(Tensor.backward, retain_graph=True) if kept else None
        self.engine.backward_sum(loss / self.gradient_accumulation_steps, weight, last, run)
        reads.begin()

    @contextmanager
    def join_uneven_inputs(self, joinables: Any, even_batches: bool | None = None) -> Iterator[None]:
        """Change nothing for an engine's model, and say so: loaders that are prepared give all ranks equally many."""
        own = super().join_uneven_inputs
        with own(joinables, even_batches) if self.engine is None else join_even(even_batches):
            yield

    def clip_grad_norm_(self, parameters: Any, max_norm: float, norm_type: float = 2) -> Tensor:
        """Have the step that follows clip the norm of all gradients, and return that norm; all ranks call it.

        A loop may leave the step out by it. NaN inside a window of accumulation, where gradients are not clipped.
        """
        if self.engine is None:
            return super().clip_grad_norm_(parameters, max_norm, norm_type)  # type: ignore[no-any-return]
        given = {parameters} if isinstance(parameters, Tensor) else set(parameters)
        trained = {p for p in self.engine.module.parameters() if p.requires_grad}
        if norm_type != 2 or not trained <= given:
            raise ConfigError(
                f"clip_grad_norm_ with {len(trained & given)} of {len(trained)} trained parameters and norm_type="
                f"{norm_type}: the step clips the 2-norm of all: pass model.parameters()."
            )
        return self._optimizer.clip(float(max_norm))

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Raise ConfigError: gradients are there in shards, and only while a step is taken."""
        raise ConfigError("clip_grad_value_ is not supported: clip the norm, with accelerator.clip_grad_norm_.")

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Do nothing: the step divides by the loss scale before it clips."""

    @property
    def _optimizer(self) -> EngineOptimizer:
        return next(one for one in self._optimizers if isinstance(one, EngineOptimizer))

    # --- states ---------------------------------------------------------------------------------

    def wait_for_everyone(self) -> None:
        """Wait until all ranks are here."""
        if self._meeting is not None:
            self._meeting.post(WAITS)
        super().wait_for_everyone()

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> dict[str, Tensor]:
        """Return the weights of a model, on rank 0 in the host's memory and {} elsewhere; all ranks call it.

        Raises ConfigError at stage 3 where a rank waits for everyone instead.
        """
        if self.engine is None or model is not self.engine.module:
            return super().get_state_dict(model, unwrap)  # type: ignore[no-any-return]
        if self._meeting is not None:
            self._meeting.expect("get_state_dict")
        return self.engine.whole_state_dict()

    def save_state(self, output_dir: str | None = None, *args: Any, **options: Any) -> Any:
        """Write FOLDER/zero3d, a checkpoint of ours, which loads on any number of ranks, and what Accelerate writes.

        Hooks of `register_save_state_pre_hook` have the engine's model, whole, and its weights among theirs. Where a
        stateful loader is, all ranks are waited for.
        """
        if self.engine is None:
            folder = super().save_state(output_dir, *args, **options)
            self._save_loaders(Path(folder))
            return folder
        with self._without_engine(self._save_model_state_pre_hook):
            folder = super().save_state(output_dir, *args, **options)
        self._save_loaders(Path(folder))
        save_engine(self.engine, Path(folder))
        return folder

    def _save_loaders(self, folder: Path) -> None:
        """Write the states of stateful loaders on rank 0, which reads for all ranks where it dispatches batches.

        Accelerate has all ranks write the same file, and the last one's is kept.
        """
        loaders = list(enumerate(self._dataloaders))
        stateful = [(number, one) for number, one in loaders if getattr(one, "use_stateful_dataloader", False)]
        if not stateful or super().num_processes == 1:
            return
        self.wait_for_everyone()
        if self.is_main_process:
            for number, one in stateful:
                save(one.state_dict(), folder / f"dl_state_dict{f'_{number}' if number else ''}.bin")
        self.wait_for_everyone()

    def load_state(self, input_dir: str | None = None, *args: Any, **options: Any) -> Any:
        """Go on from what `save_state` wrote: the last one, where Accelerate names folders and none is given.

        Of a folder that Accelerate wrote without zero3d weights, masters and moments are read, too (`others.py`).
        What hooks of `register_load_state_pre_hook` write into the engine's model is kept.
        """
        if self.engine is None:
            return super().load_state(input_dir, *args, **options)
        if input_dir is None:
            input_dir = self._last_saved()
        others = self.go_on_from_others(Path(input_dir))
        if not others:
            load_engine(self.engine, Path(input_dir))
        if others and not any(Path(input_dir).glob(f"{RNG_STATE_NAME}_*")):  # a Trainer's
            self._load_schedule(Path(input_dir))
            return None
        with self._without_engine(self._load_model_state_pre_hook):
            result = super().load_state(input_dir, *args, **options)
        for scheduler in self._schedulers if others else ():
            take_rates(self.engine, scheduler.scheduler)
        return result

    def _load_schedule(self, folder: Path) -> None:
        """Load the state of a Trainer's schedule, and have the optimizer at its rates."""
        assert self.engine is not None
        state = schedule_in(folder)
        for scheduler in self._schedulers[:1]:
            if state is not None:
                scheduler.load_state_dict(state)
            take_rates(self.engine, scheduler.scheduler)

    def go_on_from_others(self, folder: Path, adapters: str | None = None) -> bool:
        """Load masters and states of a folder that was written without zero3d; return whether it is one.

        adapters  name of PEFT's adapter that is trained
        Raises CheckpointError.
        """
        if self.engine is None or states_in(folder) is not None or (read := reader_of(folder)) is None:
            return False
        go_on(self.engine, folder, self._order, read, adapters)
        return True

    def _last_saved(self) -> str:
        """Return the newest folder of those that Accelerate has named. Raises ConfigError."""
        naming = self.project_configuration.automatic_checkpoint_naming
        folders = list(Path(self.project_dir or ".", "checkpoints").glob("checkpoint_*")) if naming else []
        if not folders:
            raise ConfigError(
                "load_state() without a folder takes the last one that automatic_checkpoint_naming has named, and here "
                f"{'there is none yet' if naming else 'it is off'}: name the folder."
            )
        return str(max(folders, key=lambda folder: int(folder.name.rpartition("_")[2])))

    @contextmanager
    def _without_engine(self, hooks: dict[int, Callable[..., Any]]) -> Iterator[None]:
        """Leave the engine's model and optimizer out of what Accelerate saves and loads itself; hooks have them."""
        models: list[Any] = self._models
        optimizers: list[Any] = self._optimizers
        callers = dict(hooks)
        self._models = [one for one in models if self.engine is None or one is not self.engine.module]
        self._optimizers = [one for one in optimizers if not isinstance(one, EngineOptimizer)]
        hooks |= {number: partial(self._with_engine, hook, models) for number, hook in callers.items()}
        try:
            yield
        finally:
            self._models, self._optimizers = models, optimizers
            hooks |= callers

    def _with_engine(self, hook: Callable[..., Any], models: list[Any], others: list[Any], *rest: Any) -> None:
        """Call a hook with all models, in their order; rest: their weights, when they are saved, and the folder."""
        engine = self.engine
        assert engine is not None
        shown = [one for one in models if one is engine.module or one in others]
        *saved, folder = rest
        whole = engine.whole_state_dict() if saved else {}
        of_others = iter(saved[0] if saved else ())
        weights = [[whole if one is engine.module else next(of_others) for one in shown]] if saved else []
        with engine.full_params():
            hook(shown, *weights, folder)
        others[:] = [one for one in shown if one is not engine.module]
        for given, left in zip(saved, weights, strict=True):
            given[:] = [one for one in left if one is not whole]


def _save_pretrained(
    engine: Engine, meeting: Meeting, model: Any, folder: Any, *given: Any, state_dict: Any = None, **options: Any
) -> None:
    """Write a model's folder on rank 0 from weights that all ranks gather; all ranks call it.

    With a state_dict, and inside full_params() or after unshard(), any rank may call it alone. Raises ConfigError where
    a rank waits for everyone instead, and on all ranks what the writing raises.
    """
    if state_dict is not None or all(map(is_open, engine.units)):
        with nullcontext() if state_dict is None else whole_prompts(engine, model, state_dict):
            type(model).save_pretrained(model, folder, *given, state_dict=state_dict, **options)
        return
    meeting.expect("save_pretrained")
    weights = engine.whole_state_dict()

    def write() -> None:
        if engine.mesh.rank == 0:
            with whole_prompts(engine, model, weights):
                type(model).save_pretrained(model, folder, *given, state_dict=weights, **options)

    agree(engine.world.patient, write)


def _train_again(parameters: list[nn.Parameter]) -> None:
    """Have parameters that were frozen for an engine require gradients, as they came."""
    for p in parameters:
        p.requires_grad_(True)


def introduced(engine: Engine) -> str:
    """Return a line with the ZeRO stage, the number of ranks and the bytes of model states on this rank."""
    world, states = engine.mesh.world, sum(entry.measured for entry in engine.memory if entry.planned is not None)
    ranks = f"{world} rank{'' if world == 1 else 's'}"
    return (
        f"zero3d: ZeRO stage {engine.stage}, {ranks}, {states / 1e6:,.1f} MB of model states on rank {engine.mesh.rank}"
    )


class PartsScheduler(AcceleratedScheduler):  # type: ignore[misc]
    """A schedule that goes on several times whenever the optimizer steps."""

    def __init__(self, scheduler: Any, optimizers: Any, with_optimizer: bool, times: int) -> None:
        super().__init__(scheduler, optimizers, step_with_optimizer=with_optimizer, split_batches=True)
        self._times = times

    def step(self, *given: Any, **options: Any) -> None:
        """Go on, where the optimizer has stepped."""
        for _ in range(self._times):
            super().step(*given, **options)


def only_tensors(data: Any) -> bool:
    """Return whether nested data has tensors alone."""
    if isinstance(data, Mapping):
        return all(map(only_tensors, data.values()))
    return all(map(only_tensors, data)) if isinstance(data, list | tuple) else isinstance(data, Tensor)


def take_back(model: nn.Module) -> None:
    """Close the engines that Accelerators have made for a model or parts of it. Raises ConfigError, OutOfBudget."""
    for module in list(model.modules()):
        vars(module).get(TAKE_BACK, lambda: None)()


leave_alike(lambda accelerator: isinstance(accelerator, Accelerator) and accelerator.engine is not None)
