"""`python -m umem_bench`: `umem bench` without umem's own command."""

from umem.cli import run_app
from umem_bench.commands import app

run_app(app, "umem bench")
