"""Names of stores, and what is asked of their settings."""

from __future__ import annotations

import pytest

import kvstore
from kvstore.errors import ConfigError, NotSupportedError, ParameterError, UnknownNameError


@pytest.mark.parametrize("name", ["local", "device", "LOCAL", "Device"])
def test_local_stores(name: str) -> None:
    with kvstore.create(name) as store:
        assert (store.type, store.rank, store.num_workers) == (name.lower(), 0, 1)


def test_unknown_names_list_the_known_ones_nearest_first() -> None:
    with pytest.raises(UnknownNameError, match=r"'dist-sync'.*nearest first: dist_sync, ") as error:
        kvstore.create("dist-sync")
    assert error.value.name == "dist-sync"
    with pytest.raises(UnknownNameError, match="local"):
        kvstore.create(3)  # type: ignore[arg-type]


def test_missing_settings_are_listed_with_the_launch_command(monkeypatch: pytest.MonkeyPatch) -> None:
    for variable in ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "DMLC_ROLE"):
        monkeypatch.delenv(variable, raising=False)
    with pytest.raises(ConfigError) as error:
        kvstore.create("dist_sync", root_uri="127.0.0.1")
    for variable in ("DMLC_PS_ROOT_PORT", "DMLC_NUM_WORKER", "DMLC_NUM_SERVER", "kvstore-server launch"):
        assert variable in error.value.text
    assert "DMLC_PS_ROOT_URI" not in error.value.text


def test_local_stores_take_no_settings_and_servers_no_store() -> None:
    with pytest.raises(ParameterError, match="timeout"):
        kvstore.create("local", timeout=3)
    with pytest.raises(NotSupportedError, match="kvstore-server server"):
        kvstore.create("dist_sync", role="server", root_uri="h", root_port=1, num_workers=1, num_servers=1)


def test_every_store_is_described() -> None:
    assert sorted(kvstore.STORES) == [
        "device", "dist_async", "dist_device_async", "dist_device_sync", "dist_sync", "local",
    ]  # fmt: skip
