"""What all pictures share: colours, fonts, the time axis, and their way to a file."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

import numpy as np

from umem.classes import TensorClass
from umem.errors import UmemError, UnsupportedError
from umem.files import replace_file
from umem.report import MigrationReport, Timeline
from umem.units import time_unit

if TYPE_CHECKING:
    import numpy.typing as npt
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

__all__ = [
    "CLASS_COLOURS",
    "FORMATS",
    "GREY",
    "NOTE_POINTS",
    "PAPER",
    "TEXT_POINTS",
    "class_legend",
    "class_words",
    "new_figure",
    "require_matplotlib",
    "require_timeline",
    "save",
    "size_unit",
    "stack_classes",
    "style",
    "title",
]

FORMATS = ("png", "svg")

# Okabe and Ito's palette, which people with any common colour blindness can tell apart.
CLASS_COLOURS: Mapping[TensorClass, str] = MappingProxyType(
    {
        TensorClass.WEIGHTS: "#0072B2",
        TensorClass.FROZEN_WEIGHTS: "#56B4E9",
        TensorClass.GRADIENTS: "#E69F00",
        TensorClass.OPTIMIZER_STATE: "#009E73",
        TensorClass.ACTIVATIONS: "#D55E00",
        TensorClass.OTHER: "#999999",
    }
)

GREY = "#555555"
TEXT_POINTS = 9
NOTE_POINTS = 8
PAPER: Mapping[str, str | float] = MappingProxyType(
    {"facecolor": "white", "edgecolor": "none", "pad": 1.0}
)
"""Box behind a note, so that lines do not cross it."""
_DOTS_PER_INCH = 144


def require_matplotlib() -> None:
    """Check that pictures can be made.

    Raises
    ------
    UnsupportedError
        If matplotlib is missing; the message says how to install it.
    """
    try:
        import matplotlib  # noqa: F401
    except ImportError:
        raise UnsupportedError(
            "pictures need matplotlib, which is not installed: pip install 'umem[plots]'"
        ) from None


def require_timeline(report: MigrationReport) -> Timeline:
    """Timeline of a report.

    Raises
    ------
    UmemError
        If it has none.
    """
    if report.timeline is None:
        raise UmemError(
            f"the report on {report.workload} with {report.planner} has no timeline to draw: "
            "simulate with timeline=True"
        )
    return report.timeline


def new_figure(width_inches: float, height_inches: float) -> Figure:
    """Make an empty figure that knows nothing of pyplot.

    Raises
    ------
    UnsupportedError
        If matplotlib is missing.
    """
    require_matplotlib()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width_inches, height_inches), dpi=_DOTS_PER_INCH, layout="constrained")
    FigureCanvasAgg(figure)
    return figure


def style(axes: Axes) -> None:
    """Leave out what carries no information, and set the size of the numbers."""
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=NOTE_POINTS)
    axes.grid(axis="y", color="#dddddd", linewidth=0.6)
    axes.set_axisbelow(True)


def title(report: MigrationReport) -> str:
    """What a picture of one report is of."""
    factor, unit = time_unit(report.step_s)
    return (
        f"predicted: {report.workload}, planner {report.planner}, policy {report.policy}, on "
        f"{report.hardware}\nstep {report.step_s * factor:.3g} {unit}, all resident "
        f"{report.ideal_s * factor:.3g} {unit}"
    )


def class_words(tensor_class: TensorClass) -> str:
    """Name of a class as a legend has it."""
    return tensor_class.value.replace("_", " ")


def size_unit(size_bytes: int) -> tuple[int, str]:
    """Bytes of the unit that an axis up to a size is best read in, and the unit's name."""
    return (1 << 30, "GiB") if size_bytes >= 1 << 30 else (1 << 20, "MiB")


def stack_classes(
    axes: Axes,
    times: npt.NDArray[np.float64],
    resident: npt.NDArray[np.float64],
    end: float,
) -> None:
    """Draw what is on the device over time as areas, stacked by class, the first one lowest.

    Parameters
    ----------
    axes
    times : float64[K]
        From when on a row holds, in the unit of the axis.
    resident : float64[K, 6]
        By class number, in the unit of the axis.
    end
        Until when the last row holds.
    """
    shown = [member for member in TensorClass if resident[:, member.number].any()]
    if not shown:
        return
    rows = np.vstack([resident, resident[-1:]])
    axes.stackplot(
        np.append(times, end),
        *(rows[:, member.number] for member in shown),
        labels=[class_words(member) for member in shown],
        colors=[CLASS_COLOURS[member] for member in shown],
        step="post",
        linewidth=0,
        # Thousands of rows; as paths they would make a vector picture of megabytes.
        rasterized=True,
    )


def class_legend(figure: Figure, axes: Axes) -> None:
    """Name the classes of stacked areas beside them, the topmost first, as they are stacked."""
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(
        handles[::-1],
        labels[::-1],
        loc="outside right center",
        fontsize=NOTE_POINTS,
        frameon=False,
        title="tensor class",
        title_fontsize=NOTE_POINTS,
    )


def save(figure: Figure, path: str | os.PathLike[str]) -> None:
    """Write a picture in one piece: a reader sees the old file or the whole new one.

    Parameters
    ----------
    figure : matplotlib.figure.Figure
        From one of the functions of this package.
    path : path
        Ends in ``.png`` or ``.svg``; its folder is made if missing.

    Raises
    ------
    UmemError
        If the ending is another one, or the file cannot be written.
    """
    path = Path(path)
    kind = path.suffix.removeprefix(".").lower()
    if kind not in FORMATS:
        raise UmemError(f"{path}: a picture's name ends in .{' or .'.join(FORMATS)}")
    picture = io.BytesIO()
    # Without a date, the same report gives the same picture.
    figure.savefig(picture, format=kind, metadata={"Date": None} if kind == "svg" else None)
    try:
        replace_file(path, picture.getvalue())
    except OSError as error:
        raise UmemError(
            f"{path}: cannot be written ({error.strerror}): choose another place"
        ) from None
