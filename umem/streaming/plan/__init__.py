"""What moves when: plans of a step for a budget, and the times that they predict."""

from __future__ import annotations

from typing import TYPE_CHECKING

from umem.core.lazy_names import lazy_names

if TYPE_CHECKING:
    from umem.streaming.plan.host_updates import plan_with_host_updates
    from umem.streaming.plan.lane_simulation import LaneKind, LaneReport, LaneTasks, simulate_lanes
    from umem.streaming.plan.recomputation import (
        plan_with_recomputation,
        with_recomputed,
        without_checkpoints,
    )
    from umem.streaming.plan.state_plan import (
        NoShorterStepError,
        StreamPlan,
        StreamProblem,
        home_bytes,
        least_slack_bytes,
        plan_stream,
        simulate_plan,
    )
    from umem.streaming.plan.step_timing import (
        FIRST_SLOTS,
        StreamUnit,
        TemporarySlot,
        largest_slot_bytes,
        simulate_stream,
    )
    from umem.streaming.plan.training_plan import TrainingPlan, plan_training, with_weights
    from umem.streaming.plan.weight_plan import WeightPlan, WeightUnit, plan_weights, staged_bytes

__all__ = [
    "FIRST_SLOTS",
    "LaneKind",
    "LaneReport",
    "LaneTasks",
    "NoShorterStepError",
    "StreamPlan",
    "StreamProblem",
    "StreamUnit",
    "TemporarySlot",
    "TrainingPlan",
    "WeightPlan",
    "WeightUnit",
    "home_bytes",
    "largest_slot_bytes",
    "least_slack_bytes",
    "plan_stream",
    "plan_training",
    "plan_weights",
    "plan_with_host_updates",
    "plan_with_recomputation",
    "simulate_lanes",
    "simulate_plan",
    "simulate_stream",
    "staged_bytes",
    "with_recomputed",
    "with_weights",
    "without_checkpoints",
]

__getattr__ = lazy_names(
    __name__,
    {
        "host_updates": "plan_with_host_updates",
        "lane_simulation": "LaneKind LaneReport LaneTasks simulate_lanes",
        "recomputation": "plan_with_recomputation with_recomputed without_checkpoints",
        "state_plan": "NoShorterStepError StreamPlan StreamProblem home_bytes least_slack_bytes "
        "plan_stream simulate_plan",
        "step_timing": "FIRST_SLOTS StreamUnit TemporarySlot largest_slot_bytes simulate_stream",
        "training_plan": "TrainingPlan plan_training with_weights",
        "weight_plan": "WeightPlan WeightUnit plan_weights staged_bytes",
    },
)
