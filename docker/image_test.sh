#!/usr/bin/env bash
# Build the image, run it as locked down as it is meant to be run, and test it. `make image-test`.
#
#   bash docker/image_test.sh [cpu|cuda]
#
# cuda: the same for the target for GPUs, which it runs on the CPU, and that it refuses to serve without a driver.
# What needs a GPU is not tested here.
#
# Environment, all optional:
#   CONTAINER_ENGINE   docker or podman; default: the first that works
#   CUDA_WHEELS        1: the cuda target with NVIDIA's libraries, gigabytes; default 0: without them
#   IMAGE              tag to build; default dragoman:cpu, dragoman:cuda or, without the libraries, dragoman:cuda-test
#   IMAGE_BUILDER      command to build with, called as: $IMAGE_BUILDER CONTEXT DOCKERFILE IMAGE WORK_DIR [OPTIONS],
#                      where OPTIONS are those of a build, such as --target. If it leaves WORK_DIR/env behind, that
#                      file is sourced before the engine is used
#   IMAGE_WORK_DIR     its WORK_DIR; default: a temporary folder, removed at the end
#   CONTAINER_NETWORK  `host` where the engine cannot publish ports; the service then listens on loopback only
#   IMAGE_PORT         port on 127.0.0.1; default 18000
#   IMAGE_MEMORY       memory limit; default 1g
#   IMAGE_MAX_MB       largest size the image may have; default 400, and for cuda 750 or with the libraries 3000
#   PYTHON             interpreter for the smoke test (3.11 or newer); default python3
set -euo pipefail

root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
target=${1:-cpu}
cuda_wheels=${CUDA_WHEELS:-0}
licenses="Apache-2.0 AND MPL-2.0"
build_options=(--target "$target")
# What the target's own default must be overruled with where there is no GPU.
device_options=()
case $target-$cuda_wheels in
  cpu-*) image=dragoman:cpu max_mb=400 ;;
  cuda-0) image=dragoman:cuda-test max_mb=750 ;;
  cuda-1) image=dragoman:cuda max_mb=3000 ;;
  *)
    echo "usage: [CUDA_WHEELS=0|1] image_test.sh [cpu|cuda]" >&2
    exit 2
    ;;
esac
if [ "$target" = cuda ]; then
  licenses="$licenses AND LicenseRef-NVIDIA-Proprietary"
  build_options+=(--build-arg "CUDA_WHEELS=$cuda_wheels")
  # `void` keeps the driver out even where every container gets it.
  device_options=(--env DRAGOMAN_DEVICE=cpu --env NVIDIA_VISIBLE_DEVICES=void)
fi
image=${IMAGE:-$image}
port=${IMAGE_PORT:-18000}
memory=${IMAGE_MEMORY:-1g}
max_mb=${IMAGE_MAX_MB:-$max_mb}
drain_s=180
python=${PYTHON:-python3}
name=dragoman-image-test-$$
engine=""
scratch=$(mktemp -d)

finish() {
  local status=$?
  if [ -n "$engine" ] && "$engine" container inspect "$name" > /dev/null 2>&1; then
    if [ "$status" -ne 0 ]; then
      echo "---- the service's log:" >&2
      "$engine" logs "$name" >&2 || true
    fi
    "$engine" rm --force "$name" > /dev/null || true
  fi
  rm -rf "$scratch"
  [ "$status" -eq 0 ] || echo "image test FAILED" >&2
}
trap finish EXIT

fail() {
  echo "FAILED  $*" >&2
  exit 1
}

ok() { printf 'ok      %s\n' "$*"; }

inside() { "$engine" exec "$name" "$@"; }

choose_engine() {
  local candidate
  for candidate in ${CONTAINER_ENGINE:-docker podman}; do
    # `info` and not `--version`: a docker client without a daemon is no engine.
    if command -v "$candidate" > /dev/null && "$candidate" info > /dev/null 2>&1; then
      engine=$candidate
      return
    fi
  done
  fail "none of ${CONTAINER_ENGINE:-docker podman} works here; start the daemon, or set CONTAINER_ENGINE"
}

