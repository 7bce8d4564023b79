"""`fissile http`: the HTTP APIs of other services, in front of Fissile's routers."""
