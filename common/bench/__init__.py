"""What `fissile bench` measures with: workloads, load shapes, records, statistics. Standard library only, no I/O."""
