"""Files that are deployed with Fissile: the embedded demo model lives in `deploy.demo`."""
