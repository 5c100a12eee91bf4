"""`dragoman translate`: arguments, a pipe, or a file that may be interrupted and resumed."""

from __future__ import annotations

import asyncio
import json
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import ExitStack, aclosing
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from app.api.engine_protocol import TranslationEngine
from app.bundle import MANIFEST_NAME, sha256_of
from app.cli.file_job import InputFacts, JobIdentity, PartialOutput, inspect_input, inspected_lines
from app.cli.in_order import Window, in_order
from app.cli.lines import Line, LineDecoder, lines_of_descriptor
from app.cli.loading import load_models
from app.cli.opening import Choice, choose, open_engine
from app.cli.output_place import OutputPlace
from app.cli.placement import Placement, place_models, tell_placement
from app.cli.progress import LineProgress
from app.decoding.options import DecodingOptions
from app.errors import InvalidOption
from app.runtime.events import SilentObserver
from app.runtime.request import PairInfo, TextResult, TranslationRequest, WarningCode
from app.settings import Settings, load_settings

_UNBOUNDED_TOKENS = 1_000_000_000
_MIN_LINES_IN_FLIGHT = 256
_LINES_IN_FLIGHT_PER_ROW = 4
"""As many keep every row busy; with more, the first lines of a file finish later and Ctrl-C loses more."""

_MAX_CHARACTERS_IN_FLIGHT = 400_000
_BYTE_ORDER_MARK = "\ufeff"
_REMARK_OF = {
    WarningCode.TARGET_TRUNCATED: "reached the limit on target tokens and may be incomplete",
    WarningCode.SEGMENT_WRAPPED: "had a segment too long for the model, translated in pieces",
    WarningCode.UNKNOWN_CHARACTERS: "hold characters the model does not know, which may be missing",
}
_MAX_LINES_NAMED = 5
_GREEDY = DecodingOptions()


@dataclass(frozen=True)
class FileOptions:
    """How a file is translated.

    Attributes:
        source_file: the input.
        output: where the translation will lie.
        resume: go on with OUTPUT.partial.
        force: replace OUTPUT.
        report: where to say in JSON what was done and how fast; None for nowhere.
    """

    source_file: Path
    output: Path
    resume: bool
    force: bool
    report: Path | None = None


class Translator:
    """One pair of one engine, line by line; remembers what its user should know.

    Attributes:
        lines_of: warning -> numbers of the lines that have it.
        num_lines: lines translated, empty ones included.
        num_source_tokens: of their segments, ends of sentences included.
        num_target_tokens: of their translations, likewise.
    """

    def __init__(self, engine: TranslationEngine, pair: PairInfo, decoding: DecodingOptions) -> None:
        """Translate by `engine`, which must have been started."""
        self._engine = engine
        self._pair = pair
        self._decoding = decoding
        self.lines_of: dict[WarningCode, list[int]] = {}
        self.num_lines = self.num_source_tokens = self.num_target_tokens = 0

    async def line(self, text: str, number: int) -> str:
        """A line's translation, on one line."""
        if text.startswith(_BYTE_ORDER_MARK) and number == 1:
            return _BYTE_ORDER_MARK + await self.line(text[1:], number)
        if not text:
            self.num_lines += 1
            return ""
        request = TranslationRequest((text,), self._pair.source, self._pair.target, self._decoding)
        result: TextResult = (await self._engine.translate(request)).texts[0]
        for code in Counter(warning.code for warning in result.warnings):
            self.lines_of.setdefault(code, []).append(number)
        self.num_lines += 1
        self.num_source_tokens += sum(segment.num_source_tokens for segment in result.segments)
        self.num_target_tokens += sum(segment.num_target_tokens for segment in result.segments)
        # A line end in a translation would shift every line after it against the source.
        return result.text.replace("\r\n", " ").replace("\n", " ")

    def remarks(self) -> list[str]:
        """One sentence for each kind of warning."""
        return [
            f"{len(numbers)} of the lines {_REMARK_OF[code]}: {_named(sorted(numbers))}"
            for code, numbers in sorted(self.lines_of.items())
        ]


