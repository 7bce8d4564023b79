"""Anthropic's API: translators between its bodies and the client library's calls and events."""
