"""What a bundle becomes when it is served: tokenizer, shortlist, and runners over its sessions."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from app.bundle import Bundle, Variant
from app.decoding.hypothesis import Hypothesis
from app.decoding.options import MAX_BEAM_SIZE
from app.decoding.shortlist import Shortlist
from app.errors import BundleCorrupt, BundleUnsupported, DeviceUnavailable, InvalidOption
from app.runtime.device import Device
from app.runtime.freed_memory import return_freed_memory
from app.runtime.gpu.model import DEVICE_VARIANTS, DeviceModel, load_device_model
from app.runtime.gpu.runner import DeviceRunner
from app.runtime.guidance_of_request import TargetPlan, plan_targets
from app.runtime.limits_proof import prove_limits
from app.runtime.onnx_model import OnnxModel, load_model
from app.runtime.onnx_runner import OnnxRunner
from app.runtime.preparation import PreparedText, assemble, prepare
from app.runtime.request import PairInfo, TextResult, TranslationRequest
from app.runtime.runner import ModelRunner
from app.text import Tokenizer


@dataclass(frozen=True)
class ServedModel:
    """What the engine needs of one bundle besides its sessions.

    Attributes:
        id: bundle id.
        pairs: directions it translates.
        tokenizer: shared by all threads.
        shortlist: shared by all threads, or None.
        eos_id: ends source and target.
        max_source_tokens: longer segments are wrapped.
        max_target_tokens: positions of the decoder.
        max_target_ratio: default limit of target tokens per source token.
        max_beam_size: widest beam; 1 when the bundle cannot search beams.
        can_guide: whether the bundle has the graphs for anything but the model's own choice of tokens.
        devices: where it runs; on GPUs one for each worker.
        make_runner: a fresh runner for the worker of this number.
    """

    id: str
    pairs: tuple[PairInfo, ...]
    tokenizer: Tokenizer
    shortlist: Shortlist | None
    eos_id: int
    max_source_tokens: int
    max_target_tokens: int
    max_target_ratio: float
    make_runner: Callable[[int], ModelRunner]
    max_beam_size: int = 1
    can_guide: bool = False
    devices: tuple[Device, ...] = (Device(),)

    def check_request(self, request: TranslationRequest) -> None:
        """Refuse what this model cannot do, before any work.

        Raises:
            InvalidOption: names the option, the bundle and the remedy.
        """
        options = request.options
        if options.beam_size > self.max_beam_size:
            raise InvalidOption(
                f"beam_size is {options.beam_size}; bundle {self.id} can search at most "
                f"{self.max_beam_size} beams. Use fewer, or export the bundle again with this version"
            )
        if request.is_guided and not self.can_guide:
            raise InvalidOption(
                f"bundle {self.id} has no graph for min_target_tokens, min_target_ratio, "
                "no_repeat_ngram_size, repetition_penalty, forbidden, alignment and target_prefixes; export "
                "the bundle again with this version, or leave them out"
            )
        if options.min_target_tokens > self.max_target_tokens:
            raise InvalidOption(
                f"min_target_tokens is {options.min_target_tokens}; bundle {self.id} translates a segment "
                f"into at most {self.max_target_tokens} tokens. Ask for fewer"
            )

    def prepare(self, request: TranslationRequest) -> tuple[list[PreparedText], list[TargetPlan]]:
        """Cut the request's texts into segments, and say what each segment's target is held to.

        Raises:
            InvalidOption: a phrase or a prefix does not suit the model or its text.
        """
        prepared = [
            prepare(
                text,
                language=request.source,
                tokenizer=self.tokenizer,
                max_source_tokens=self.max_source_tokens,
                shortlist=self.shortlist,
            )
            for text in request.texts
        ]
        plans = plan_targets(
            request,
            prepared,
            tokenizer=self.tokenizer,
            default_ratio=self.max_target_ratio,
            model_limit=self.max_target_tokens,
        )
        return prepared, plans

    def assemble(
        self,
        request: TranslationRequest,
        prepared: Sequence[PreparedText],
        hypotheses: Iterable[Sequence[Hypothesis]],
    ) -> list[TextResult]:
        """Put the translations of all segments, in their order, into the texts they come from."""
        left = iter(hypotheses)
        return [
            assemble(
                text,
                [next(left) for _ in text.segments],
                self.tokenizer,
                with_alignment=request.options.alignment,
            )
            for text in prepared
        ]


def load_served_model(
    bundle: Bundle,
    *,
    variant: Variant,
    max_rows: int,
    use_shortlist: bool,
    devices: Sequence[Device] = (Device(),),
    gpu_memory_bytes: int | None = None,
    use_cuda_graphs: bool = True,
) -> ServedModel:
    """Open a bundle's sessions, tokenizer and shortlist; blocking.

    Args:
        bundle: a verified bundle.
        variant: which arithmetic.
        max_rows: rows per row group of a runner.
        use_shortlist: limit the output to the bundle's shortlist, if it has one and the variant a use for it.
        devices: where to run it: GPUs, one for each worker, or the CPU for all.
        gpu_memory_bytes: most that all models may hold on a GPU in weights and row slots, or None.
        use_cuda_graphs: launch whole decoder steps at once, on GPUs.

    Raises:
        BundleError: something in the bundle cannot be used.
        DeviceUnavailable: a device cannot be used, or has too little memory.
    """
    manifest = bundle.manifest
    if any(pair.target_token_id is not None for pair in manifest.pairs):
        raise BundleUnsupported(
            f"bundle {manifest.id} chooses its target language by a token, which this version does not feed "
            "to the model; export a bundle for one pair"
        )
    tokenizer = Tokenizer.open(bundle.file(manifest.tokenizer), eos_id=manifest.tokens.eos_id)
    if tokenizer.vocabulary_size != manifest.sizes.vocabulary_size:
        raise BundleCorrupt(
            f"bundle {manifest.id}: the tokenizer has {tokenizer.vocabulary_size} pieces and the model "
            f"{manifest.sizes.vocabulary_size}; they do not belong together, export the bundle again"
        )
    graphs = _load_graphs(
        bundle,
        variant=variant,
        max_rows=max_rows,
        use_shortlist=use_shortlist,
        devices=devices,
        gpu_memory_bytes=gpu_memory_bytes,
        use_cuda_graphs=use_cuda_graphs,
    )
    shortlist = None
    if graphs.need_candidates and manifest.shortlist is not None:
        shortlist = Shortlist.load(bundle.file(manifest.shortlist))
        _check_shortlist(bundle, shortlist)
    return_freed_memory()
    return ServedModel(
        id=manifest.id,
        pairs=tuple(PairInfo(pair.source, pair.target, manifest.id) for pair in manifest.pairs),
        tokenizer=tokenizer,
        shortlist=shortlist,
        eos_id=manifest.tokens.eos_id,
        max_source_tokens=manifest.limits.max_source_tokens,
        max_target_tokens=manifest.limits.max_target_tokens,
        max_target_ratio=manifest.limits.max_target_ratio,
        make_runner=graphs.make_runner,
        # A step looks at twice as many continuations as beams, so the vocabulary must hold them.
        max_beam_size=(
            max(1, min(MAX_BEAM_SIZE, manifest.sizes.vocabulary_size // 2)) if graphs.can_search_beams else 1
        ),
        can_guide=graphs.can_guide,
        devices=tuple(devices),
    )


@dataclass(frozen=True)
class _Graphs:
    """What a variant's loaded graphs can do, and runners of them."""

    make_runner: Callable[[int], ModelRunner]
    can_search_beams: bool
    can_guide: bool
    need_candidates: bool = False


