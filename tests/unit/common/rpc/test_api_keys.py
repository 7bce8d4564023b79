"""API keys: creation, storage, lookup and reload."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import structlog
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from common.cli.core.errors import CommandError
from common.limits import KEY_FILE_LOOK_S, MAX_API_KEYS
from common.rpc.api_keys import ApiKey, KeyFileError, KeyRing, Role, new_key, parse_keys, parse_line
from common.rpc.key_store import KeyStore
from router.cli.keys import keys as keys_command

DIGEST = hashlib.sha256(b"key").hexdigest()
_NAMES = st.text("abcXYZ019_.@/-", min_size=1, max_size=12)
_ROLES = st.sets(st.sampled_from(list(Role)), min_size=1)


@given(_NAMES, st.one_of(st.just(""), _NAMES), _ROLES, st.sampled_from(["", "low", "normal", "high"]))
def test_stored_key_line_round_trips_without_the_key(name: str, tenant: str, roles: set[Role], most: str) -> None:
    key, kept = new_key(name, tenant, roles, most)
    assert parse_line(kept.line(), "here") == kept == ApiKey(name, tenant, frozenset(roles), kept.sha256, most)
    # The line of a key without a maximum keeps the format of earlier versions.
    assert kept.line().count(":") == (4 if most else 3)
    assert kept.sha256 == hashlib.sha256(key.encode()).hexdigest()
    assert key not in kept.line()
    assert not any(char.isspace() for char in kept.line())


def test_keys_are_256_bits_and_never_the_same() -> None:
    made = {new_key("a", "", [Role.INFER])[0] for _ in range(100)}
    assert len(made) == 100
    assert all(key.startswith("fsl_") and len(key) == 4 + 43 for key in made)


def test_key_ring_finds_only_exact_key() -> None:
    key, kept = new_key("alice", "gold", [Role.INFER])
    ring = KeyRing([kept, new_key("bob", "", [Role.INFER])[1]])
    assert ring.find(key) is kept
    for wrong in ("", key[:-1], key + "x", key.swapcase(), kept.sha256, kept.line(), "\udcff"):
        assert ring.find(wrong) is None


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        ("alice", "keys, line 2 is not a key; a line is NAME:TENANT"),
        (f"al ice::infer:{DIGEST}", "line 2: name 'al ice'; allowed: 1 to 128 letters"),
        (f"::infer:{DIGEST}", "line 2: name ''"),
        (f"alice:go ld:infer:{DIGEST}", "line 2: tenant 'go ld'"),
        (f"alice::root:{DIGEST}", "role 'root'; allowed: infer, admin-read, admin-write"),
        (f"alice:::{DIGEST}", "role ''"),
        ("alice::infer:secret", "line 2: no SHA-256 in 64"),
        (f"alice::infer:{DIGEST.upper()}", "no SHA-256"),
        (
            f"alice::infer:{DIGEST}:top",
            "line 2: 'top' after the SHA-256; allowed: max-priority=low, ",
        ),
        (f"alice::infer:{DIGEST}:max-priority=", "'max-priority=' after the SHA-256"),
        (f"alice::infer:{DIGEST}:max-priority=high:x", "line 2 is not a key"),
        (f"b::infer:{'0' * 64}", "name 'b' or its key stands there twice"),
        (f"c::infer:{'1' * 64}", "name 'c' or its key stands there twice"),
    ],
)
def test_bad_key_line_is_named_without_digest(line: str, problem: str) -> None:
    good = f"b::infer:{'1' * 64}"
    with pytest.raises(KeyFileError) as caught:
        parse_keys([good, line], "keys")
    assert problem in str(caught.value)
    assert "secret" not in str(caught.value)


def test_none_and_too_many_are_refused() -> None:
    with pytest.raises(KeyFileError, match="keys holds 0 keys; allowed: 1 to 4096"):
        parse_keys(["", "# nobody"], "keys")
    many = [f"k{i}::infer:{i:064x}" for i in range(MAX_API_KEYS + 1)]
    with pytest.raises(KeyFileError, match="holds 4097 keys"):
        parse_keys(many, "keys")
    assert len(parse_keys(["# all", *many[:-1]], "keys")) == MAX_API_KEYS


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_changed_key_file_is_read_within_a_second(tmp_path: Path) -> None:
    file, clock = tmp_path / "keys", Clock()
    (old, old_kept), (new, new_kept) = new_key("old", "", [Role.INFER]), new_key("new", "", [Role.INFER])
    always, always_kept = new_key("always", "", [Role.INFER])
    file.write_text(old_kept.line() + "\n")
    store = KeyStore(file, [always_kept.line()], clock)
    file.write_text(new_kept.line() + "\n# end\n")
    clock.now += KEY_FILE_LOOK_S / 2
    assert store.ring().find(old)
    clock.now += KEY_FILE_LOOK_S / 2
    assert (store.ring().find(old), store.ring().find(new)) == (None, new_kept)
    assert store.ring().find(always) == always_kept


def test_key_file_replaced_by_device_or_pipe_keeps_keys(tmp_path: Path) -> None:
    """Regression: reading /dev/zero blocked the event loop for ever."""
    key, kept = new_key("a", "", [Role.INFER])
    os.mkfifo(tmp_path / "pipe")
    for target in ("/dev/zero", tmp_path / "pipe"):
        file, clock = tmp_path / "keys", Clock()
        file.write_text(kept.line())
        store = KeyStore(file, (), clock)
        file.unlink()
        file.symlink_to(target)
        clock.now += KEY_FILE_LOOK_S
        with structlog.testing.capture_logs() as logs:
            assert store.ring().find(key)
            store._reader.join(60)  # type: ignore[union-attr]
        assert "is not a regular file" in logs[0]["why"]
        file.unlink()


@pytest.mark.parametrize("content", ["", "half:", None, b"\xff"])
def test_unusable_key_file_keeps_keys_with_one_warning(content: str | bytes | None, tmp_path: Path) -> None:
    file, clock = tmp_path / "keys", Clock()
    key, kept = new_key("a", "", [Role.INFER])
    file.write_text(kept.line())
    store = KeyStore(file, (), clock)
    if content is None:
        file.unlink()
    else:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())
    with structlog.testing.capture_logs() as logs:
        for _ in range(3):
            clock.now += KEY_FILE_LOOK_S
            assert store.ring().find(key)
        (warning,) = logs
        assert (warning["log_level"], str(file) in warning["why"]) == ("warning", True)
        file.write_text(new_key("b", "", [Role.INFER])[1].line())
        os.utime(file, (1, 1))
        clock.now += KEY_FILE_LOOK_S
        assert store.ring().find(key) is None
        assert kept.sha256 not in repr(logs)


@pytest.mark.parametrize(("file", "lines", "problem"), [("gone", [], "gone cannot be read"), (None, ["x"], "line 1")])
def test_unusable_keys_at_start_are_refused(file: str | None, lines: list[str], problem: str, tmp_path: Path) -> None:
    with pytest.raises(KeyFileError, match=problem):
        KeyStore(tmp_path / file if file else None, lines)


def test_key_command_prints_key_and_line() -> None:
    made = CliRunner().invoke(keys_command, ["new", "alice", "--tenant", "gold", "--role", "admin-read", "--json"])
    printed = json.loads(made.stdout)
    kept = parse_line(printed["line"], "printed")
    assert KeyRing([kept]).find(printed["key"]) == kept
    assert kept == ApiKey("alice", "gold", frozenset({Role.ADMIN_READ}), kept.sha256)
    shown = CliRunner().invoke(keys_command, ["new", "bob"]).stdout.splitlines()
    kept = parse_line(shown[-1], "printed")
    assert KeyRing([kept]).find(shown[1]) == kept
    assert kept.roles == {Role.INFER}
    shown = CliRunner().invoke(keys_command, ["new", "carol", "--max-priority", "high"]).stdout.splitlines()
    assert parse_line(shown[-1], "printed").max_priority == "high"
    refused = CliRunner().invoke(keys_command, ["new", "a:b"]).exception
    assert isinstance(refused, CommandError)
    assert "name 'a:b'; allowed" in str(refused)
