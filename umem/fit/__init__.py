"""Whether a model fits a machine, and how fast it runs, from its configuration alone."""

from umem.fit.answer import Fit, Way, fit_inference, fit_training
from umem.fit.estimate import (
    ALL_LINEAR,
    MOMENTS,
    QUANTISED,
    TRAINING_PRECISIONS,
    Workload,
    training_step,
)
from umem.fit.shapes import ModelShape, config_shape, generic_shape, load_shape

__all__ = [
    "ALL_LINEAR",
    "MOMENTS",
    "QUANTISED",
    "TRAINING_PRECISIONS",
    "Fit",
    "ModelShape",
    "Way",
    "Workload",
    "config_shape",
    "fit_inference",
    "fit_training",
    "generic_shape",
    "load_shape",
    "training_step",
]
