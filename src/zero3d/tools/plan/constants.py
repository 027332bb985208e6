"""Every constant of the planner that is no data sheet's and no formula's: its value, and what it was fitted on.

    fitted     on rows of published tables, by least mean error; `default` is what a system without rows of its own gets
    assumed    no row tells; `source` says where it is from

The code that plans reads its numbers here, so this table cannot be wrong about them. Rows are named as
`benchmarks/planner_accuracy.py` names them: a set of one publication, and what of it is compared. That script also
fits each constant anew without a set, and says how far predictions of that set are off then. docs/plan.md shows all.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import NamedTuple

Key = tuple[str, str]
Values = Mapping[Key, float]


class Rows(NamedTuple):
    """Rows of a set: memory, time or fits; which ones, if not all."""

    set: str
    kind: str
    which: str = ""


@dataclass(frozen=True)
class Constant:
    """Holds one number of the planner, and where it is from.

    system   whose it is: one of profiles.py, a card, a part of the planner; of judging alone, a set of rows
    default  what would be taken without the rows that it was fitted on
    source   where an assumed number is from
    lender   the system it was fitted for, where that is another one
    """

    system: str
    name: str
    value: float
    unit: str
    fitted_on: tuple[Rows, ...] = ()
    default: float | None = None
    source: str = ""
    lender: str = ""

    @property
    def key(self) -> Key:
        """Return the system and the name by which a constant is looked up."""
        return self.system, self.name


def fitted(system: str, name: str, value: float, unit: str, default: float, *rows: Rows) -> Constant:
    """Make a constant that was fitted on rows."""
    return Constant(system, name, value, unit, rows, default)


def assumed(system: str, name: str, value: float, unit: str, source: str) -> Constant:
    """Make a constant that no row tells."""
    return Constant(system, name, value, unit, source=source)


def lent(original: Constant, system: str) -> Constant:
    """Take another system's constant for one that has no rows for it."""
    return replace(original, system=system, lender=original.system)


AZURE, BLOOM, BLOOM_MEMORY = (
    Rows("deepspeed_azure", "time"),
    Rows("bloom176b_prequel", "time"),
    Rows("bloom176b_prequel", "memory"),
)
TITAN, TITAN_MEMORY, IBM = Rows("torchtitan", "time"), Rows("torchtitan", "memory"), Rows("ibm_fsdp", "time")
NANOTRON, NANOTRON_MEMORY = Rows("nanotron", "time"), Rows("nanotron", "memory")
MEGATRON, CORE, LAYERS = (
    Rows("megatron2021_table1", "time"),
    Rows("megatron_core_h100", "time"),
    Rows("galvatron_forward", "time"),
)
TABLE_2, TABLE_5 = Rows("megatron2021_table2", "time"), Rows("korthikanti_table5", "time")
SCALE, RECENT = Rows("megascale_megatron", "time"), Rows("automodel_2026", "time")
RECENT_LORA = Rows("automodel_2026_lora", "time")
A100 = (LAYERS, MEGATRON, TABLE_2, TABLE_5, SCALE, AZURE, BLOOM, IBM)
H100 = (NANOTRON, CORE, IBM, RECENT, RECENT_LORA)
FORGE_MEMORY = Rows("kempnerforge_h200", "memory")
FORGE, BRIDGE = Rows("kempnerforge_h200", "time"), Rows("megatron-core_2026_fp8", "time", "over ep")
EAGER = (MEGATRON, TABLE_2, TABLE_5, AZURE, BLOOM)

SPARE = "x live bytes, that the allocator holds"
SHARE = "of the data axis' communication hidden"
MATRIX = "of the card's peak, matrix products"
FLASH = "x the card's peak, causal flash attention with masked scores counted"

_HIDE_DP = fitted("torchtitan", "hide_dp", 0.65, SHARE, 0.5, TITAN, IBM, CORE, RECENT, RECENT_LORA)
_HIDE_TP = fitted("torchtitan-async-tp", "hide_tp", 0.67, "of tp's all-reduces hidden", 0.5, TITAN, CORE)
_SLOW_TP = "x the links' seconds of tp's all-reduces"
_H100_96 = (
    fitted("h100-96", "matrix", 0.68, MATRIX, 0.68, TITAN),
    fitted("h100-96", "flash", 0.43, FLASH, 0.55, TITAN),
)
_H200 = (fitted("h200", "matrix", 0.79, MATRIX, 0.68, FORGE), fitted("h200", "flash", 0.76, FLASH, 0.55, FORGE))
_H100 = (fitted("h100", "matrix", 0.75, MATRIX, 0.68, *H100), fitted("h100", "flash", 0.355, FLASH, 0.55, *H100))

