"""`python -m umem_bench`: what `umem bench` starts."""

from umem.cli import run_app
from umem_bench.cli import app

run_app(app, "umem bench")
