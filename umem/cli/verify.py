"""`umem verify`: umem on this machine, measured beside its predictions, as a page to send."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from umem.cli import INTERRUPTED_STATUS, output
from umem.cli.bench import find_benchmarks
from umem.core.errors import UmemError
from umem.core.lazy_names import loads_names
from umem.core.units import format_bytes

if TYPE_CHECKING:
    from umem.doctor import Report, collect, diagnose
    from umem.hardware.load import MEASURE

__all__ = ["app"]

_loads_names = loads_names(
    globals(), {"umem.doctor": "collect diagnose", "umem.hardware.load": "MEASURE"}
)

app = output.make_app()


@app.command()
@_loads_names
def verify(
    minutes: Annotated[
        float, typer.Option(min=1, max=60, help="Leave out what does not fit into this time.")
    ] = 10,
    folder: Annotated[
        Path,
        typer.Option(
            "--output", readable=False, metavar="FOLDER", help="Where the page and the files go."
        ),
    ] = Path(),
) -> None:
    """Measure umem on this GPU: rates, trainings beside their predictions, bits and budgets.

    Writes umem-verify.md and umem-verify.json, to send, and the measured profile. Nothing else
    should use the GPU meanwhile. Needs no network. Ctrl-C keeps what was measured.

    Exits with 1 if umem does not work here, or losses or a budget are not what they have to be.
    """
    output.check_can_write("--output", folder, folder=True)
    with output.progress() as say:
        say("Importing torch and looking at the machine")
        diagnosis = diagnose(collect())
        if not diagnosis.swap_works:
            failures = diagnosis.failures
            first = next((it for it in failures if it.name == "GPU"), failures[0])
            typer.echo(
                f"umem: umem.enable() does not work here: {first.name}, {first.value}: "
                f"{first.remedy}; `umem doctor` says why",
                err=True,
            )
            raise typer.Exit(1)
        find_benchmarks()
        for package in ("transformers", "peft"):
            if importlib.util.find_spec(package) is None:
                raise UmemError(
                    f"{package} is not installed, whose models are trained: pip install {package}"
                )
        _verify(diagnosis, folder, minutes, say)


def _verify(diagnosis: Report, folder: Path, minutes: float, say: output.Progress) -> None:
    from umem_bench.card import Card
    from umem_bench.verify import LEAST_FREE_BYTES, PAGE, RECORD, Verification

    try:
        card = Card.find()
    except OSError as error:
        raise UmemError(
            f"{error}. Where CPU and GPU share one memory it reports none to hold budgets against: "
            f"run `{MEASURE}` and `umem doctor` there"
        ) from None
    if card.free_bytes < LEAST_FREE_BYTES:
        raise UmemError(
            f"the GPU has {format_bytes(card.free_bytes)} free, and the trainings need "
            f"{format_bytes(LEAST_FREE_BYTES)}: end what else uses it"
        )
    folder.mkdir(exist_ok=True)
    found = Verification(diagnosis, diagnosis.devices[0], card, folder, minutes, say, typer.echo)
    try:
        found.run()
    except KeyboardInterrupt:
        typer.echo(f"umem: interrupted; {folder / PAGE} has what was measured", err=True)
        raise typer.Exit(INTERRUPTED_STATUS) from None
    wrong = [it for it in found.checks() if not it.passed]
    for check in wrong:
        typer.echo(f"wrong: {check.subject}: {check.detail}")
    output.print_written([folder / PAGE, folder / RECORD])
    raise typer.Exit(1 if wrong else 0)