build() {
  local revision work started_s
  revision=$(git -C "$root" rev-parse HEAD 2> /dev/null || echo unknown)
  build_options+=(--build-arg "REVISION=$revision")
  started_s=$(date +%s)
  if [ -n "${IMAGE_BUILDER:-}" ]; then
    work=${IMAGE_WORK_DIR:-$scratch/work}
    mkdir -p "$work"
    # Unquoted: the builder may be a command with arguments.
    # shellcheck disable=SC2086
    $IMAGE_BUILDER "$root" "$root/docker/Dockerfile" "$image" "$work" "${build_options[@]}"
    if [ -f "$work/env" ]; then
      # shellcheck disable=SC1091
      . "$work/env"
    fi
    choose_engine
  else
    choose_engine
    # The docker format keeps HEALTHCHECK; podman's default format has no place for it.
    local format=()
    [ "$(basename "$engine")" != podman ] || format=(--format docker)
    "$engine" build ${format[@]+"${format[@]}"} "${build_options[@]}" \
      --tag "$image" --file "$root/docker/Dockerfile" "$root"
  fi
  local size_mb
  size_mb=$("$engine" image inspect "$image" --format '{{.Size}}' | awk '{printf "%.0f", $1 / 1e6}')
  ok "built $image in $(($(date +%s) - started_s)) s, $size_mb MB"
  [ "$size_mb" -lt "$max_mb" ] || fail "the image has $size_mb MB, the limit is $max_mb"
  "$engine" history --format '{{.Size}} {{.CreatedBy}}' "$image" | awk '/^[0-9.]+ ?[MG]B/ {print "layer   " substr($0, 1, 60)}'
}

check_configuration() {
  local version
  version=$("$engine" run --rm --network none --no-healthcheck "$image" --version)
  "$engine" image inspect "$image" > "$scratch/image.json"
  "$python" - "$scratch/image.json" "${version#dragoman }" "$licenses" "$target" << 'PYTHON'
import json, sys

with open(sys.argv[1]) as file:
    image = json.load(file)[0]
config = image["Config"]
labels = config.get("Labels") or {}
environment = dict(variable.split("=", 1) for variable in config.get("Env") or [])
# docker has it in Config, podman beside it.
health = config.get("Healthcheck") or image.get("HealthCheck") or image.get("Healthcheck") or {}
wrong = [
    f"{what} is {found!r}, expected {wanted!r}"
    for what, found, wanted in (
        ("User", config.get("User"), "10001:10001"),
        ("StopSignal", config.get("StopSignal"), "SIGTERM"),
        ("Entrypoint", config.get("Entrypoint"), ["dragoman"]),
        ("Cmd", config.get("Cmd"), ["serve", "--host", "0.0.0.0"]),
        ("ExposedPorts", list(config.get("ExposedPorts") or {}), ["8000/tcp"]),
        ("version label", labels.get("org.opencontainers.image.version"), sys.argv[2]),
        ("licence label", labels.get("org.opencontainers.image.licenses"), sys.argv[3]),
        ("DRAGOMAN_DEVICE", environment.get("DRAGOMAN_DEVICE"), "cuda" if sys.argv[4] == "cuda" else None),
        # An image that asks for every GPU gets them where nobody meant it to.
        ("NVIDIA_VISIBLE_DEVICES", environment.get("NVIDIA_VISIBLE_DEVICES"), None),
        ("Healthcheck.Test", health.get("Test"), ["CMD", "python", "/opt/dragoman/healthcheck.py"]),
    )
    if found != wanted
]
sys.exit("FAILED  image configuration: " + "; ".join(wrong) if wrong else 0)
PYTHON
  ok "image configuration: user, signal, health check, entry point, version, licences"
}

start() {
  local options=(
    --detach --name "$name" --read-only --tmpfs /tmp --cap-drop=all
    --security-opt no-new-privileges --memory "$memory" --pids-limit 256
    # A busy machine may take longer than the default for the request that is in flight when it stops.
    --env "DRAGOMAN_DRAIN_S=$drain_s"
    ${device_options[@]+"${device_options[@]}"}
  )
  # The long form below, because bash before 4.4 takes an empty array for an unset one.
  local command=()
  if [ "${CONTAINER_NETWORK:-}" = host ]; then
    options+=(--network host --env "DRAGOMAN_PORT=$port")
    command=(serve --host 127.0.0.1)
  else
    options+=(--publish "127.0.0.1:$port:8000")
  fi
  # Run here by hand: podman's timers need systemd, and docker's first check would come too late.
  [ "$(basename "$engine")" != podman ] || options+=(--health-interval=disable)
  "$engine" run "${options[@]}" "$image" ${command[@]+"${command[@]}"} > /dev/null
  local deadline_s=$(($(date +%s) + 90))
  until inside python /opt/dragoman/healthcheck.py > /dev/null 2>&1; do
    [ "$("$engine" inspect "$name" --format '{{.State.Running}}')" = true ] || fail "the service ended at its start"
    [ "$(date +%s)" -lt "$deadline_s" ] || fail "not ready after 90 s"
    sleep 0.2
  done
  ok "started: read-only, /tmp in memory, no capabilities, no new privileges, $memory, 256 processes"
}

