from __future__ import annotations

from pathlib import Path

import pytest

from app.errors import InvalidOption
from model.training.config import ModelSection, RunConfig
from model.training.config_file import check_files, load_run_config

SMALLEST = """
source = "en"
target = "pt"
output = "run"
{top}
[[data.source]]
name = "human"
path = "pairs.tsv"
"""
WITH_MODEL = SMALLEST + "[model]\n"


def load(tmp_path: Path, more: str = "", *, text: str = WITH_MODEL, top: str = "") -> RunConfig:
    path = tmp_path / "run.toml"
    path.write_text(text.format(top=top) + more)
    return load_run_config(path)


def complaint(tmp_path: Path, more: str = "", *, text: str = WITH_MODEL, top: str = "") -> str:
    with pytest.raises(InvalidOption) as caught:
        load(tmp_path, more, text=text, top=top)
    return caught.value.message


def test_the_smallest_file_has_defaults_for_the_rest(tmp_path: Path) -> None:
    config = load(tmp_path)
    assert config.model == ModelSection()
    assert config.training.max_steps == 10_000
    assert config.training.betas == (0.9, 0.98)
    assert config.dev is None


def test_paths_are_relative_to_the_file_wherever_they_stand(tmp_path: Path) -> None:
    config = load(
        tmp_path,
        """
        [[data.source]]
        name = "made"
        path = "/elsewhere/made.src"
        target_path = "made.tgt"
        [dev]
        source_path = "dev.en"
        target_path = "../dev.pt"
        [distillation]
        teacher = "teacher"
        """,
        text=SMALLEST.replace(
            "[[data", 'data.exclude = ["a/test.en", "/b/test.pt"]\ndata.cache = "cache"\n[[data'
        ),
    )
    assert config.output == tmp_path / "run"
    human, made = config.data.source
    assert human.path == tmp_path / "pairs.tsv"
    assert human.target_path is None
    assert (made.path, made.target_path) == (Path("/elsewhere/made.src"), tmp_path / "made.tgt")
    assert config.data.exclude == (tmp_path / "a/test.en", Path("/b/test.pt"))
    assert config.data.cache == tmp_path / "cache"
    assert config.dev is not None
    assert (config.dev.source_path, config.dev.target_path) == (tmp_path / "dev.en", tmp_path / "../dev.pt")
    assert config.distillation is not None
    assert config.distillation.teacher == tmp_path / "teacher"


@pytest.mark.parametrize(
    ("top", "more", "expected"),
    [
        ("sede = 3", "", "there is no key sede; did you mean seed?"),
        ("", "num_head = 8", "there is no key model.num_head; did you mean num_heads?"),
        ("", "[training]\nwarmup = 3", "there is no key training.warmup; did you mean warmup_steps?"),
        ("", "[vocabulary]\nsizes = 3", "there is no key vocabulary.sizes; did you mean size?"),
        ("", "[data.filters]\nmax_charcters = 9", "data.filters.max_charcters; did you mean max_characters?"),
        ("", "[[data.source]]\nname='a'\npath='b'\nwieght=2", "data.source.2.wieght; did you mean weight?"),
        ("", "[trainig]\nmax_steps = 3", "there is no key trainig; did you mean training?"),
        ("", "[dev]\nsource_path='a'\ntarget_path='b'\npatient=1", "dev.patient; did you mean patience?"),
        ("", "[distillation]\nteacher='a'\nhumans=[]", "distillation.humans; did you mean human?"),
        ("", "xyzzy = 1", "there is no key model.xyzzy; known are d_model, num_heads,"),
    ],
)
def test_an_unknown_key_names_the_nearest_one(tmp_path: Path, top: str, more: str, expected: str) -> None:
    message = complaint(tmp_path, more, top=top)
    assert expected in message
    assert str(tmp_path / "run.toml") in message


def test_all_faults_are_named_at_once(tmp_path: Path) -> None:
    message = complaint(tmp_path, "num_head = 8\n[training]\nmax_steps = 0\nclip = 1")
    assert "model.num_head" in message
    assert "training.max_steps is 0" in message
    assert "training.clip;" in message


def test_missing_keys_are_named(tmp_path: Path) -> None:
    message = complaint(tmp_path, text="source = 'en'\n[dev]\nsource_path = 'a'\n[[data.source]]\nname = 'a'")
    for key in ("target", "output", "dev.target_path", "data.source.1.path"):
        assert f"the key {key} is missing" in message


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("max_steps = '100'", "training.max_steps is '100'"),
        ("max_steps = true", "training.max_steps is True"),
        ("max_steps = 1.5", "training.max_steps is 1.5"),
        ("tensorboard = 1", "training.tensorboard is 1"),
        ("tensorboard = 'no'", "training.tensorboard is 'no'"),
        ("learning_rate = '1e-3'", "training.learning_rate is '1e-3'"),
        ("learning_rate = inf", "training.learning_rate is inf"),
        ("learning_rate = nan", "training.learning_rate is nan"),
        ("learning_rate = 0", "training.learning_rate is 0"),
        ("learning_rate = 2020-01-01", "training.learning_rate is '2020-01-01'"),
        ("betas = [0.9]", "training.betas"),
        ("betas = [0.9, 1.0]", "training.betas.2 is 1.0"),
        ("schedule = 'cosine'", "training.schedule is 'cosine'"),
        ("learning_rate_scales = { 'a.*' = -1 }", "training.learning_rate_scales.a.* is -1"),
        ("batch_tokens = [1]", "training.batch_tokens is [1]"),
    ],
)
def test_a_value_of_the_wrong_kind_is_named(tmp_path: Path, line: str, expected: str) -> None:
    assert expected in complaint(tmp_path, f"[training]\n{line}")


