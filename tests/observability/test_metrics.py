import pytest
from prometheus_client import CollectorRegistry

from app.observability import Metrics
from app.runtime.events import AdmissionEvent, RuntimeObserver, StepEvent
from app.runtime.reload import ReloadOutcome
from app.runtime.request import PairInfo


@pytest.fixture
def registry() -> CollectorRegistry:
    return CollectorRegistry()


@pytest.fixture
def metrics(registry: CollectorRegistry) -> Metrics:
    return Metrics(registry)


def test_runtime_events_become_metrics(registry: CollectorRegistry, metrics: Metrics) -> None:
    observer: RuntimeObserver = metrics
    observer.on_admission(
        AdmissionEvent("m", (0.1, 0.3), num_source_tokens=6, num_padded_tokens=8, duration_s=0.02)
    )
    observer.on_step(StepEvent("m", num_rows=4, source_length=10, num_source_tokens=30, duration_s=0.004))
    observer.on_finished("m", num_target_tokens=7, finish_reason="eos")
    observer.on_cancelled("m", num_segments=2)
    observer.on_failure("m", num_segments=3, error=ValueError("secret"))

    def value(name: str, **labels: str) -> float | None:
        return registry.get_sample_value(name, {"model": "m", **labels})

    assert value("dragoman_queue_seconds_sum") == pytest.approx(0.4)
    assert value("dragoman_queue_seconds_count") == 2
    assert value("dragoman_encoder_seconds_sum") == pytest.approx(0.02)
    assert value("dragoman_encoder_padding_ratio_sum") == pytest.approx(0.25)
    assert value("dragoman_source_tokens_total") == 6
    assert value("dragoman_step_seconds_sum") == pytest.approx(0.004)
    assert value("dragoman_step_rows_sum") == 4
    assert value("dragoman_step_padding_ratio_sum") == pytest.approx(0.25)
    assert value("dragoman_target_tokens_total") == 7
    assert value("dragoman_segment_target_tokens_sum") == 7
    assert value("dragoman_segments_finished_total", reason="eos") == 1
    assert value("dragoman_segments_cancelled_total") == 2
    assert value("dragoman_segments_failed_total", error="ValueError") == 3
    assert b"secret" not in metrics.exposition()


def test_a_step_without_positions_has_no_padding(registry: CollectorRegistry, metrics: Metrics) -> None:
    metrics.on_step(StepEvent("m", num_rows=0, source_length=0, num_source_tokens=0, duration_s=0.001))
    metrics.on_admission(AdmissionEvent("m", (), num_source_tokens=0, num_padded_tokens=0, duration_s=0.001))
    assert registry.get_sample_value("dragoman_step_seconds_count", {"model": "m"}) == 1
    assert registry.get_sample_value("dragoman_step_padding_ratio_count", {"model": "m"}) is None


def test_buckets_reach_from_a_tenth_of_a_millisecond_to_ten_seconds(metrics: Metrics) -> None:
    metrics.on_step(StepEvent("m", num_rows=1, source_length=1, num_source_tokens=1, duration_s=0.001))
    text = metrics.exposition().decode()
    assert 'dragoman_step_seconds_bucket{le="0.0001",model="m"} 0.0' in text
    assert 'dragoman_step_seconds_bucket{le="10.0",model="m"} 1.0' in text


def test_two_services_in_one_process_do_not_share_metrics() -> None:
    one, other = Metrics(CollectorRegistry()), Metrics(CollectorRegistry())
    one.on_cancelled("m", num_segments=1)
    assert b'segments_cancelled_total{model="m"}' not in other.exposition()
    assert b"process_resident_memory_bytes" in one.exposition()


def test_cache_events_are_counted_by_what_became_of_the_segment(
    registry: CollectorRegistry, metrics: Metrics
) -> None:
    for result in ("hit", "hit", "miss", "joined"):
        metrics.on_cache_lookup("m", result)
    metrics.on_cache_size(num_bytes=300, num_entries=2)
    counted = [
        registry.get_sample_value(f"dragoman_cache_{name}_total", {"model": "m"})
        for name in ("hits", "misses", "joined")
    ]
    assert counted == [2, 1, 1]
    assert registry.get_sample_value("dragoman_cache_bytes") == 300
    assert registry.get_sample_value("dragoman_cache_entries") == 2
    with pytest.raises(KeyError):
        metrics.on_cache_lookup("m", "a new result")


def test_a_model_or_worker_that_is_gone_is_no_longer_shown(metrics: Metrics) -> None:
    pairs = [PairInfo("en", "pt", "old")]
    ages = [0.5, 0.25]
    metrics.watch_state(draining=lambda: False, healthy=lambda: True, pairs=lambda: pairs)
    metrics.watch_workers(heartbeat_ages_s=lambda: ages, started=lambda: True)
    before = metrics.exposition().decode()
    assert 'dragoman_model_loaded{model="old",pair="en-pt"} 1.0' in before
    assert 'dragoman_worker_heartbeat_age_seconds{worker="1"} 0.25' in before
    pairs[:] = [PairInfo("en", "pt", "new")]
    ages.pop()
    after = metrics.exposition().decode()
    assert 'dragoman_model_loaded{model="new",pair="en-pt"} 1.0' in after
    assert 'model="old"' not in after
    assert 'worker="1"' not in after


def test_unusual_methods_share_one_label(metrics: Metrics) -> None:
    for method in ("GET", "secret"):
        metrics.request_started()
        metrics.request_finished(method, route="/livez", status=200, duration_s=0.001)
    text = metrics.exposition().decode()
    assert 'method="OTHER"' in text
    assert "secret" not in text


def test_every_outcome_of_a_reload_has_its_series_from_the_start(
    registry: CollectorRegistry, metrics: Metrics
) -> None:
    """A series that began with the first failure would have no increase, and the alert would miss it."""
    for outcome in ReloadOutcome:
        assert registry.get_sample_value("dragoman_reloads_total", {"outcome": outcome}) == 0
    metrics.on_reload(ReloadOutcome.FAILED)
    assert registry.get_sample_value("dragoman_reloads_total", {"outcome": "failed"}) == 1
