"""Parts of `fissile bench`.

Pure: `workload` (what is asked), `load` (when), `records` and `figures` (what came of it), `report` (how it is told).
With I/O: `machine` (who uses this machine), `service` (requests to a router), `offline` (requests to an engine).
"""
