from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

from benchmarks.peers.ctranslate2_process import PreparedJobs, peer_job
from benchmarks.peers.tuning import worth_trying
from benchmarks.workload import Workload

PIECES = ["</s>", "<unk>", "a", "b", "c"]


@dataclass(frozen=True)
class Answer:
    hypotheses: list[list[str]]


class Future:
    def __init__(self, answer: Answer) -> None:
        self._answer = answer

    def result(self) -> Answer:
        return self._answer


class FakeTranslator:
    """Repeats the source, cut at the limit, as the real one would with such a model."""

    def __init__(self) -> None:
        self.calls: list[dict[str, object]] = []

    def translate_batch(self, tokens, *, max_decoding_length, asynchronous=False, **options):
        self.calls.append({"tokens": tokens, "limit": max_decoding_length, **options})
        answers = [Answer([sentence[:max_decoding_length]]) for sentence in tokens]
        return [Future(answer) for answer in answers] if asynchronous else answers


def job(workload: Workload, *, one_by_one: bool):
    return peer_job(
        Path("model"), workload, PIECES, beam_size=1, use_vmap=True, num_threads=2, one_by_one=one_by_one
    )


def test_sources_become_pieces_without_the_end_of_sentence():
    found = job(Workload([[2, 3, 0], [4, 0]], [9, 9]), one_by_one=False)
    assert [batch.tokens for batch in found.batches] == [[["a", "b"], ["c"]]]


def test_the_end_of_sentence_counts_only_where_it_was_chosen():
    translator = FakeTranslator()
    jobs = PreparedJobs(lambda folder, num_threads: translator)
    workload = Workload([[2, 3, 0], [2, 3, 4, 0], [4, 0]], [2, 2, 5])
    number = jobs.answer({"prepare": asdict(job(workload, one_by_one=False))})["job"]
    # Two sentences reach their limit of 2; the third makes one token and ends.
    assert jobs.answer({"run": number})["num_tokens"] == 2 + 2 + 2


def test_one_by_one_never_puts_two_sentences_in_a_call():
    translator = FakeTranslator()
    jobs = PreparedJobs(lambda folder, num_threads: translator)
    prepared = asdict(job(Workload([[2, 0], [3, 0], [4, 0]], [5, 5, 7]), one_by_one=True))
    jobs.answer({"run": jobs.answer({"prepare": prepared})["job"]})
    assert all(len(call["tokens"]) == 1 for call in translator.calls)
    assert {call["limit"] for call in translator.calls} == {5, 7}
    assert all(call["use_vmap"] for call in translator.calls)


def test_a_translator_is_loaded_once_for_all_jobs_of_a_model():
    loaded: list[tuple[str, int]] = []

    def load(folder: Path, num_threads: int) -> FakeTranslator:
        loaded.append((str(folder), num_threads))
        return FakeTranslator()

    jobs = PreparedJobs(load)
    prepared = asdict(job(Workload([[2, 0]], [5]), one_by_one=False))
    for _ in range(3):
        jobs.answer({"forget": jobs.answer({"prepare": prepared})["job"]})
    assert loaded == [("model", 2)]


def test_batches_are_tried_only_as_large_as_leave_one_for_every_replica():
    hundred = Workload([[2, 0]] * 100, [5] * 100)
    assert worth_trying(job(hundred, one_by_one=False), (8, 32, 50, 64)) == [8, 32, 50]
    assert worth_trying(job(hundred, one_by_one=False), (64, 128)) == [64]
    assert worth_trying(job(hundred, one_by_one=True), (8, 32)) == [1]
