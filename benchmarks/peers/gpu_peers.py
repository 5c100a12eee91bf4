"""Other engines on the same device with the same weights: CTranslate2 in float16, PyTorch as it stands.

Both are optional; what is missing is said, not guessed.
"""

from __future__ import annotations

import importlib.util
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from app.runtime.device import Device
from benchmarks.gpu_models import CheckedModel, random_weights


class NotMeasured(Exception):
    """Why a figure does not exist."""


@dataclass(frozen=True)
class PeerRate:
    """Another engine's throughput.

    Attributes:
        engine: its name, version and arithmetic.
        num_sentences: decoded at the same time.
        beam_size: 1 is greedy.
        tokens_per_s: target tokens a second.
    """

    engine: str
    num_sentences: int
    beam_size: int
    tokens_per_s: float


class CTranslate2Device:
    """CTranslate2's model of the same weights, on the device."""

    def __init__(self, checked: CheckedModel, device: Device) -> None:
        """Load it: float16 on a GPU, float32 on a CPU.

        Raises:
            NotMeasured: the engine, its model or its GPU is missing.
        """
        if importlib.util.find_spec("ctranslate2") is None:
            raise NotMeasured("ctranslate2 is not installed")
        if checked.ctranslate2 is None:
            raise NotMeasured("the model was exported where ctranslate2 is not installed")
        import ctranslate2

        from benchmarks.peers.ctranslate2_model import pieces_of

        compute_type = "float16" if device.kind == "cuda" else "float32"
        try:
            self._translator = ctranslate2.Translator(
                str(checked.ctranslate2),
                device=device.kind,
                device_index=device.index,
                compute_type=compute_type,
                intra_threads=1,
            )
        except (RuntimeError, ValueError) as error:
            raise NotMeasured(f"CTranslate2 {ctranslate2.__version__} refuses: {error}") from error
        self.name = f"CTranslate2 {ctranslate2.__version__} {compute_type}"
        manifest = checked.bundle.manifest
        self._pieces = pieces_of(checked.bundle.file(manifest.tokenizer).read_bytes())

    def rate(
        self,
        sources: Sequence[Sequence[int]],
        *,
        target_length: int,
        num_sentences: int,
        beam_size: int,
        min_s: float,
    ) -> PeerRate:
        """Decode batches of so many sentences, whose targets all have one length, for `min_s` seconds."""
        batch = [
            [self._pieces[token] for token in sources[index % len(sources)][:-1]]
            for index in range(num_sentences)
        ]

        def decode() -> int:
            results = self._translator.translate_batch(
                batch,
                beam_size=beam_size,
                max_decoding_length=target_length,
                max_batch_size=num_sentences,
            )
            return sum(len(result.hypotheses[0]) for result in results)

        return PeerRate(self.name, num_sentences, beam_size, _tokens_per_s(decode, min_s))


class TorchDevice:
    """The PyTorch model as it stands, step by step with a cache: the floor."""

    def __init__(self, checked: CheckedModel, device: Device) -> None:
        """Put a random model on the device: float16 on a GPU, float32 on a CPU.

        Raises:
            NotMeasured: PyTorch is missing or was built without CUDA.
        """
        if importlib.util.find_spec("torch") is None:
            raise NotMeasured("PyTorch is not installed")
        import torch

        from exporters.torch_reference import to_module

        if device.kind == "cuda" and not torch.cuda.is_available():
            raise NotMeasured(f"PyTorch {torch.__version__} has no CUDA device")
        module = to_module(random_weights(checked.name))
        self._device = torch.device(str(device))
        self._module = (module.half() if device.kind == "cuda" else module).to(self._device)
        self._eos_id = checked.bundle.manifest.tokens.eos_id
        arithmetic = "float16" if device.kind == "cuda" else "float32"
        self.name = f"PyTorch {torch.__version__} eager {arithmetic}"

    def rate(
        self, sources: Sequence[Sequence[int]], *, target_length: int, num_sentences: int, min_s: float
    ) -> PeerRate:
        """Decode batches greedily, as `CTranslate2Device.rate`."""
        import torch

        from model.greedy import greedy

        batch = [sources[index % len(sources)] for index in range(num_sentences)]
        length = max(map(len, batch))
        ids = torch.full((num_sentences, length), self._eos_id, device=self._device)
        mask = torch.zeros((num_sentences, length), dtype=torch.bool, device=self._device)
        for row, source in enumerate(batch):
            ids[row, : len(source)] = torch.tensor(source, device=self._device)
            mask[row, : len(source)] = True

        def decode() -> int:
            results = greedy(self._module, ids, mask, max_steps=target_length)
            return sum(len(result.token_ids) + result.ended for result in results)

        return PeerRate(self.name, num_sentences, 1, _tokens_per_s(decode, min_s))


def _tokens_per_s(decode: Callable[[], int], min_s: float) -> float:
    """Of calls until `min_s` seconds have passed, after one that does not count."""
    decode()
    num_tokens = 0
    started_at_s = time.perf_counter()
    while num_tokens == 0 or time.perf_counter() - started_at_s < min_s:
        num_tokens += decode()
    return num_tokens / (time.perf_counter() - started_at_s)
