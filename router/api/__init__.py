"""The RPCs of the router: how calls are admitted, built, answered and written."""
