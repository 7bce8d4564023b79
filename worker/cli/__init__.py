"""The commands of a worker: `fissile worker`, `fissile worker warmup`, `fissile bench offline`."""
