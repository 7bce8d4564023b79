"""What the commands share: options, errors, output, and the call of a router."""
