"""Settings of every test run."""

import os

from hypothesis import settings

# As in the worker; here it must be set before the first test module imports torch.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
# Workers of tests leave nothing in the user's cache folder.
os.environ["FISSILE_WEIGHTS_CACHE"] = "off"

# A busy machine is no fault of what is tested.
settings.register_profile("fissile", deadline=None)
settings.load_profile("fissile")
