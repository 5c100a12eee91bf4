"""Every knob of the service: its unit, range and default. Read only by the entry layer.

Each field is the environment variable ``DRAGOMAN_<FIELD>``; `dragoman serve` takes some as options too.
"""

from __future__ import annotations

import difflib
import math
import os
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Annotated, Literal

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

from app.bundle import Variant, default_directory
from app.errors import SettingsError
from app.runtime.device import refuse_contradiction

PREFIX = "DRAGOMAN_"
_CGROUP_ROOT = Path("/sys/fs/cgroup")
_CGROUP_MEMBERSHIP = Path("/proc/self/cgroup")


def available_cores(cgroup_root: Path = _CGROUP_ROOT, *, membership: Path = _CGROUP_MEMBERSHIP) -> int:
    """CPU cores this process may use: its affinity mask, lowered by a CPU limit of its control groups.

    A limit of 1.5 cores counts as 1: two busy threads would be throttled in turn, and every row of a
    batch waits for the slower one.

    Args:
        cgroup_root: where the control groups are mounted (version 2, or version 1's ``cpu`` below it).
        membership: the file that lists this process's groups, one ``id:controllers:path`` a line.
    """
    limits = [
        limit
        for folder in _cgroup_folders(cgroup_root, membership)
        if (limit := _cgroup_cpu_limit(folder)) is not None
    ]
    cores = len(os.sched_getaffinity(0))
    return max(1, min([cores, *(math.floor(limit) for limit in limits)]))


def _cgroup_folders(root: Path, membership: Path) -> list[Path]:
    """Every folder that may limit this process: its own groups and all above them."""
    folders = [root, root / "cpu", root / "cpu,cpuacct"]
    try:
        lines = membership.read_text().splitlines()
    except OSError:
        # Outside Linux or in a sandbox there is no such file: the mount's root is all there is to ask.
        return folders
    for line in lines:
        _, controllers, path = line.split(":", 2)
        if controllers == "" or "cpu" in controllers.split(","):
            folder = root / controllers if controllers else root
            for part in PurePosixPath(path).parts[1:]:
                folder = folder / part
                folders.append(folder)
    return folders


def _cgroup_cpu_limit(folder: Path) -> float | None:
    """A group's CPU limit in cores; None without one or where it cannot be read."""
    try:
        if (folder / "cpu.max").is_file():
            quota, period = (folder / "cpu.max").read_text().split()[:2]
        elif (folder / "cpu.cfs_quota_us").is_file():
            quota = (folder / "cpu.cfs_quota_us").read_text().strip()
            period = (folder / "cpu.cfs_period_us").read_text().strip()
        else:
            return None
        if quota == "max" or int(quota) <= 0 or int(period) <= 0:
            return None
        return int(quota) / int(period)
    except (OSError, ValueError):
        # No limit can be known; the affinity mask is then the honest answer.
        return None


