"""Detection of the machine at hand."""

from __future__ import annotations

import pytest
import torch

from umem.hardware import load_hardware

pytestmark = pytest.mark.gpu


def test_detect_describes_this_machine() -> None:
    hardware = load_hardware("detect")
    properties = torch.cuda.get_device_properties(0)
    assert hardware.name == properties.name
    assert hardware.device_bytes == properties.total_memory
    assert hardware.sources["device_bytes"].text == "detected"
    assert hardware.to_host_bytes_per_s > 0
    assert hardware.to_device_bytes_per_s <= hardware.link_bytes_per_s
    assert load_hardware("detect") == hardware
