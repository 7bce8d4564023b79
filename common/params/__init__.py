"""Parameters of requests and of the engine: their types, defaults and checks."""
