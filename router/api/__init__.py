"""The RPCs of the router, and what each call is held to."""
