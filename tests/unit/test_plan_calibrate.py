"""What `zero3d calibrate` makes of its timings."""

from math import isclose

import pytest

from zero3d.plan.calibrate import MESSAGES, fit
from zero3d.plan.hardware import named


@pytest.mark.parametrize(("n", "bandwidth", "latency"), [(2, 2e9, 50e-6), (8, 100e9, 4e-6), (4, 1e9, 0.0)])
def test_the_line_is_found_again(n, bandwidth, latency):
    hops = 2 * (n - 1)
    link = fit(n, MESSAGES, [hops * latency + hops / n * size / bandwidth for size in MESSAGES])
    assert isclose(link.bandwidth, bandwidth, rel_tol=1e-6)
    assert isclose(link.latency, latency, rel_tol=1e-6, abs_tol=1e-12)


def test_timings_that_fall_with_size_still_give_a_link():
    link = fit(2, (1, 2, 4), [3.0, 2.0, 1.0])
    assert link.bandwidth > 0
    assert link.latency >= 0


@pytest.mark.parametrize(("device", "name"), [
    ("NVIDIA A100-SXM4-80GB", "a100-80"), ("NVIDIA A100-SXM4-40GB", "a100-40"), ("NVIDIA H100 80GB HBM3", "h100"),
    ("NVIDIA H200", "h200"), ("Tesla V100-SXM2-32GB", "v100-32"), ("NVIDIA GeForce RTX 3090", "rtx-3090"),
    ("NVIDIA RTX A6000", "a6000"), ("AMD Instinct MI300X", "mi300x"), ("NVIDIA B200", "b200"), ("Tesla T4", None),
])  # fmt: skip
def test_a_device_is_found_in_the_catalogue_by_its_drivers_name(device, name):
    assert named(device) == name
