"""Benchmarks: umem's allocator beside torch's own and RMM's, in one run.

Every allocator has a worker process of its own (a process swaps once). The workers of a benchmark
start together and then take turns, one round each, so that a drift of the machine meets all of
them. `umem.bench.runner` conducts, `umem.bench.results` holds what came out, `umem.bench.report`
prints it and checks it against the targets. `umem.bench.train` is another benchmark, with a
conductor, results and reports of its own.
"""
