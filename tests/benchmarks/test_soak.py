from __future__ import annotations

import json
import sys
from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.soak import SoakOptions, SoakReport, soak, table
from benchmarks.soak_checks import check_answers, check_end, check_metrics, check_process, growth
from benchmarks.soak_client import Account, translations_of
from benchmarks.soak_flood import flood
from benchmarks.soak_requests import LIBRETRANSLATE, NATIVE, SoakRequest, soak_requests
from benchmarks.soak_server import Counts, ProcessSample, counts_of

FAKE_SERVER = (sys.executable, str(Path(__file__).with_name("soak_fake_server.py")), "{port}")
SAMPLE = ProcessSample(
    at_s=0.0, rss_bytes=100_000_000, mapped_bytes=0, num_files=9, num_connections=0, num_threads=5
)
REQUEST = SoakRequest(
    "known text", "POST", NATIVE, (), b"", frozenset({200}), "en-pt", ("Hello.",), num_segments=1
)


OPTIONS = SoakOptions(200, num_clients=8, sample_every_s=0.01, max_rows=4, command=FAKE_SERVER)


def failed(report: SoakReport) -> set[str]:
    return {check.name for check in report.failed}


def answer(*texts: str) -> bytes:
    return json.dumps({"texts": [{"text": text} for text in texts]}).encode()


def counts(requests: dict[tuple[str, int], int], **totals: float) -> Counts:
    named = {f"dragoman_{name}": value for name, value in totals.items()}
    return Counts(Counter(requests), named)


def test_a_server_that_does_everything_right_is_told_so_and_stopped():
    done = []
    report = soak(OPTIONS, on_done=lambda: done.append(1))
    # So short a run is all warm-up: its memory says nothing.
    assert failed(report) <= {"memory grows by less than 2%"}, table(report)
    assert len(done) == report.num_requests == sum(report.sent.values()) == 200
    lines = table(report)
    assert all(f"  {check.name}: " in lines for check in report.checks)


def test_what_a_server_does_wrong_is_named():
    options = replace(OPTIONS, command=(*FAKE_SERVER, "leak", "files", "threads", "fault", "wrong"))
    report = soak(options)
    assert failed(report) >= {
        "right answers, no unexplained 5xx",
        "equal questions, equal answers",
        "memory grows by less than 2%",
        "open files do not grow",
        "threads do not grow",
        "no error in the log",
    }
    assert "FAILED  equal questions, equal answers" in table(report)


def test_a_server_that_does_not_start_says_why():
    with pytest.raises(RuntimeError, match="no bundle today"):
        soak(replace(OPTIONS, command=(sys.executable, "-c", "import sys; sys.exit('no bundle today')")))


def test_a_mix_is_drawn_once_and_holds_every_kind():
    requests = list(soak_requests(3000, seed=3))
    assert requests == list(soak_requests(3000, seed=3))
    assert requests != list(soak_requests(3000, seed=4))
    kinds = Counter(request.kind for request in requests)
    assert len(kinds) == 18
    new = sum(number for kind, number in kinds.items() if "new" in kind or "list" in kind)
    assert 0.25 < new / 3000 < 0.4
    assert {request.pair for request in requests} == {"en-pt", "pt-en", ""}
    assert any(dict(request.headers).get("X-Priority") == "bulk" for request in requests)


