"""Parts that every HTTP API shares: bodies, errors, server-sent events, and the runner of answers."""
