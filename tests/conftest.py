"""Shared set-up: tests marked `gpu` are skipped, with the reason, where torch sees no GPU."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip the tests marked `gpu` on a machine without one."""
    needing_gpu = [item for item in items if item.get_closest_marker("gpu")]
    if not needing_gpu:
        return
    reason = _why_no_gpu()
    if reason:
        for item in needing_gpu:
            item.add_marker(pytest.mark.skip(reason=reason))


def _why_no_gpu() -> str:
    """Why GPU tests cannot run here, or ""."""
    import torch

    if torch.version.cuda is None:
        return f"torch {torch.__version__} is built without CUDA"
    # Through NVML: the driver is not started, so that tests may still fork.
    if torch.cuda.device_count() == 0:
        return "torch sees no NVIDIA GPU"
    return ""