def test_the_flood_has_more_of_every_kind_than_there_are_rows_and_shares_no_text_with_the_mix():
    bodies = list(flood(max_rows=64, num_workers=2))
    texts = [text for body in bodies for text in body["texts"]]
    assert len(set(texts)) == len(texts)
    assert not set(texts) & {text for request in soak_requests(3000, seed=1) for text in request.texts}
    for pair in (("en", "pt"), ("pt", "en")):
        of_pair = [body for body in bodies if (body["source"], body["target"]) == pair]
        widths = [body["options"].get("beam_size", 1) for body in of_pair]
        assert sorted(set(widths)) == [1, 2, 3, 4]
        assert all(
            len(body["texts"]) > 2 * (64 // width) for body, width in zip(of_pair, widths, strict=True)
        )


def test_texts_come_again_after_the_cache_has_dropped_them():
    seen: set[tuple[str, str]] = set()
    num_repeated = 0
    for request in soak_requests(6000, seed=1):
        parts = {(request.pair, part) for text in request.texts for part in text.split("\n\n")}
        if request.kind == "old text again":
            assert parts <= seen
            num_repeated += 1
        seen |= parts
    assert num_repeated > 100


def test_both_dialects_answers_are_read():
    assert translations_of(NATIVE, {"texts": [{"text": "a"}, {"text": "b"}]}) == ["a", "b"]
    assert translations_of(LIBRETRANSLATE, {"translatedText": "a"}) == ["a"]
    assert translations_of(LIBRETRANSLATE, {"translatedText": ["a", "b"]}) == ["a", "b"]


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (503, b"{}", "status 503"),
        (200, b"<html>", "not JSON"),
        (200, answer("a", "b"), "2 translations of 1"),
    ],
)
def test_an_answer_that_is_not_right_is_counted_and_named(status: int, body: bytes, words: str):
    account = Account()
    account.note_answer(REQUEST, status, body)
    assert account.num_wrong == 1
    assert words in account.wrong[0]


def test_equal_questions_are_compared_across_dialects_and_unequal_ones_are_not():
    account = Account()
    account.note_answer(REQUEST, 200, answer("Olá."))
    account.note_answer(replace(REQUEST, options="other"), 200, answer("Oi."))
    account.note_answer(replace(REQUEST, pair="pt-en"), 200, answer("Hello."))
    libretranslate = replace(REQUEST, path=LIBRETRANSLATE)
    account.note_answer(libretranslate, 200, b'{"translatedText": "Ol\\u00e1."}')
    assert (account.num_unequal, account.num_compared, account.num_wrong) == (0, 1, 0)
    assert all(check.passed for check in check_answers(account))
    account.note_answer(libretranslate, 200, b'{"translatedText": "Oi."}')
    assert (account.num_unequal, account.num_compared) == (1, 2)
    assert not all(check.passed for check in check_answers(account))


def test_growth_is_measured_behind_the_warm_up():
    rss = [1] * 20 + [100] * 10 + [999] * 60 + [110] * 10
    samples = [replace(SAMPLE, rss_bytes=value) for value in rss]
    grown = growth(samples, lambda sample: sample.rss_bytes)
    assert (grown.warm, grown.last) == (100, 110)
    assert grown.share == pytest.approx(0.1)
    assert [check.passed for check in check_process(samples, before=SAMPLE, after=SAMPLE)] == [
        False,
        True,
        True,
        True,
    ]


def test_too_few_looks_at_the_process_fail_rather_than_pass():
    checks = check_process([SAMPLE] * 19, before=SAMPLE, after=SAMPLE)
    assert [check.passed for check in checks] == [False]


def test_threads_may_come_and_go_but_not_stay():
    def passed(numbers: list[int]) -> bool:
        samples = [replace(SAMPLE, num_threads=number) for number in numbers]
        return check_process(samples, before=SAMPLE, after=SAMPLE)[2].passed

    assert passed([5, 7, *[5] * 90, *[7, 9] * 4])
    assert not passed([5, 7, *[5] * 90, *[8] * 11])


def test_files_and_connections_left_behind_fail():
    after = replace(SAMPLE, num_files=10, num_connections=1)
    checks = check_process([SAMPLE] * 20, before=SAMPLE, after=after)
    assert {check.name for check in checks if not check.passed} == {
        "open files do not grow",
        "no connection is left",
    }


def account_of(*, answered: int, left: int) -> Account:
    account = Account()
    for _ in range(answered):
        account.note_answer(REQUEST, 200, answer("Olá."))
    account.sent["known text"] = answered + left
    account.left[NATIVE] = left
    account.num_segments_sent = answered + left
    return account


