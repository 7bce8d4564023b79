"""Where the workers are, and the Session with each."""
