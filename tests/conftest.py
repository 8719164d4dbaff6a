"""Settings of all tests."""

import importlib.util

if importlib.util.find_spec("hypothesis"):
    from hypothesis import HealthCheck, settings

    # A machine that is busy is slow, which is no failure.
    settings.register_profile("steady", deadline=None, suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("steady")