_GAMING = Rows("fsdp_qlora_lora", "time"), Rows("fsdp_qlora_qlora", "time")
_RTX = (fitted("rtx", "matrix", 1.0, MATRIX, 0.68, *_GAMING), assumed("rtx", "flash", 0.55, FLASH, "other cards'"))

_DEEPSPEEDS = ("deepspeed", "deepspeed-0.3")
_TITANS = ("torchtitan", "torchtitan-async-tp")
_PIECES = "gathers per unit and pass"
_OF_LOSS = "bytes per logit beside a loss in fp32 without a copy"
_DECODING = "bytes moved per decoded weight"
_SHIFT = "transformers until 4.45: shifted logits, made contiguous in fp32"
_IN_16 = "a loss that stays in 16 bits where nothing is in autocast"
_READS = "bitsandbytes: codes are read, 16 bits written"
_KEEPS = "bytes per element of the inputs of layers in 4 bits"
_LIVE = "stage3_max_live_parameters, in 16 bits"
_FREED = "fragments that are left once a full device has let go of the rest"
QWEN_LORA, QWEN_QLORA = Rows("qwen_lora (doubt)", "memory"), Rows("qwen_qlora (doubt)", "memory")
SHARDED = tuple(
    Rows(name, "memory") for name in ("fsdp_qlora_lora", "fsdp_qlora_lora (doubt)", "fsdp_qlora_qlora (doubt)")
)
PACKED = Rows("litgpt_qlora", "memory"), Rows("litgpt_qlora (doubt)", "memory")
_SPARE = fitted("fsdp-qlora", "spare", 1.18, SPARE, 1.1, *SHARDED, QWEN_LORA, QWEN_QLORA)
_ADAPTED = (
    _SPARE,
    *(lent(_SPARE, name) for name in ("peft", "peft-gptq", "peft-zero3", "litgpt")),
    *(
        assumed(name, "tight", 1.02, SPARE, _FREED)
        for name in ("peft", "peft-gptq", "peft-zero3", "fsdp-qlora", "litgpt")
    ),
    lent(_HIDE_DP, "fsdp-qlora"),
    assumed("fsdp-qlora", "loss_more", 4.0, _OF_LOSS, _SHIFT),
    assumed("peft-gptq", "loss_more", -4.0, _OF_LOSS, _IN_16),
    assumed("peft-zero3", "live", 2e9, "bytes of weights that stay gathered", _LIVE),
    assumed("peft-zero3", "unit_hops", 4.0, _PIECES, "the matrices of a block"),
    assumed("fsdp-qlora", "decoded", 2.6, _DECODING, _READS),
    assumed("litgpt", "decoded", 2.6, _DECODING, _READS),
    fitted("peft-gptq", "decoded", 19.0, _DECODING, 10.0, Rows("qwen_qlora (doubt)", "time")),
    fitted("litgpt", "packed_input", 2.6, _KEEPS, 2.0, *PACKED),
)
_HALVES = '"selective" keeps every second product\'s output'
_LOSS = "exp and its sum in fp32, of which 10 bytes are in any loss"

SYSTEM_CONSTANTS = (
    lent(_HIDE_DP, "zero3d"),
    lent(_HIDE_DP, "megatron-core"),
    lent(_HIDE_TP, "megatron-core"),
    *(assumed(name, "bucket", 5e8, "gradients reduced together", "reduce_bucket_size") for name in _DEEPSPEEDS),
    assumed("deepspeed", "unit_hops", 4.0, _PIECES, "the matrices of GPT's block: smaller parameters persist"),
    assumed("deepspeed-0.3", "unit_hops", 12.0, _PIECES, "every parameter of GPT's block"),
    *(assumed(name, "again", 0.5, "of a block's forward, run again", _HALVES) for name in _TITANS),
    *(assumed(name, "loss_over_tp", 6.0, "bytes per logit of a loss over tp, beyond any", _LOSS) for name in _TITANS),
    assumed(
        "deepspeed-0.3", "spare", 1.0, SPARE, "ZeRO-R keeps inputs and gradients in buffers of their own: no fragments"
    ),
    fitted("megatron-deepspeed", "block", 0.005, "s that the host adds per block and micro-batch", 0.0, BLOOM),
    *_ADAPTED,
    _HIDE_DP,
    lent(_HIDE_DP, "torchtitan-async-tp"),
    lent(_HIDE_DP, "kempnerforge"),
    fitted("kempnerforge", "sums_whole", 3.7, "bytes per parameter of whole gradients", 4.0, FORGE_MEMORY),
    fitted("kempnerforge", "slow_tp", 3.0, _SLOW_TP, 1.0, FORGE),
    fitted("megatron-core", "hide_ep", 0.34, "of experts' rows on their way hidden", 0.5, BRIDGE),
    lent(_HIDE_DP, "automodel"),
    _HIDE_TP,
)

