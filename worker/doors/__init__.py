"""Engine protocols of other projects, served by a worker: one adapter, and a servicer with a field table for each."""
