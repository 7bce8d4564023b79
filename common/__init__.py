"""Code shared by router and worker. Imports the stubs only; never torch."""