check_health() {
  local state deadline_s
  if [ "$(basename "$engine")" = podman ]; then
    podman healthcheck run "$name" > /dev/null || fail "podman healthcheck run says unhealthy"
  else
    deadline_s=$(($(date +%s) + 90))
    until state=$("$engine" inspect "$name" --format '{{.State.Health.Status}}') && [ "$state" = healthy ]; do
      [ "$(date +%s)" -lt "$deadline_s" ] || fail "health is $state after 90 s"
      sleep 1
    done
  fi
  # A check that cannot fail is none: where nobody listens it must say so.
  if "$engine" exec --env DRAGOMAN_PORT=9 "$name" python /opt/dragoman/healthcheck.py > /dev/null; then
    fail "the health check passes where nobody listens"
  fi
  ok "health check: healthy, and unhealthy where nobody listens"
}

check_confinement() {
  local uid found tool
  uid=$(inside id -u)
  [ "$uid" = 10001 ] || fail "runs as uid $uid, expected 10001"
  [ "$(inside cat /proc/1/comm)" = dragoman ] || fail "process 1 is not dragoman, so it gets no signals"
  # Bounding set and mount table: an ordinary user has no effective capability and writes nowhere anyway.
  inside sh -c 'grep -q "^CapBnd:[[:space:]]*0*$" /proc/1/status' || fail "process 1 may get capabilities"
  inside sh -c 'grep -q "^NoNewPrivs:[[:space:]]*1$" /proc/1/status' || fail "process 1 may gain privileges"
  inside grep -q '^[^ ]* / [^ ]* ro[, ]' /proc/mounts || fail "the root file system is writable"
  found=$(inside find /opt/dragoman '(' -user "$uid" -o -perm -o+w ')' ! -type l)
  [ -z "$found" ] || fail "the service could write to its own files: $found"
  inside sh -c 'touch /tmp/x && rm /tmp/x' || fail "/tmp is not writable"
  ok "uid $uid, process 1, no capabilities, root read-only, own files not its own, /tmp writable"

  found=$(inside python -c 'import importlib.util as u; print(*[m for m in (
    "torch", "onnx", "model", "exporters", "pip", "setuptools", "wheel", "pytest", "mypy") if u.find_spec(m)])')
  [ -z "$found" ] || fail "the service's environment has $found"
  for tool in gcc g++ cc make ld git curl; do
    if inside sh -c "command -v $tool" > /dev/null; then fail "the image has $tool"; fi
  done
  ok "absent: torch, onnx, training code, pip and build packages, compilers"

  inside dragoman models verify > /dev/null || fail "a shipped bundle is damaged: dragoman models verify"
  inside sh -c 'ls /opt/dragoman/lib/python3*/site-packages/dragoman-*/licenses/LICENSES/MPL-2.0.txt' > /dev/null ||
    fail "the licence of the shipped models is not in the image"
  ok "bundles whole, licences included"
}

check_offline() {
  local translated
  translated=$(echo "Good morning, my friends." | "$engine" run --rm --interactive --network none --read-only \
    --tmpfs /tmp --no-healthcheck ${device_options[@]+"${device_options[@]}"} "$image" translate --source en --target pt 2> "$scratch/offline.log") ||
    fail "translating without a network: $(tail -n 3 "$scratch/offline.log")"
  case $translated in
    *[Bb]om\ dia*) ok "without any network it starts and translates: $translated" ;;
    *) fail "without a network it translated to '$translated'" ;;
  esac
}

