"""`python -m umem_bench`, which is `umem bench`."""

from umem_bench.cli.commands import app

app(prog_name="umem bench")
