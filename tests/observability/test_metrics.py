import pytest
from prometheus_client import CollectorRegistry

from app.observability import Metrics
from app.runtime.events import AdmissionEvent, RuntimeObserver, StepEvent


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