_COPIED = "bitsandbytes' kernel: codes are copied and read, 16 bits written; of large matrices copied once more"
_HOPPER = "FlashAttention-3 over 2: 1.5 to 2 forward, 1.5 to 1.75 backward (Shah et al. 2024)"

KERNEL_CONSTANTS = (
    fitted("a100", "matrix", 0.8, MATRIX, 0.68, *A100),
    assumed("a100", "flash", 1.0, FLASH, "FlashAttention-2: half of the peak under a causal mask (Dao 2023)"),
    assumed("a100", "memory", 0.8, "of the card's bandwidth", "what copies reach"),
    *_H100,
    assumed("h100", "memory", 0.8, "of the card's bandwidth", "what copies reach"),
    *_H100_96,
    assumed("h100-96", "memory", 0.8, "of the card's bandwidth", "what copies reach"),
    *_H200,
    assumed("h200", "memory", 0.8, "of the card's bandwidth", "what copies reach"),
    *_RTX,
    assumed("rtx", "memory", 0.8, "of the card's bandwidth", "what copies reach"),
    assumed("v100", "matrix", 0.62, MATRIX, "a guess"),
    assumed("v100", "flash", 0.5, FLASH, "a guess"),
    assumed("v100", "memory", 0.8, "of the card's bandwidth", "what copies reach"),
    assumed("cpu", "matrix", 0.6, "of the peak, matrix products", "a guess; zero3d calibrate measures it"),
    assumed("cpu", "flash", 0.3, "of the peak, attention", "a guess; zero3d calibrate measures it"),
    assumed("cpu", "memory", 0.5, "of the bandwidth", "a guess; zero3d calibrate measures it"),
    assumed("other cards", "matrix", 0.68, MATRIX, "h100's"),
    assumed("other cards", "flash", 0.55, FLASH, "h100's"),
    assumed("other cards", "memory", 0.8, "of the card's bandwidth", "what copies reach"),
    assumed("kernels", "fp8", 2.0, "x products in 16 bits", "tensor cores do twice as many"),
    fitted(
        "kernels",
        "odd_head",
        9.6,
        "x eager attention whose heads are not a multiple of 8",
        4.0,
        BLOOM._replace(which="such heads"),
    ),
    fitted("kernels", "eager_passes", 1.77, "passes over kept scores, eager attention", 2.0, *EAGER),
    assumed("kernels", "rest_passes", 2.0, "passes over what is kept", "written in the forward, read in the backward"),
    assumed("kernels", "flash_backward", 2.5, "x the forward", "five products for two: scores are computed again"),
    assumed("kernels", "hopper", 1.65, "x flash attention, by kernels written for Hopper", _HOPPER),
    assumed("kernels", "launch", 4e-6, "s per kernel", "a guess"),
    assumed("kernels", "dispatch", 10e-6, "s in which the host launches one kernel of several", "a guess"),
    assumed("kernels", "decoded", 22.0, _DECODING, "by torch's operators: codes are read, fp32 twice, the result"),
    assumed("kernels", "decoded_nf4", 5.5, _DECODING, _COPIED),
)

