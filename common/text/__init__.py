"""Text in and out: tokenizers, chat templates, detokenizers, stop strings."""
