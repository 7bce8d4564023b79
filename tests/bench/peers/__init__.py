"""Other engines beside Fissile: installed in their own venvs, the same work, one client, one run."""