# Without a GPU the target for GPUs must end, at once and with the reason, and never serve slowly instead.
check_refusal() {
  local device code started_s
  for device in "" cuda:1; do
    code=0
    started_s=$(date +%s)
    timeout 120 "$engine" run --rm --network none --read-only --tmpfs /tmp --no-healthcheck --env NVIDIA_VISIBLE_DEVICES=void \
      ${device:+--env "DRAGOMAN_DEVICE=$device"} "$image" > "$scratch/refusal.log" 2>&1 || code=$?
    [ "$code" = 1 ] || fail "without a GPU it ended with $code after $(($(date +%s) - started_s)) s, expected 1: $(tail -n 3 "$scratch/refusal.log")"
    grep -q "device ${device:-cuda} cannot be used: the NVIDIA driver's library libcuda.so.1 cannot be loaded" "$scratch/refusal.log" ||
      fail "without a GPU it does not say why it ended: $(tail -n 3 "$scratch/refusal.log")"
    if grep -q Traceback "$scratch/refusal.log"; then fail "without a GPU it ends in a traceback"; fi
    ok "without a GPU it ends: $(grep -o "device ${device:-cuda} cannot be used: [^(]*" "$scratch/refusal.log" | head -n 1)"
  done
  "$engine" run --rm --network none --no-healthcheck "$image" models list > "$scratch/models" ||
    fail "dragoman models list needs a GPU"
  grep -q en-pt "$scratch/models" || fail "dragoman models list shows no en-pt: $(cat "$scratch/models")"
  ok "without a GPU it lists its models"
}

# As far as it can be told without a driver: the runtime has its CUDA provider, and of the libraries that this is
# linked to nothing but the driver's is missing.
check_cuda_libraries() {
  local packages missing expected
  inside python -c 'import sys, onnxruntime as o; sys.exit("CUDAExecutionProvider" not in o.get_available_providers())' ||
    fail "onnxruntime has no CUDA provider"
  packages=$(inside python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
  missing=$(inside ldd "$packages/onnxruntime/capi/libonnxruntime_providers_cuda.so" | awk '/not found/ {print $1}' | sort -u | tr '\n' ' ')
  expected="libcuda.so.1 "
  [ "$cuda_wheels" = 1 ] || expected="libcublas.so.13 libcublasLt.so.13 libcuda.so.1 libcudart.so.13 libcurand.so.10 "
  [ "$missing" = "$expected" ] || fail "the CUDA provider misses $missing, expected $expected"
  if [ "$cuda_wheels" = 1 ]; then
    # All that the runtime's extras ask for is there, in versions that they allow.
    inside /usr/local/bin/python -m pip --python /opt/dragoman/bin/python install --quiet --dry-run --no-index \
      'onnxruntime-gpu[cuda,cudnn]' || fail "NVIDIA's packages are not those that onnxruntime-gpu asks for"
    # Every symbol resolved, which ldd does not tell.
    inside python -c '
import ctypes, pathlib, sys
bad = {}
for path in sorted(pathlib.Path(sys.argv[1], "nvidia").glob("*/lib/*.so.*")):
    try:
        ctypes.CDLL(str(path), mode=2)
    except OSError as error:
        if not str(error).startswith("libcuda.so.1:"):
            bad[path.name] = str(error)
sys.exit(str(bad) if bad else 0)' "$packages" || fail "libraries of NVIDIA do not load"
  fi
  ok "CUDA provider, for which these are missing: $missing"
}

print_memory() {
  inside cat /proc/1/status | awk -v when="$1" '
    /^VmRSS/ { rss = $2 } /^VmHWM/ { peak = $2 } /^Threads/ { threads = $2 }
    END { printf "memory  %s: %.0f MB resident, %.0f MB at most, %d threads\n", when, rss / 1000, peak / 1000, threads }'
}

check_drain() {
  local code
  "$python" "$root/docker/smoke_test.py" "http://127.0.0.1:$port" --stop "$engine stop --time $((drain_s + 10)) $name"
  "$engine" logs "$name" > "$scratch/log" 2>&1
  # The service's own word that the signal met a running request, and that nothing was dropped.
  grep '"event": *"draining"' "$scratch/log" | grep -q '"running_requests": *1' ||
    fail "the signal met no running request, so this proves nothing"
  grep '"event": *"drained"' "$scratch/log" | grep -q '"finished": *true' || fail "the drain was cut short"
  code=$("$engine" inspect "$name" --format '{{.State.ExitCode}}')
  [ "$code" = 0 ] || fail "exit code $code after SIGTERM, expected 0"
  ok "SIGTERM with a request in flight: answered whole, exit code 0"
}

build
check_configuration
[ "$target" = cpu ] || check_refusal
check_offline
start
"$python" "$root/docker/smoke_test.py" "http://127.0.0.1:$port"
print_memory "after the smoke test"
check_health
check_confinement
[ "$target" = cpu ] || check_cuda_libraries
check_drain
echo "image test passed: $target"
