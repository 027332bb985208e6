"""Kernels are told where documents end by names that released packages have, as transformers calls them."""

import importlib
import inspect
import json
from pathlib import Path

import pytest
import torch
from hybrids import with_kernels

from zero3d.models import mixing
from zero3d.models.packed_documents import Documents, Told, during

PUBLISHED = json.loads((Path(__file__).parents[2] / "benchmarks" / "published" / "kernels.json").read_text())
KERNELS, VERSIONS = PUBLISHED["kernels"], PUBLISHED["transformers"]
ENDS = {
    "chunk_gated_delta_rule": {"cu_seqlens": "ends", "cu_seqlens_cpu": "ends_on_host"},
    "chunk_kda": {"cu_seqlens": "ends", "cu_seqlens_cpu": "ends_on_host"},
    "mamba_chunk_scan_combined": {"seq_idx": "numbers"},
    "causal_conv1d_fn": {"seq_idx": "numbers"},
    "selective_scan_fn": {},
}
ALIKE = {"query": "q", "key": "k", "value": "v", "hidden_states": "x"}  # other names of the same in kernels
MAMBA1 = {"hidden_states": "u", "dt": "delta"}
OWN = {"use_mambapy", "use_associative_scan", "cu_seqlens", "seq_idx", "**"}  # keywords of transformers' own
DOCUMENTS = Documents.of(torch.tensor([[0, 1, 2, 0, 1, 2, 3], [0, 1, 0, 1, 2, 3, 4]]))


def named(kernel):
    return f"{kernel['function']}-{kernel['version']}"


def before(kernel, version):
    """Name of transformers' function before a kernel, and what is recorded of it; None where there is none."""
    of = version["functions"].items()
    return next(((name, one) for name, one in of if one["kernel"] == kernel["function"]), None)


def installed(kinds):
    """The modeling file of the last of some types that this version of transformers has."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

    has = [kind for kind in kinds if kind in CONFIG_MAPPING_NAMES]
    return importlib.import_module(f"transformers.models.{has[-1]}.modeling_{has[-1]}") if has else None


def stand_in(kernel, calls):
    """A function with a kernel's own parameters that says what it was called with."""
    kinds = inspect.Parameter
    names = kernel["parameters"]
    signature = inspect.Signature(
        [kinds("others" if name == "**" else name, kinds.VAR_KEYWORD if name == "**" else kinds.POSITIONAL_OR_KEYWORD,
               **({} if name == "**" else {"default": None})) for name in names]
    )  # fmt: skip

    def called(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        calls.append(given)
        first = next(iter(given.values()))
        out = given.get("v", first)
        return (out, None) if kernel["package"] == "fla-core" else out

    called.__signature__ = signature
    return called


@pytest.mark.parametrize("kernel", KERNELS, ids=named)
def test_each_is_told_by_names_that_it_has(monkeypatch, kernel):
    """Called as each recorded version of transformers calls it, with every tensor that has time."""
    for version in VERSIONS:
        if kernel["function"] not in ENDS or (found := before(kernel, version)) is None:
            continue
        name, one = found
        if (file := installed(one["files"])) is None:
            continue
        calls = []
        with_kernels(monkeypatch, file, {name: stand_in(kernel, calls)})
        function = mixing.told_first(name, getattr(file, name))
        assert mixing._ends_of(name, function) == ENDS[kernel["function"]]
        for call in one["calls"]:
            values = dict.fromkeys([*one["parameters"], *call["keywords"]])
            dim = -1 if name in (mixing.CONVOLUTION, "mamba_selective_scan") else 1
            timed = ("hidden_states",) if name == mixing.CONVOLUTION else mixing.SCANS[name].time
            shape = (2, 3, 7) if dim == -1 else (2, 7, 3, 4)
            values |= {each: torch.zeros(shape) for each in timed if each in values}
            positional = [values[each] for each in one["parameters"][: call["by_position"]]]
            calls.clear()
            with during(Told(DOCUMENTS)):
                function(*positional, **{each: values[each] for each in call["keywords"] if each != "**"})
            assert calls
            for what, of in ENDS[kernel["function"]].items():
                assert all(torch.equal(given[what], getattr(DOCUMENTS, of)) for given in calls)
            if kernel["package"] == "fla-core":
                assert all(given[each].shape[:2] == (1, 14) for given in calls for each in ("q", "k", "v", "g", "beta"))


@pytest.mark.parametrize("version", VERSIONS, ids=lambda version: version["version"])
@pytest.mark.parametrize("kernel", KERNELS, ids=named)
def test_arguments_by_position_are_those_of_the_kernel(kernel, version):
    """transformers drops keywords that a kernel does not name: none that matters may be among them."""
    found = before(kernel, version)
    if found is None:
        assert kernel["function"] == "chunk_kda"
        assert version["version"] == "5.16.0"
        return
    _, one = found
    alike = ALIKE | (MAMBA1 if kernel["function"] == "selective_scan_fn" else {})
    for call in one["calls"]:
        assert call["inside"] == "forward"  # where a module's mixing is looked for
        passed = [alike.get(name, name) for name in one["parameters"][: call["by_position"]]]
        assert passed == kernel["parameters"][: call["by_position"]]
        assert set(call["keywords"]) <= {*kernel["parameters"], *OWN}


def test_what_a_convolution_asserts_is_so_of_ours():
    for kernel in KERNELS:
        if kernel["function"] == "causal_conv1d_fn":
            assert kernel["of_seq_idx"]["dtype"] == str(DOCUMENTS.numbers.dtype).removeprefix("torch.")
            assert kernel["of_seq_idx"]["channel_last"]
            assert DOCUMENTS.numbers.is_contiguous()
            calls = [call for version in VERSIONS for call in before(kernel, version)[1]["calls"]]
            words = {word for call in calls for word in call["keywords"]}
            assert words.isdisjoint(kernel["of_seq_idx"]["not_with"])


@pytest.mark.parametrize("last", [True, False])
def test_a_convolution_s_kernel_gets_channels_last(monkeypatch, last):
    import transformers.models.lfm2.modeling_lfm2 as file

    seen = []

    def kernel(x, weight, bias=None, seq_idx=None, activation=None):
        seen.append(x)
        return x

    with_kernels(monkeypatch, file, {"causal_conv1d_fn": kernel})
    function = mixing.told_first("causal_conv1d_fn", file.causal_conv1d_fn)
    x = torch.randn(2, 7, 3).mT if last else torch.randn(2, 3, 7)
    with during(Told(DOCUMENTS)):
        function(x, torch.randn(3, 4))
    assert seen[0].stride(1) == 1
    assert torch.equal(seen[0], x)
    assert (seen[0].data_ptr() == x.data_ptr()) is last


def test_versions_of_transformers_have_the_functions_that_are_replaced():
    oldest, newest = (version["functions"] for version in VERSIONS)
    assert set(newest) == set(mixing.FUNCTIONS)
    assert set(newest) - set(oldest) == {"chunk_kimi_delta_attention"}  # its types are not there either
    for name, one in oldest.items():
        assert one["parameters"] == newest[name]["parameters"]
        assert set(one["files"]) <= set(newest[name]["files"])


def test_the_installed_version_has_them_too():
    for name, one in VERSIONS[-1]["functions"].items():
        if file := installed(one["files"]):
            found = inspect.signature(inspect.unwrap(getattr(file, name))).parameters.values()
            assert ["**" if each.kind is each.VAR_KEYWORD else each.name for each in found] == one["parameters"]