def translate(
    texts: Sequence[str],
    file: FileOptions | None,
    *,
    source: str | None,
    target: str | None,
    encoding: str,
    overrides: Mapping[str, object],
    decoding: DecodingOptions = _GREEDY,
) -> None:
    """Translate texts, else a file, else standard input.

    Raises:
        InvalidOption: the bundle cannot decode as asked, or a file is in the way.
        KeyboardInterrupt: after what is finished was written.
        DragomanError: see the modules that do the parts.
    """
    settings = load_settings(overrides)
    decoder = LineDecoder(encoding)
    if file is None:
        _check_streams(needs_input=not texts)
    choice = choose(settings.bundles, source=source, target=target)
    placement = place_models(settings, [choice.bundle])
    tell_placement(placement)
    with ExitStack() as stack:
        job = None
        if file is not None:
            # Everything that may be wrong with the files shows before a model is loaded.
            place = stack.enter_context(
                OutputPlace(file.output, source_file=file.source_file, resume=file.resume, force=file.force)
            )
            if file.report is not None:
                _check_report(file.report, place, source_file=file.source_file, force=file.force)
            facts = inspect_input(file.source_file, decoder)
            identity = _identity(facts, choice, settings, placement, decoder, decoding)
            output = stack.enter_context(PartialOutput(place, identity, resume=file.resume))
            job = _FileJob(file.source_file, facts, output)
        engine = open_engine(
            load_models([choice.bundle], settings, placement),
            settings,
            placement,
            max_waiting_tokens=_UNBOUNDED_TOKENS,
            observer=SilentObserver(),
        )
        translator = Translator(engine, choice.pair, decoding)
        window = Window(
            max_items=max(
                _MIN_LINES_IN_FLIGHT, _LINES_IN_FLIGHT_PER_ROW * placement.max_rows * placement.num_workers
            ),
            max_size=_MAX_CHARACTERS_IN_FLIGHT,
        )

        async def run() -> float:
            engine.start()
            started_s = time.perf_counter()
            try:
                if texts:
                    lines = _lines_of_texts(texts)
                    await _translate_lines(lines, translator, LineDecoder("utf-8"), window, write=_print)
                elif job is None:
                    if sys.stdin.isatty():
                        print("type lines to translate; Ctrl-D ends", file=sys.stderr)
                    lines = lines_of_descriptor(sys.stdin.fileno())
                    await _translate_lines(lines, translator, decoder, window, write=_print)
                else:
                    await _translate_file(translator, job, decoder, window)
                return time.perf_counter() - started_s
            finally:
                await engine.stop(drain_s=0)

        elapsed_s = asyncio.run(run())
    if file is not None and file.report is not None:
        report = _report(translator, choice, settings, placement, decoding, elapsed_s=elapsed_s)
        file.report.write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    for remark in translator.remarks():
        print(remark, file=sys.stderr)


@dataclass(frozen=True)
class _FileJob:
    source_file: Path
    facts: InputFacts
    output: PartialOutput


async def _translate_lines(
    lines: AsyncIterator[Line],
    translator: Translator,
    decoder: LineDecoder,
    window: Window,
    *,
    write: Callable[[bytes], None],
    on_translated: Callable[[], None] = lambda: None,
    num_done: int = 0,
) -> None:
    """Translate lines, the first of which follows `num_done` others, and write each when its turn comes."""
    finished: dict[int, bytes] = {}

    async def work(line: Line) -> None:
        translation = await translator.line(decoder.decode(line), line.number)
        finished[line.number] = translation.encode() + line.ending
        on_translated()

    number = num_done
    try:
        async with aclosing(in_order(lines, work, size_of=_size, window=window)) as results:
            async for line, _ in results:
                number = line.number
                write(finished.pop(number))
    finally:
        # Ctrl-C may have come between the end of some lines' translations and their turns.
        while (translation := finished.pop(number + 1, None)) is not None:
            number += 1
            write(translation)


