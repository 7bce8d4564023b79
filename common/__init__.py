"""What router and worker share. Imports the stubs only; never torch."""
