"""Decisions about which request goes to which worker, and when. Pure: takes `now`, does no I/O."""
