import os
from pathlib import Path

import pytest

from app.bundle import default_directory
from app.errors import SettingsError
from app.settings import Settings, available_cores, load_settings


@pytest.fixture(autouse=True)
def no_settings_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in os.environ:
        if name.upper().startswith("DRAGOMAN_"):
            monkeypatch.delenv(name)


def test_defaults_are_safe_and_complete() -> None:
    settings = load_settings()
    assert settings.host == "127.0.0.1"
    assert settings.port == 8000
    assert settings.bundles == default_directory()
    assert (settings.device, settings.variant, settings.gpu_memory_mb) == ("auto", "auto", 0)
    assert {settings.num_workers, settings.max_rows, settings.max_admission_tokens} == {"auto"}


def test_every_setting_says_what_it_means() -> None:
    for name, field in Settings.model_fields.items():
        assert field.description, name


def test_every_request_within_the_limit_on_characters_fits_the_body_limit() -> None:
    settings = load_settings()
    # An escaped character of the basic plane takes six bytes of JSON.
    assert settings.max_text_characters * 6 <= settings.max_body_bytes


def test_the_environment_is_read_and_the_command_line_goes_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAGOMAN_PORT", "9001")
    monkeypatch.setenv("DRAGOMAN_USE_SHORTLIST", "false")
    assert load_settings().port == 9001
    assert load_settings({"port": None}).port == 9001
    assert load_settings({"port": 9002}).port == 9002
    assert load_settings().use_shortlist is False


@pytest.mark.parametrize(
    ("wrong", "right"),
    [
        ("DRAGOMAN_PROT", "DRAGOMAN_PORT"),
        ("DRAGOMAN_MAX_ROW", "DRAGOMAN_MAX_ROWS"),
        ("DRAGOMAN_WORKERS", "DRAGOMAN_NUM_WORKERS"),
        ("dragoman_hots", "DRAGOMAN_HOST"),
    ],
)
def test_a_misspelt_name_is_fatal_and_the_right_one_is_named(
    monkeypatch: pytest.MonkeyPatch, wrong: str, right: str
) -> None:
    monkeypatch.setenv(wrong, "1")
    with pytest.raises(SettingsError, match=f"{wrong} is not a setting; did you mean {right}"):
        load_settings()


@pytest.mark.parametrize(
    ("name", "value", "limit"),
    [
        ("PORT", "70000", "65535"),
        ("PORT", "http", "integer"),
        ("PORT", "", "integer"),
        ("MAX_ROWS", "0", "1"),
        ("NUM_WORKERS", "1.5", "integer"),
        ("DRAIN_S", "nan", "finite"),
        ("VARIANT", "cuda", "cpu-int8"),
        ("DEVICE", "gpu", "cuda:N"),
        ("DEVICE", "cuda:", "cuda:N"),
        ("DEVICE", "cuda:-1", "cuda:N"),
        ("GPU_MEMORY_MB", "-1", "0"),
        ("MAX_ADMISSION_TOKENS", "63", "64"),
        ("LOG_FORMAT", "xml", "json"),
        ("USE_SHORTLIST", "maybe", "boolean"),
    ],
)
def test_a_bad_value_names_variable_value_and_limit(
    monkeypatch: pytest.MonkeyPatch, name: str, value: str, limit: str
) -> None:
    monkeypatch.setenv(f"DRAGOMAN_{name}", value)
    with pytest.raises(SettingsError) as caught:
        load_settings()
    assert f"DRAGOMAN_{name} is {value!r}" in caught.value.message
    assert limit in caught.value.message


def test_a_bad_option_is_named_as_the_option() -> None:
    with pytest.raises(SettingsError, match="--max-rows is -1"):
        load_settings({"max_rows": -1})


@pytest.mark.parametrize(
    ("device", "variant"),
    [("cpu", "cuda-fp16"), ("cuda", "cpu-int8"), ("cuda", "cpu-fp32"), ("cuda:1", "cpu-int8")],
)
def test_a_device_and_a_variant_that_do_not_go_together_are_both_named(device: str, variant: str) -> None:
    with pytest.raises(SettingsError) as refused:
        load_settings({"device": device, "variant": variant})
    assert f"DRAGOMAN_DEVICE is {device!r}" in refused.value.message
    assert f"DRAGOMAN_VARIANT is {variant!r}" in refused.value.message


@pytest.mark.parametrize("device", ["auto", "cpu", "cuda", "cuda:0", "cuda:12"])
def test_a_device_alone_contradicts_nothing(device: str) -> None:
    assert load_settings({"device": device}).device == device


def test_what_the_settings_command_prints_can_be_set_on_any_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = load_settings()
    for name in ("num_workers", "max_rows", "max_admission_tokens", "device", "variant"):
        monkeypatch.setenv(f"DRAGOMAN_{name.upper()}", str(getattr(settings, name)))
    assert load_settings() == settings


@pytest.fixture
def four_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _pid: {0, 1, 2, 3})


@pytest.mark.parametrize(
    ("content", "cores"),
    [
        ("200000 100000\n", 2),
        ("150000 100000\n", 1),
        ("50000 100000\n", 1),
        ("800000 100000\n", 4),
        ("max 100000\n", 4),
        ("garbage\n", 4),
        ("", 4),
    ],
)
@pytest.mark.usefixtures("four_cores")
def test_a_version_2_limit_lowers_the_cores(tmp_path: Path, content: str, cores: int) -> None:
    (tmp_path / "cpu.max").write_text(content)
    assert available_cores(tmp_path, membership=tmp_path / "absent") == cores


@pytest.mark.parametrize(("quota", "cores"), [("300000", 3), ("-1", 4), ("0", 4)])
@pytest.mark.usefixtures("four_cores")
def test_a_version_1_limit_lowers_the_cores(tmp_path: Path, quota: str, cores: int) -> None:
    group = tmp_path / "cpu,cpuacct" / "docker"
    group.mkdir(parents=True)
    (group / "cpu.cfs_quota_us").write_text(quota)
    (group / "cpu.cfs_period_us").write_text("100000")
    membership = tmp_path / "cgroup"
    membership.write_text("3:cpu,cpuacct:/docker\n2:memory:/elsewhere\n")
    assert available_cores(tmp_path, membership=membership) == cores


@pytest.mark.usefixtures("four_cores")
def test_the_lowest_limit_of_all_groups_above_counts(tmp_path: Path) -> None:
    inner = tmp_path / "system.slice" / "dragoman.service"
    inner.mkdir(parents=True)
    (tmp_path / "system.slice" / "cpu.max").write_text("200000 100000")
    (inner / "cpu.max").write_text("300000 100000")
    membership = tmp_path / "cgroup"
    membership.write_text("0::/system.slice/dragoman.service\n")
    assert available_cores(tmp_path, membership=membership) == 2


@pytest.mark.usefixtures("four_cores")
def test_without_control_groups_the_affinity_counts(tmp_path: Path) -> None:
    assert available_cores(tmp_path, membership=tmp_path / "absent") == 4
