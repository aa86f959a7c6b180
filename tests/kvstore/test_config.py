"""Settings come from the environment or keywords, and every wrong one is named with what is allowed."""

import msgspec
import pytest

from kvstore.config import ENVIRONMENT, REQUIRED, Config, TransportName, read_config
from kvstore.errors import ConfigError, ParameterError
from kvstore.messages import Role

JOB = {
    "DMLC_PS_ROOT_URI": "127.0.0.1",
    "DMLC_PS_ROOT_PORT": "9000",
    "DMLC_NUM_WORKER": "2",
    "DMLC_NUM_SERVER": "1",
}


def test_every_field_has_its_variable_and_the_reverse() -> None:
    fields = {field.name for field in msgspec.structs.fields(Config)}
    assert set(ENVIRONMENT) == fields
    assert len(set(ENVIRONMENT.values())) == len(fields)
    assert set(REQUIRED) <= fields


def test_texts_of_the_environment_become_values() -> None:
    config = read_config(
        {
            **JOB,
            "DMLC_ROLE": "server",
            "DMLC_SERVER_ID": "0",
            "KVSTORE_INSECURE": "1",
            "KVSTORE_TRANSPORT": "tcp",
            "KVSTORE_HEARTBEAT": "0.25",
            "KVSTORE_PORT": "9000-9010",
            "KVSTORE_CHECKSUM": "true",
        }
    )
    assert (config.role, config.root_port, config.num_workers, config.server_id) == (Role.SERVER, 9000, 2, 0)
    assert (config.insecure, config.checksum, config.transport) == (True, True, TransportName.TCP)
    assert (config.heartbeat, config.port) == (0.25, "9000-9010")


def test_defaults_are_the_documented_ones() -> None:
    config = read_config(JOB)
    assert (config.heartbeat, config.dead_after, config.timeout, config.retry) == (1.0, 15.0, 60.0, 5.0)
    assert (config.chunk_elements, config.insecure, config.transport) == (262_144, False, TransportName.AUTO)


def test_keywords_win_none_and_empty_variables_count_as_not_given() -> None:
    config = read_config({**JOB, "DMLC_INTERFACE": "", "KVSTORE_TIMEOUT": "5"}, num_workers=4, timeout=None)
    assert (config.num_workers, config.interface, config.timeout) == (4, "", 5.0)


def test_missing_settings_are_all_listed_with_variable_keyword_and_launch_command() -> None:
    with pytest.raises(ConfigError) as caught:
        read_config({"DMLC_NUM_WORKER": "2"})
    text = str(caught.value)
    for name in ("root_uri", "root_port", "num_servers"):
        assert ENVIRONMENT[name] in text and f"{name}=" in text
    assert "DMLC_NUM_WORKER" not in text and "kvstore-server launch -n" in text


@pytest.mark.parametrize(
    ("variable", "value"),
    [
        ("DMLC_ROLE", "boss"),
        ("DMLC_PS_ROOT_PORT", "http"),
        ("DMLC_PS_ROOT_PORT", "65536"),
        ("DMLC_NUM_WORKER", "-1"),
        ("DMLC_NUM_WORKER", "0"),
        ("DMLC_NUM_SERVER", "0"),
        ("DMLC_NUM_SERVER", "two"),
        ("DMLC_WORKER_ID", "2"),
        ("DMLC_SERVER_ID", "1"),
        ("KVSTORE_INSECURE", "perhaps"),
        ("KVSTORE_TRANSPORT", "udp"),
        ("KVSTORE_HEARTBEAT", "0"),
        ("KVSTORE_HEARTBEAT", "nan"),
        ("KVSTORE_TIMEOUT", "inf"),
        ("KVSTORE_DEAD_AFTER", "inf"),
        ("KVSTORE_DEAD_AFTER", "1.5"),
        ("KVSTORE_CHUNK_ELEMENTS", "100"),
        ("KVSTORE_MESSAGE_BYTES", "1"),
    ],
)
def test_a_wrong_value_is_named_with_its_variable(variable: str, value: str) -> None:
    with pytest.raises(ParameterError, match=variable) as caught:
        read_config({**JOB, variable: value})
    assert value in str(caught.value) and caught.value.allowed


def test_an_unknown_keyword_suggests_the_nearest() -> None:
    with pytest.raises(ParameterError, match=r"'num_worker'.*nearest first: num_workers"):
        read_config(JOB, num_worker=2)


def test_a_frame_holds_a_chunk_of_the_widest_elements() -> None:
    large = read_config(JOB, chunk_elements=1 << 20)
    assert large.limits.frame > (1 << 20) * 8
    assert read_config(JOB).limits.frame >= 262_144 * 8


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        read_config(JOB).timeout = 1.0  # type: ignore[misc]
