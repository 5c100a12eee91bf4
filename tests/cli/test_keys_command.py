import json
import stat
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from app.__main__ import main
from app.cli.access import access_options, trusted_proxies
from app.errors import SettingsError
from app.keys import ApiKey, KeyFile, KeyRing, KeySource, Scope, digest_of, keys_from_environment, new_key
from app.settings import Settings, load_settings

NOW = datetime.now(UTC)


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "keys.json"
    monkeypatch.setenv("DRAGOMAN_KEYS_FILE", str(path))
    return path


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as ended:
        main(["keys", *arguments])
    return int(ended.value.code or 0)


def created(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert run("create", *arguments) == 0
    return capsys.readouterr().out.removesuffix("\n")


def add(path: Path, key: ApiKey) -> None:
    KeyFile(path).update(lambda present: (*present, key))


def present(source: KeySource) -> KeyRing:
    """What a request does before it looks a key up."""
    if source.has_changed():
        source.reload()
    return source.ring


def test_a_key_is_printed_once_and_only_its_hash_is_kept(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = created(capsys, "my app", "--expires", "90d", "--characters-per-day", "1000")
    assert text.isascii()
    assert len(text) > 43
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    (key,) = KeyFile(file).read()
    assert KeySource([], KeyFile(file)).ring.find(text.encode()) == key
    assert (key.name, key.scopes, key.limits.characters_per_day) == ("my app", {Scope.TRANSLATE}, 1000)
    assert key.expires_at is not None
    assert (key.expires_at - NOW).days in (89, 90)
    secret = text.rpartition(key.id)[2]
    for shown in (file.read_text(), repr(key), str(new_key("n", key.scopes, created_at=NOW))):
        assert secret not in shown
        assert "text=" not in shown
    for form in ([], ["--json"]):
        assert run("list", *form) == 0
        printed = "".join(capsys.readouterr())
        assert "my app" in printed
        assert key.id in printed
        assert secret not in printed
        assert key.digest.hex() not in printed


def test_two_keys_are_never_alike(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len({created(capsys, "same name") for _ in range(5)}) == 5
    assert len(KeyFile(file).read()) == 5


def test_a_revoked_key_opens_nothing_and_stays_on_the_list(
    file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = created(capsys, "a", "--scope", "translate", "--scope", "admin")
    created(capsys, "b")
    first, second = KeyFile(file).read()
    assert run("revoke", first.id) == 0
    capsys.readouterr()
    assert run("list", "--json") == 0
    listed = json.loads(capsys.readouterr().out)
    assert [one["state"] for one in listed] == ["revoked", "valid"]
    revoked = KeySource([], KeyFile(file)).ring.find(text.encode())
    assert revoked is not None
    assert not any(revoked.opens(scope, NOW) for scope in Scope)
    assert second.opens(Scope.TRANSLATE, NOW)
    assert not second.opens(Scope.ADMIN, NOW)
    assert run("revoke", "no-such-id") == 2
    assert "`dragoman keys list` shows the ids" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ["a", "--scope", "root"],
        ["a", "--expires", "soon"],
        ["a", "--expires", "2020-01-01"],
        ["a", "--expires", "999999w"],
        ["a", "--requests-per-second", "0"],
        ["", "--expires", "1d"],
        ["line\nbreak"],
        ["x" * 65],
    ],
)
def test_a_key_that_makes_no_sense_is_not_made(
    file: Path, capsys: pytest.CaptureFixture[str], arguments: list[str]
) -> None:
    assert run("create", *arguments) == 2
    assert capsys.readouterr().out == ""
    assert not file.exists()


def test_without_a_file_the_remedy_is_named(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("DRAGOMAN_KEYS_FILE", raising=False)
    assert run("list") == 2
    assert "DRAGOMAN_KEYS_FILE" in capsys.readouterr().err


def test_commands_at_once_lose_no_key(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    made = [new_key(f"n{number}", frozenset({Scope.TRANSLATE}), created_at=NOW).key for number in range(12)]
    with ThreadPoolExecutor(6) as pool:
        list(pool.map(lambda key: add(path, key), made))
    assert {key.id for key in KeyFile(path).read()} == {key.id for key in made}


def test_a_change_that_fails_leaves_the_file_as_it_was(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    add(path, new_key("a", frozenset({Scope.TRANSLATE}), created_at=NOW).key)
    before = path.read_bytes()

    def fails(present: tuple[ApiKey, ...]) -> tuple[ApiKey, ...]:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        KeyFile(path).update(fails)
    assert path.read_bytes() == before
    assert sorted(one.name for one in tmp_path.iterdir()) == ["keys.json", "keys.json.lock"]


def test_a_mode_that_lets_the_services_group_read_is_kept_and_no_more(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    for number, (mode, kept) in enumerate([(0o640, 0o640), (0o666, 0o640), (0o400, 0o600)]):
        add(path, new_key(f"n{number}", frozenset({Scope.TRANSLATE}), created_at=NOW).key)
        path.chmod(mode)
        add(path, new_key(f"m{number}", frozenset({Scope.TRANSLATE}), created_at=NOW).key)
        assert stat.S_IMODE(path.stat().st_mode) == kept


def test_a_running_service_takes_up_changes_and_survives_a_damaged_file(tmp_path: Path) -> None:
    now_s = [0.0]
    path = tmp_path / "keys.json"
    first, second = (new_key(name, frozenset({Scope.TRANSLATE}), created_at=NOW) for name in ("a", "b"))
    add(path, first.key)
    source = KeySource([], KeyFile(path), interval_s=1, clock=lambda: now_s[0])
    add(path, second.key)
    assert present(source).find(second.text.encode()) is None
    now_s[0] += 1
    with capture_logs() as logs:
        assert present(source).find(second.text.encode()) == second.key
    assert [line["event"] for line in logs] == ["keys_reloaded"]
    good = path.read_bytes()
    for damage in (
        b"{",
        b'{"version": 2, "keys": []}',
        first.text.encode(),
        b'{"keys": [{"id": "x"}]}',
        None,
    ):
        path.unlink() if damage is None else path.write_bytes(damage)
        with capture_logs() as logs:
            for _ in range(3):
                now_s[0] += 1
                assert present(source).find(first.text.encode()) == first.key
        assert [line["event"] for line in logs] == ["keys_not_reloaded"]
        assert first.text not in str(logs)
    path.write_bytes(good.replace(b'"b"', b'"c"'))
    now_s[0] += 1
    assert [key.name for key in present(source).keys] == ["a", "c"]


def test_a_missing_or_damaged_file_keeps_the_service_from_starting(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    with pytest.raises(SettingsError, match="dragoman keys create"):
        KeySource([], KeyFile(path))
    path.write_text("no keys")
    with pytest.raises(SettingsError, match=r"keys\.json"):
        KeySource([], KeyFile(path))


def test_keys_of_the_environment_may_be_given_as_they_are_or_hashed() -> None:
    text = "a-key-of-more-than-22-characters="
    scopes = frozenset({Scope.TRANSLATE})
    given = keys_from_environment(f" one={text}, ", scopes, variable="V")
    hashed = keys_from_environment(f"one=sha256:{digest_of(text.encode()).hex()}", scopes, variable="V")
    assert given == hashed
    assert KeySource(given).ring.find(text.encode()) == given[0]


@pytest.mark.parametrize(
    "wrong",
    [
        "justakey-of-some-length-and-more",
        "a=short-secret",
        "=nameless-key-that-is-long-enough",
        "a=sha256:12ab",
    ],
)
def test_a_wrong_key_in_the_environment_is_named_by_its_place_and_never_repeated(wrong: str) -> None:
    with pytest.raises(SettingsError, match="V: entry 1") as caught:
        keys_from_environment(wrong, frozenset({Scope.TRANSLATE}), variable="V")
    assert wrong.rpartition("=")[2] not in caught.value.message


def test_the_settings_never_show_the_keys(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    secret = "tell-nobody-tell-nobody-tell"
    monkeypatch.setenv("DRAGOMAN_API_KEYS", f"one={secret}")
    monkeypatch.setenv("DRAGOMAN_ADMIN_KEYS", f"two={secret}2")
    for form in ([], ["--json"]):
        with pytest.raises(SystemExit):
            main(["settings", *form])
        assert secret not in "".join(capsys.readouterr())
    assert secret not in repr(load_settings())
    options = access_options(load_settings(), ["0.0.0.0"])
    assert options.keys is not None
    assert secret not in repr(options)
    found = [options.keys.ring.find(text.encode()) for text in (secret, f"{secret}2")]
    assert [key and key.opens(Scope.ADMIN, NOW) for key in found] == [False, True]


@pytest.mark.parametrize(
    ("addresses", "allow", "warned"),
    [
        (["127.0.0.1"], "auto", False),
        (["127.0.0.1", "::1"], "auto", False),
        (["0.0.0.0"], "auto", True),
        (["::"], "auto", True),
        (["::1", "192.0.2.7"], "auto", True),
        (["0.0.0.0"], "true", False),
    ],
)
def test_a_service_without_keys_is_open_and_says_so_where_others_can_reach_it(
    addresses: list[str], allow: str, warned: bool
) -> None:
    with capture_logs() as logs:
        options = access_options(Settings.model_validate({"allow_anonymous": allow}), addresses)
    assert options.keys is None
    assert options.allow_anonymous
    assert [line["log_level"] for line in logs] == (["warning"] if warned else [])
    assert not warned or "DRAGOMAN_KEYS_FILE" in logs[0]["remedy"]


def test_keys_close_the_service_to_strangers_unless_they_are_allowed(file: Path) -> None:
    add(file, new_key("a", frozenset({Scope.TRANSLATE}), created_at=NOW).key)
    for allow, open_to_all in (("auto", False), ("false", False), ("true", True)):
        settings = Settings.model_validate({"allow_anonymous": allow, "keys_file": str(file)})
        options = access_options(settings, ["0.0.0.0"])
        assert options.keys is not None
        assert options.allow_anonymous is open_to_all


def test_a_file_without_keys_is_closed_rather_than_open(file: Path) -> None:
    KeyFile(file).update(lambda present: present)
    options = access_options(Settings(keys_file=str(file)), ["127.0.0.1"])
    assert options.keys is not None
    assert not options.allow_anonymous


def test_a_service_nobody_could_use_does_not_start() -> None:
    with pytest.raises(SettingsError, match="dragoman keys create"):
        access_options(Settings(allow_anonymous="false"), ["127.0.0.1"])


def test_proxies_are_addresses_or_networks_and_never_everybody() -> None:
    assert trusted_proxies(Settings()) == []
    assert trusted_proxies(Settings(trusted_proxies="10.0.0.0/8, ::1")) == ["10.0.0.0/8", "::1"]
    for wrong in ("*", "proxy.internal", "10.0.0.1/8"):
        with pytest.raises(SettingsError, match="TRUSTED_PROXIES"):
            trusted_proxies(Settings(trusted_proxies=wrong))