def _load_graphs(
    bundle: Bundle,
    *,
    variant: Variant,
    max_rows: int,
    use_shortlist: bool,
    devices: Sequence[Device],
    gpu_memory_bytes: int | None,
    use_cuda_graphs: bool,
) -> _Graphs:
    if variant in DEVICE_VARIANTS:
        _prove_limits_on_cpu(bundle)
        loaded = [
            load_device_model(
                bundle,
                variant=variant,
                device=device,
                memory_limit_bytes=gpu_memory_bytes,
                use_cuda_graphs=use_cuda_graphs,
            )
            for device in devices
        ]
        return _Graphs(
            functools.partial(_device_runner, loaded, max_rows=max_rows),
            can_search_beams=loaded[0].beam_step is not None,
            can_guide=loaded[0].guided_step is not None,
        )
    if gpus := [str(device) for device in devices if device.kind != "cpu"]:
        raise DeviceUnavailable(
            f"variant {variant} runs on the CPU alone, not on {', '.join(gpus)}; ask for cuda-fp16, or set "
            "DRAGOMAN_DEVICE=cpu"
        )
    model: OnnxModel = load_model(bundle, variant=variant, use_shortlist=use_shortlist)
    prove_limits(bundle, model)

    def make_runner(_worker_index: int) -> ModelRunner:
        return OnnxRunner(model, max_rows=max_rows)

    return _Graphs(
        make_runner,
        can_search_beams=model.beam_step is not None,
        can_guide=model.guided_step is not None,
        need_candidates=model.candidates is not None,
    )


def _prove_limits_on_cpu(bundle: Bundle) -> None:
    """Prove the limits with the float32 graphs, which an export makes beside all others.

    A GPU reads whatever lies behind a table that is too short, and says nothing.
    """
    if "cpu-fp32" in bundle.manifest.variants:
        prove_limits(bundle, load_model(bundle, variant="cpu-fp32", use_shortlist=False))


def _device_runner(models: Sequence[DeviceModel], worker_index: int, *, max_rows: int) -> DeviceRunner:
    """A runner on the worker's GPU; on the CPU all workers share the sessions."""
    if models[0].device.kind == "cpu":
        worker_index = 0
    if worker_index >= len(models):
        raise ValueError(f"worker {worker_index} has no GPU of its own; there are {len(models)}")
    return DeviceRunner(models[worker_index], max_rows=max_rows)


def _check_shortlist(bundle: Bundle, shortlist: Shortlist) -> None:
    manifest = bundle.manifest
    if shortlist.vocabulary_size != manifest.sizes.vocabulary_size:
        raise BundleCorrupt(
            f"bundle {manifest.id}: the shortlist is for {shortlist.vocabulary_size} tokens and the model "
            f"has {manifest.sizes.vocabulary_size}; they do not belong together, export the bundle again"
        )
    eos_id = manifest.tokens.eos_id
    # Every source ends with end-of-sentence, so what that token allows is allowed to every sentence.
    if eos_id not in shortlist.candidates([eos_id]):
        raise BundleCorrupt(
            f"bundle {manifest.id}: the shortlist never allows the end of a sentence (token {eos_id}), so no "
            "translation would end; export the bundle again, without a shortlist or with another one"
        )
