"""Configuration changes of a running router."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
from fissile.admin.v1 import admin_pb2 as apb

from common.errors import ConfigVersionError, InvalidFieldError
from router.app import router
from router.cli.routing import OPTIONS
from router.runtime_config import RELOADABLE, ConfigStore, ReloadedConfig, RoutingConfig, RuntimeConfig
from router.workers.addresses import AddressError

SETTINGS = RuntimeConfig(RoutingConfig(tenant_weight={"gold": 4.0}), ("a:1",))


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"placement": "best"}, "placement is best; valid: one of prefix_aware, least_loaded"),
        ({"delay_factor": -1.0}, "delay_factor is -1.0; valid: 0 or more"),
        ({"delay_factor": float("nan")}, "delay_factor is nan"),
        ({"max_hold_s": 61.0}, "max_hold is 61.0"),
        ({"queue_size": 0}, "queue_size is 0"),
        ({"tenant_weight": {"gold": 0.0}}, "tenant_weight\\['gold'\\] is 0.0; valid: more than 0"),
        ({"tenant_weight": {"": 2.0}}, "an entry without a tenant"),
        ({"tenant_concurrency": {"gold": -1}}, "tenant_concurrency\\['gold'\\] is -1"),
        ({"tenant_max_priority": {"gold": "top"}}, "tenant_max_priority\\['gold'\\] is top; valid: one of low, normal"),
        ({"tenant_max_priority": {"": ""}}, "tenant_max_priority\\[''\\] is empty"),
        ({"tenant_weight": {str(i): 1.0 for i in range(5000)}}, "at most 4096"),
    ],
)
def test_bad_values_are_refused(fields: dict[str, object], message: str) -> None:
    with pytest.raises(InvalidFieldError, match=message):
        RoutingConfig(**fields)  # type: ignore[arg-type]


def test_bad_settings_are_refused() -> None:
    with pytest.raises(AddressError, match="'a' is not a worker's address"):
        RuntimeConfig(RoutingConfig(), ("a",))
    with pytest.raises(InvalidFieldError, match="log_level is loud"):
        RuntimeConfig(RoutingConfig(), ("a:1",), "loud")


class Site:
    """A configuration, its applied versions, and the file that it reads."""

    def __init__(self) -> None:
        self.applied: list[RuntimeConfig] = []
        self.read: Callable[[], ReloadedConfig] = lambda: ReloadedConfig(SETTINGS, ())
        self.configuration = ConfigStore(SETTINGS, self.applied.append, self._read)

    def _read(self) -> ReloadedConfig:
        return self.read()


def test_configuration_version_counts_real_changes() -> None:
    site = Site()
    site.configuration.set_routing(SETTINGS.routing)
    assert (site.configuration.version, site.applied) == (1, [])
    changed = replace(SETTINGS.routing, delay_factor=1.0)
    site.configuration.set_routing(changed, if_version=1)
    assert site.configuration.version == 2
    assert site.applied == [replace(SETTINGS, routing=changed)]
    with pytest.raises(ConfigVersionError, match="is at version 2 now, not 1"):
        site.configuration.set_routing(SETTINGS.routing, if_version=1)
    assert len(site.applied) == 1


def test_reload_applies_configuration_file() -> None:
    site = Site()
    site.configuration.set_routing(replace(SETTINGS.routing, placement="round_robin"))
    wanted = RuntimeConfig(RoutingConfig(queue_size=9), ("b:1",), "debug")
    site.read = lambda: ReloadedConfig(wanted, ("port",))
    done = site.configuration.reload()
    assert set(done.changed) == {"worker", "placement", "queue-size", "tenant-weight", "log-level"}
    assert (done.version, done.needs_restart) == (3, ("port",))
    assert site.configuration.settings == site.applied[-1] == wanted
    again = site.configuration.reload()
    assert (again.version, again.changed, again.needs_restart) == (3, (), ("port",))
    assert len(site.applied) == 2


def test_reload_names_reverted_settings() -> None:
    """Regression: settings of SetRouting were lost, and were only listed among the changes."""
    site = Site()
    routing = SETTINGS.routing
    site.configuration.set_routing(replace(routing, placement="round_robin", queue_size=5, delay_factor=1.0))
    site.configuration.set_routing(replace(routing, placement="round_robin", queue_size=5))
    site.read = lambda: ReloadedConfig(RuntimeConfig(replace(routing, queue_size=5), ("b:1",)), ())
    done = site.configuration.reload()
    # The file has the queue's new value now; the gate is reverted.
    assert (set(done.changed), done.undone) == ({"worker", "placement"}, ("placement",))
    # A change in the file itself reverts no setting.
    routing = replace(routing, placement="session", queue_size=9)
    site.read = lambda: ReloadedConfig(replace(SETTINGS, routing=routing), ())
    done = site.configuration.reload()
    assert (set(done.changed), done.undone) == ({"worker", "placement", "queue-size"}, ())


def test_unreadable_configuration_reverts_no_setting() -> None:
    site = Site()
    site.configuration.set_routing(replace(SETTINGS.routing, placement="round_robin"))
    good = site.read

    def broken() -> ReloadedConfig:
        raise AddressError("line 7")

    site.read = broken
    with pytest.raises(AddressError, match="line 7"):
        site.configuration.reload()
    site.read = good
    assert site.configuration.reload().undone == ("placement",)


def test_unreadable_configuration_changes_no_setting() -> None:
    site = Site()

    def broken() -> ReloadedConfig:
        raise AddressError("line 7")

    site.read = broken
    with pytest.raises(AddressError, match="line 7"):
        site.configuration.reload()
    assert (site.configuration.version, site.applied) == (1, [])


def test_each_routing_setting_has_option_and_field() -> None:
    options = {option.opts[0].removeprefix("--") for option in router.params}
    assert options >= RELOADABLE
    assert RELOADABLE - {"worker", "log-level"} == OPTIONS.keys()
    assert {known.field for known in OPTIONS.values()} == set(apb.Routing.DESCRIPTOR.fields_by_name)