async def _translate_file(
    translator: Translator, job: _FileJob, decoder: LineDecoder, window: Window
) -> None:
    num_done = job.output.num_done
    lines = _lines_after(job.source_file, job.facts, num_done)
    console = Console(stderr=True)
    # A bar's last state in a log or in another program's hands would only look like an error.
    console.quiet = not console.is_terminal
    with LineProgress(num_lines=job.facts.num_lines, num_done=num_done, console=console) as progress:

        def write(translation: bytes) -> None:
            job.output.write(translation)
            progress.line_written()

        await _translate_lines(
            lines,
            translator,
            decoder,
            window,
            write=write,
            on_translated=progress.line_translated,
            num_done=num_done,
        )
    job.output.finish()


async def _lines_after(path: Path, facts: InputFacts, num_done: int) -> AsyncIterator[Line]:
    for line in inspected_lines(path, facts):
        if line.number > num_done:
            yield line


async def _lines_of_texts(texts: Sequence[str]) -> AsyncIterator[Line]:
    for number, text in enumerate(texts, 1):
        yield Line(number, text.encode("utf-8", "surrogateescape"), b"\n")


def _print(translation: bytes) -> None:
    sys.stdout.buffer.write(translation)
    sys.stdout.buffer.flush()


def _check_streams(*, needs_input: bool) -> None:
    """Python has None for a stream that was closed when it started."""
    if needs_input and sys.stdin is None:
        raise InvalidOption("standard input is closed; give TEXTs, a pipe, or --input and --output")
    if sys.stdout is None:
        raise InvalidOption("standard output is closed; redirect it, or use --input and --output")


def _identity(
    facts: InputFacts,
    choice: Choice,
    settings: Settings,
    placement: Placement,
    decoder: LineDecoder,
    decoding: DecodingOptions,
) -> JobIdentity:
    return JobIdentity(
        input_sha256=facts.sha256,
        input_bytes=facts.num_bytes,
        encoding=decoder.name,
        source=choice.pair.source,
        target=choice.pair.target,
        model=choice.pair.model,
        manifest_sha256=sha256_of(choice.bundle.path / MANIFEST_NAME),
        variant=placement.choice.variant,
        use_shortlist=settings.use_shortlist,
        beam_size=decoding.beam_size,
        length_penalty=decoding.length_penalty,
    )


def _check_report(report: Path, place: OutputPlace, *, source_file: Path, force: bool) -> None:
    if not report.parent.is_dir():
        raise InvalidOption(f"{report.parent} is not a folder; make it, or name another report")
    taken = (source_file, place.output, place.partial, place.facts, place.new_facts, place.lock)
    if any(report.resolve() == path.resolve() for path in taken):
        raise InvalidOption(
            f"the report {report} would be written over the input or the output; name another"
        )
    if report.exists() and not (force and report.is_file()):
        raise InvalidOption(f"{report} exists; pass --force to replace a file, or name another report")


def _report(
    translator: Translator,
    choice: Choice,
    settings: Settings,
    placement: Placement,
    decoding: DecodingOptions,
    *,
    elapsed_s: float,
) -> dict[str, object]:
    """What this run did; a resumed one says nothing of the lines that were there already."""
    return {
        "model": choice.pair.model,
        "source": choice.pair.source,
        "target": choice.pair.target,
        "variant": placement.choice.variant,
        "devices": [str(device) for device in placement.choice.devices],
        "use_shortlist": settings.use_shortlist,
        "beam_size": decoding.beam_size,
        "length_penalty": decoding.length_penalty,
        "num_lines": translator.num_lines,
        "num_source_tokens": translator.num_source_tokens,
        "num_target_tokens": translator.num_target_tokens,
        "elapsed_s": elapsed_s,
        "lines_with_warnings": {code.value: sorted(lines) for code, lines in translator.lines_of.items()},
    }


def _size(line: Line) -> int:
    return len(line.content)


def _named(numbers: list[int]) -> str:
    shown = ", ".join(map(str, numbers[:_MAX_LINES_NAMED]))
    return shown if len(numbers) <= _MAX_LINES_NAMED else f"{shown} and others"
