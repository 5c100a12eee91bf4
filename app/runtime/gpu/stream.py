"""The order in which one runner's calls happen on its device."""

from __future__ import annotations

import numpy as np
import onnxruntime

from app.runtime.gpu.graphs import Succession
from app.runtime.gpu.model import DeviceModel

_NOT_CAPTURED = -1


class DeviceStream:
    """Runs graphs one behind the other on the stream that a model's sessions share.

    What nobody reads at once is launched without waiting. While something is under way that was, its
    inputs must not be written by the host, which knows nothing of the stream: hence `settle`.
    """

    def __init__(self, succession: Succession | None = None) -> None:
        """Nothing is under way.

        Args:
            succession: in which the runner is now the newest; once it is not, nothing can be run any more.
        """
        self._succession = succession
        self._proof = None if succession is None else succession.succeed()
        self._launched = _run_options(_NOT_CAPTURED, synchronize=False)
        self._awaited = _run_options(_NOT_CAPTURED, synchronize=True)
        self._captured: dict[int, onnxruntime.RunOptions] = {}
        self._under_way: onnxruntime.IOBinding | None = None

    def check(self) -> None:
        """Raise if the model has a newer runner.

        Raises:
            Superseded: it has.
        """
        if self._succession is not None:
            self._succession.check(self._proof)

    def launch(self, session: onnxruntime.InferenceSession, binding: onnxruntime.IOBinding) -> None:
        """Start a graph and return."""
        self.check()
        self._under_way = binding  # also if it fails: who knows how far it came
        session.run_with_iobinding(binding, self._launched)

    def run(
        self,
        session: onnxruntime.InferenceSession,
        binding: onnxruntime.IOBinding,
        *,
        graph_id: int | None = None,
    ) -> None:
        """Run a graph and wait for it and for all before it.

        Args:
            session: the graph.
            binding: its inputs and outputs.
            graph_id: name of the captured graph that does the work; a new name captures. None captures
                nothing.
        """
        self.check()
        options = self._awaited
        if graph_id is not None:
            if graph_id not in self._captured:
                self._captured[graph_id] = _run_options(graph_id, synchronize=True)
            options = self._captured[graph_id]
        session.run_with_iobinding(binding, options)
        self._under_way = None

    def settle(self) -> None:
        """Wait for what was launched; to be called before the host writes anything that graphs read."""
        if self._under_way is not None:
            self._under_way.synchronize_outputs()
            self._under_way = None


def enter_thread(model: DeviceModel, stream: DeviceStream) -> None:
    """Make the model's device the calling thread's, before it allocates or copies anything there itself.

    Only a run does that: CUDA's calls go to the device that the thread used last, at first to GPU 0.
    """
    binding = model.encoder.io_binding()
    binding.bind_cpu_input("source_ids", np.full((1, 1), model.manifest.tokens.eos_id, dtype=np.int64))
    binding.bind_cpu_input("source_mask", np.ones((1, 1), dtype=np.int32))
    for output in model.encoder.get_outputs():
        binding.bind_output(output.name, model.device.kind, model.device.index)
    stream.run(model.encoder, binding)


def _run_options(graph_id: int, *, synchronize: bool) -> onnxruntime.RunOptions:
    options = onnxruntime.RunOptions()
    options.log_severity_level = 3
    # Left out, it would be 0, and sessions with CUDA graphs would capture one of that name.
    options.add_run_config_entry("gpu_graph_id", str(graph_id))
    options.add_run_config_entry("disable_synchronize_execution_providers", "0" if synchronize else "1")
    return options
