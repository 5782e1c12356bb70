"""Settings are strict, and never show a secret."""

import pytest
from pydantic import Field, ValidationError

from fulmen.errors import SettingsInvalid
from fulmen_service_kit.settings import KeyHolderSettings, settings_config


class SampleSettings(KeyHolderSettings):
    service_name = "sample"
    model_config = settings_config("FULMEN_SAMPLE_")


def test_every_problem_is_named_at_once_and_no_value_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULMEN_SAMPLE_PORT", "seven")
    monkeypatch.setenv("FULMEN_SAMPLE_PROT", "7")
    monkeypatch.setenv("FULMEN_SAMPLE_SIGNING_KEY", "hunter2" * 5)

    with pytest.raises(SettingsInvalid) as caught:
        SampleSettings.from_environment()

    fields = {v.field for v in caught.value.violations}
    assert fields == {"FULMEN_SAMPLE_PORT", "FULMEN_SAMPLE_PROT"}
    assert "hunter2" not in str(caught.value)


def test_a_short_signing_key_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULMEN_SAMPLE_SIGNING_KEY", "short")

    with pytest.raises(SettingsInvalid, match="32 bytes") as caught:
        SampleSettings.from_environment()

    assert "short" not in str(caught.value).replace("short signing", "")


def test_dev_mode_needs_a_loopback_host(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULMEN_SAMPLE_DEV_MODE", "true")
    monkeypatch.setenv("FULMEN_SAMPLE_HOST", "0.0.0.0")

    with pytest.raises(SettingsInvalid, match="loopback"):
        SampleSettings.from_environment()


class ListedSettings(SampleSettings):
    prices: dict[str, float] = Field(default_factory=dict)
    hosts: list[str] = Field(default_factory=list)
    level: float | None = None


def test_dicts_and_lists_are_json_and_all_else_is_text(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULMEN_SAMPLE_SIGNING_KEY", "7" * 40)
    monkeypatch.setenv("FULMEN_SAMPLE_PRICES", '{"a": 1.5}')
    monkeypatch.setenv("FULMEN_SAMPLE_HOSTS", '["b", "c"]')
    monkeypatch.setenv("FULMEN_SAMPLE_LEVEL", "0.5")
    monkeypatch.setenv("FULMEN_SAMPLE_PORT", "7101")

    settings = ListedSettings.from_environment()

    assert (settings.prices, settings.hosts, settings.level, settings.port) == ({"a": 1.5}, ["b", "c"], 0.5, 7101)
    assert settings.signing_key.get_secret_value() == "7" * 40


def test_what_is_no_json_is_named_together_with_all_other_problems(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULMEN_SAMPLE_SIGNING_KEY", "7" * 40)
    monkeypatch.setenv("FULMEN_SAMPLE_PRICES", "a=1.5")
    monkeypatch.setenv("FULMEN_SAMPLE_HOSTS", "[" * 100_000)
    monkeypatch.setenv("FULMEN_SAMPLE_PORT", "seven")

    with pytest.raises(SettingsInvalid) as caught:
        ListedSettings.from_environment()

    fields = {v.field for v in caught.value.violations}
    assert fields == {"FULMEN_SAMPLE_PRICES", "FULMEN_SAMPLE_HOSTS", "FULMEN_SAMPLE_PORT"}


def test_the_environment_is_read_when_it_is_asked_for_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULMEN_SAMPLE_PORT", "7101")

    assert SampleSettings(signing_key="k" * 40).port == 0


def test_the_resolved_settings_mask_secrets() -> None:
    settings = SampleSettings(signing_key="k" * 40)

    described = settings.describe()

    assert "k" * 40 not in str(described)
    assert "k" * 40 not in repr(settings)
    assert described["FULMEN_SAMPLE_HOST"] == "127.0.0.1"


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"tls_certificate_file": "a.pem"}, "must be set together"),
        ({"tls_key_file": "a.key"}, "must be set together"),
        ({"tls_client_ca_file": "ca.pem"}, "requires tls_certificate_file"),
        (
            {"tls_certificate_file": "a.pem", "tls_key_file": "a.key", "agents_port": 7104},
            "requires tls_client_ca_file",
        ),
    ],
)
def test_settings_of_tls_that_do_not_go_together_are_refused(given: dict[str, object], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        SampleSettings.model_validate({"signing_key": "k" * 40, **given})
