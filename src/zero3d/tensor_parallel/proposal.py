"""Lines of a plan that a message proposes for a model without one: right for the model, or none.

attention    q, k, v (or one matrix of all three) and the output, by name, and the matrices of a mixer: what is between
             them is computed whole on every rank, which is right whatever it is; `shipped.py` has plans that share out
             heads
MLP          by name: shared out, or computed whole where a norm lies on what would be cut, or where widths tell that
             something else lies between, such as halves of one matrix that gate each other
the rest     stays whole
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
from torch import nn

from zero3d.models.blocks import find_blocks
from zero3d.tensor_parallel.shipped import Plan, cut, whole_attention

ATTENTIONS = (  # names of inputs, and of the output, which may be in a module beside
    ("q_proj k_proj v_proj", "o_proj"),
    ("q_proj k_proj v_proj", "out_proj"),
    ("q_proj k_proj v_proj", "dense"),
    ("self.query self.key self.value", "output.dense"),
    ("query key value", "out_proj"),
    ("query_key_value", "dense"),
    ("qkv_proj", "o_proj"),
    ("qkv_proj", "out_proj"),
    ("Wqkv", "out_proj"),
    ("c_attn", "c_proj"),
    ("q k v", "o"),
    ("Wq Wk Wv", "Wo"),
    ("in_proj", "out_proj"),
    ("wq wk wv", "wo"),
)
MLPS = (
    ("gate_proj up_proj", "down_proj"),
    ("up_proj", "down_proj"),
    ("w1 w3", "w2"),
    ("fc1", "fc2"),
    ("fc_in", "fc_out"),
    ("dense_h_to_4h", "dense_4h_to_h"),
    ("c_fc", "c_proj"),
    ("gate up", "down"),
    ("up", "down"),
    ("lin1", "lin2"),
    ("linear1", "linear2"),
    ("intermediate.dense", "output.dense"),
    ("wi_0 wi_1", "wo"),
    ("wi", "wo"),
)


def propose(model: nn.Module, roots: Sequence[str]) -> str:
    """Return a sentence with a map for every kind of block, in names that begin behind one of `roots`."""
    blocks = find_blocks(model)
    if not blocks:
        return f"Its modules are {', '.join(name for name, _ in model.named_children())}."
    kinds = {(name.rpartition(".")[0], type(block)): block for name, block in reversed(blocks.items())}
    plan: Plan = {}
    for (listed, _), block in reversed(kinds.items()):
        root = max((root for root in roots if f"{listed}.".startswith(root)), key=len)
        plan |= {f"{listed[len(root) :]}.*.{name}": style for name, style in _of_block(block).items()}
    if not plan:
        first = max(blocks.values(), key=lambda block: sum(p.numel() for p in block.parameters()))
        names = ", ".join(name for name, m in first.named_modules() if _is_matrix(m))
        return f"No style fits matrices called {names or 'nothing'}: pass tp=1, or give each one a style."
    return "For example: {" + ", ".join(f"{name!r}: {style!r}" for name, style in plan.items()) + "}."


def _of_block(block: nn.Module) -> Plan:
    """Return styles by name inside the block, of the modules that the tables know."""
    plan: Plan = {}
    for where, module in block.named_modules():
        for inputs, output in _known(module, ATTENTIONS):
            plan |= whole_attention(where, inputs, output)
        for inputs, output in _known(module, MLPS):
            if f"{where}.{output}" not in plan:
                plain = _is_plain(module, inputs) and _fits(module, inputs, output)
                make = cut if plain else whole_attention
                plan |= make(where, inputs, output)
    return {name.lstrip("."): style for name, style in plan.items()}


def _known(module: nn.Module, table: Sequence[tuple[str, str]]) -> Iterator[tuple[str, str]]:
    """Yield the first row of a table whose names are all matrices in this module, if any."""
    matrices = {name for name, m in module.named_modules() if _is_matrix(m)}
    rows = [row for row in table if matrices.issuperset([*row[0].split(), row[1]])]
    yield from rows[:1]


def _is_plain(module: nn.Module, inputs: str) -> bool:
    """Return whether nothing beside its matrices has parameters of the width that would be cut."""
    of_matrices = {id(p) for m in module.modules() if _is_matrix(m) for p in m.parameters()}
    widths = {max(module.get_submodule(name).weight.shape) for name in inputs.split()}  # type: ignore[arg-type]
    return not any(p.numel() in widths for p in module.parameters() if id(p) not in of_matrices)


def _fits(module: nn.Module, inputs: str, output: str) -> bool:
    """Return whether every input matrix gives just the width that the output matrix takes."""
    taken, _ = _widths(module.get_submodule(output))
    return all(_widths(module.get_submodule(name))[1] == taken for name in inputs.split())


def _widths(matrix: nn.Module) -> tuple[int, int]:
    """Return a matrix's widths of input and output; transformers' Conv1D has its weight transposed."""
    shape: torch.Size = matrix.weight.shape  # type: ignore[assignment]
    return (shape[1], shape[0]) if isinstance(matrix, nn.Linear) else (shape[0], shape[1])


def _is_matrix(module: nn.Module) -> bool:
    return isinstance(module, nn.Linear) or (type(module).__name__ == "Conv1D" and hasattr(module, "nf"))
