from __future__ import annotations

from collections import Counter

from benchmarks.workload import Workload, forced, forced_mix, natural

SIZES = {"vocabulary_size": 50, "eos_id": 0}


def test_real_sentences_come_longest_first():
    workload = natural([[5, 0], [5, 6, 7, 0], [5, 6, 0]], max_target_tokens=9)
    assert [len(source) for source in workload.sources] == [4, 3, 2]
    assert workload.limits == [9, 9, 9]
    assert not workload.forced


def test_forced_sentences_decode_as_many_tokens_as_they_have():
    workload = forced(6, 25, **SIZES, seed=1)
    assert workload.forced
    assert [len(source) for source in workload.sources] == list(workload.limits) == [25] * 6


def test_random_sentences_end_once_and_hold_nothing_but_words():
    for source in forced(20, 12, **SIZES, seed=1).sources:
        *words, end = source
        assert end == 0
        assert all(2 <= word < 50 for word in words)


def test_a_mix_comes_in_whole_blocks_of_one_length_and_is_drawn_once():
    workload = forced_mix(5, **SIZES, seed=3)
    assert all(count % 32 == 0 for count in Counter(workload.limits).values())
    assert list(workload.limits) == sorted(workload.limits, reverse=True)
    assert len(set(workload.limits)) > 1
    assert workload == forced_mix(5, **SIZES, seed=3)
    assert workload != forced_mix(5, **SIZES, seed=4)


def test_grouping_by_limit_keeps_every_sentence_and_its_limit():
    workload = Workload([[1], [2], [3]], [7, 9, 7])
    assert workload.by_limit() == {7: [[1], [3]], 9: [[2]]}


def test_a_sample_is_spread_evenly_and_keeps_limits_beside_their_sentences():
    workload = Workload([[index] for index in range(10)], list(range(10)))
    sample = workload.sample(5)
    assert [source[0] for source in sample.sources] == list(sample.limits) == [0, 2, 4, 6, 8]
    assert workload.sample(99) == workload
