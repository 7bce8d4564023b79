"""Tables and plots of docs/reference/performance.md, from tests/bench/results: `python -m tests.bench.plots`."""