_LLAMA = "a trace of transformers' LlamaDecoderLayer: 64 bytes in all at 7B's shape"
_NINE = "9 of 10 published measurements lie within it, predicted without their source"
_ALL = "all published measurements lie within it, which are few, predicted without their source"
_MARGINS = (
    ("full", 0.11, _NINE),
    ("lora", 0.13, _ALL),
    ("qlora", 0.13, _ALL),
    ("offload", 0.13, "a guess: the largest of the other kinds'"),
)
_NARROWED = "the median over published sets of what 9 of 10 plans do not exceed, corrected by a smaller run"
_APART = "of published pairs whose plans differ by more, 19 in 20 are ranked as they were measured"
_STRAGGLERS = "MegaScale: one node in 200 took a tenth longer, and all waited for it (Jiang et al. 2024)"
OTHER_CONSTANTS = (
    assumed("samplers", "room", 0.7, "of a card's memory, for weights", "a guess: caches have the rest"),
    assumed(
        "links", "coding", 16.0, "bytes per element coded or decoded", "its code, fp32 scratch both ways, its value"
    ),
    assumed("links", "reached", 0.8, "of a link's data sheet", "what NCCL's best bus bandwidths are of it"),
    assumed("links", "latency inside", 4e-6, "s per hop within a node", "a guess; zero3d calibrate measures it"),
    assumed("links", "half inside", 2e6, "bytes at half the bandwidth", "a guess; zero3d calibrate measures it"),
    assumed("links", "latency across", 12e-6, "s per hop between nodes", "a guess; zero3d calibrate measures it"),
    assumed("links", "half across", 1e6, "bytes at half the bandwidth", "a guess; zero3d calibrate measures it"),
    assumed("step", "fixed", 0.02, "s per step", "a guess: launching, data, logging"),
    assumed(
        "step",
        "host_bandwidth",
        100e9,
        "bytes/s of a node's memory for Adam on the host",
        "a guess; zero3d calibrate measures it",
    ),
    *(
        assumed("plan", f"margin {kind}", share, "of a device's planned bytes, beyond them", source)
        for kind, share, source in _MARGINS
    ),
    assumed("step", "apart", 0.04, "of a step, by which two plans' seconds differ for sure", _APART),
    assumed("step", "spread", 0.1, "of what a rank computes, either way, once a run was measured", _NARROWED),
    assumed("step", "low", 0.85, "x planned seconds, low", "how published times lie around the plan's"),
    assumed("step", "high", 1.2, "x planned seconds, high", "how published times lie around the plan's"),
    assumed(
        "experts",
        "imbalance",
        1.25,
        "x the mean's rows, on the busiest ep rank",
        "a guess; zero3d compare prints a run's",
    ),
    assumed("nodes", "slow", 0.005, "of nodes, that are slower than others", _STRAGGLERS),
    assumed("nodes", "slower", 0.1, "x a step, longer on such a node", _STRAGGLERS),
    assumed("schedules", "zero-bubble", 1 / 3, "of the bubble, left", "Qi et al. 2023, table 1"),
    assumed("schedules", "zbv", 0.0, "of the bubble, left", "Qi et al. 2023, table 1"),
    assumed("Llama's closed form", "eager copies", 6.5, "bytes kept per hidden element", _LLAMA),
    assumed("Llama's closed form", "eager norms", 28.0, "bytes kept per hidden element", _LLAMA),
    assumed("Llama's closed form", "fused norms", 8.0, "bytes kept per hidden element", "one kernel: input and scale"),
    assumed("zero3d", "reserved", 1.05, SPARE, "a guess; zero3d calibrate measures it"),
    assumed("zero3d", "context", 0.6e9, "bytes of CUDA and libraries", "a guess"),
    assumed(
        "zero3d",
        "communicator",
        0.69e9,
        "bytes of NCCL for each communicator",
        "NVIDIA/nccl issue 964: 544 MB of two A100s, 688 MB of more; zero3d calibrate measures it",
    ),
    assumed(
        "zero3d",
        "narrow communicator",
        0.03e9,
        "bytes of NCCL for one of one channel, which carries a few numbers",
        "NVIDIA/nccl issue 1685: buffers of 10.5 and 2.1 MB a channel and peer; a ring has two",
    ),
    assumed("zero3d", "norm", 20.0, "bytes of a hidden element, backward of a norm", "five fp32, seen in dry runs"),
    assumed("zero3d", "kept norm", 8.0, "bytes of a hidden element, last norm and head", "copies in fp32 and 16 bits"),
    assumed("zero3d", "tile", 14.0, "bytes of a hidden element, backward of a loss in tiles", "seen in dry runs"),
    assumed("zero3d", "process", 3e9, "bytes of host memory per process", "a guess"),
    fitted("other systems", "spare", 1.19, SPARE, 1.1, BLOOM_MEMORY, NANOTRON_MEMORY, TITAN_MEMORY),
    assumed("other systems", "context", 0.5e9, "bytes of CUDA", "a guess"),
    assumed("other systems", "communicator", 0.5e9, "bytes of NCCL for each communicator", "a guess"),
    assumed("other systems", "buffers", 1e9, "bytes of communication buckets", "a guess"),
)

CONSTANTS = (*SYSTEM_CONSTANTS, *KERNEL_CONSTANTS, *OTHER_CONSTANTS)
VALUES: Values = {constant.key: constant.value for constant in CONSTANTS}


def constant(system: str, name: str) -> float:
    """Look up a constant's value."""
    return VALUES[system, name]


def source_of(system: str, name: str) -> str:
    """Return where an assumed constant is from."""
    return next(each.source for each in CONSTANTS if each.key == (system, name))


def of_system(system: str, values: Values = VALUES) -> dict[str, float]:
    """Return all values of one system, by name."""
    return {name: number for (whose, name), number in values.items() if whose == system}
