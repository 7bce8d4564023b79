"""Tables and plots of docs/performance.md, made from tests/bench/results: `python -m tests.bench.plots [--check]`."""
