"""The engine's own timestamps, from a real model."""

from __future__ import annotations

from itertools import pairwise

from app.bundle import default_directory, discover
from app.observability.tracing import stages_of
from app.runtime.engine import Engine, EngineOptions
from app.runtime.request import TranslationRequest

TEXT = "The train leaves early. Nobody knows when it comes back."


async def test_the_stages_of_a_translation_follow_one_another_and_fill_its_time() -> None:
    bundles = [bundle for bundle in discover(default_directory()) if bundle.manifest.pairs[0].source == "en"]
    engine = Engine.open(bundles, EngineOptions(num_workers=1, max_cache_bytes=1_000_000))
    engine.start()
    try:
        result = await engine.translate(TranslationRequest((TEXT,), "en", "pt"))
        again = await engine.translate(TranslationRequest((TEXT,), "en", "pt"))
        empty = await engine.translate(TranslationRequest(("\n",), "en", "pt"))
    finally:
        assert await engine.stop(drain_s=30)
    assert len(result.texts[0].segments) == 2
    timings, stages = result.timings, stages_of(result.timings)
    assert [stage.name for stage in stages] == ["prepare", "queue", "encode", "decode", "detokenise"]
    moments = (
        0.0,
        timings.prepared_s,
        timings.first_row_s,
        timings.first_encoded_s,
        timings.decoded_s,
        timings.total_s,
    )
    assert all(earlier < later for earlier, later in pairwise(moments))
    assert timings.queue_s + timings.decode_s <= timings.decoded_s
    # What the cache has, and what has no segments, neither waits nor is decoded.
    assert again.texts == result.texts
    assert again.timings.decode_s == 0
    assert "decode" not in [stage.name for stage in stages_of(again.timings)]
    assert [stage.name for stage in stages_of(empty.timings)] == ["prepare", "detokenise"]
