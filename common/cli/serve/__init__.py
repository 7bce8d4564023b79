"""`fissile serve`: one router and its workers as child processes."""
