"""The one table of command-line options: command line, environment, YAML, `Config` and docs are made from it."""
