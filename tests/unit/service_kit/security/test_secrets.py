"""Secrets come from files, change while a service runs, and are never shown."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from pydantic import Field, SecretStr

from fulmen.errors import SettingsInvalid, TokenInvalid
from fulmen_service_kit.security.own_token import OwnToken
from fulmen_service_kit.security.secret import Secret, SigningKeys
from fulmen_service_kit.security.tokens import Role, TokenSigner, TokenVerifier
from fulmen_service_kit.settings import KeyHolderSettings, settings_config

OLD, NEW = "o" * 40, "n" * 40
PREFIX = "FULMEN_SECRETIVE_"


class SecretiveSettings(KeyHolderSettings):
    service_name = "secretive"
    model_config = settings_config(PREFIX)

    keys: dict[str, SecretStr] = Field(default_factory=dict, description="Keys by name. Secret.")


@pytest.fixture(autouse=True)
def every_look_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files are looked at whenever they are asked for."""
    monkeypatch.setattr("fulmen.watched_file.LOOK_S", 0.0)


@pytest.fixture
def key_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Returns the file that the environment names as that of the signing key."""
    path = tmp_path / "signing.key"
    path.write_text(OLD + "\n")
    monkeypatch.setenv(f"{PREFIX}SIGNING_KEY_FILE", str(path))
    return path


def issued(key: str | SigningKeys) -> str:
    return TokenSigner(key).issue(Role.CLIENT, subject="ann", ttl_s=60)


def test_a_secret_comes_from_the_file_that_the_environment_names(
    key_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "keys.json").write_text('{"openai": "sk-1"}')
    monkeypatch.setenv(f"{PREFIX}KEYS_FILE", str(tmp_path / "keys.json"))
    settings = SecretiveSettings.from_environment()
    assert settings.signing_key.get_secret_value() == OLD
    assert settings.keys["openai"].get_secret_value() == "sk-1"
    described = settings.describe()
    assert described[f"{PREFIX}SIGNING_KEY_FILE"] == str(key_file)
    assert OLD not in str(described)
    assert "sk-1" not in str(described)


def test_every_problem_with_files_of_secrets_is_named_and_none_of_them_shown(
    key_file: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "keys.json").write_text("sk-1 is no JSON")
    monkeypatch.setenv(f"{PREFIX}KEYS_FILE", str(tmp_path / "keys.json"))
    monkeypatch.setenv(f"{PREFIX}SIGNING_KEY", NEW)
    monkeypatch.setenv(f"{PREFIX}PORT_FILE", "x")
    with pytest.raises(SettingsInvalid) as caught:
        SecretiveSettings.from_environment()
    told = {violation.field: violation.description for violation in caught.value.violations}
    assert set(told) == {f"{PREFIX}{name}_FILE" for name in ("KEYS", "SIGNING_KEY", "PORT")}
    assert told[f"{PREFIX}PORT_FILE"] == "no such setting"
    assert "set only one" in told[f"{PREFIX}SIGNING_KEY_FILE"]
    for secret in (OLD, NEW, "sk-1"):
        assert secret not in str(caught.value)


@pytest.mark.parametrize("names", [("SIGNING_KEY",), ("TLS_CERTIFICATE", "TLS_KEY", "TLS_CA")])
def test_files_that_cannot_be_read_are_all_named(names: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(f"{PREFIX}DEV_MODE", "true")  # needs no key
    for name in names:
        monkeypatch.setenv(f"{PREFIX}{name}_FILE", f"/nowhere/{name}")
    with pytest.raises(SettingsInvalid, match=r"No such file|cannot be read") as caught:
        SecretiveSettings.from_environment()
    assert {violation.field for violation in caught.value.violations} == {f"{PREFIX}{name}_FILE" for name in names}


def test_a_deployment_changes_its_key_with_no_restart_and_no_moment_without_service(key_file: Path) -> None:
    keys = SecretiveSettings.from_environment().signing_keys()
    verifier, own = TokenVerifier(keys), OwnToken(TokenSigner(keys), subject="store")
    by_old, own_by_old = issued(keys), own()
    assert verifier.verify(by_old).subject == "ann"

    key_file.write_text(f"{OLD}\n{NEW}\n")  # every service is to know the new key before any signs with it
    assert verifier.verify(issued(NEW)).subject == "ann"
    assert TokenVerifier(OLD).verify(issued(keys)).subject == "ann"

    key_file.write_text(f"{NEW}\n{OLD}\n")  # the new key signs
    assert TokenVerifier(NEW).verify(issued(keys)).subject == "ann"
    assert own() != own_by_old
    assert TokenVerifier(NEW).verify(own()).role is Role.SERVICE
    assert verifier.verify(by_old).subject == "ann"

    key_file.write_text(NEW)  # the old key is forgotten, with everything that it has signed
    with pytest.raises(TokenInvalid):
        verifier.verify(by_old)
    assert verifier.verify(issued(NEW)).subject == "ann"


@pytest.mark.parametrize("spoilt", [b"", b"\n", b"short", f"{NEW}\nshort".encode(), b"\xff\xfe" * 40])
def test_a_file_of_keys_that_is_spoilt_changes_nothing(key_file: Path, spoilt: bytes) -> None:
    keys = SecretiveSettings.from_environment().signing_keys()
    by_old = issued(keys)
    key_file.write_bytes(spoilt)
    assert TokenVerifier(keys).verify(by_old).subject == "ann"
    assert keys.signing() == OLD.encode()
    key_file.write_text(NEW)
    assert keys.signing() == NEW.encode()


def test_a_services_own_token_is_replaced_after_half_of_its_life() -> None:
    now_s = 0.0
    own = OwnToken(TokenSigner(OLD), subject="store", ttl_s=60, clock=lambda: now_s)
    first = own()
    now_s = 29.0
    assert own() is first
    now_s = 31.0
    assert own() is not first
    assert OwnToken(TokenSigner(""), subject="store")() == ""


def test_secrets_and_keys_do_not_show_what_they_hold(key_file: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    settings = SecretiveSettings.from_environment()
    secret, keys = settings.secret("signing_key"), settings.signing_keys()
    key_file.write_text(NEW)
    keys.accepted()
    shown = [repr(each) for each in (settings, secret, keys, Secret(OLD), TokenSigner(keys), TokenVerifier(keys))]
    for text in (*shown, caplog.text):
        assert OLD not in text
        assert NEW not in text
