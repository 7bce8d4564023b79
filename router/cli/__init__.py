"""Commands of operators: workers, cordon, drain, flush, routing, reload."""
