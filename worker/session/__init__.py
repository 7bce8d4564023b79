"""The network side of a worker: its RPCs, the Session protocol and the live requests of each router."""
