"""What `zero3d calibrate` makes of its timings."""

from dataclasses import replace
from math import isclose

import pytest

from zero3d.tools.plan.calibrate import MESSAGES, _per_partner, fit
from zero3d.tools.plan.hardware import cluster, named


@pytest.mark.parametrize(("n", "bandwidth", "latency"), [(2, 2e9, 50e-6), (8, 100e9, 4e-6), (4, 1e9, 0.0)])
def test_the_line_is_found_again(n, bandwidth, latency):
    hops = 2 * (n - 1)
    link = fit(n, MESSAGES, [hops * latency + hops / n * size / bandwidth for size in MESSAGES])
    assert isclose(link.bandwidth, bandwidth, rel_tol=1e-6)
    assert isclose(link.latency, latency, rel_tol=1e-6, abs_tol=1e-12)


def test_timings_that_fall_with_size_give_the_bandwidth_of_the_largest_message():
    """2/3 l + 1/3 i, l + i and 2 l + 4 i are nearest to 1 with l = 1098/657 and i < 0."""
    link = fit(2, (1, 2, 4), [3.0, 2.0, 1.0])
    assert link.bandwidth == pytest.approx(4 / 1.0)
    assert link.latency == pytest.approx(1098 / 657)


def test_timings_that_grow_faster_than_sizes_are_bandwidth_alone():
    """2 l + i = 1 and 2 l + 2 i = 4 ask for l < 0; without it i and i / 2 are nearest to 1 with i = 1.5 / 1.25."""
    link = fit(2, (1, 2), [1.0, 4.0])
    assert link.latency == 0
    assert link.bandwidth == pytest.approx(1.25 / 1.5)


@pytest.mark.parametrize(("device", "name"), [
    ("NVIDIA A100-SXM4-80GB", "a100-80"), ("NVIDIA A100-SXM4-40GB", "a100-40"), ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA H200", "h200"), ("Tesla V100-SXM2-32GB", "v100-32"), ("NVIDIA GeForce RTX 3090", "rtx-3090"),
    ("NVIDIA RTX A6000", "a6000"), ("AMD Instinct MI300X", "mi300x"), ("NVIDIA B200", "b200"), ("Tesla T4", "t4"),
    ("NVIDIA GB200", "gb200"), ("NVIDIA GB300", "gb300"), ("NVIDIA B300 SXM6 AC", "b300"), ("NVIDIA L40S", "l40s"),
    ("NVIDIA GH200 480GB", "gh200"), ("NVIDIA H20", "h20"), ("NVIDIA H800", "h800"), ("NVIDIA L4", "l4"),
    ("NVIDIA A10G", "a10g"), ("NVIDIA GeForce RTX 5090", "rtx-5090"), ("NVIDIA L40", None), ("NVIDIA A10", None),
    ("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", "rtx-pro-6000"), ("NVIDIA GeForce GTX 1080", None),
])  # fmt: skip
def test_a_device_is_found_in_the_catalogue_by_its_drivers_name(device, name):
    assert named(device) == name


@pytest.mark.parametrize(("card", "local", "all_links"), [("mi300x", 2, 350e9), ("mi300x", 8, 50e9), ("h100", 2, 50e9)])
def test_a_measured_link_is_of_those_that_its_ranks_used(card, local, all_links):
    sheet = cluster(card, 8).inside
    found = _per_partner(replace(sheet, bandwidth=50e9, partners=0), sheet, local)
    assert found.to(local - 1) == pytest.approx(50e9)
    assert (found.bandwidth, found.partners) == (pytest.approx(all_links), sheet.partners)