ENDED = {
    "queue_seconds_count": 9.0,
    "segments_finished_total": 8.0,
    "segments_cancelled_total": 2.0,
    "cache_hits_total": 1.0,
    "cache_misses_total": 9.0,
}


@pytest.mark.parametrize(
    ("requests", "passed"),
    [
        ({(NATIVE, 200): 10, (NATIVE, 499): 2}, True),
        ({(NATIVE, 200): 11, (NATIVE, 499): 1}, True),
        ({(NATIVE, 200): 10, (NATIVE, 499): 1}, False),
        ({(NATIVE, 200): 9, (NATIVE, 499): 3}, False),
        ({(NATIVE, 200): 10, (NATIVE, 500): 2}, False),
        ({(NATIVE, 200): 10, (NATIVE, 499): 2, (LIBRETRANSLATE, 200): 1}, False),
        ({(NATIVE, 200): 10, (NATIVE, 499): 2, ("/metrics", 200): 3}, True),
    ],
)
def test_the_counters_of_requests_must_add_up(requests: dict[tuple[str, int], int], passed: bool):
    checks = check_metrics(account_of(answered=10, left=2), counts(requests, **ENDED), quiet=True)
    assert checks[0].passed is passed
    assert all(check.passed for check in checks[1:])


@pytest.mark.parametrize(
    ("changed", "quiet", "name"),
    [
        ({"queue_seconds_count": 11.0}, True, "admitted = finished + cancelled + expired"),
        ({"queue_seconds_count": 7.0}, True, "admitted = finished + cancelled + expired"),
        ({"segments_failed_total": 1.0}, True, "admitted = finished + cancelled + expired"),
        ({"cache_hits_total": 9.0}, True, "cache lookups = segments sent"),
        ({"cache_hits_total": 0.0}, True, "cache lookups = segments sent"),
        ({}, False, "nothing waits or runs when all have left"),
    ],
)
def test_segments_that_are_unaccounted_for_fail(changed: dict[str, float], quiet: bool, name: str):
    told = counts({(NATIVE, 200): 10, (NATIVE, 499): 2}, **{**ENDED, **changed})
    checks = check_metrics(account_of(answered=10, left=2), told, quiet=quiet)
    assert [check.name for check in checks if not check.passed] == [name]


def test_too_little_decoding_fails():
    told = counts(
        {(NATIVE, 200): 40}, segments_finished_total=11, queue_seconds_count=11, cache_hits_total=40
    )
    checks = check_metrics(account_of(answered=40, left=0), told, quiet=True)
    assert [check.passed for check in checks] == [True, True, True, True, False]


def test_the_exposition_is_summed_over_labels_and_looked_at_twice():
    text = """# TYPE dragoman_segments_finished counter
dragoman_segments_finished_total{model="a",reason="eos"} 3.0
dragoman_segments_finished_total{model="b",reason="eos"} 4.0
# TYPE dragoman_http_request_seconds histogram
dragoman_http_request_seconds_bucket{code="200",le="+Inf",method="GET",route="/livez"} 2.0
dragoman_http_request_seconds_count{code="200",method="GET",route="/livez"} 2.0
dragoman_http_request_seconds_sum{code="200",method="GET",route="/livez"} 0.5
"""
    found = counts_of(text)
    assert found.totals["dragoman_segments_finished_total"] == 7
    assert found.requests == {("/livez", 200): 2}
    later = counts_of(text.replace(" 4.0", " 6.0").replace('route="/livez"} 2.0', 'route="/livez"} 5.0'))
    assert later.since(found).totals["dragoman_segments_finished_total"] == 2
    assert later.since(found).requests == {("/livez", 200): 3}


def test_an_unclean_end_and_a_log_with_an_error_fail():
    assert all(check.passed for check in check_end(0, '{"level": "warning"}\n'))
    assert [check.passed for check in check_end(None, "")] == [False, True]
    assert [check.passed for check in check_end(-9, '{"event": "x", "level": "error"}')] == [False, False]
