"""Hardware profiles."""

from umem.hardware._model import Hardware

__all__ = ["Hardware"]
