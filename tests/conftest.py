"""Settings of every test run."""

import os

# As in the worker; here it must be set before the first test module imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