class Settings(BaseSettings):
    """The service's settings, checked and frozen."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, extra="forbid", frozen=True, allow_inf_nan=False)

    host: str = Field(
        default="127.0.0.1", min_length=1, description="Address to listen on; 0.0.0.0 listens on all."
    )
    port: int = Field(default=8000, ge=0, le=65535, description="TCP port; 0 lets the system choose one.")
    bundles: Path = Field(
        default_factory=default_directory,
        description="Folder of bundles, or one bundle. Default: the bundles shipped with the service.",
    )
    device: str = Field(
        default="auto",
        pattern=r"^(auto|cpu|cuda(:[0-9]{1,3})?)$",
        description="Where the models run: cpu, cuda (every GPU), cuda:N (that GPU), or auto: every GPU if "
        "all of them and all bundles fit together, else the CPU.",
    )
    variant: Literal["auto", Variant] = Field(
        default="auto",
        description="Which graphs of each bundle run: cpu-int8, cpu-fp32, cuda-fp16, or auto: cpu-int8 on a "
        "CPU and cuda-fp16 on GPUs.",
    )
    gpu_memory_mb: int = Field(
        default=0,
        ge=0,
        le=1_048_576,
        description="Most memory of each GPU for weights and row slots, MiB; 0: no limit of ours.",
    )
    cuda_graphs: bool = Field(
        default=True,
        description="Launch whole decoder steps at once on GPUs, as CUDA graphs; false where a driver or a "
        "library cannot capture them: the answers are the same, and small batches slower.",
    )
    num_workers: Annotated[int, Field(ge=1, le=1024)] | Literal["auto"] = Field(
        default="auto",
        description="Decoding threads; auto: the cores this process may use (affinity, container limit), or "
        "on GPUs one each, where no other number will do.",
    )
    max_rows: Annotated[int, Field(ge=1, le=4096)] | Literal["auto"] = Field(
        default="auto",
        description="Segments decoded together per worker, rows; auto: 64 on a CPU, 256 on a GPU.",
    )
    max_waiting_tokens: int = Field(
        default=131_072,
        ge=64,
        le=1_000_000_000,
        description="Source tokens (times beams) accepted and not yet finished, all requests; more gets 429.",
    )
    max_admission_tokens: Annotated[int, Field(ge=64, le=1_000_000)] | Literal["auto"] = Field(
        default="auto",
        description="Padded source tokens encoded between two decoder steps; auto: 1024 on a CPU, 16384 on a "
        "GPU.",
    )
    use_shortlist: bool = Field(
        default=True,
        description="Restrict the output projection to a bundle's lexical shortlist, if it has one.",
    )
    max_body_bytes: int = Field(
        default=2 * 1024 * 1024, ge=1024, le=1_073_741_824, description="Largest request body, bytes."
    )
    body_timeout_s: float = Field(
        default=30.0, ge=0.1, le=3600, description="Seconds that a request's body may take to arrive."
    )
    head_timeout_s: float = Field(
        default=30.0,
        ge=0.1,
        le=3600,
        description="Seconds that a request's line and headers may take to arrive, from their first byte.",
    )
    max_texts: int = Field(default=1024, ge=1, le=1_000_000, description="Most texts in one request.")
    max_text_characters: int = Field(
        default=250_000,
        ge=1,
        le=1_000_000_000,
        description="Most characters in one request, all its texts together.",
    )
    keep_alive_s: int = Field(
        default=120,
        ge=1,
        le=86_400,
        description="Seconds an idle connection stays open; more than clients and proxies keep theirs.",
    )
    drain_s: float = Field(
        default=30.0, ge=0, le=3600, description="Seconds that admitted work may take after SIGTERM."
    )
    drain_grace_s: float = Field(
        default=0.0,
        ge=0,
        le=3600,
        description="Least seconds after SIGTERM in which readiness answers 503 before the port closes.",
    )
    max_heartbeat_age_s: float = Field(
        default=4.0,
        ge=1,
        le=3600,
        description="Seconds without a sign of life after which a worker counts as stuck: readiness fails "
        "and it is replaced, once. More than a decoder step may take.",
    )
    request_timeout_s: float = Field(
        default=0.0,
        ge=0,
        le=86_400,
        description="Seconds a request may take, from when it was read, and the most that X-Request-Timeout "
        "may ask for; later it gets 504. 0: no limit.",
    )
    max_bulk_share: float = Field(
        default=0.75,
        gt=0,
        le=1,
        description="Share of the rows and of the waiting tokens that requests of priority bulk may hold.",
    )
    max_cache_bytes: int = Field(
        default=32 * 1024 * 1024,
        ge=0,
        le=1_099_511_627_776,
        description="Memory for translated segments, which are not decoded again while kept, bytes; equal "
        "segments at one time are decoded once. About 0.7 kB a sentence. 0 switches both off.",
    )
    cors_origins: str = Field(
        default="",
        description="Origins whose web pages may call the service, separated by commas; * allows all.",
    )
    keys_file: str = Field(
        default="", description="File of API keys, made with `dragoman keys create`; read when it changes."
    )
    api_keys: SecretStr = Field(
        default=SecretStr(""),
        description="API keys that may translate: name=key or name=sha256:<hex>, separated by commas.",
    )
    admin_keys: SecretStr = Field(
        default=SecretStr(""),
        description="API keys that may also read the metrics and reload the bundles, in the same form.",
    )
    allow_anonymous: Literal["auto", "true", "false"] = Field(
        default="auto",
        description="Whether callers without a key may translate; auto: only while there are no keys.",
    )
    open_metrics: bool = Field(
        default=False, description="Whether /metrics needs no key even when there are keys."
    )
    anonymous_requests_per_second: int = Field(
        default=0,
        ge=0,
        le=1_000_000,
        description="Requests each address may send a second without a key; 0: no limit.",
    )
    anonymous_characters_per_minute: int = Field(
        default=0,
        ge=0,
        le=1_000_000_000_000,
        description="Characters each address may translate a minute without a key; 0: no limit.",
    )
    anonymous_characters_per_day: int = Field(
        default=0,
        ge=0,
        le=1_000_000_000_000,
        description="Characters each address may translate a day (UTC) without a key; 0: no limit.",
    )
    trusted_proxies: str = Field(
        default="",
        description="Addresses or networks of proxies, separated by commas, whose X-Forwarded-For is true.",
    )
    log_format: Literal["console", "json"] = Field(default="console", description="Form of the log lines.")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        default="info", description="Least severe log line that is written."
    )
    tracing: bool = Field(
        default=False,
        description="Send OpenTelemetry traces, to OTEL_EXPORTER_OTLP_ENDPOINT; needs the extra otel.",
    )


def load_settings(
    overrides: Mapping[str, object] | None = None, *, environ: Mapping[str, str] = os.environ
) -> Settings:
    """Read the environment and the command line's overrides.

    Args:
        overrides: field name -> value; None values are ignored.
        environ: checked for misspelt names; the values themselves come from the process environment.

    Raises:
        SettingsError: a ``DRAGOMAN_*`` variable is unknown, ill-typed, out of range or at odds with another.
    """
    _refuse_unknown_names(environ)
    given = {name: value for name, value in (overrides or {}).items() if value is not None}
    try:
        settings = Settings(**given)  # type: ignore[arg-type]  # checked by the model, that is the point
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = str(first["loc"][0])
        origin = f"--{name.replace('_', '-')}" if name in given else f"{PREFIX}{name.upper()}"
        about = Settings.model_fields[name].description if name in Settings.model_fields else ""
        raise SettingsError(f"{origin} is {first['input']!r}: {first['msg']}. {about}".strip()) from None
    refuse_contradiction(settings.device, settings.variant)
    return settings


def _refuse_unknown_names(environ: Mapping[str, str]) -> None:
    known = {f"{PREFIX}{field.upper()}" for field in Settings.model_fields}
    for name in sorted(environ):
        if name.upper().startswith(PREFIX) and name.upper() not in known:
            near = difflib.get_close_matches(name.upper(), known, n=1, cutoff=0.0)[0]
            raise SettingsError(f"{name} is not a setting; did you mean {near}? Rename it, or unset it")
