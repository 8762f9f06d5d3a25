"""What all classes of tensors use to move: lanes, homes, staged state and the budget they share."""

from __future__ import annotations

from typing import TYPE_CHECKING

from umem.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from umem.streaming.stage.device_room import DeviceRoom
    from umem.streaming.stage.held_tensors import HeldTensors
    from umem.streaming.stage.homes import StateMemory, is_whole, rehome
    from umem.streaming.stage.lanes import (
        Copy,
        CudaLanes,
        HostLanes,
        Lane,
        Lanes,
        cuda_lanes,
        untraced,
    )
    from umem.streaming.stage.memory import CudaRoom, CudaStateMemory
    from umem.streaming.stage.ring import TRANSITIONS, Bundle, BundleEvent, BundleState, Ring, Slot
    from umem.streaming.stage.shared_budget import SharedBudget
    from umem.streaming.stage.staged_state import find_spans
    from umem.streaming.stage.state_room import StateRoom
    from umem.streaming.stage.state_views import StateViews

__all__ = [
    "TRANSITIONS",
    "Bundle",
    "BundleEvent",
    "BundleState",
    "Copy",
    "CudaLanes",
    "CudaRoom",
    "CudaStateMemory",
    "DeviceRoom",
    "HeldTensors",
    "HostLanes",
    "Lane",
    "Lanes",
    "Ring",
    "SharedBudget",
    "Slot",
    "StateMemory",
    "StateRoom",
    "StateViews",
    "cuda_lanes",
    "find_spans",
    "is_whole",
    "rehome",
    "untraced",
]

__getattr__ = lazy_names(
    __name__,
    {
        "device_room": "DeviceRoom",
        "held_tensors": "HeldTensors",
        "homes": "StateMemory is_whole rehome",
        "lanes": "Copy CudaLanes HostLanes Lane Lanes cuda_lanes untraced",
        "memory": "CudaRoom CudaStateMemory",
        "ring": "TRANSITIONS Bundle BundleEvent BundleState Ring Slot",
        "shared_budget": "SharedBudget",
        "staged_state": "find_spans",
        "state_room": "StateRoom",
        "state_views": "StateViews",
    },
)
