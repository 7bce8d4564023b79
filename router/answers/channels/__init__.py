"""Model output in channels: content, reasoning and calls of tools, as transformers' response templates describe it."""
