"""Tokens of workers to the messages of a client: text, logprobs, reasoning and tool calls."""
