"""`python -m umem_bench`: what `umem bench` starts."""

from umem_bench.cli import app

app(prog_name="umem bench")