def test_whole_numbers_are_good_for_rates(tmp_path: Path) -> None:
    assert load(tmp_path, "[training]\nlearning_rate = 1\nclip_norm = 0").training.clip_norm == 0.0


@pytest.mark.parametrize("section", ["training = 3", "training = []", "data = 'a'"])
def test_a_value_in_the_place_of_a_section_is_named(tmp_path: Path, section: str) -> None:
    text = f"source='en'\ntarget='pt'\noutput='o'\n{section}\n" + (
        "" if section.startswith("data") else "[[data.source]]\nname='a'\npath='b'\n"
    )
    assert section.partition(" ")[0] + " is" in complaint(tmp_path, "[model]", text=text)


@pytest.mark.parametrize(
    ("top", "more", "expected"),
    [
        ("initial = 'm'", "[model]", "2 of them are given"),
        ("initial = 'm'", "[distillation]\nteacher = 't'", "2 of them are given"),
        ("", "[model]\n[distillation]\nteacher = 't'", "2 of them are given"),
        ("", "", "0 of them are given"),
        ("", "[distillation]\nteacher = 't'\nfrom_teacher = false", "0 of them are given"),
        ("initial = 'm'", "[vocabulary]", "leave `[vocabulary]` out"),
        ("", "[distillation]\nteacher = 't'\n[vocabulary]", "leave `[vocabulary]` out"),
        (
            "",
            "[model]\n[vocabulary]\n[distillation]\nteacher = 't'\nfrom_teacher = false",
            "leave `[vocabulary]` out",
        ),
        ("", "[model]\n[training]\naverage_of = 'best'", "average_of = 'best' needs a [dev] section"),
        (
            "",
            "[model]\n[[data.source]]\nname = 'human'\npath = 'b'",
            "two [[data.source]] have the same name",
        ),
        (
            "",
            "[distillation]\nteacher = 't'\nhuman = ['human', 'humon']",
            "human names ['humon']; the sources are ['human']",
        ),
        (
            "",
            "[model]\n[vocabulary]\npath = 'v'\nsize = 500\nbyte_fallback = true",
            "nothing looks at byte_fallback, size; leave one or the other out",
        ),
        (
            "",
            "[model]\n[dev]\nsource_path = 'a'\ntarget_path = 'b'\nevery_steps = 0\npatience = 2",
            "patience = 2 counts evaluations",
        ),
        (
            "",
            "[distillation]\nteacher = 't'\ndivergence_weight = 0\ntoken_weight = 0\nhidden_weight = 0",
            "divergence_weight, token_weight, hidden_weight are all 0",
        ),
        (
            "",
            "[distillation]\nteacher = 't'\nhuman = ['human']\n"
            "human_divergence_weight = 0\nhuman_token_weight = 0",
            "human_divergence_weight, human_token_weight, human_hidden_weight are all 0",
        ),
        ("", "[distillation]\nteacher = 't'\nsampled_others = 100000000", "sampled_others is 100000000"),
        (
            "",
            "[model]\n[training]\nschedule_power = 2",
            "schedule_power is of the linear schedule, and this one is inverse_sqrt; leave it out",
        ),
        (
            "",
            "[distillation]\nteacher = 't'\n[training]\nlabel_smoothing = 0.1",
            "label_smoothing is for training from text",
        ),
        (
            "",
            "[distillation]\nteacher = 't'\nhuman_token_weight = 1\nhuman_hidden_weight = 0",
            "distillation.human_hidden_weight, distillation.human_token_weight: for the sources that",
        ),
        (
            "",
            "[model]\n[training]\nmax_steps = 100\nwarmup_steps = 100",
            "training.warmup_steps is 100 and training.max_steps 100, so that the learning rate rises",
        ),
        (
            "",
            "[distillation]\nteacher = 't'\nhuman = ['human']\nhidden_weight = 1\ntoken_weight = 0",
            "distillation.hidden_weight, distillation.token_weight: for targets that the teacher made",
        ),
        (
            "initial = 'm'",
            "[distillation]\nteacher = 't'\nfrom_teacher = false\nfit_steps = 5",
            "distillation.fit_steps is for a student that starts as its teacher",
        ),
        (
            "",
            "[model]\n[training]\nmax_steps = 250\ncheckpoint_every_steps = 100\naverage = 4",
            "training.average is 4, but 250 steps with one checkpoint every 100 make 3",
        ),
        (
            "",
            "[model]\n[training]\nmax_steps = 250\naverage = 2\naverage_of = 'best'\n"
            "[dev]\nsource_path = 'a'\ntarget_path = 'b'\nevery_steps = 0",
            "training.average is 2, but 250 steps with one checkpoint every 250 make 1",
        ),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, top: str, more: str, expected: str) -> None:
    assert expected in complaint(tmp_path, more, text=SMALLEST, top=top)


@pytest.mark.parametrize(
    ("top", "more"),
    [
        ("initial = 'm'", ""),
        ("", "[distillation]\nteacher = 't'\nhuman = ['human']"),
        ("", "[model]\n[distillation]\nteacher = 't'\nfrom_teacher = false"),
        ("initial = 'm'", "[distillation]\nteacher = 't'\nfrom_teacher = false"),
        ("", "[model]\n[vocabulary]\nsize = 500"),
        ("", "[distillation]\nteacher = 't'\n[training]\nlabel_smoothing = 0"),
        ("", "[model]\n[training]\nschedule = 'linear'\nschedule_power = 2"),
        ("", "[model]\n[training]\nmax_steps = 250\ncheckpoint_every_steps = 100\naverage = 3"),
        ("", "[distillation]\nteacher = 't'\nhuman = ['human']\nhuman_token_weight = 1"),
    ],
)
def test_every_way_to_start_is_open(tmp_path: Path, top: str, more: str) -> None:
    load(tmp_path, more, text=SMALLEST, top=top)


def test_a_complaint_about_a_section_does_not_print_the_section(tmp_path: Path) -> None:
    message = complaint(
        tmp_path, "[dev]\nsource_path = 'a'\ntarget_path = 'b'\nstop_by = 'bleu'\ndecode = false"
    )
    assert message.endswith("dev: stop_by = 'bleu' needs decode = true")


def test_a_model_that_cannot_be_is_refused(tmp_path: Path) -> None:
    message = complaint(tmp_path, "d_model = 100\nnum_heads = 8")
    assert "model: d_model is 100; it must be even and a multiple of num_heads (8)" in message


@pytest.mark.parametrize("content", [b"source = ", b"\xff\xfe"])
def test_what_is_no_toml_is_refused_by_name(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "run.toml"
    path.write_bytes(content)
    with pytest.raises(InvalidOption, match=r"run\.toml cannot be read as TOML"):
        load_run_config(path)
    with pytest.raises(InvalidOption, match="absent cannot be read"):
        load_run_config(tmp_path / "absent")


def test_the_sections_documented_keys_are_all_there_are() -> None:
    """A key without a word of documentation, or a word about no key, would mislead."""
    for section in (RunConfig, *(type_ for type_ in _sections())):
        documented = {
            line.strip().partition(":")[0]
            for line in (section.__doc__ or "").partition("Attributes:")[2].splitlines()
            if ": " in line and line.startswith(" " * 8) and not line.startswith(" " * 12)
        }
        if documented:
            assert documented <= set(section.model_fields)
            missing = set(section.model_fields) - documented
            assert missing <= {"model", "vocabulary", "data", "dev", "training", "distillation"}


def _sections() -> tuple[type[RunConfig], ...]:
    from model.training import config

    names = ("VocabularySection", "DevSection", "DataSection", "TrainingSection", "DistillationSection")
    return tuple(getattr(config, name) for name in names)


def test_files_that_do_not_exist_are_all_named_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "pairs.tsv").touch()
    check_files(load(tmp_path))
    more = '[dev]\nsource_path = "dev.en"\ntarget_path = "pairs.tsv"\n[vocabulary]\npath = "v.spm"'
    with pytest.raises(InvalidOption) as caught:
        check_files(load(tmp_path, more))
    assert f"vocabulary.path is {tmp_path / 'v.spm'}, dev.source_path is {tmp_path / 'dev.en'}" in str(
        caught.value
    )
    assert "pairs.tsv" not in str(caught.value)


def test_a_language_that_is_no_code_is_refused_before_the_training(tmp_path: Path) -> None:
    text = WITH_MODEL.replace('source = "en"', 'source = "english!"')
    assert "source is 'english!'" in complaint(tmp_path, text=text)


def test_a_list_that_is_empty_because_its_entries_are_wrong_is_not_complained_about(tmp_path: Path) -> None:
    words = complaint(
        tmp_path, text=WITH_MODEL.replace('path = "pairs.tsv"', 'path = "p"\nsource_column = 0')
    )
    assert "column is 0" in words
    assert "at least 1 item" not in words


def test_a_gated_decoder_with_more_queries_can_be_trained_from_nothing(tmp_path: Path) -> None:
    model = load(tmp_path, "decoder_cell = 'gated_attention'\ndecoder_query_heads = 16").model
    assert model is not None
    config = model.transformer(100, eos_id=0)
    assert (config.decoder_cell, config.num_query_heads, config.num_heads) == ("gated_attention", 16, 8)
    assert "multiple of num_heads" in complaint(tmp_path, "decoder_query_heads = 12")
